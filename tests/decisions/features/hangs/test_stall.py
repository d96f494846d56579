"""Which evidence is a stall, and for which worker the others wait: generated traces of hangs and of harmless pauses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stall_traces import HARMLESS, INTERVAL, PROBED, Trace, Worker, evaluation, idle, spin, spin_overloaded

import dlrover_run
import tf_ps_runner
from dlrover_run.features.hangs.search.codes import GuiltCode
from dlrover_run.features.hangs.search.detector import (
    MIN_LIMIT,
    PAUSE_FACTOR,
    PROBING,
    STARTUP_LIMIT,
    UNLEARNED_LIMIT,
    Decision,
    Detector,
    Resumed,
    StallCode,
    Stalled,
)
from dlrover_run.features.hangs.search.guilt import Finding, find_guilty, find_stall, ranks_to_restart
from dlrover_run.features.hangs.search.spin import PROBES
from dlrover_run.features.hangs.search.suspects import MAX_FILE, MAX_FUNCTION, Place, Suspect, describe_worker
from dlrover_run.observe.processes import ProcessFigures, WorkerFigures
from dlrover_run.observe.records import Evidence, Traffic
from dlrover_run.stacks.stack import Frame, Stack, Thread, fold, render

HANGS = {
    "stopped": (idle, StallCode.TRAINING),
    "sleep, deadlock, lost network, a rank that left": (idle, StallCode.TRAINING),
    "spin": (spin, StallCode.BUSY),
    "spin, with too few processors": (spin_overloaded, StallCode.BUSY),
}


@pytest.mark.parametrize("name", HANGS)
@pytest.mark.parametrize("period", [0.5, 2, 10])
def test_a_hang_is_found_in_time(name: str, period: float) -> None:
    trace = Trace()
    trace.train(12 * period, period)
    began = trace.now
    each, code = HANGS[name]
    found = trace.run(200, each)
    assert found is not None
    assert found.code is code
    assert found.ranks == (0, 1)
    probes = max(PROBES / PROBED * INTERVAL, PROBING) if code is StallCode.BUSY else 0
    assert trace.now - began <= max(MIN_LIMIT, PAUSE_FACTOR * period) + probes + 2 * INTERVAL + period


def test_before_the_first_steps_the_limit_is_longer() -> None:
    trace = Trace()
    found = trace.run(UNLEARNED_LIMIT + 5, idle)
    assert found is not None
    assert trace.now >= UNLEARNED_LIMIT


def test_a_rhythm_that_is_faster_than_the_samples_has_the_shortest_limit() -> None:
    detector, worker = Detector(), Worker(0)

    def sample(at: float, last: float, *, moved: bool) -> Decision:
        worker.bytes += 1000 * moved
        worker.data_age = at - last
        one = worker.evidence(at)
        return detector.observe([one._replace(rank=rank) for rank in (0, 1)])

    for second in range(20):
        at = second * 1.25
        # Data every 50 ms, of which a sample shows the last.
        assert sample(at, at - second % 5 / 100, moved=True) is None
    assert detector.limit == MIN_LIMIT
    hung = at + 0.2
    assert sample(at + 1.25, hung, moved=True) is None
    assert sample(hung + MIN_LIMIT - 0.01, hung, moved=False) is None
    found = sample(hung + MIN_LIMIT + 0.01, hung, moved=False)
    assert isinstance(found, Stalled)
    assert found.since == pytest.approx(hung)


def test_the_last_data_of_a_long_pause_is_where_it_began() -> None:
    detector, worker = Detector(), Worker(0)
    last = 0.0
    for number in range(1, 100):
        at = number * 0.5
        if moved := number % 16 == 0:
            last = at - 0.3
            worker.bytes += 1000
        worker.data_age = at - last
        one = worker.evidence(at)
        assert detector.observe([one._replace(rank=rank) for rank in (0, 1)]) is None, moved
    assert detector.limit == pytest.approx(PAUSE_FACTOR * 16 * 0.5)


def test_workers_that_never_connected_are_no_stall() -> None:
    trace = Trace()
    for worker in trace.workers:
        worker.at_store = False
    assert trace.run(10 * UNLEARNED_LIMIT, idle) is None


def test_a_worker_alone_that_waits_for_requests_is_no_stall() -> None:
    trace = Trace(1)
    trace.train()
    assert trace.run(10 * UNLEARNED_LIMIT, idle) is None


def test_a_withdrawn_stall_can_be_found_again() -> None:
    trace = Trace()
    trace.train()
    assert trace.run(20, idle) is not None
    trace.detector.withdraw()
    assert trace.run(MIN_LIMIT - INTERVAL, idle) is None
    assert trace.run(MIN_LIMIT, idle) is not None


def test_a_limit_of_the_user_replaces_the_learned_one() -> None:
    trace = Trace(detector=Detector(timeout=7))
    trace.train()
    found = trace.run(20, idle)
    assert found is not None
    assert found.limit == 7


def test_a_worker_that_never_connects_to_the_store() -> None:
    trace = Trace(3)
    trace.workers[2].at_store = False

    def others_log(workers: Sequence[Worker], _: float) -> None:
        workers[0].cpu += 0.01

    assert trace.run(UNLEARNED_LIMIT - 1, others_log) is None
    trace = Trace(3, Detector(timeout=1000))
    trace.workers[2].at_store = False
    found = trace.run(STARTUP_LIMIT + 5, others_log)
    assert found is not None
    assert (found.code, found.ranks) == (StallCode.START, (2,))


def test_workers_that_never_connect_to_the_store_of_another_node() -> None:
    trace = Trace(2, Detector(elsewhere=True))
    for worker in trace.workers:
        worker.at_store = False
    assert trace.run(STARTUP_LIMIT - 1, idle) is None
    found = trace.run(STARTUP_LIMIT, idle)
    assert found is not None
    assert (found.code, found.ranks) == (StallCode.START, (0, 1))


def test_a_worker_that_still_reads_files_is_not_late() -> None:
    trace = Trace(3)
    trace.workers[2].at_store = False

    def loads(workers: Sequence[Worker], _: float) -> None:
        workers[2].read += 1_000_000

    assert trace.run(3 * STARTUP_LIMIT, loads) is None


def test_the_only_worker_of_a_node_is_watched_if_other_nodes_train() -> None:
    trace = Trace(1, Detector(elsewhere=True))
    trace.train()
    assert trace.detector.knows_limit
    exchanged_at = trace.detector.exchanged_at
    found = trace.run(20, idle)
    assert found is not None
    assert found.limit < UNLEARNED_LIMIT
    assert trace.detector.exchanged_at == exchanged_at


@pytest.mark.parametrize("each", HARMLESS)
def test_a_harmless_pause_of_a_minute_is_no_stall(each: Callable[[Sequence[Worker], float], None]) -> None:
    trace = Trace()
    trace.train()
    assert trace.run(60, each) is None
    trace.workers[0].state = "S"
    trace.workers[1].traced = False
    trace.train()
    assert trace.run(UNLEARNED_LIMIT * 10, idle) is not None, "a hang after it is still found"


@pytest.mark.parametrize("halves", range(1, 24))
def test_a_pause_that_follows_work_counts_from_the_end_of_the_work(halves: int) -> None:
    trace = Trace()
    trace.train()
    assert trace.run(halves * INTERVAL, evaluation) is None
    assert trace.run(MIN_LIMIT - INTERVAL, idle) is None
    assert trace.run(2 * MIN_LIMIT, idle) is not None


def test_a_watch_that_takes_few_samples_decides_after_it_has_looked_at_the_processes() -> None:
    trace = Trace()
    trace.train()
    writer = trace.workers[0]
    for seconds, full in ((1.0, False), (2.5, True), (2.5, True), (2.5, True)):
        trace.now += seconds
        writer.written += 5000
        assert trace.detector.observe([one.evidence(trace.now, full) for one in trace.workers]) is None


@pytest.mark.parametrize("gap", [4, 60, 36_000])
def test_a_machine_that_was_frozen_is_no_stall(gap: float) -> None:
    trace = Trace()
    trace.train()
    trace.now += gap
    assert trace.run(MIN_LIMIT - 2 * INTERVAL, idle) is None
    trace.train()


def test_work_before_a_freeze_is_as_new_as_the_end_of_it() -> None:
    trace = Trace()
    trace.train()
    assert trace.run(10 * INTERVAL, evaluation) is None
    trace.now += 60.0
    assert trace.run(MIN_LIMIT - 2 * INTERVAL, idle) is None
    assert trace.run(2 * MIN_LIMIT, idle) is not None


def test_data_from_before_a_freeze_is_as_new_as_the_end_of_it() -> None:
    trace = Trace()
    trace.train()
    for worker in trace.workers:
        worker.bytes += 1000
        worker.data_age = 60.0
    trace.now += 60.0
    assert trace.run(MIN_LIMIT - INTERVAL, idle) is None
    assert trace.run(2 * MIN_LIMIT, idle) is not None


def test_a_reported_pause_raises_the_limit() -> None:
    trace = Trace()
    trace.train()
    assert trace.run(20, idle) is not None
    for one in trace.workers:
        one.bytes += 1
    trace.now += INTERVAL
    resumed = trace.sample()
    assert isinstance(resumed, Resumed)
    assert resumed.seconds >= MIN_LIMIT
    limit = trace.detector.limit
    assert limit > MIN_LIMIT
    trace.train()
    assert trace.run(limit - 1, idle) is None


def test_a_new_round_begins_with_the_unlearned_limit() -> None:
    assert Detector().limit == UNLEARNED_LIMIT


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.5, 20), min_size=6, max_size=20))
def test_a_pause_shorter_than_an_earlier_one_is_no_stall(pauses: list[float]) -> None:
    trace = Trace()
    longest = max(pauses)

    def step() -> None:
        for one in trace.workers:
            one.bytes += 1000

    for pause in [longest] * 5 + pauses * 3:
        assert trace.run(pause, idle) is None
        step()


# The worker for which the others wait.

WAITS = Stack(
    (
        Thread(
            "0x1",
            (
                Frame("/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3, "all_reduce"),
                Frame("/home/u/train.py", 19, "step"),
                Frame("/home/u/train.py", 30, "<module>"),
            ),
        ),
    )
)


def at(*frames: str) -> Stack:
    """A stack of `file:line:function`, the innermost first."""
    parts = [frame.rsplit(":", 2) for frame in frames]
    return Stack((Thread("0x1", tuple(Frame(file, int(line), name) for file, line, name in parts)),))


ELSEWHERE = at("/home/u/train.py:10:next_batch", "/home/u/train.py:30:<module>")


def suspects(count: int, guilty: int, **facts: object) -> list[Suspect]:
    """All wait in one collective, apart from the guilty one."""
    state = str(facts.pop("state", "S"))
    age = facts.pop("age", None)
    children = facts.pop("children", ())
    found = []
    for rank in range(count):
        own = ProcessFigures(rank + 100, "python", state if rank == guilty else "S", 1, 1, 0, 0, 0)
        figures = WorkerFigures(own, children if rank == guilty else ())  # type: ignore[arg-type]
        sent_age = age if rank == guilty else 3.0
        evidence = Evidence(rank, 10, Traffic(sent_age=sent_age), figures)  # type: ignore[arg-type]
        more = facts if rank == guilty else {}
        if more.get("ended"):
            found.append(Suspect(rank, ended=True))
        else:
            found.append(describe_worker(rank, evidence, **{"stack": WAITS, **more}))  # type: ignore[arg-type]
    return found


STOPPED_CHILD = ProcessFigures(900, "python", "T", 100, 0, 0, 0, 0)

GUILT: dict[GuiltCode, dict[str, Any]] = {
    GuiltCode.STOPPED: {"state": "T", "stack": None},
    GuiltCode.BLOCKED_IN_KERNEL: {"state": "D", "stack": None},
    GuiltCode.ENDED: {"ended": True, "stack": None},
    GuiltCode.LATE: {"late": True, "stack": None},
    GuiltCode.SPINNING: {"stack": ELSEWHERE, "share": 0.99},
    GuiltCode.ELSEWHERE: {"stack": ELSEWHERE},
    GuiltCode.LOCKED: {"stack": at("/usr/lib/python3.11/threading.py:324:wait", "/home/u/train.py:7:load")},
    GuiltCode.CHILD_LOST: {
        "stack": at(
            "/x/site-packages/torch/utils/data/dataloader.py:1131:_try_get_data", "/home/u/train.py:8:<module>"
        ),
        "children": (STOPPED_CHILD,),
    },
    GuiltCode.SENT_NOTHING: {"age": 4.0},
}


@pytest.mark.parametrize("code", GUILT)
@pytest.mark.parametrize(("count", "guilty"), [(2, 0), (2, 1), (4, 0), (4, 2)])
def test_the_guilty_rank_and_the_reason(code: GuiltCode, count: int, guilty: int) -> None:
    found = find_guilty(suspects(count, guilty, **GUILT[code]))
    assert (found.code, found.ranks) == (code, (guilty,))
    stack = GUILT[code].get("stack", WAITS)
    if isinstance(stack, Stack):
        assert found.line is not None
        assert found.line.file == "/home/u/train.py"
        assert found.line == stack.user_line


def test_a_rank_in_another_collective_than_the_others() -> None:
    other = at("/x/site-packages/torch/distributed/distributed_c10d.py:9:barrier", "/home/u/train.py:44:<module>")
    stacks = [WAITS, WAITS, other]
    found = find_guilty([describe_worker(rank, None, stack) for rank, stack in enumerate(stacks)])
    assert (found.code, found.ranks) == (GuiltCode.OTHER_COLLECTIVE, (2,))
    assert found.line is not None
    assert found.line.line == 44


@pytest.mark.parametrize("count", [1, 2])
def test_as_many_ranks_in_one_collective_as_in_another(count: int) -> None:
    other = at("/x/site-packages/torch/distributed/distributed_c10d.py:9:barrier", "/home/u/train.py:44:<module>")
    stacks = [WAITS] * count + [other] * count
    traffic = [Traffic(sent_age=3.0 + (rank == 0)) for rank in range(2 * count)]
    found = find_guilty(
        [describe_worker(rank, Evidence(rank, 10, traffic[rank]), stack) for rank, stack in enumerate(stacks)]
    )
    assert (found.code, found.ranks) == (GuiltCode.DIFFERENT_COLLECTIVES, tuple(range(2 * count)))
    assert [reason.params.get("line") for reason in found.reasons] == [None, 19, 44]


@pytest.mark.parametrize(("unsent", "guilty"), [((0, 1, 2, 1), (2,)), ((1, 1), (0, 1)), ((3, 3, 2, 2), (0, 1))])
def test_the_rank_that_is_cut_off_has_unacknowledged_data_to_all_its_peers(
    unsent: tuple[int, ...], guilty: tuple[int, ...]
) -> None:
    traffic = [Traffic(unsent=4000, unsent_peers=count) for count in unsent]
    found = find_guilty([describe_worker(rank, Evidence(rank, 10, one), WAITS) for rank, one in enumerate(traffic)])
    assert (found.code, found.ranks) == (GuiltCode.NETWORK, guilty)


def test_other_rules_that_agree_are_listed() -> None:
    found = find_guilty(suspects(4, 2, stack=ELSEWHERE, age=5.0))
    assert found.agree == (GuiltCode.SENT_NOTHING,)


def test_without_evidence_the_cause_is_unknown() -> None:
    assert find_guilty([describe_worker(rank, None) for rank in range(4)]) == Finding(GuiltCode.UNKNOWN)
    assert find_guilty([describe_worker(rank, None, WAITS) for rank in range(4)]) == Finding(GuiltCode.UNKNOWN)
    assert find_guilty([]) == Finding(GuiltCode.UNKNOWN)


@given(st.permutations(range(4)), st.sampled_from(list(GUILT)))
def test_the_order_of_the_workers_does_not_matter(order: list[int], code: GuiltCode) -> None:
    known = suspects(4, 1, **GUILT[code])
    assert find_guilty([known[place] for place in order]) == find_guilty(known)


WAITING, IDLE = Suspect(0, Place.COLLECTIVE), Suspect(0, Place.ELSEWHERE)


@pytest.mark.parametrize(
    ("remaining", "trains", "code"),
    [
        (WAITING, False, GuiltCode.ENDED),
        (IDLE, False, None),
        (IDLE, True, None),
        (Suspect(0, state="T"), False, GuiltCode.STOPPED),
        (Suspect(0, ended=True), True, None),
    ],
)
def test_a_rank_that_has_ended_counts_while_another_one_waits(
    remaining: Suspect, trains: bool, code: GuiltCode | None
) -> None:
    suspects = [remaining, Suspect(1, ended=True)]
    found = find_stall(suspects, trains=trains)
    assert (None if found is None else found.code) == code
    if found is not None:
        assert found.ranks == ((1,) if code is GuiltCode.ENDED else (0,))
        assert ranks_to_restart(found, suspects) == (0,), "the one that runs"


def test_idle_workers_are_stalled_only_if_they_train() -> None:
    idle = [Suspect(rank, Place.ELSEWHERE) for rank in (0, 1)]
    assert find_stall(idle, trains=False) is None
    found = find_stall(idle, trains=True)
    assert found == Finding(GuiltCode.UNKNOWN)
    assert ranks_to_restart(found, idle) == (0,)


def test_the_record_of_a_worker_is_bounded() -> None:
    frame = Frame("/" + "d" * 300 + "/a\x1b\n.py", 10**9, "f" * 300)
    found = describe_worker(0, None, Stack((Thread("0x1", (frame,)),)))
    assert (len(found.file), len(found.function)) == (MAX_FILE, MAX_FUNCTION)
    assert found.file.endswith("/a??.py")
    assert msgspec.json.decode(msgspec.json.encode(found), type=Suspect) == found


# Stacks.


def test_equal_stacks_are_folded() -> None:
    folded = fold({0: WAITS, 1: ELSEWHERE, 2: WAITS, 3: WAITS})
    assert [one.ranks for one in folded] == [(1,), (0, 2, 3)]
    assert render(folded).splitlines()[1] == "  /home/u/train.py:10 in next_batch"


def test_the_line_of_the_user_is_not_one_of_the_launcher_in_a_checkout() -> None:
    script = Frame("/home/ann/dlrover_run/train.py", 7, "main")
    for package in (dlrover_run, tf_ps_runner):
        for path in Path(str(package.__file__)).parent.rglob("*.py"):
            for ours in {str(path), str(path.resolve())}:
                assert Stack((Thread("MainThread", (Frame(ours, 1, "f"), script)),)).user_line == script, ours
