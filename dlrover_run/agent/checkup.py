"""This node's part in a node check: it computes of its own accord, then tries what the coordinator asks for.

Nobody else is needed for computing, so a node begins with that at once, while it looks for the others and they for it.
What came of everything goes into its status. All is of the latest word alone: a task is obeyed once, and a newer one
takes its place.

The crew lives from the first task to the start of the workers, whose devices it would hold. The template that it was
forked from goes then too: it costs 200 MB for as long as the job trains, and starting another takes two seconds of a
rare wait. Where each round is checked it stays, for then every restart would wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dlrover_run.agent.crew import Answer, Crew, CrewLost, Order
from dlrover_run.agent.environment import check_environments
from dlrover_run.agent.link_orders import link_orders, place_in_order
from dlrover_run.agent.slow_devices import describe_slow, find_slow, quicker
from dlrover_run.agent.starter import Starter
from dlrover_run.coordination.bounds import MAX_PROBLEM
from dlrover_run.coordination.check_records import (
    CPU,
    MOST_DEVICES,
    CheckTask,
    Checkup,
    Computed,
    DeviceSpeed,
    Linked,
    LinkTried,
    TaskKey,
)
from dlrover_run.coordination.records import NodeStatus
from dlrover_run.coordination.rules import CHECK_ALWAYS, CHECK_NEVER
from dlrover_run.spec import Entrypoint, JobSpec, SpecError
from dlrover_run.supervisor.ports import HeldPort
from dlrover_run.supervisor.process import StuckProcess

COMPUTE_SECONDS = 0.5
"""Seconds that the devices compute: a clock that is still rising, or a neighbour's burst, averages out, and nobody
waits for it who waits for a second."""

LOOK_TIMEOUT = 10.0
"""Seconds that a driver gets to say what ails its devices; with one that says nothing it is the computing that shows
it."""

LINK_SHARE = 0.25
"""The part of a task's time that one link may take, beyond what the links before it in its group may; then the crew is
ended, and what it answers counts for nothing."""

GROUP_SHARE = 0.8
"""The part of a link's time after which its processes give up by themselves, and live to try the next one."""

NODE_CHECK_FOLDER = str(Path(__file__).resolve().parent.parent / "node_check")

STORE_PORT = "DLROVER_RUN_CHECK_STORE_PORT"
"""The variable that tells local rank 0 of the crew to host a store at this port from its start on (`tasks.py`)."""

NO_TORCH = "torch cannot be imported: No module named 'torch'"
"""What a process answers to every order in an interpreter that has no torch."""

PRELOAD = ("torch", "torch.distributed")
"""What a template of the crew's own imports before it forks."""


class CheckPart:
    """What this node does for a check, and what came of it; nothing where nobody checks.

    `starter` is that of the workers, whose template serves the crew too where it has one with torch. `undisturbed`
    keeps orphans from being reaped while processes are forked; `on_news` is called when there is more to say.
    `find_ailments` finds what makes this node unfit as it is, sentences, of which the first is told in place of a
    speed. `say` prints a warning about devices that are slower than the node's others. `folder` is the program of
    the crew.
    """

    def __init__(
        self,
        spec: JobSpec,
        starter: Starter,
        undisturbed: Callable[[], AbstractContextManager[None]],
        on_news: Callable[[], None],
        find_ailments: Callable[[], Awaitable[Sequence[str]]],
        say: Callable[[str], None],
        folder: str = NODE_CHECK_FOLDER,
    ) -> None:
        self._spec = spec
        self._workers_starter = starter
        self._undisturbed = undisturbed
        self._on_news = on_news
        self._find_ailments = find_ailments
        self._say = say
        self._warned = False
        self._ailments: asyncio.Future[Sequence[str]] | None = None
        self._folder = folder
        self._python = spec.entrypoint.python or sys.executable
        # With `static` ranks nothing is heard of the others.
        self._wanted = spec.rules.check != CHECK_NEVER and (spec.backend != "static" or spec.rules.most == 1)
        self._port = HeldPort() if self._wanted else None
        self._key = TaskKey()
        self._computed: Computed | None = None
        self._linked: Linked | None = None
        self._work: list[asyncio.Future[None]] = []
        self._crew: Crew | None = None
        self._ending: set[Crew] = set()
        self._own_starter: Starter | None = None
        self._closing: asyncio.Future[None] | None = None
        self._closed = False
        self._error: BaseException | None = None

    @property
    def pids(self) -> set[int]:
        """The processes of the crew and of its own template, while they run."""
        found = set(self._own_starter.pids) if self._own_starter is not None else set()
        for crew in (*self._ending, self._crew):
            if crew is not None:
                found |= crew.pids
        return found

    @property
    def devices(self) -> Sequence[DeviceSpeed]:
        """How fast each device was when this node computed last, the slowest first."""
        return self._computed.devices if self._computed is not None else ()

    def add_to(self, status: NodeStatus) -> NodeStatus:
        """A status of this node together with what is to be said of its check."""
        if self._port is None:
            return status
        return msgspec.structs.replace(
            status, check_port=self._port.number, computed=self._computed, linked=self._linked
        )

    def follow(self, task: CheckTask | None, checkup: Checkup | None = None) -> None:
        """Do what the coordinator asks for, or compute where nothing has come of that yet. No worker may run.

        With a `checkup` of this node and no task the crew ends: whoever waits for a place then may do so for long, and
        holds no device meanwhile. A later task, as somebody's partner, finds another crew.

        Raises SpecError when the interpreter has no torch, and what else ended the work.
        """
        if self._error is not None:
            raise self._error
        if not self._wanted or self._closed:
            return
        if self._ailments is None:
            self._ailments = asyncio.ensure_future(self._find_ailments())
        if task is not None and task.key > self._key:
            self._key = task.key
            self._begin(partial(self._obey, task))
        elif task is None and checkup is not None:
            if not self._work and self._holds_much:
                self._begin(self._let_go)
        elif self._computed is None and not self._work:
            self._begin(self._compute_alone)

    async def rest(self) -> None:
        """End the crew, for the workers come now; a later task finds another. Raises StuckProcess when the kernel does
        not end it."""
        await _end_all(list(self._work))
        await self._end_crew()
        for crew in list(self._ending):
            await self._end(crew)
        if self._template_is_idle:
            # The workers need not wait for that: it holds no device.
            self._closing = asyncio.ensure_future(self._close_starter())

    async def close(self) -> None:
        """End everything, for good."""
        self._closed = True
        with contextlib.suppress(StuckProcess):
            await self.rest()
        if self._closing is not None:
            await asyncio.wait([self._closing])
        await self._close_starter()
        if self._ailments is not None:
            self._ailments.cancel()
        if self._port is not None:
            self._port.release()

    @property
    def _template_is_idle(self) -> bool:
        """Whether the crew's own template is there and no use is seen for it."""
        return self._own_starter is not None and self._closing is None and self._spec.rules.check != CHECK_ALWAYS

    @property
    def _holds_much(self) -> bool:
        return self._crew is not None or self._template_is_idle

    async def _let_go(self) -> None:
        # One that the kernel does not end is still there for `rest`, which says so.
        with contextlib.suppress(StuckProcess):
            await self._end_crew()
        if self._template_is_idle:
            self._closing = asyncio.ensure_future(self._close_starter())

    def _begin(self, work: Callable[[], Awaitable[None]]) -> None:
        begun = asyncio.ensure_future(self._replace(list(self._work), work))
        self._work.append(begun)
        begun.add_done_callback(self._note_end)

    async def _replace(self, before: Sequence[asyncio.Future[None]], work: Callable[[], Awaitable[None]]) -> None:
        await _end_all(before)
        await work()

    def _note_end(self, work: asyncio.Future[None]) -> None:
        self._work.remove(work)
        if not work.cancelled() and (error := work.exception()) is not None:
            self._error = error
        self._on_news()

    async def _compute_alone(self) -> None:
        self._computed = await self._compute(TaskKey(), self._after(self._spec.rules.check_timeout))

    async def _obey(self, task: CheckTask) -> None:
        deadline = self._after(task.timeout)
        if task.compute:
            if self._computed is not None and self._computed.device == CPU:
                # Where a driver could not be initialised it stays so in that process. Another one may find the device.
                with contextlib.suppress(StuckProcess):
                    await self._end_crew()
            self._computed = await self._compute(task.key, deadline)
            self._on_news()
        if task.links:
            self._linked = await self._try_links(task, deadline)

    async def _compute(self, key: TaskKey, deadline: float) -> Computed:
        order = {"do": "compute", "seconds": COMPUTE_SECONDS}
        try:
            # The look at the machine goes on meanwhile, and is over long before torch has been read.
            await self._crew_by(deadline)
            if ailments := await self._known_ailments():
                return Computed(key, problem=_clipped(f"it was not even tried: {ailments[0]}"))
            orders = [order] * self._spec.workers_per_node
            answers = await self._ask(orders, deadline)
            found, threshold = _speeds(answers), self._spec.rules.straggler_threshold
            if not _first_problem(answers) and find_slow(found, threshold):
                # A clock that had not risen yet, or a neighbour's burst, is over by then.
                answers = await self._ask(orders, deadline)
                found = quicker(found, _speeds(answers))
                self._warn(describe_slow(found, threshold))
        except CrewLost as lost:
            return Computed(key, problem=_clipped(str(lost)))
        slowest = sorted(found, key=lambda device: device.tflops)
        wrong = any(answer.wrong for answer in answers)
        return Computed(key, tuple(slowest[:MOST_DEVICES]), _first_problem(answers), wrong)

    def _warn(self, sentences: Sequence[str]) -> None:
        # Whoever computes again for the coordinator is told once.
        if sentences and not self._warned:
            self._warned = True
            for sentence in sentences:
                self._say(sentence)

    async def _try_links(self, task: CheckTask, deadline: float) -> Linked:
        tried: list[LinkTried] = []
        problem, began = "", self._after(0.0)
        for link in task.links:
            other = next((end.node for end in link if end.node != task.node), task.node)
            seconds = began + task.timeout * LINK_SHARE * (place_in_order(task, link) + 1) - self._after(0.0)
            try:
                orders = link_orders(task.key, link, task.node, seconds * GROUP_SHARE)
                answers = await self._ask(orders, min(deadline, self._after(seconds)))
            except CrewLost as lost:
                gone = _clipped(str(lost))
                if lost.own or len(link) == 1:
                    problem = gone
                tried.append(LinkTried(other, problem=gone))
                # Of the links after this one, which nobody has tried, there is nothing to tell.
                break
            else:
                trouble = _first_problem(answers)
                speed = 0.0 if trouble else min(answer.gigabytes for answer in answers)
                tried.append(LinkTried(other, speed, trouble))
        return Linked(task.key, tuple(tried), problem)

    async def _ask(self, orders: Sequence[Order], deadline: float) -> list[Answer]:
        """Have a crew that does as it is told. Raises CrewLost when it does not, or is not there in time."""
        crew = await self._crew_by(deadline)
        try:
            answers = await crew.ask(orders, deadline - self._after(0.0))
        except CrewLost:
            crew.kill()
            raise
        if any(answer.problem == NO_TORCH for answer in answers):
            raise SpecError(
                f"--network-check needs torch in {self._python}, which has none: install it there, or leave the flag "
                "out."
            )
        return answers

    async def _known_ailments(self) -> Sequence[str]:
        looking = self._ailments
        assert looking is not None, "it begins before any task"
        await asyncio.wait([looking], timeout=LOOK_TIMEOUT)
        return looking.result() if looking.done() else ()

    async def _crew_by(self, deadline: float) -> Crew:
        seconds = max(0.0, deadline - self._after(0.0))
        starting = asyncio.ensure_future(self._ready_crew())
        try:
            await asyncio.wait([starting], timeout=seconds)
        finally:
            await _end_all([starting])
        if starting.cancelled():
            raise CrewLost(
                f"the processes of the node check could not be started in {seconds:.3g} s; where starting takes "
                "longer, as from a slow disk, give it more with --rdzv-conf check_timeout=SECONDS",
                own=True,
            )
        return starting.result()

    async def _ready_crew(self) -> Crew:
        if self._crew is not None:
            if self._crew.idle:
                return self._crew
            # One that the kernel does not end is no reason to say nothing: the next one meets the same and says so.
            with contextlib.suppress(StuckProcess):
                await self._end_crew()
        starter = await self._starter()
        await starter.warmed(os.environ)
        argv = (self._python, "-u", self._folder)
        assert self._port is not None, "a node that is checked holds one"
        first, *others = check_environments(self._spec, os.environ)
        # Its store is there long before the first link: whoever comes too early is let wait for up to a second.
        self._crew = crew = Crew(argv, [{**first, STORE_PORT: str(self._port.number)}, *others])
        await crew.start(lambda start: starter.start_folder(start, self._folder), self._undisturbed)
        return crew

    async def _starter(self) -> Starter:
        if self._spec.start_method == "forkserver" and self._spec.entrypoint.kind != "program":
            await self._workers_starter.warmed(os.environ)
            # With a script that does not import torch itself, each process of the crew would have to.
            if self._own_starter is None and all(self._workers_starter.has_imported(name) for name in PRELOAD):
                return self._workers_starter
        if self._closing is not None:
            await asyncio.wait([self._closing])
        if self._own_starter is None:
            entrypoint = Entrypoint("script", self._folder, python=self._python)
            own = replace(self._spec, entrypoint=entrypoint, start_method="forkserver", preload=PRELOAD)
            # That it spawns after all is nothing that a person could do much about.
            self._own_starter = Starter(own, lambda sentence: None)
        return self._own_starter

    async def _close_starter(self) -> None:
        if self._own_starter is not None:
            await self._own_starter.close()
        self._own_starter = self._closing = None

    async def _end_crew(self) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            self._ending.add(crew)
            await self._end(crew)

    async def _end(self, crew: Crew) -> None:
        await crew.end()
        self._ending.discard(crew)

    def _after(self, seconds: float) -> float:
        return asyncio.get_running_loop().time() + seconds


async def _end_all(work: Sequence[asyncio.Future[Any]]) -> None:
    for each in work:
        each.cancel()
    if work:
        await asyncio.wait(work)


def _speeds(answers: Sequence[Answer]) -> list[DeviceSpeed]:
    good = ((rank, answer) for rank, answer in enumerate(answers) if not answer.problem)
    return [DeviceSpeed(rank, answer.device, answer.tflops) for rank, answer in good]


def _first_problem(answers: Sequence[Answer]) -> str:
    """A clause about the first local rank that failed, which it names where there are several."""
    for local_rank, answer in enumerate(answers):
        if answer.problem:
            return _clipped(answer.problem if len(answers) == 1 else f"local rank {local_rank}: {answer.problem}")
    return ""


def _clipped(clause: str) -> str:
    return " ".join(clause.split())[:MAX_PROBLEM]
