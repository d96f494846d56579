"""Runs the hooks of a node: what each one is told, and what follows from its failure."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
from dlrover_run.agent.node_feature import NodeRefused
from dlrover_run.agent.result import JobResult
from dlrover_run.coordination.model import Assignment, NodeReport, RankAssignment, RoundKey
from dlrover_run.features.hooks.settings import HookSettings
from dlrover_run.processes.user_command import UserCommand
from dlrover_run.workers.feature import WorkersFeature

FLAG = "--hook"


class Hooks(WorkersFeature):
    """The commands of this node. They run one after the other, each at most `HookSettings.timeout` seconds."""

    def __init__(self, services: AgentServices, tasks: FrameworkAdapter[Any]) -> None:
        super().__init__(services, tasks)
        self._settings = services.job.settings_of("hooks", HookSettings)
        self._assignment = Assignment()
        self._current: UserCommand | None = None
        self._failed_in: RoundKey | None = None
        self._turn = asyncio.Lock()
        self._after_failure: asyncio.Task[str] | None = None

    @property
    def pids(self) -> set[int]:
        return set() if self._current is None else {self._current.pid}

    def follow(self, assignment: Assignment, ends: bool) -> None:
        self._assignment = assignment

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
            self._after_failure = self._services.start(self._run("after-failure", facts))
        return report

    async def before_round(self, ranks: RankAssignment) -> None:
        # What looks at a failure may need the devices as they are.
        if self._after_failure is not None:
            await self._after_failure
        if not self._services.shutdown.wanted:
            problem = await self._run("before-round", _round_facts(ranks))
            if problem and not self._services.shutdown.wanted:
                raise NodeRefused(f"the hook before-round keeps this node out of round {ranks.round}: {problem}")

    def stop_waiting(self) -> None:
        """A signal ends the command that runs, in the time that the workers have; one at the end of the job gets the
        rest of it."""
        if self._current is not None:
            self._current.limit(self._seconds)

    async def close(self, result: JobResult) -> None:
        if self._after_failure is not None:
            await self._after_failure
        facts = {"EXIT_CODE": str(result.exit_code), "CAUSE": result.error or result.reason}
        await self._run("at-end", facts)

    @property
    def _seconds(self) -> float:
        """The seconds that a command has which begins now."""
        _, seconds, _ = self._services.shutdown.stop_with(self._settings.timeout)
        return min(seconds, self._settings.timeout)

    async def _run(self, event: str, facts: Mapping[str, str]) -> str:
        """Run the commands of an event. Returns what is wrong with the first that has failed, empty if none has; for
        other events than the one that decides about a round it is printed here."""
        async with self._turn:
            for words in self._settings.commands.get(event, ()):
                if problem := await self._run_one(event, words, facts):
                    if event == "before-round":
                        return problem
                    self._services.console.info(f"warning: the hook {event} has failed: {problem}")
        return ""

    async def _run_one(self, event: str, words: tuple[str, ...], facts: Mapping[str, str]) -> str:
        if not (seconds := self._seconds):
            return "this node was ended at once"
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
        return {**os.environ, **{f"DLROVER_{name}": value for name, value in own.items()}}


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
