"""How the tasks of a node have ended: what is found out about each, and what is remembered of it."""

from __future__ import annotations

import time

from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.policies.parameter_servers.model import Role, TaskEnd
from dlrover_run.supervisor.process import ManagedProcess, ProcessSpec
from tf_ps_runner.agent.endings import Found, raised, task_end
from tf_ps_runner.agent.hosted import Hosted
from tf_ps_runner.agent.telling import Telling

MOST_ENDS = 50
"""Ends of tasks that are kept for the report on the last of them."""


class Findings:
    """What is known of the ends of a node's tasks. `ends` are how the last of them have ended."""

    def __init__(self, relay: RelayClient, telling: Telling) -> None:
        self._relay = relay
        self._telling = telling
        self._raised: dict[tuple[Role, int], str] = {}
        self.ends: list[tuple[TaskEnd, WorkerExit]] = []

    async def find_out(self, hosted: Hosted, process: ManagedProcess[ProcessSpec]) -> TaskEnd:
        """How a task has ended whose process has, once its last words are known."""
        task, outputs, memory = hosted.task, hosted.outputs, hosted.memory
        assert process.code is not None, "it has ended"
        assert outputs is not None, "it was given with the process"
        assert memory is not None, "it was given with the process"
        stopped = process.stopped_with if not hosted.silent else None
        killed = memory.killed_for_memory(process.code) if stopped is None and not hosted.silent else None
        words = await outputs.last_words(self._relay)
        outputs.forget(self._relay)
        end = WorkerExit(
            rank=task.rank,
            local_rank=task.rank,
            pid=process.pid,
            code=process.code,
            unix_time=process.ended_at,
            stopped_with=stopped,
            stderr_tail=words,
            stdout_path=outputs.stdout_path,
            stderr_path=outputs.stderr_path,
            name=str(task.key),
        )
        place = (task.role, task.rank)
        told = task_end(
            Found(
                role=task.role,
                end=end,
                lived=time.monotonic() - hosted.started_at,
                silent=hosted.silent,
                memory=killed,
                dismissed=stopped is not None or hosted.leaving,
                stepped=hosted.past_beginning,
                before=self._raised.get(place),
            )
        )
        self._telling.ended(hosted.key, told, hosted.step)
        if (exception := raised(end)) is not None:
            self._raised[place] = exception
        else:
            self._raised.pop(place, None)
        self.ends = [*self.ends[-MOST_ENDS:], (told, end)]
        return told
