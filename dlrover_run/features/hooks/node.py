"""Runs the hooks of a node: what each one receives, and what follows from its failure."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
from dlrover_run.agent.result import JobResult, NodeRefused
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import RankAssignment, RoundKey
from dlrover_run.features.hooks.settings import (
    AFTER_FAILURE,
    AT_END,
    BEFORE_ROUND,
    EVENTS,
    HookEnd,
    HookEvent,
    HookSettings,
)
from dlrover_run.processes.user_command import UserCommand
from dlrover_run.words.log_level import internal_error, log_frames
from dlrover_run.words.reasons import Code
from dlrover_run.workers.feature import WorkersFeature

FLAG = "--hook"


class Hooks(WorkersFeature):
    """The commands of this node. They run one after the other, each at most `HookSettings.timeout` seconds."""

    def __init__(self, services: AgentServices, tasks: FrameworkAdapter[Any]) -> None:
        super().__init__(services, tasks)
        self._settings = services.job.settings_of("hooks", HookSettings)
        self._assignment = Assignment()
        self._shutting_down = False
        self._current: UserCommand | None = None
        self._until: dict[str, float] = {}
        """When the commands of an event have to end, because the job has ended, on the clock of the loop."""
        self._event = ""
        self._failed_in: RoundKey | None = None
        self._passed: RoundKey | None = None
        """The last round before which all commands have succeeded."""
        self._turn = asyncio.Lock()
        self._after_failure: asyncio.Task[None] | None = None
        self._not_begun: Mapping[str, str] | None = None
        """The facts of the last failure, until its commands begin."""

    @property
    def pids(self) -> set[int]:
        return set() if self._current is None else {self._current.pid}

    @property
    def needs_devices(self) -> bool:
        return self._after_failure is not None and not self._after_failure.done()

    def follow(self, assignment: Assignment, shutting_down: bool) -> None:
        self._assignment = assignment
        if shutting_down and not self._shutting_down:
            self._shutting_down = True
            until = asyncio.get_running_loop().time() + self._services.job.shutdown_timeout
            ends = {HookEnd.JOB_OVER}
            if Code.STOPPED_ON_REQUEST.within(assignment.reasons):
                ends.add(HookEnd.STOPPED)
            self._until = {event.name: until for event in EVENTS.values() if event.end in ends}
            self.stop_waiting()

    def add_to_report(self, report: NodeReport) -> NodeReport:
        failure, ranks = report.failure, report.ranks
        if failure is not None and ranks is not None and ranks.key != self._failed_in:
            self._failed_in = ranks.key
            facts = {
                **_round_facts(ranks),
                "FAILED_RANK": str(failure.rank),
                "CAUSE": failure.exit_text,
                "EXIT_CODE": str(failure.exit_status),
            }
            self._not_begun = facts
            self._after_failure = self._services.start(self._run_after_failure(facts))
            # A node check waits for it.
            self._after_failure.add_done_callback(lambda _: self._services.wake())
        return report

    async def before_cleanup(self) -> None:
        # What looks at a failure may need the processes and the devices as they are.
        await self._failure_seen()

    async def before_round(self, ranks: RankAssignment, is_wanted: Callable[[], bool]) -> None:
        # Where workers are replaced in their round, there is no cleanup.
        await self._failure_seen()
        # For a round that runs already others take the places of those of its workers that have failed.
        if is_wanted() and ranks.key != self._passed:
            problem = await self._run(BEFORE_ROUND, _round_facts(ranks))
            if not problem:
                self._passed = ranks.key
            elif is_wanted():
                raise NodeRefused(f"the hook {BEFORE_ROUND.name} keeps this node out of round {ranks.round}: {problem}")

    def stop_waiting(self) -> None:
        """A signal ends the command that runs, in the time that the workers have; one at the end of the job gets the
        rest of it."""
        if self._current is not None:
            self._current.limit(self._seconds(self._event))

    async def close(self, result: JobResult) -> None:
        await self._failure_seen()
        if self._not_begun is not None:
            # The report of that failure has made the node leave, which ends what runs in the background.
            await self._run_after_failure(self._not_begun)
        facts = {"EXIT_CODE": str(result.exit_code), "CAUSE": result.error or result.reason}
        await self._run(AT_END, facts)

    async def _run_after_failure(self, facts: Mapping[str, str]) -> None:
        """An error of ours in it ends no node: the restart does not need these commands."""
        self._not_begun = None
        try:
            await self._run(AFTER_FAILURE, facts)
        except Exception as error:
            self._services.console.info(f"warning: the hook {AFTER_FAILURE.name} has failed: {internal_error(error)}")
            log_frames(self._services.console.info, error)

    async def _failure_seen(self) -> None:
        """Return when no command runs because of a failure. An error that ends the node has cancelled it, and goes on
        to the end of the job nevertheless."""
        if self._after_failure is not None:
            await asyncio.wait([self._after_failure])

    def _seconds(self, event: str) -> float:
        """The seconds that a command has from now on."""
        seconds = self._settings.timeout
        if (until := self._until.get(event)) is not None:
            seconds = min(seconds, until - asyncio.get_running_loop().time())
        if (left := self._services.shutdown.left) is not None:
            seconds = min(seconds, left)
        return max(0.0, seconds)

    async def _run(self, event: HookEvent, facts: Mapping[str, str]) -> str:
        """Run the commands of an event. Returns what is wrong with the first that has failed if the event decides, else
        prints it; empty if nothing is wrong."""
        async with self._turn:
            for words in self._settings.commands.get(event.name, ()):
                if event.decides and self._shutting_down:
                    break
                if problem := await self._run_one(event.name, words, facts):
                    if event.decides:
                        return problem
                    self._services.console.info(f"warning: the hook {event.name} has failed: {problem}")
        return ""

    async def _run_one(self, event: str, words: tuple[str, ...], facts: Mapping[str, str]) -> str:
        if not (seconds := self._seconds(event)):
            return "no time was left for it"
        self._event = event
        try:
            self._current = command = UserCommand(FLAG, words, self._environment(event, facts), seconds)
        except OSError as error:
            return f"{words[0]} cannot be started: {error.strerror or error}"
        try:
            await command.ended()
        finally:
            command.stop()
            self._current = None
            # What it has left behind.
            self._services.orphans.kill_session(command.pid)
        return command.problem

    def _environment(self, event: str, facts: Mapping[str, str]) -> Mapping[str, str]:
        services = self._services
        run_dir = services.run_dir
        own = {
            "HOOK": event,
            "JOB": services.job.display_name,
            "NODE": services.node_state.host,
            "NODE_ID": services.node_state.node_id,
            "RESTARTS": str(self._assignment.restart_count),
            "LOG_DIR": run_dir.path if run_dir.keep and run_dir.path is not None else "",
            **facts,
        }
        return {**os.environ, **{f"DLROVER_{name}": _encodable(value) for name, value in own.items()}}


def _encodable(value: str) -> str:
    """The value as far as a variable can have it: a locale may lack a character of a cause, and C ends at NUL."""
    encoding = sys.getfilesystemencoding()
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        value = value.encode(encoding, "replace").decode(encoding)
    return value.replace("\0", "?")


def _round_facts(ranks: RankAssignment) -> dict[str, str]:
    last = ranks.first_rank + ranks.workers - 1
    return {
        "ROUND": str(ranks.round),
        "NODE_RANK": str(ranks.node_rank),
        "NODES": str(ranks.nodes),
        "RANKS": str(last) if ranks.workers == 1 else f"{ranks.first_rank}-{last}",
        "WORLD_SIZE": str(ranks.world_size),
    }


NODE = Hooks
