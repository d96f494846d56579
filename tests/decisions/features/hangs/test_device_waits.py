"""Workers that wait for their devices: which place that is, who is named, and what has to wait."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from support.virtual_loop import run_virtually
from test_stall_watch import Workers, hang, stack, watch_of

from dlrover_run.features.hangs.node.stall_report import StallReport
from dlrover_run.features.hangs.search.codes import GuiltCode
from dlrover_run.features.hangs.search.detector import Detector
from dlrover_run.features.hangs.search.guilt import find_guilty, find_stall, is_held_back
from dlrover_run.features.hangs.search.outside import OUTSIDE_LIMIT
from dlrover_run.features.hangs.search.suspects import DeviceUse, Place, Suspect, describe_worker, hold_unproven
from dlrover_run.observe.processes import ProcessFigures, WorkerFigures
from dlrover_run.observe.records import Evidence, Traffic
from dlrover_run.stacks.stack import Frame, Stack
from dlrover_run.stacks.wait import Wait
from dlrover_run.words.reasons import render

ITEM = Frame("/u/train.py", 64, "<module>")
BATCH = Frame("/u/train.py", 41, "load_batch")
ALL_REDUCE = Frame("/x/site-packages/torch/distributed/c10d.py", 3, "all_reduce")
LOCK = Frame("/usr/lib/python3.12/threading.py", 3, "wait")


def evidence(state: str = "R", wchan: str = "") -> Evidence:
    own = ProcessFigures(9, "python", state, 1, 0, 0, 0, 0)
    return Evidence(0, 1.0, Traffic(), WorkerFigures(own, (), wchan))


def placed(frames: Iterable[Frame], state: str = "R", wchan: str = "", **more: Any) -> Suspect:
    holds = more.pop("holds_lock", None)
    return describe_worker(0, evidence(state, wchan), stack(*frames)._replace(holds_lock=holds), 1.0, **more)


def test_where_a_main_thread_is() -> None:
    assert placed([ITEM], main_share=1.0).place is Place.DEVICE
    assert placed([ITEM], main_share=1.0, holds_lock=False).place is Place.DEVICE
    assert placed([ITEM], main_share=1.0, holds_lock=True).place is Place.ELSEWHERE, "it runs Python, or computes in C"
    assert placed([ITEM], "S", main_share=0.0).place is Place.ELSEWHERE, "only helper threads are busy"
    assert placed([ITEM], "T", main_share=1.0).place is Place.ELSEWHERE
    assert placed([ITEM], "D", main_share=1.0).place is Place.ELSEWHERE
    assert placed([ALL_REDUCE, ITEM], main_share=1.0).place is Place.COLLECTIVE
    assert placed([LOCK, ITEM], main_share=1.0).place is Place.LOCK
    asleep = {"state": "S", "wchan": "futex_do_wait", "main_share": 0.0}
    assert placed([ITEM], **asleep).place is Place.ELSEWHERE
    assert placed([ITEM], **asleep, wait=Wait(has_device=True)).place is Place.DEVICE
    assert placed([ITEM], "S", "poll_schedule_timeout", main_share=0.0, wait=Wait(None, True)).place is Place.ELSEWHERE


def test_a_sleep_that_ends_after_a_worker_would_be_named_is_not_waited_for() -> None:
    asleep = {"state": "S", "wchan": "hrtimer_nanosleep", "main_share": 0.0}
    assert placed([BATCH], **asleep).outside
    assert placed([BATCH], **asleep, wait=Wait(sleeps=OUTSIDE_LIMIT - 1)).outside
    assert not placed([BATCH], **asleep, wait=Wait(sleeps=OUTSIDE_LIMIT + 1)).outside


def at(rank: int, place: Place, line: Frame = ITEM, **more: Any) -> Suspect:
    more = {"busy": place is Place.DEVICE, "state": "S", "outside": place is Place.DEVICE, **more}
    return Suspect(rank, place, file=line.file, line=line.line, function=line.function, **more)


def on_device(*ranks: int, **more: Any) -> list[Suspect]:
    return [at(rank, Place.DEVICE, **more) for rank in ranks]


@pytest.mark.parametrize(
    ("suspect", "code"),
    [
        (at(1, Place.ELSEWHERE, BATCH), GuiltCode.OFF_DEVICE),
        (at(1, Place.LOCK, BATCH), GuiltCode.LOCKED),
        (at(1, Place.ELSEWHERE, BATCH, busy=True), GuiltCode.SPINNING),
        (at(1, Place.ELSEWHERE, BATCH, lost_child=True), GuiltCode.CHILD_LOST),
        (at(1, Place.ELSEWHERE, BATCH, state="T"), GuiltCode.STOPPED),
        (at(1, Place.DEVICE, BATCH, busy=False, has_device=True), GuiltCode.OFF_DEVICE),
    ],
)
@pytest.mark.parametrize("others", [(0,), (0, 2), (0, 2, 3, 4)])
def test_the_one_that_is_not_on_its_device_while_the_others_are(
    suspect: Suspect, code: GuiltCode, others: tuple[int, ...]
) -> None:
    suspects = [*on_device(*others), suspect]
    Random(1).shuffle(suspects)
    found = find_stall(suspects, trains=False)
    assert found is not None
    assert (found.code, found.ranks, found.line) == (code, (1,), BATCH)
    assert not is_held_back(found, suspects)


def test_all_on_their_devices_at_one_place() -> None:
    suspects = on_device(0, 1, 2)
    found = find_stall(suspects, trains=False)
    assert found is not None
    assert (found.code, found.ranks, found.line) == (GuiltCode.ON_DEVICE, (), ITEM)
    assert is_held_back(found, suspects), "a kernel may take long"
    assert not is_held_back(found, [replace(one, outside=False) for one in suspects])
    assert render(found.reasons) == (
        "every rank waits for its device, or computes in one call, at /u/train.py:64 in <module>; "
        "nothing says for which operation"
    )


def test_devices_that_are_busy_are_in_the_sentence() -> None:
    busy, idle = (DeviceUse(own=use) for use in (99, 3))
    for uses, last in (
        ((busy, busy), "the devices are busy, and nothing says with which kernel"),
        ((busy, idle), "nothing says for which operation"),
        ((busy, None), "nothing says for which operation"),
    ):
        suspects = [replace(one, device=use) for one, use in zip(on_device(0, 1), uses, strict=True)]
        assert render(find_guilty(suspects).reasons).endswith(f"; {last}")


def test_all_on_their_devices_at_several_places() -> None:
    other = at(1, Place.DEVICE, BATCH)
    found = find_guilty([*on_device(0, 2), other])
    assert (found.code, found.ranks, found.line) == (GuiltCode.OTHER_WAIT, (1,), BATCH)
    assert is_held_back(found, [*on_device(0, 2), other]), "it may evaluate there"
    found = find_guilty([*on_device(0), other])
    assert (found.code, found.ranks) == (GuiltCode.DIFFERENT_WAITS, (0, 1))
    assert (found.line, found.other_line) == (ITEM, BATCH)
    assert is_held_back(found, [*on_device(0), other])


def test_one_that_spins_while_the_others_are_in_a_collective() -> None:
    spins = at(1, Place.DEVICE, BATCH)
    others = [at(0, Place.COLLECTIVE), at(2, Place.COLLECTIVE)]
    found = find_guilty([*others, spins])
    assert (found.code, found.ranks) == (GuiltCode.SPINNING, (1,))
    assert not is_held_back(found, [*others, spins])
    # With accelerators it may wait for the others in turn.
    on_gpu = replace(spins, has_device=True)
    assert find_guilty([*others, on_gpu]).ranks == ()
    late = at(3, Place.ELSEWHERE, BATCH)
    assert find_guilty([*others, on_gpu, late]).ranks == (3,)


def test_a_worker_that_has_run_python_since_the_stall_began_does_not_hang() -> None:
    moved = [replace(one, moved=True, outside=False) for one in on_device(0, 1)]
    assert find_stall(moved, trains=True) is None
    stopped = at(2, Place.ELSEWHERE, BATCH, state="T")
    assert find_stall([*moved, stopped], trains=False) is not None


def test_one_worker_that_waits_for_its_device() -> None:
    (alone,) = on_device(0)
    assert find_stall([alone], trains=False) is None
    found = find_stall([alone], trains=True)
    assert found is not None
    assert found.code is GuiltCode.ON_DEVICE
    assert is_held_back(found, [alone])


def test_without_an_accelerator_one_that_waits_for_a_lock_is_named_later() -> None:
    locked = at(1, Place.LOCK, BATCH)
    assert [one.outside for one in hold_unproven([*on_device(0), locked])] == [True, True]
    for proof in (
        on_device(0, has_device=True),
        [at(0, Place.COLLECTIVE)],
        [*on_device(0), at(2, Place.COLLECTIVE)],
    ):
        assert not hold_unproven([*proof, locked])[-1].outside
    for other in ({"busy": True}, {"lost_child": True}, {"state": "T"}):
        assert not hold_unproven([*on_device(0), replace(locked, **other)])[-1].outside


class OnDevices(Workers):
    """Two workers that spin at the same line once they hang; `variables` are those of rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = dict.fromkeys((0, 1), stack(ITEM))
        self.variables = 7

    async def read(self, ranks: Iterable[int], **more: Any) -> dict[int, tuple[Stack, ...]]:
        found = await super().read(ranks, **more)
        return {rank: tuple(one._replace(variables=self.variables) for one in stacks) for rank, stacks in found.items()}

    def sample(self, full: bool) -> list[Evidence]:
        return [one._replace(figures=_spinning(one)) for one in super().sample(full)]


def _spinning(one: Evidence) -> WorkerFigures | None:
    return None if one.figures is None else WorkerFigures(one.figures.own._replace(cpu=one.at))


@pytest.mark.parametrize("moves", [False, True])
def test_a_long_kernel_of_all_ranks_is_reported_late_and_only_if_no_python_has_run(moves: bool) -> None:
    workers, reports = OnDevices(), list[StallReport]()
    watch = watch_of(Detector(), workers, reports.append)

    async def scenario() -> None:
        await hang(watch, workers, 2 * 60)
        assert not reports
        workers.variables += moves
        for _ in range(2 * 40):
            await watch.step()

    run_virtually(scenario())
    assert [report.guilty for report in reports] == ([] if moves else [()])
