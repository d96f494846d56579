"""When two failures are the same: on recorded runs of 103 programs that fail (`recorded/record.py`)."""

from __future__ import annotations

import json
import signal
from itertools import combinations
from pathlib import Path

import pytest

from dlrover_run.failures.worker_exit import DeviceError, WorkerExit
from dlrover_run.features.experiments.kinds import Kind, form_of, kind_of

RECORDED = Path(__file__).parent / "recorded" / "failures.json"
RUNS: dict[str, list[dict[str, str | int]]] = json.loads(RECORDED.read_text())


def end(tail: str, code: int = 1, rank: int = 0) -> WorkerExit:
    return WorkerExit(rank=rank, local_rank=rank, pid=rank, code=code, unix_time=1e9, stderr_tail=tail)


def recorded(run: dict[str, str | int], rank: int | None = None) -> WorkerExit:
    code, tail = run["code"], run["stderr"]
    assert isinstance(code, int)
    assert isinstance(tail, str)
    if rank is None:
        return end(tail, code)
    return end("".join(f"[rank{rank}]: {line}" for line in tail.splitlines(keepends=True)), code, rank)


def kind(run: dict[str, str | int], rank: int | None = None) -> Kind:
    found = kind_of(recorded(run, rank))
    assert found is not None
    return found


KINDS = {name: [kind(run) for run in runs] for name, runs in RUNS.items()}


def test_runs_of_one_defect_are_the_same_whatever_numbers_directory_and_rank_they_had() -> None:
    pairs = [(name, *pair) for name, kinds in KINDS.items() for pair in combinations(kinds, 2)]
    assert len(pairs) >= 200
    assert [name for name, one, other in pairs if one != other] == []
    assert [name for name, kinds in KINDS.items() if kind(RUNS[name][0], rank=3) != kinds[0]] == []


def test_other_defects_are_not_the_same_though_their_exception_is() -> None:
    pairs = [
        (name, other)
        for name, other in combinations(KINDS, 2)
        if KINDS[name][0].error == KINDS[other][0].error and KINDS[name][0].cause == KINDS[other][0].cause
    ]
    assert len(pairs) >= 200
    assert [pair for pair in pairs if KINDS[pair[0]][0].digest == KINDS[pair[1]][0].digest] == []
    assert len({kinds[0].digest for kinds in KINDS.values()}) == len(KINDS)


def test_what_people_see_of_a_kind() -> None:
    shown = KINDS["ValueError in a loader's process"][0]
    assert (shown.cause, shown.error, shown.place) == ("exception", "ValueError", "train.py:9 in __getitem__")
    crashed = KINDS["signal SEGV without a dump"][0]
    assert (crashed.cause, crashed.error, crashed.place) == ("signal", "was killed by SIGSEGV (segmentation fault)", "")


@pytest.mark.parametrize(
    "failed",
    [
        end("", -signal.SIGKILL),
        end("", -signal.SIGTERM),
        end('Traceback (most recent call last):\n  File "t.py", line 1, in f\nDistNetworkError: reset\n'),
        WorkerExit(0, 0, 1, -11, 1e9, device_error=DeviceError("after Xid 79", blames_device=True)),
        WorkerExit(0, 0, 1, -9, 1e9, oom_kill="the limit was hit"),
        WorkerExit(0, 0, 1, 1, 1e9, full_disk="no space was left"),
        WorkerExit(0, 0, 1, -9, 1e9, killed_for="--restart-stalled"),
    ],
    ids=["killed", "terminated", "peer lost", "device", "memory", "disk", "stall"],
)
def test_what_is_explained_already_or_was_sent_is_not_compared(failed: WorkerExit) -> None:
    assert kind_of(failed) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("loss 1.5e-3 at 0x7f01", "loss nan at 0x7fab9"),
        ("read /data/a/x_1.bin", "read ./b/y.bin"),
        ("got [1, 2, 3] on cuda:0", "got [7] on cuda:11"),
        ("key 'a b' of \"c\"", "key 'd'"),
        ("job 0f8fad5b-d9cb-469f-a165-70867728950e", "job 7c9e6679-7425-40de-944b-e07fc1f90ae7"),
    ],
)
def test_the_form_of_a_message_has_no_value(one: str, other: str) -> None:
    assert form_of([f"ValueError: {one}"]).removesuffix(" of <text>") == form_of([f"ValueError: {other}"])


PRINTED = sorted((Path(__file__).parents[2] / "failures" / "printed_errors").glob("own-*.txt"))


@pytest.mark.parametrize("path", PRINTED, ids=lambda path: path.stem)
def test_a_failure_has_its_place_however_a_program_prints_it(path: Path) -> None:
    found = kind_of(end(path.read_text()))
    assert found is not None
    assert (found.cause, found.error) == ("exception", "KeyError" if path.stem == "own-plain-chain" else "ValueError")
    assert found.place.startswith(("err.py:3 in load", "train.py:4 in <module>"))
