"""The stacks of a job's workers: which nodes are asked for them, and their answers with equal stacks folded. Pure.

The agent of a node folds the stacks of its workers, and what asked the nodes folds their answers. Both are bounded, so
a job whose workers all differ loses stacks, which are named as left out, and never the answer.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.records.bounds import (
    Count,
    Name,
    NodeId,
    Total,
)
from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.requests import RequestFailed
from dlrover_run.coordination.records.round import NodeKey, RankAssignment
from dlrover_run.coordination.rounds.ranks import rank_assignments
from dlrover_run.coordination.rounds.requested_changes import find_nodes
from dlrover_run.job_status import questions
from dlrover_run.job_status.questions import LogPiece, StackQuery

SCHEMA = 1
"""The version of the meaning of the fields of `JobStacks`. New fields keep it."""

MAX_TEXT = 300
"""Characters of the name of a file or of a function; of a longer one the end."""

MAX_FRAMES = 100
"""Calls of one stack."""

MAX_NODE_BYTES = 128 * 1024
"""Bytes of the stacks of one node, half of what a message of a node may have."""

MAX_JOB_BYTES = 384 * 1024
"""Bytes of the stacks of a job, so that all workers and nodes without one fit into the same message of a master."""

MAX_MISSING = 10_000
"""Workers without a stack that an answer names."""

MAX_SILENT = 1000
"""Nodes without an answer that are named."""

MAX_WORKERS = 50_000
"""Workers that one stack names."""

NODE_TIMEOUT = 5.0
"""Seconds that a node has to answer. Its workers have `stacks.read.STACKS_TIMEOUT` of them."""

_STACK_BYTES = 32
"""Bytes of a stack besides its workers and its calls."""


class StackProblem(enum.StrEnum):
    """Why there is no stack of a worker, or no answer of a node. A worker that is STOPPED has a stack nevertheless."""

    STOPPED = "stopped"
    BLOCKED = "blocked"
    NO_PYTHON = "no_python"
    NOT_PERMITTED = "not_permitted"
    NO_ANSWER = "no_answer"
    ENDED = "ended"
    NO_ROOM = "no_room"
    NODE_DISCONNECTED = "node_disconnected"
    NODE_NO_ANSWER = "node_no_answer"


Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Worker = Total | Name
"""The rank of a worker, or the name of a task in a job without ranks."""


class StackFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call; `line` is 0 if it is not known."""

    file: Text
    line: Total
    function: Text


class FoldedStack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The calls of the main threads of these workers, the innermost first. Without `frames` none runs Python code."""

    workers: Annotated[tuple[Worker, ...], Meta(max_length=MAX_WORKERS)]
    frames: Annotated[tuple[StackFrame, ...], Meta(max_length=MAX_FRAMES)] = ()


class MissingStacks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workers without a stack, and why."""

    problem: StackProblem
    workers: Annotated[tuple[Worker, ...], Meta(max_length=MAX_WORKERS)]


class NodeStacks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The answer of one node: stacks, or output in `logs` if that was asked for."""

    stacks: Annotated[tuple[FoldedStack, ...], Meta(max_length=MAX_WORKERS)] = ()
    missing: Annotated[tuple[MissingStacks, ...], Meta(max_length=len(StackProblem))] = ()
    logs: Annotated[tuple[LogPiece, ...], Meta(max_length=MAX_WORKERS)] = ()


class SilentNode(msgspec.Struct, frozen=True):
    """A node without an answer; `node` is its rank, None without one."""

    node: Count | None
    host: Name
    node_id: NodeId
    problem: StackProblem


class JobStacks(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of a job: those of the fewest workers first, then workers without one, and nodes without an answer.
    `nodes` is the number of nodes that were asked. Asked for output it has `logs` in their place, and says how many
    pieces had no room."""

    schema: int = SCHEMA
    job: str
    round: int
    nodes: int
    stacks: tuple[FoldedStack, ...] = ()
    missing: tuple[MissingStacks, ...] = ()
    silent: tuple[SilentNode, ...] = ()
    logs: tuple[LogPiece, ...] = ()
    logs_omitted: int = 0


class NodeName(NamedTuple):
    """A node that is asked, as `SilentNode` names it."""

    node: int | None
    host: str
    node_id: str


class StackFolder:
    """Folds equal stacks, up to `max_bytes`; the workers of stacks for which there is no room are missing."""

    def __init__(self, max_bytes: int) -> None:
        self._room = max_bytes
        self._workers: dict[tuple[StackFrame, ...], list[int | str]] = {}
        self._missing: dict[StackProblem, list[int | str]] = {}

    def add(self, workers: Sequence[int | str], frames: tuple[StackFrame, ...]) -> None:
        """Add the stack that these workers have."""
        if not workers:
            return
        size = sum(len(str(worker)) + 3 for worker in workers)
        if frames not in self._workers:
            size += _STACK_BYTES + len(msgspec.json.encode(frames))
        if size > self._room:
            self.add_missing(StackProblem.NO_ROOM, workers)
            return
        self._room -= size
        self._workers.setdefault(frames, []).extend(workers)

    def add_missing(self, problem: StackProblem, workers: Sequence[int | str]) -> None:
        """Add workers that have no stack."""
        self._missing.setdefault(problem, []).extend(workers)

    @property
    def folded(self) -> tuple[FoldedStack, ...]:
        """The stacks, those of the fewest workers first: the outlier is what a reader looks for."""
        found = [FoldedStack(_ordered(workers), frames) for frames, workers in self._workers.items()]
        return tuple(sorted(found, key=lambda one: (len(one.workers), _order(one.workers[0]))))

    @property
    def missing(self) -> tuple[MissingStacks, ...]:
        """The workers without a stack."""
        return tuple(
            MissingStacks(problem, _ordered(workers)[:MAX_MISSING])
            for problem, workers in sorted(self._missing.items())
        )


class StackRequest:
    """One question on its way: `nodes` are asked, and those of them that are not `connected` have no answer. `on_done`
    is called when the last answer is here."""

    def __init__(
        self,
        number: int,
        nodes: Mapping[NodeKey, NodeName],
        connected: Iterable[NodeKey],
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self.number = number
        self._nodes = dict(nodes)
        self._on_done = on_done
        self._folder = StackFolder(MAX_JOB_BYTES)
        self._logs: list[LogPiece] = []
        self._logs_room = questions.MAX_JOB_BYTES
        self._logs_omitted = 0
        self._problems = dict.fromkeys(nodes, StackProblem.NODE_DISCONNECTED)
        self._problems.update((key, StackProblem.NODE_NO_ANSWER) for key in connected if key in nodes)

    @property
    def waits_for(self) -> tuple[NodeKey, ...]:
        """The connected nodes that have not answered."""
        return tuple(key for key, problem in self._problems.items() if problem is StackProblem.NODE_NO_ANSWER)

    def take(self, key: NodeKey, found: NodeStacks) -> None:
        """The answer of a node; a second one is ignored."""
        if self._problems.pop(key, None) is None:
            return
        for stack in found.stacks:
            self._folder.add(stack.workers, stack.frames)
        for missing in found.missing:
            self._folder.add_missing(missing.problem, missing.workers)
        for piece in found.logs:
            if len(piece.data) <= self._logs_room:
                self._logs_room -= len(piece.data)
                self._logs.append(piece)
            else:
                self._logs_omitted += 1
        self._note_change()

    def lose(self, key: NodeKey) -> None:
        """A node is not connected any more."""
        if key in self._problems:
            self._problems[key] = StackProblem.NODE_DISCONNECTED
            self._note_change()

    def result(self, job: str, plan: Plan) -> JobStacks:
        """All that is known now."""
        return JobStacks(
            job=job,
            round=plan.key.number,
            nodes=len(self._nodes),
            stacks=self._folder.folded,
            missing=self._folder.missing,
            logs=tuple(self._logs),
            logs_omitted=self._logs_omitted,
            silent=tuple(SilentNode(*self._nodes[key], problem) for key, problem in self._problems.items())[
                :MAX_SILENT
            ],
        )

    def _note_change(self) -> None:
        if not self.waits_for:
            self._on_done()


def nodes_to_ask(plan: Plan, nodes: Nodes, query: StackQuery) -> dict[NodeKey, NodeName]:
    """The nodes that a question concerns, those of the round in the order of their ranks. Raises RequestFailed if there
    is none."""
    ranks = rank_assignments(plan)
    here = {key: None for key, member in nodes.items() if member.report.phase is not NodePhase.LEFT}
    wanted = [*(key for key in ranks if key in here), *(key for key in here if key not in ranks)]
    if query.node:
        named = find_nodes(plan, nodes, query.node)
        wanted = [key for key in wanted if key in named]
    if query.rank is not None:
        wanted = [key for key in wanted if key in ranks and ranks[key].has_rank(query.rank)]
        if not wanted:
            on = f" on node {query.node}" if query.node else ""
            raise RequestFailed(f"no worker{on} has the rank {query.rank} now")
    return {key: NodeName(_rank(ranks, key), nodes[key].report.host, key.node_id) for key in wanted}


def clipped(text: str) -> str:
    """A name with its end, where the file or the function is."""
    return text if len(text) <= MAX_TEXT else "..." + text[3 - MAX_TEXT :]


def _rank(ranks: Mapping[NodeKey, RankAssignment], key: NodeKey) -> int | None:
    return ranks[key].node_rank if key in ranks else None


def _order(worker: int | str) -> tuple[bool, int, str]:
    return (False, worker, "") if isinstance(worker, int) else (True, 0, worker)


def _ordered(workers: Iterable[int | str]) -> tuple[int | str, ...]:
    return tuple(sorted(workers, key=_order))
