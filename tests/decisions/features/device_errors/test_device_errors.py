"""Which error of a GPU explains the end of a worker, and when the node leaves. `device_errors.txt` has what is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.golden import assert_golden

from dlrover_run.devices.gpu_state import GpuState
from dlrover_run.devices.xids import XIDS, XidClass, classify
from dlrover_run.failures import causes
from dlrover_run.failures.worker_exit import DeviceError, WorkerExit
from dlrover_run.features.device_errors import explain as explaining
from dlrover_run.features.device_errors.explain import explain, gpu_of
from dlrover_run.features.device_errors.messages import WatchedGpu, XidSeen

GOLDEN = Path(__file__).with_name("device_errors.txt")
DOCS = Path(__file__).parents[4] / "docs/device-errors.md"

ENDED = 1000.0
GPUS = [WatchedGpu(index, f"GPU-{index}", f"0000:{0x1A + index:02x}:00.0") for index in range(4)]


def seen(number: int, before: float = 0.04, index: int = 3) -> XidSeen:
    return XidSeen(index, number, ENDED - before)


def found(*errors: XidSeen, state: GpuState | None = None, memory_errors: int | None = None) -> DeviceError | None:
    return explain(3, ENDED, errors, state, memory_errors)


def killed(error: DeviceError | None, **known: object) -> WorkerExit:
    return WorkerExit(rank=3, local_rank=3, pid=7, code=-9, unix_time=ENDED, device_error=error)


def test_each_number_of_the_table_is_said_in_these_words() -> None:
    lines = []
    for number in range(1, 180):
        error = found(seen(number))
        said = causes.describe_exit(killed(error))
        leaves = "the node leaves" if error is not None and error.remedy else "the node stays"
        lines.append(f"{number:3}  rank 3 {said}; {leaves}")
    assert_golden(GOLDEN, "\n".join(lines) + "\n")


def test_an_error_of_the_program_blames_neither_the_device_nor_the_node() -> None:
    for number, (kind, _, needs_reset) in XIDS.items():
        if kind is XidClass.PROGRAM:
            error = found(seen(number))
            assert error is not None
            assert not needs_reset
            assert not error.blames_device
            assert not error.remedy
            assert causes.cause_of(killed(error)) is causes.Cause.SIGNAL


def test_a_note_explains_nothing() -> None:
    notes = [number for number, xid in XIDS.items() if xid.kind is XidClass.NOTE]
    assert notes
    assert found(*map(seen, notes)) is None


@pytest.mark.parametrize(
    ("errors", "number"),
    [
        ([seen(31), seen(79, 0.01)], 79),
        ([seen(94, 2), seen(13, 0.1)], 94),
        ([seen(13, 2), seen(31, 1)], 13),
        ([seen(39, 2), seen(31, 1)], 31),
        ([seen(74, 0.2), seen(48, 0.1)], 48),
        ([seen(79, index=2), seen(31)], 31),
    ],
)
def test_of_several_errors_the_one_counts_that_explains_the_others(errors: list[XidSeen], number: int) -> None:
    for order in (errors, errors[::-1]):
        error = found(*order)
        assert error is not None
        assert f"Xid {number} of" in error.clause


@pytest.mark.parametrize(
    ("before", "number", "explains"),
    [
        (explaining.EXPLAINS_FOR, 31, True),
        (explaining.EXPLAINS_FOR + 1, 31, False),
        (explaining.EXPLAINS_FOR + 1, 79, True),
        (-explaining.REPORTED_WITHIN, 31, True),
        (-explaining.REPORTED_WITHIN - 0.1, 79, False),
    ],
)
def test_an_error_explains_what_comes_soon_after_it(before: float, number: int, explains: bool) -> None:
    assert (found(seen(number, before)) is not None) is explains


@pytest.mark.parametrize(
    ("number", "state", "leaves"),
    [
        # The driver decides where it reports an action.
        (95, GpuState(3, action=0), False),
        (95, GpuState(3, action=4), False),
        (95, GpuState(3, action=None), True),
        (94, GpuState(3, action=1), True),
        (31, GpuState(3, action=2), True),
        (31, GpuState(3, problem="GPU is lost"), True),
        (95, None, True),
        (31, None, False),
        # There is no GPU any more that an answer could be about.
        (79, GpuState(3, action=0), True),
    ],
)
def test_the_driver_decides_whether_the_node_can_go_on(number: int, state: GpuState | None, leaves: bool) -> None:
    error = found(seen(number), state=state)
    assert error is not None
    assert bool(error.remedy) is leaves


@pytest.mark.parametrize(
    ("state", "before", "said", "leaves"),
    [
        (GpuState(3), None, None, False),
        (GpuState(3, memory_errors=2), 2, None, False),
        (GpuState(3, memory_errors=2), None, None, False),
        (GpuState(3, memory_errors=3), 2, "GPU 3 has had an uncorrected memory error (ECC)", False),
        (GpuState(3, action=1, memory_errors=3), 2, "the driver reports that GPU 3 has failed", True),
        (GpuState(3, problem="GPU is lost"), None, "GPU 3 does not answer the driver", True),
    ],
)
def test_without_an_error_the_state_of_the_gpu_counts(
    state: GpuState, before: int | None, said: str | None, leaves: bool
) -> None:
    error = found(state=state, memory_errors=before)
    assert (error is None) is (said is None)
    if error is not None and said is not None:
        assert said in error.clause
        assert bool(error.remedy) is leaves
        assert causes.cause_of(killed(error)) is causes.Cause.DEVICE


def test_a_worker_whose_device_failed_has_not_lost_a_peer() -> None:
    """NCCL reports the loss of its own device as a loss of connections."""
    tail = "RuntimeError: Connection closed by peer [127.0.0.1]:1234"
    end = WorkerExit(rank=3, local_rank=3, pid=7, code=1, unix_time=ENDED, stderr_tail=f"Traceback\n{tail}")
    assert causes.lost_peer(end)
    for number, lost in ((79, False), (31, True)):
        explained = WorkerExit(3, 3, 7, 1, ENDED, stderr_tail=end.stderr_tail, device_error=found(seen(number)))
        assert causes.lost_peer(explained) is lost


@pytest.mark.parametrize(
    ("visible", "local_rank", "pids", "index"),
    [
        (None, 2, {7}, 2),
        ("3,1", 0, {7}, 3),
        ("3,1", 1, {7}, 1),
        ("3,1", 2, {7}, None),
        ("GPU-2", 5, {7}, 2),
        ("", 0, {7}, None),
        # The driver names a process of it, whatever its local rank.
        (None, 0, {7, 99}, 3),
    ],
)
def test_which_gpu_a_worker_uses(visible: str | None, local_rank: int, pids: set[int], index: int | None) -> None:
    error = XidSeen(3, 79, ENDED, pids=(98, 99))
    assert gpu_of(GPUS, visible, local_rank, error, pids) == index


def test_the_docs_have_the_class_of_each_number() -> None:
    """And whether the node leaves, in the order of the numbers."""
    rows = re.findall(r"^\| ([\d, -]+) \| (\w+) \| ([^|]+) \| (leaves|) ?\|$", DOCS.read_text(), re.M)
    told = {}
    for numbers, kind, text, leaves in rows:
        for part in numbers.split(", "):
            first, _, last = part.partition("-")
            for number in range(int(first), int(last or first) + 1):
                assert number not in told
                told[number] = (kind, text.strip(), leaves == "leaves")
    assert told == {number: (str(xid.kind), xid.text, xid.needs_reset) for number, xid in XIDS.items()}
    assert classify(9999).kind is XidClass.UNKNOWN
