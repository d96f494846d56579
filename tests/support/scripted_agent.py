"""An agent in a process of its own, with a scripted rendezvous client that answers its reports as the test sets."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dlrover_run.agent.agent import Agent
from dlrover_run.agent.result import JobResult
from dlrover_run.console.console import Console
from dlrover_run.coordination.records.assignment import Assignment, Waiting
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.round import Failure, RankAssignment, RoundKey
from dlrover_run.events.records import Event, Events
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.output.run_directory import create_run_dir, make_temp_dir
from dlrover_run.processes import tree, watchdog
from dlrover_run.rendezvous import kinds
from dlrover_run.spec import Entrypoint, JobSpec
from dlrover_run.words.reasons import Code, Reasons, sentence
from dlrover_run.workers.adapter import TorchAdapter

PATIENCE = 60.0
"""Seconds that an agent may take before its test counts as hung."""


def rank_assignment(number: int = 1, **more: Any) -> RankAssignment:
    """Return the ranks of this node in a round: it is alone unless other fields are given."""
    place = RankAssignment(
        key=RoundKey(1, number), restart_count=0, node_rank=0, nodes=1, workers=1, first_rank=0, world_size=1,
        role_first_rank=0, role_world_size=1, store_address="127.0.0.1", store_port=0,
    )  # fmt: skip
    return msgspec.structs.replace(place, **more)


def training(place: RankAssignment | None, number: int | None = None, **more: Any) -> Assignment:
    """Return the assignment of a round that trains, with those ranks of the node, or none."""
    key = place.key if place is not None else RoundKey(1, number or 1)
    restarts = place.restart_count if place is not None else 0
    assignment = Assignment(
        epoch=1, phase=PlanPhase.TRAINING, key=key, restart_count=restarts, reasons=sentence("because"), ranks=place
    )
    return msgspec.structs.replace(assignment, **more)


def gathering(number: int, text: str = "1 of 2 nodes is here: a") -> Assignment:
    """Return the assignment to wait for other nodes, after that round."""
    return Assignment(
        epoch=1, key=RoundKey(1, number), reasons=sentence("node-b was lost"), waiting=Waiting(sentence(text), 30.0)
    )


def over(phase: PlanPhase, number: int = 1, failure: Failure | None = None, reasons: Reasons = ()) -> Assignment:
    """Return the assignment of a job that has ended."""
    reasons = reasons or ((failure.reason,) if failure else (Code.ALL_SUCCEEDED(),))
    return Assignment(epoch=1, phase=phase, key=RoundKey(1, number), failure=failure, reasons=reasons)


FINISHED = over(PlanPhase.FINISHED)

Answer = Assignment | str | Callable[[], Any] | None


def phase(wanted: NodePhase) -> Callable[[NodeReport], bool]:
    """Return a condition: a report has that phase."""
    return lambda status: status.phase is wanted


class ScriptedRendezvous:
    """Runs its script: once a report fulfils the condition of the next step, its answer becomes the assignment.

    A text is a problem of the client instead, and a function is called for the answer.
    """

    def __init__(self, steps: Sequence[tuple[Callable[[NodeReport], bool], Answer]], listener: Callable[[], None]):
        self.assignment = Assignment()
        self.problem: str | None = None
        self.is_user_error = False
        self.is_away = False
        self.is_cut_off = False
        self.pids: set[int] = set()
        self.statuses: list[NodeReport] = []
        self._steps = list(steps)
        self._listener = listener

    def report(self, status: NodeReport) -> None:
        if self.statuses and self.statuses[-1] == status:
            return
        self.statuses.append(status)
        if self._steps and self._steps[0][0](status):
            answer = self._steps.pop(0)[1]
            answer = answer() if callable(answer) else answer
            if isinstance(answer, str):
                self.problem = answer
            elif answer is not None:
                self.assignment = answer
            # As from a socket: events that the loop finds at the same time come first.
            asyncio.get_running_loop().call_soon(self._listener)

    async def close(self) -> None:
        assert not self._steps, f"{len(self._steps)} steps were not reached; the last status was {self.statuses[-1]}"


class Emitted(Events):
    """Records events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


@dataclass(frozen=True)
class AgentRun:
    """The run of an agent: its reports in their order, its output, and the result of the job."""

    statuses: list[NodeReport]
    result: JobResult
    output: str

    @property
    def phases(self) -> list[NodePhase]:
        """The phases in their order, each once."""
        found: list[NodePhase] = []
        for status in self.statuses:
            if not found or found[-1] is not status.phase:
                found.append(status.phase)
        return found


@dataclass
class ScriptedAgent:
    """An agent whose workers run `shell` with /bin/sh in the directory of the test, and the script of its client."""

    directory: Path
    shell: str
    steps: list[tuple[Callable[[NodeReport], bool], Answer]] = field(default_factory=list)
    spec: dict[str, Any] = field(default_factory=dict)
    parent_pipes: Sequence[int] = ()
    watchdog_end: int = -1

    def signal(self, number: signal.Signals, above: bool = False) -> None:
        """Send the agent a signal as its watchdog does; `above`: the sender is an ancestor of the watchdog."""
        watchdog.send(self.watchdog_end, watchdog.ReceivedSignal(number, above, os.getpid(), time.monotonic()))

    def on(self, wanted: NodePhase | Callable[[NodeReport], bool], answer: Answer = None) -> ScriptedAgent:
        """Add a step: the answer of the client once the agent has sent such a report."""
        self.steps.append((phase(wanted) if isinstance(wanted, NodePhase) else wanted, answer))
        return self

    def run(self) -> AgentRun:
        """Run it in a child process, so that the signals of the agent, and its kills of orphans, do not affect this
        process."""
        reader, writer = os.pipe()
        console = os.open(self.directory / "console", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(reader)
                outcome = self._act(console)
                with open(writer, "wb") as out:
                    pickle.dump(outcome, out)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writer)
        os.close(console)
        with open(reader, "rb") as answer:
            data = answer.read()
        os.waitpid(child, 0)
        assert data, "the agent failed; its traceback is above"
        statuses, result = pickle.loads(data)
        return AgentRun(statuses, result, (self.directory / "console").read_text())

    def _act(self, console: int) -> tuple[list[NodeReport], JobResult]:
        os.setsid()
        os.chdir(self.directory)
        tree.become_subreaper()
        spec = JobSpec(
            **{
                "entrypoint": Entrypoint("program", "/bin/sh", ("-c", self.shell)),
                "run_id": "job",
                "rendezvous": kinds.Master("node0", 29400),
                "shutdown_timeout": PATIENCE,
                **self.spec,
            }
        )
        watchdog.block_signals(spec.signals)
        # What a watchdog would write to.
        parent_pipe, self.watchdog_end = os.pipe()
        self.parent_pipes = (*self.parent_pipes, parent_pipe)
        relay = RelayClient((console, console))
        # The kernel ends a child that hangs, and not a handler in Python, which a wait in C would never let run.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, chain=True)
        signal.alarm(int(PATIENCE))
        return asyncio.run(self._run_agent(spec, relay))

    async def _run_agent(self, spec: JobSpec, relay: RelayClient) -> tuple[list[NodeReport], JobResult]:
        own_console = Console(relay.write, lambda: None)
        relay.attach(own_console.info)
        rendezvous: list[ScriptedRendezvous] = []

        def open_rendezvous(listener: Callable[[], None], log: Callable[[str], None]) -> ScriptedRendezvous:
            rendezvous.append(ScriptedRendezvous(self.steps, listener))
            return rendezvous[0]

        run_dir = make_temp_dir(create_run_dir(spec.logs, spec.run_id), relay.remove_at_end)
        agent = Agent(spec, run_dir, relay, self.parent_pipes, own_console, open_rendezvous, TorchAdapter)
        result = await agent.run()
        await relay.drain()
        await relay.close()
        tree.end_children()
        return rendezvous[0].statuses, result
