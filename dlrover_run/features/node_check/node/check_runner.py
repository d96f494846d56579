"""This node's part in a node check: the compute test, which starts immediately, and the tasks of the coordinator.

The compute test needs no other node, so the node begins with it while it joins the job. All results go into its report.
Only the latest assignment counts: a task is carried out once, and a newer one replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec

from dlrover_run.background import Background, TimeLimit
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.features.node_check.decision.model import (
    CPU,
    MAX_DEVICES,
    MAX_PROBLEM,
    CheckKey,
    CheckTask,
    ComputeResult,
    DeviceSpeed,
    LinkResult,
    LinkResults,
    NodeCheckReport,
    NodeHealth,
)
from dlrover_run.features.node_check.node.check_processes import NODE_CHECK_FOLDER, CheckProcesses
from dlrover_run.features.node_check.node.check_workers import (
    CheckReply,
    CheckRequest,
    CheckWorkers,
    CheckWorkersLost,
    describe_shared,
    describe_slow,
    device_speeds,
    find_slow,
    link_requests,
    place_in_order,
    quicker,
)
from dlrover_run.features.node_check.rules import CHECK_ALWAYS, NodeCheckRules
from dlrover_run.processes.ports import HeldPort
from dlrover_run.processes.process import StuckProcess
from dlrover_run.spec import JobSpec, SpecError
from dlrover_run.words.log_level import internal_error, log_frames
from dlrover_run.workers.starter import Starter

COMPUTE_SECONDS = 0.5
"""Seconds that the devices compute: long enough to average out a rising clock or a burst of a neighbour, and short
compared with the start of the processes."""

LOOK_TIMEOUT = 10.0
"""Seconds that a driver gets to report problems of its devices. If it does not answer, the compute test shows them."""

LINK_SHARE = 0.25
"""The part of a task's time that one link may take, beyond the time of the links before it in its group. Then the check
processes are ended, and their answers do not count."""

GROUP_SHARE = 0.8
"""The part of a link's time after which its processes give up by themselves, so that they can test the next link."""

NO_TORCH = "torch cannot be imported: No module named 'torch'"
"""The answer to every request in an interpreter that has no torch."""

ENDS_NODE = (SpecError, OSError, StuckProcess)
"""What ends the node, as where workers start: this machine, or what the user has asked for, cannot do it."""


class NodeCheckRunner:
    """Runs the node check of this node and keeps its results; inactive if the job has no node check.

    `starter` is that of the workers; its template is used for the check processes too if it has imported torch.
    `undisturbed` suspends the reaping of orphans while processes are forked. `on_news` is called when there are new
    results. `find_problems` returns what makes this node unfit, as sentences; the first one is reported in place of a
    speed. `warn` prints a warning about devices that are slower than the node's others. `folder` is the program of the
    check processes.
    """

    def __init__(
        self,
        spec: JobSpec,
        starter: Starter,
        undisturbed: Callable[[], AbstractContextManager[None]],
        on_news: Callable[[], None],
        find_problems: Callable[[], Coroutine[Any, Any, Sequence[str]]],
        warn: Callable[[str], None],
        folder: str = NODE_CHECK_FOLDER,
    ) -> None:
        self._spec = spec
        self._on_news = on_news
        self._find_problems = find_problems
        self._print_warning = warn
        self._warned = False
        self._problems: asyncio.Future[Sequence[str]] | None = None
        self._rules = NodeCheckRules.get(spec.rules.parts)
        # With `static` ranks, no node receives anything from the others.
        self._wanted = self._rules.applies and not spec.nodes_apart
        self._port = HeldPort() if self._wanted else None
        self._key = CheckKey()
        self._computed: ComputeResult | None = None
        self._noted: set[str] = set()
        self._linked: LinkResults | None = None
        self._work: list[asyncio.Future[None]] = []
        self._closed = False
        self._error: Exception | None = None
        self._has_failed = False
        self._background = Background(self._note_failure)
        keep_template = self._rules.check == CHECK_ALWAYS
        port = 0 if self._port is None else self._port.number
        self._processes = CheckProcesses(spec, starter, undisturbed, port, keep_template, self._note_failure, folder)

    @property
    def pids(self) -> set[int]:
        """The pids of the check processes and of their template, while they run."""
        return self._processes.pids

    @property
    def devices(self) -> Sequence[DeviceSpeed]:
        """The speed of each device in the last compute test, the slowest first."""
        return self._computed.devices if self._computed is not None else ()

    def add_to_report(self, status: NodeReport) -> NodeReport:
        """A report of this node together with its node check results."""
        if self._port is None:
            return status
        part = NodeCheckReport(check_port=self._port.number, compute_result=self._computed, link_result=self._linked)
        return msgspec.structs.replace(status, parts=with_part(status.parts, part))

    def update(self, task: CheckTask | None, node_health: NodeHealth | None = None) -> None:
        """Carry out the task of the coordinator, or run the compute test if it has no result yet. No worker may run.

        With a result of this node and no task, the check processes end: the node may wait long for its ranks, and
        must hold no device meanwhile. A later task, as the partner of another node, starts new check processes.

        Raises SpecError if the interpreter has no torch, and OSError or StuckProcess if this machine cannot run the
        check processes.
        """
        if self._error is not None:
            raise self._error
        if not self._wanted or self._closed:
            return
        if self._problems is None:
            self._problems = self._background.start(self._find_problems())
        if task is not None and task.key > self._key:
            self._key = task.key
            self._begin(partial(self._carry_out, task))
        elif task is None and node_health is not None:
            if not self._work and self._processes.are_idle:
                self._begin(self._processes.release)
        elif self._computed is None and not self._work:
            self._begin(self._compute_alone)

    async def suspend(self) -> None:
        """End the check processes, because the workers start now; a later task starts new ones. Raises StuckProcess if
        the kernel does not end one."""
        await _end_all(list(self._work))
        await self._processes.suspend()

    async def close(self) -> None:
        """End everything permanently."""
        self._closed = True
        with contextlib.suppress(StuckProcess):
            await self.suspend()
        await self._processes.close()
        await self._background.close()
        if self._port is not None:
            self._port.release()

    def _begin(self, work: Callable[[], Awaitable[None]]) -> None:
        begun = self._background.start(self._replace(list(self._work), work))
        self._work.append(begun)
        begun.add_done_callback(self._note_end)

    async def _replace(self, before: Sequence[asyncio.Future[None]], work: Callable[[], Awaitable[None]]) -> None:
        await _end_all(before)
        await work()

    def _note_end(self, work: asyncio.Future[None]) -> None:
        self._work.remove(work)
        self._on_news()

    def _note_failure(self, error: Exception) -> None:
        """The next `update` raises what ends the node, which `on_news` brings about."""
        if isinstance(error, ENDS_NODE):
            self._error = error
            self._on_news()
        else:
            self._note_internal_error(error)

    def _note_internal_error(self, error: Exception) -> str:
        """A defect of ours ends no node: it is printed once. Returns a clause for a result, as the test has failed."""
        clause = _clipped(internal_error(error))
        if not self._has_failed:
            self._has_failed = True
            self._print_warning(f"warning: the node check of this node has failed: {clause}")
            log_frames(self._print_warning, error)
        return clause

    async def _compute_alone(self) -> None:
        self._computed = await self._compute(CheckKey(), self._after(self._rules.check_timeout))

    async def _carry_out(self, task: CheckTask) -> None:
        deadline = self._after(task.timeout)
        if task.compute:
            if self._computed is not None and self._computed.device == CPU:
                # A driver that could not be initialized stays so in that process. A new process may find the device.
                with contextlib.suppress(StuckProcess):
                    await self._processes.end()
            self._computed = await self._compute(task.key, deadline)
            self._on_news()
        if task.links:
            self._linked = await self._try_links(task, deadline)

    async def _compute(self, key: CheckKey, deadline: float) -> ComputeResult:
        request = {"do": "compute", "seconds": COMPUTE_SECONDS}
        try:
            # The inspection of the machine runs meanwhile, and ends long before torch is imported.
            await self._workers_by(deadline)
            if problems := await self._known_problems():
                return ComputeResult(key, problem=_clipped(f"it was not even tried: {problems[0]}"))
            requests = [request] * self._spec.workers_per_node
            answers = await self._ask(requests, deadline)
            found, threshold = device_speeds(answers), self._rules.straggler_threshold
            if not _first_problem(answers) and find_slow(found, threshold):
                # A rising clock, or a burst of a neighbour, is over by then.
                answers = await self._ask(requests, deadline)
                found = quicker(found, device_speeds(answers))
                self._warn(describe_slow(found, threshold))
        except CheckWorkersLost as lost:
            return ComputeResult(key, problem=_clipped(str(lost)))
        except ENDS_NODE:
            raise
        except Exception as error:
            # The coordinator has the test repeated.
            return ComputeResult(key, problem=self._note_internal_error(error))
        slowest = sorted(found, key=lambda device: device.tflops)
        wrong = any(answer.wrong for answer in answers)
        return ComputeResult(key, tuple(slowest[:MAX_DEVICES]), _first_problem(answers), wrong)

    def _warn(self, sentences: Sequence[str]) -> None:
        # Print the warning once, also if the coordinator has the test repeated.
        if sentences and not self._warned:
            self._warned = True
            for sentence in sentences:
                self._print_warning(sentence)

    def _note_shared(self, sentence: str) -> None:
        if sentence not in self._noted:
            self._noted.add(sentence)
            self._print_warning(sentence)

    async def _try_links(self, task: CheckTask, deadline: float) -> LinkResults:
        tried: list[LinkResult] = []
        problem, began = "", self._after(0.0)
        for link in task.links:
            other = next((end.node for end in link if end.node != task.node), task.node)
            seconds = began + task.timeout * LINK_SHARE * (place_in_order(task, link) + 1) - self._after(0.0)
            try:
                requests = link_requests(task.key, link, task.node, seconds * GROUP_SHARE)
                answers = await self._ask(requests, min(deadline, self._after(seconds)))
            except CheckWorkersLost as lost:
                gone = _clipped(str(lost))
                if lost.local or len(link) == 1:
                    problem = gone
                tried.append(LinkResult(other, problem=gone))
                # The links after this one were not tried and are not reported.
                break
            except ENDS_NODE:
                raise
            except Exception as error:
                problem = self._note_internal_error(error)
                tried.append(LinkResult(other, problem=problem))
                break
            else:
                trouble = _first_problem(answers)
                speed = 0.0 if trouble else min(answer.gigabytes for answer in answers)
                tried.append(LinkResult(other, speed, trouble))
                if shared := next((answer.shared for answer in answers if answer.shared), ""):
                    self._note_shared(describe_shared(shared, len(link)))
        return LinkResults(task.key, tuple(tried), problem)

    async def _ask(self, requests: Sequence[CheckRequest], deadline: float) -> list[CheckReply]:
        """Have the check processes answer. Raises CheckWorkersLost if they do not, or do not start in time."""
        workers = await self._workers_by(deadline)
        try:
            answers = await workers.run(requests, deadline - self._after(0.0))
        except Exception:
            workers.kill()
            raise
        if any(answer.problem == NO_TORCH for answer in answers):
            raise SpecError(
                f"--network-check needs torch in {self._processes.python}, which has none: install it there, or leave "
                "the flag out."
            )
        return answers

    async def _known_problems(self) -> Sequence[str]:
        looking = self._problems
        assert looking is not None, "it begins before any task"
        with contextlib.suppress(TimeoutError):
            async with TimeLimit(LOOK_TIMEOUT):
                await asyncio.wait([looking])
        # An error of it was printed.
        return looking.result() if looking.done() and looking.exception() is None else ()

    async def _workers_by(self, deadline: float) -> CheckWorkers:
        return await self._processes.ready(max(0.0, deadline - self._after(0.0)))

    def _after(self, seconds: float) -> float:
        return asyncio.get_running_loop().time() + seconds


async def _end_all(work: Sequence[asyncio.Future[Any]]) -> None:
    for each in work:
        each.cancel()
    if work:
        await asyncio.wait(work)


def _first_problem(answers: Sequence[CheckReply]) -> str:
    """A clause about the first local rank that failed, which it names where there are several."""
    for local_rank, answer in enumerate(answers):
        if answer.problem:
            return _clipped(answer.problem if len(answers) == 1 else f"local rank {local_rank}: {answer.problem}")
    return ""


def _clipped(clause: str) -> str:
    return " ".join(clause.split())[:MAX_PROBLEM]
