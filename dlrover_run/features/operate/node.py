"""The socket of this node's agent, on which it answers operators of this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dlrover_run.agent.host import launcher_pid
from dlrover_run.agent.node_feature import NodeFeature
from dlrover_run.features.operate.agent_socket import AgentSocket
from dlrover_run.words.log_level import internal_error, log_frames

if TYPE_CHECKING:
    from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
    from dlrover_run.agent.result import JobResult
    from dlrover_run.features.operate.protocol import AgentInfo, JobEnding, TaskProgress


class OperatorSocket(NodeFeature):
    """Has the socket from before the first task until the result of the job is known to all who wait for it."""

    def __init__(self, services: AgentServices, tasks: FrameworkAdapter[Any]) -> None:
        super().__init__(services, tasks)
        self._began = time.monotonic()
        self._socket = AgentSocket(
            self._info,
            services.ask,
            self._task_progress,
            services.ask_stacks,
            services.read_activity,
            services.events.lines,
        )

    def open(self) -> None:
        try:
            self._socket.listen()
        except OSError as error:
            self._note_failure(error)
            return
        self._services.start(self._accept())

    async def _accept(self) -> None:
        try:
            await self._socket.accept()
        except Exception as error:
            self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        # The job does not need the socket.
        problem = error.strerror or error if isinstance(error, OSError) else internal_error(error)
        self._services.console.info(f"warning: `status` does not find this node from here: {problem}")
        if not isinstance(error, OSError):
            log_frames(self._services.console.info, error)

    async def close(self, result: JobResult) -> None:
        # Only now, as the features before may take long, and a reader that need not wait would read all the time.
        await self._services.end_logs()
        await self._socket.finish(lambda: self._ending(result))
        self._socket.close()

    def _info(self) -> AgentInfo:
        # Imported with the first question: a launch does not wait for it.
        import shlex

        from dlrover_run.features.operate.protocol import MAX_SCRIPT, AgentInfo

        job, node = self._services.job, self._services.node_state
        program = job.entrypoint
        # As it was typed, without the directory of the script.
        script = shlex.join((os.path.basename(program.target) or program.target, *program.args))
        return AgentInfo(
            job=job.display_name,
            program=job.rules.program,
            backend=job.rendezvous.backend,
            host=node.host,
            node_id=node.node_id,
            pid=os.getpid(),
            launcher=launcher_pid(job),
            script=script[:MAX_SCRIPT],
            seconds=round(time.monotonic() - self._began, 3),
            endpoint=job.rendezvous.endpoint or job.endpoint,
            log=self._services.events.path,
        )

    def _ending(self, result: JobResult) -> JobEnding:
        from dlrover_run.features.operate.protocol import JobEnding

        seconds = round(time.monotonic() - self._began, 3)
        return JobEnding(exit_code=result.exit_code, reason=result.error or result.reason, seconds=seconds)

    def _task_progress(self) -> Sequence[TaskProgress]:
        from dlrover_run.features.operate.protocol import TaskProgress

        now = time.monotonic_ns()
        return [
            TaskProgress(
                name=name,
                steps=progress.steps,
                idle=round(max(0, now - progress.at) / 1e9, 3),
                period=period,
            )
            for name, (progress, period) in self._services.tick.sample().items()
        ]


NODE = OperatorSocket
