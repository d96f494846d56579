"""A defect planted in each rule about collectives, and the test that finds it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import test_collective_positions as positions
import test_device_use as devices
import test_ras_report as ras
import test_recorder as recorder
from support.nccl_ras import text_report

COLLECTIVES = "dlrover_run.features.hangs.collectives"


def in_text(job: object) -> str:
    return text_report(job, verbose=True)


PLANTED: dict[str, tuple[str, str, str, Callable[[], object]]] = {
    "the rank that is ahead is named": (
        "compare",
        "if position.entered < number)",
        "if position.entered >= number)",
        lambda: positions.test_a_rank_that_has_not_entered_a_collective_is_behind_in_it("ras", 1),
    ),
    "the last operation in which others wait, not the first": (
        "compare",
        "number = min(first.values(), default=least + 1)",
        "number = max(position.entered for position in table.values())",
        lambda: positions.test_a_rank_that_has_not_entered_a_collective_is_behind_in_it("flight recorder", 3),
    ),
    "an operation that has ended is waited in": (
        "compare",
        "rank: max(least, position.completed or 0) + 1",
        "rank: least + 1",
        positions.test_a_rank_that_has_ended_an_operation_waits_in_a_later_one,
    ),
    "ranks of other nodes are not counted": (
        "compare",
        "*(table[rank].ahead for rank in ranks), 0)",
        "0)",
        positions.test_ranks_on_other_nodes_count_where_a_report_shows_them,
    ),
    "sizes are not compared": (
        "compare",
        "size = position.bytes if position.operation in SAME_SIZE else None",
        "size = None",
        positions.test_another_size_is_a_mismatch_where_an_operation_has_one_size,
    ),
    "sizes are compared where they may differ": (
        "compare",
        "size = position.bytes if position.operation in SAME_SIZE else None",
        "size = position.bytes",
        positions.test_another_size_is_a_mismatch_where_an_operation_has_one_size,
    ),
    "the greater side of a mismatch is named": (
        "compare",
        "lag = _lag(LagKind.MISMATCH, table, tuple(fewest), tuple(most), number)",
        "lag = _lag(LagKind.MISMATCH, table, tuple(most), tuple(fewest), number)",
        lambda: positions.test_another_operation_in_place_of_that_of_the_others_is_a_mismatch_of_both_sides(
            "flight recorder"
        ),
    ),
    "one of two equal sides is wrong": (
        "compare",
        "is_even=len(fewest) == len(most)",
        "is_even=False",
        lambda: positions.test_of_two_sides_of_the_same_size_none_is_wrong("flight recorder"),
    ),
    "kinds that RAS counts by themselves are not put together": (
        "compare",
        "        if here > max(table[rank].entered for rank in lag.waiting):\n",
        "        if False:\n",
        lambda: positions.test_of_two_sides_of_the_same_size_none_is_wrong("ras"),
    ),
    "numbers of a large group are compared between two ranks": (
        "compare",
        "comparable = position.size == 2",
        "comparable = True",
        positions.test_a_rank_that_receives_from_one_that_sends_nothing_waits_for_it,
    ),
    "a rank that has done its part is waited for": (
        "compare",
        "            if done or not position.waits:\n",
        "            if not position.waits:\n",
        positions.test_a_rank_that_receives_from_one_that_sends_nothing_waits_for_it,
    ),
    "ranks that wait in nothing wait for a silent one": (
        "compare",
        "if not missing or not waits or group in explained:",
        "if not missing or group in explained:",
        positions.test_ranks_that_wait_in_no_operation_wait_for_no_silent_rank,
    ),
    "a silent rank is not named": (
        "compare",
        "    lags += _silent(tables, {lag.group for lag in lags})\n",
        "",
        lambda: positions.test_a_rank_of_which_no_source_tells_is_silent("ras"),
    ),
    "a rank that waits in turn is named": (
        "compare",
        "free = tuple(rank for rank in lag.ranks if not waits_in[rank])",
        "free = lag.ranks",
        positions.test_a_rank_that_waits_for_another_one_is_not_the_last,
    ),
    "groups in another order are no deadlock": (
        "compare",
        "    for number in sorted(after.keys() - resolved):\n",
        "    for number in ():\n",
        positions.test_groups_in_another_order_are_a_deadlock_of_both,
    ),
    "an operation in which not all wait is that of all": (
        "compare",
        "        if all(any((one.counter",
        "        if any(any((one.counter",
        positions.test_the_operation_in_which_all_wait_is_known_of_a_recorder,
    ),
    "the processes of another node are ours": (
        "ras_positions",
        "if place.pid in ranks_of and is_here(place.host)",
        "if place.pid in ranks_of",
        ras.test_only_what_is_of_our_processes_on_this_node_counts,
    ),
    "groups that are even are kept, and those that differ are not": (
        "ras_positions",
        "found.setdefault(rank, []).append((launched.is_even, -count, position))",
        "found.setdefault(rank, []).append((not launched.is_even, -count, position))",
        ras.test_of_a_rank_in_many_groups_those_that_differ_are_kept,
    ),
    "ranks that a text does not list are not known": (
        "ras_positions",
        "            counts |= _unlisted(one, launched, ranks_of, is_here)\n",
        "",
        lambda: ras.test_a_rank_that_is_behind_is_found_in_each_format(in_text, 8),
    ),
    "a worker in a child counts as two": (
        "ras_positions",
        "or one.size != len(ranks):",
        "or one.size != len(ranks_of):",
        lambda: ras.test_a_worker_whose_script_runs_in_a_child_is_known_by_it(in_text),
    ),
    "the members of a group are not known": (
        "ras_positions",
        'return pack(known) if len(known) == one.size else ""',
        'return ""',
        ras.test_ranks_of_groups_are_global_ranks_where_all_are_here,
    ),
    "the ranks below a number of ranks are not read": (
        "ras_report",
        "            elif self._kind is not None and self._listed_count is not None:\n",
        "            elif False:\n",
        ras.test_the_first_versions_count_all_kinds_of_operations_together,
    ),
    "missing ranks are not read": (
        "ras_report",
        '            if self._section == "INCOMPLETE":\n',
        "            if False:\n",
        ras.test_a_stopped_process_is_silent_in_its_group,
    ),
    "a value that is no number counts": (
        "ras_report",
        "                if (count := _number(counts, operation)) is not None:\n",
        "                if (count := counts[operation]) is not None:\n",
        ras.test_a_rank_without_a_process_and_unknown_fields_are_left_out,
    ),
    "the last operation is described, not the one that is waited in": (
        "recorder",
        "    number = min(completed + 1, entered)\n",
        "    number = entered\n",
        recorder.test_the_first_operation_that_has_not_ended_is_described,
    ),
    "what torch counts itself is not read": (
        "recorder",
        '    completed = max((*done, _count(status.get("last_completed_collective")) or 0))\n',
        "    completed = max((*done, 0))\n",
        recorder.test_what_torch_counts_itself_is_believed_where_a_state_is_late,
    ),
    "ranks of a group are taken for global ranks": (
        "recorder",
        "    peer = ranks[index] if index < len(ranks) else None\n",
        "    peer = index\n",
        recorder.test_a_receive_names_the_global_rank_that_sends,
    ),
    "only the first tensor has bytes": (
        "recorder",
        "        total += math.prod(size) * item\n",
        "        total = math.prod(size) * item\n",
        recorder.test_the_first_operation_that_has_not_ended_is_described,
    ),
    "the least used device counts": (
        "../node/device_use",
        "    most = max(used,",
        "    most = min(used,",
        devices.test_the_device_that_a_worker_uses_most_counts,
    ),
    "a driver without samples says that a process is idle": (
        "../node/device_use",
        "        own = None\n",
        "        pass\n",
        devices.test_a_driver_that_has_no_samples_of_processes_says_nothing_of_one,
    ),
}


def with_defect(module: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module with another text in one place, under a name of its own."""
    name = f"{COLLECTIVES}.{module}".replace("collectives.../node/", "node.")
    real = import_module(name)
    assert real.__file__ is not None
    source = Path(real.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {name}"
    planted = ModuleType(f"{name}_planted")
    monkeypatch.setitem(sys.modules, planted.__name__, planted)
    exec(compile(source.replace(old, new), real.__file__, "exec"), planted.__dict__)
    return planted


@pytest.mark.parametrize("defect", PLANTED)
def test_a_planted_defect_is_found(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, old, new, finds = PLANTED[defect]
    planted = with_defect(module, old, new, monkeypatch)
    for tests in (positions, ras, recorder, devices):
        for name in planted.__dict__.keys() & tests.__dict__.keys():
            if not name.startswith("_"):
                monkeypatch.setattr(tests, name, planted.__dict__[name])
    with pytest.raises((AssertionError, ValueError, TypeError, IndexError, KeyError)):
        finds()
