"""What a dump of torch's flight recorder shows of a worker: recorded on a GPU, made by torch's pickler, damaged, and
made by somebody who wants to run code here."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
from pathlib import Path

import pytest
import support
from hypothesis import given
from hypothesis import strategies as st

from dlrover_run.features.hangs.collectives import recorder
from dlrover_run.features.hangs.collectives.compare import Operation, compare
from dlrover_run.features.hangs.collectives.positions import MAX_POSITIONS
from dlrover_run.features.hangs.collectives.recorder import read_dump, recorder_positions

RECORDED = Path(support.__path__[0]) / "recorded"


def _recorded(rank: int) -> dict:
    dump = read_dump((RECORDED / f"flight-recorder-rank{rank}.json").read_bytes())
    assert dump is not None
    return dump


def _entry(number: int, state: str = "completed", **more) -> dict:
    return {
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4, 8]],
        "input_dtypes": ["Float"],
        "state": state,
        "is_p2p": False,
        **more,
    }


def _dump(*entries: dict, groups: dict | None = None) -> dict:
    config = groups or {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": list(entries)}


def test_the_recorded_dumps_name_the_rank_that_slept_and_the_operation() -> None:
    found = {rank: recorder_positions(_recorded(rank), rank) for rank in range(2)}
    (lag,) = compare(found)
    assert (lag.ranks, lag.waiting, lag.group_name) == ((1,), (0,), "default_pg")
    assert lag.awaited == Operation("all_reduce", 125, 1049600 * 4, "Float")
    (position,) = found[1]
    assert (position.entered, position.completed, position.size, position.members) == (124, 124, 2, "0-1")
    assert (position.operation, position.bytes, position.dtype) == ("all_reduce", 1049600 * 4, "Float")


def test_the_first_operation_that_has_not_ended_is_described() -> None:
    entries = [_entry(7), _entry(8, "started", input_sizes=[[2], [3]]), _entry(9, "scheduled", input_sizes=[[100]])]
    (position,) = recorder_positions(_dump(*entries), 0)
    assert (position.number, position.entered, position.completed, position.bytes) == (8, 9, 7, 20)
    behind = recorder_positions(_dump(_entry(7)), 1)
    (lag,) = compare({0: [position], 1: behind})
    assert (lag.ranks, lag.awaited) == ((1,), Operation("all_reduce", 8, 20, "Float"))


def test_what_torch_counts_itself_is_believed_where_a_state_is_late() -> None:
    # Without a watchdog, as with gloo, entries keep their first state.
    dump = _dump(_entry(7, "scheduled"), _entry(8, "scheduled"))
    dump["pg_status"] = {
        "0": {"last_enqueued_collective": 8, "last_started_collective": -1, "last_completed_collective": 8}
    }
    (position,) = recorder_positions(dump, 0)
    assert (position.entered, position.completed, position.waits) == (8, 8, False)


def test_a_receive_names_the_global_rank_that_sends() -> None:
    groups = {"5": {"name": "5", "desc": "pp", "ranks": "[1, 3]"}}
    own = _entry(
        0, "started", p2p_seq_id=6, is_p2p=True, process_group=("5", "pp"), profiling_name="nccl:recv 1<-0", pg_id=2
    )
    (position,) = recorder_positions(_dump(own, groups=groups), 3)
    assert (position.peer, position.operation, position.number, position.completed) == (1, "recv", 6, 5)
    assert (position.name, position.members) == ("pp", "1,3")
    own["profiling_name"] = "nccl:send 1->0"
    (position,) = recorder_positions(_dump(own, groups=groups), 3)
    assert (position.peer, position.operation) == (1, "send")
    own["profiling_name"] = "nccl:coalesced"
    assert recorder_positions(_dump(own, groups=groups), 3) == ()


def test_the_groups_that_were_used_last_are_kept() -> None:
    names = [str(number) for number in range(10)]
    groups = {name: {"name": name, "desc": f"g{name}", "ranks": "[0, 1]"} for name in names}
    entries = [_entry(1, process_group=(name, f"g{name}")) for name in names]
    found = recorder_positions(_dump(*entries, groups=groups), 0)
    assert [one.name for one in found] == [f"g{number}" for number in range(9, 9 - MAX_POSITIONS, -1)]


def test_the_same_group_has_the_same_text_on_each_rank() -> None:
    dumps = [_dump(_entry(7, pg_id=number)) for number in range(2)]
    one, other = (recorder_positions(dump, rank)[0] for rank, dump in enumerate(dumps))
    assert one.group == other.group
    elsewhere = recorder_positions(_dump(_entry(7), groups={"0": {"ranks": "[0, 1]"}}), 0)[0]
    assert elsewhere.group != one.group


def test_a_dump_in_pickle_is_read_as_in_json() -> None:
    dump = _dump(_entry(7), _entry(8, "started"))
    in_json = read_dump(json.dumps(dump).encode())
    for protocol in range(2, 5):
        found = read_dump(pickle.dumps(dump, protocol=protocol))
        assert found is not None
        assert recorder_positions(found, 0) == recorder_positions(in_json, 0)


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_dump_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / "made"
    for protocol in range(5):
        data = pickle.dumps({"entries": [_Evil(path)]}, protocol=protocol)
        assert read_dump(data) is None
    assert not path.exists()
    pickle.loads(data)
    assert path.exists(), "this is what such a file does elsewhere"


def test_what_is_no_dump_or_not_yet_all_of_one_is_none(monkeypatch) -> None:
    whole = pickle.dumps(_dump(_entry(7)), protocol=2)
    for data in (b"", b"{", b"[]", b"{}", b'{"entries": 5}', b"x", whole[:-1], whole[: len(whole) // 2]):
        assert read_dump(data) is None
    monkeypatch.setattr(recorder, "MAX_DUMP", 10)
    assert read_dump(whole) is None


@given(st.integers(0, 10**6))
def test_a_dump_with_strange_values_is_read_as_far_as_it_goes(choice) -> None:
    draw = random.Random(choice)
    dump = copy.deepcopy(_dump(_entry(7), _entry(8, "started"), _entry(0, "started", is_p2p=True, p2p_seq_id=3)))
    strange = [None, -1, 2**70, "x" * 500, "\x00", [], {}, [[None]], "[0, 'a']", "[" * 2000, True, 1.5]
    for _ in range(draw.randrange(1, 6)):
        level = draw.choice([dump, *dump["entries"], *dump["pg_config"].values()]) if dump.get("entries") else dump
        if isinstance(level, dict) and level:
            key = draw.choice(sorted(level))
            if key != "entries":
                level[key] = draw.choice(strange)
        if not isinstance(dump["pg_config"], dict):
            dump["pg_config"] = {}
    for position in recorder_positions(dump, 0):
        assert position.completed <= position.entered


@pytest.mark.parametrize(
    ("dtype", "size"), [("BFloat16", 64), ("Float8_e4m3fn", 32), ("Unknown", None), ("Double", 256)]
)
def test_the_bytes_are_those_of_all_tensors(dtype, size) -> None:
    (position,) = recorder_positions(_dump(_entry(7, input_dtypes=[dtype])), 0)
    assert position.bytes == size
