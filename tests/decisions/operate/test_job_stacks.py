"""The stacks of a job: which nodes receive the request, how answers are folded, which nodes are named as missing, and
what is shown."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.golden import assert_screens
from support.virtual_loop import run_virtually
from support.virtual_torch import TorchJob, rules

from dlrover_run.coordination.records.requests import RequestFailed
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.features.operate.display.text import PROBLEMS, render_stacks
from dlrover_run.job_status import stacks
from dlrover_run.job_status.questions import StackQuery
from dlrover_run.job_status.stacks import (
    FoldedStack,
    JobStacks,
    MissingStacks,
    NodeName,
    NodeStacks,
    StackFolder,
    StackFrame,
    StackProblem,
    StackRequest,
    nodes_to_ask,
)
from dlrover_run.rendezvous.kv.records import Keys
from dlrover_run.rendezvous.kv.stacks import WATCH_RETRY, answer_stack_requests
from dlrover_run.transport.messages import (
    MAX_MASTER_MESSAGE,
    MAX_NODE_MESSAGE,
    Answered,
    ReadStacks,
    StacksFound,
    decode_from_master,
    decode_from_node,
    encode,
)

REDUCE = (StackFrame("/lib/torch/distributed.py", 88, "all_reduce"), StackFrame("/home/ann/train.py", 40, "main"))
LOAD = (StackFrame("/home/ann/train.py", 61, "next_batch"), StackFrame("/home/ann/train.py", 39, "main"))

A, B, C = (NodeKey(name, "1") for name in "abc")
NODES = {A: NodeName(0, "n01", "a"), B: NodeName(1, "n02", "b"), C: NodeName(None, "n03", "c")}


def trio() -> TorchJob:
    """A job that trains with a and b, of two workers each, with c as its spare."""
    job = TorchJob(rules(2, 2, spares=1))
    job.come("a", "b", "c")
    return job


def asked(job: TorchJob, query: StackQuery) -> list[str]:
    return [key.node_id for key in nodes_to_ask(job.plan, job.coordinator.nodes, query)]


class TestNodesThatReceiveTheRequest:
    def test_all_nodes_and_those_of_the_round_first(self) -> None:
        assert asked(trio(), StackQuery()) == ["a", "b", "c"]
        names = nodes_to_ask(trio().plan, trio().coordinator.nodes, StackQuery())
        assert list(names.values()) == [NodeName(0, "a", "a"), NodeName(1, "b", "b"), NodeName(None, "c", "c")]

    @pytest.mark.parametrize(("rank", "node"), [(0, "a"), (1, "a"), (2, "b"), (3, "b")])
    def test_of_a_rank_its_node_alone(self, rank: int, node: str) -> None:
        assert asked(trio(), StackQuery(rank=rank)) == [node]

    @pytest.mark.parametrize("name", ["1", "b"])
    def test_one_node(self, name: str) -> None:
        assert asked(trio(), StackQuery(node=name)) == ["b"]

    @pytest.mark.parametrize("query", [StackQuery(rank=4), StackQuery(node="n99"), StackQuery(rank=0, node="b")])
    def test_nothing_that_is_not_there(self, query: StackQuery) -> None:
        with pytest.raises(RequestFailed):
            asked(trio(), query)

    def test_a_job_without_a_round_has_no_ranks(self) -> None:
        job = TorchJob(rules(2, 2))
        job.come("a")
        assert asked(job, StackQuery()) == ["a"]
        with pytest.raises(RequestFailed):
            asked(job, StackQuery(rank=0))


class TestFolding:
    def test_equal_stacks_are_one_and_the_outlier_is_first(self) -> None:
        folder = StackFolder(10_000)
        folder.add([0, 1], REDUCE)
        folder.add([2], LOAD)
        folder.add([4, 3], REDUCE)
        assert folder.folded == (FoldedStack((2,), LOAD), FoldedStack((0, 1, 3, 4), REDUCE))

    def test_another_line_is_another_stack(self) -> None:
        folder = StackFolder(10_000)
        folder.add([0], REDUCE)
        folder.add([1], (msgspec.structs.replace(REDUCE[0], line=89), *REDUCE[1:]))
        assert len(folder.folded) == 2

    def test_what_has_no_room_is_named(self) -> None:
        folder = StackFolder(250)
        for worker in range(3):
            folder.add([worker], (StackFrame(f"{worker}" * 100, 1, "f"),))
        folder.add_missing(StackProblem.STOPPED, [7])
        assert [each.workers for each in folder.folded] == [(0,)]
        assert folder.missing == (
            MissingStacks(StackProblem.NO_ROOM, (1, 2)),
            MissingStacks(StackProblem.STOPPED, (7,)),
        )

    def test_the_largest_answers_fit_into_their_messages(self) -> None:
        text = "\u20ac" * stacks.MAX_TEXT
        for limit, most in ((stacks.MAX_NODE_BYTES, MAX_NODE_MESSAGE), (stacks.MAX_JOB_BYTES, MAX_MASTER_MESSAGE)):
            folder = StackFolder(limit)
            for worker in range(2000):
                frames = tuple(StackFrame(text, line, text) for line in range(worker % stacks.MAX_FRAMES))
                folder.add([worker], (*frames, StackFrame("", worker, "")))
            found = NodeStacks(folder.folded, folder.missing)
            assert len(encode(StacksFound(1, msgspec.Raw(msgspec.json.encode(found))))) <= most


class TestRequest:
    def test_it_is_done_with_the_last_answer(self) -> None:
        done: list[bool] = []
        request = StackRequest(1, NODES, [A, B], lambda: done.append(True))
        assert request.waits_for == (A, B)
        request.take(A, NodeStacks((FoldedStack((0, 1), REDUCE),)))
        request.take(A, NodeStacks((FoldedStack((0, 1), LOAD),)))
        assert not done
        request.take(B, NodeStacks((FoldedStack((2,), REDUCE),), (MissingStacks(StackProblem.STOPPED, (3,)),)))
        assert done
        found = request.result("resnet", trio().plan)
        assert found.stacks == (FoldedStack((0, 1, 2), REDUCE),)
        assert found.missing == (MissingStacks(StackProblem.STOPPED, (3,)),)
        assert [(one.node_id, one.problem) for one in found.silent] == [("c", StackProblem.NODE_DISCONNECTED)]

    def test_a_node_that_does_not_answer_is_named(self) -> None:
        request = StackRequest(1, NODES, [A, B])
        request.take(B, NodeStacks())
        silent = request.result("resnet", trio().plan).silent
        assert [(one.node, one.problem) for one in silent] == [
            (0, StackProblem.NODE_NO_ANSWER), (None, StackProblem.NODE_DISCONNECTED),
        ]  # fmt: skip

    def test_a_node_that_is_lost_meanwhile_is_not_waited_for(self) -> None:
        done: list[bool] = []
        request = StackRequest(1, {A: NODES[A], B: NODES[B]}, [A, B], lambda: done.append(True))
        request.take(A, NodeStacks())
        request.lose(C)
        assert not done
        request.lose(B)
        assert done
        assert request.result("resnet", trio().plan).silent[0].problem is StackProblem.NODE_DISCONNECTED

    def test_an_answer_of_a_node_that_was_not_asked_is_ignored(self) -> None:
        request = StackRequest(1, {A: NODES[A]}, [A])
        request.take(B, NodeStacks((FoldedStack((9,), LOAD),)))
        assert request.result("resnet", trio().plan).stacks == ()


class TestMessages:
    def test_they_travel(self) -> None:
        query = ReadStacks(3, 7)
        assert decode_from_master(encode(query)) == query
        found = NodeStacks((FoldedStack((0, "worker 1"), LOAD),), (MissingStacks(StackProblem.BLOCKED, ("ps 0",)),))
        message = decode_from_node(encode(StacksFound(3, msgspec.Raw(msgspec.json.encode(found)))))
        assert isinstance(message, StacksFound)
        assert msgspec.json.decode(message.stacks, type=NodeStacks) == found

    def test_an_answer_without_stacks_has_none(self) -> None:
        answer = decode_from_master(encode(Answered()))
        assert isinstance(answer, Answered)
        assert msgspec.json.decode(answer.stacks, type=JobStacks | None) is None

    def test_names_that_are_too_long_are_cut_at_their_beginning(self) -> None:
        long = "/very/long" * 100 + "/train.py"
        assert len(stacks.clipped(long)) == stacks.MAX_TEXT
        assert stacks.clipped(long).endswith("/train.py")
        assert stacks.clipped("train.py") == "train.py"


class TestText:
    def job(self, **changes: object) -> JobStacks:
        request = StackRequest(1, NODES, [A, B])
        request.take(A, NodeStacks((FoldedStack((0, 1, 2), REDUCE), FoldedStack((3,), LOAD))))
        return msgspec.structs.replace(request.result("resnet", trio().plan), **changes)

    def test_a_control_character_of_another_node_does_not_reach_the_terminal(self) -> None:
        frames = (StackFrame("\x1b]0;x\x07", 1, "f\x1b[2J"),)
        assert "\x1b" not in render_stacks(self.job(stacks=(FoldedStack((0,), frames),)))

    def test_the_screens_are_those_of_the_golden_file(self) -> None:
        missing = tuple(MissingStacks(problem, (rank,)) for rank, problem in enumerate(StackProblem))
        screens = {
            "each stack once, and the outlier first": render_stacks(self.job()),
            "tasks go by their names": render_stacks(
                self.job(stacks=(FoldedStack(("ps 0", "worker 1"), ()),), silent=())
            ),
            "each problem": render_stacks(self.job(missing=missing)),
        }
        assert_screens(Path(__file__).with_name("stacks.txt"), screens)
        assert PROBLEMS.keys() == set(StackProblem)
        assert len(set(PROBLEMS.values())) == len(PROBLEMS)


def test_an_internal_error_of_the_answers_in_etcd_is_reported_once_and_ends_no_node() -> None:
    lines: list[str] = []

    class BrokenStore:
        watches = 0

        def watch(self, ranges: object) -> Any:
            self.watches += 1
            raise RuntimeError("broken")

    async def source(query: StackQuery) -> NodeStacks:
        raise AssertionError("no question arrives")

    async def run(store: Any) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.5 * WATCH_RETRY):
                await answer_stack_requests(store, Keys("/jobs", "job"), "a", source, lines.append)

    store = BrokenStore()
    run_virtually(run(store))
    assert store.watches == 3
    assert lines == [
        "warning: questions for stacks are not answered: internal error: RuntimeError('broken'); please report it"
    ]
