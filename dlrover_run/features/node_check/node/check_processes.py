"""The check processes of a node and the template that they are forked from: when they start, and who ends them.

They run from the first task until the workers start, whose devices they would hold. Their template ends then too: it
would cost 200 MB while the job trains, and starting another takes two seconds of a rare wait. If each round is checked,
the template stays, because otherwise every restart would wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from msgspec.structs import replace

from dlrover_run.background import Background, TimeLimit
from dlrover_run.features.node_check.node.check_workers import CheckWorkers, CheckWorkersLost, check_environments
from dlrover_run.processes.process import StuckProcess
from dlrover_run.spec import Entrypoint, JobSpec
from dlrover_run.workers.starter import Starter

NODE_CHECK_FOLDER = str(Path(__file__).resolve().parent.parent / "check")

STORE_PORT = "DLROVER_RUN_CHECK_STORE_PORT"
"""The variable with the port at which the check process of local rank 0 hosts a store from its start (`tasks.py`)."""

PRELOAD = ("torch", "torch.distributed")
"""What a separate template of the check processes imports before it forks."""


class CheckProcesses:
    """Starts and ends the check processes, for the runner of the node check.

    `starter` is that of the workers; its template is used here too if it has imported torch. `undisturbed` suspends the
    reaping of orphans while processes are forked. `port` is where they host a store. With `keep_template` a template of
    their own stays when they end. `failed` is called with an error of its end. `folder` is their program.
    """

    def __init__(
        self,
        spec: JobSpec,
        starter: Starter,
        undisturbed: Callable[[], AbstractContextManager[None]],
        port: int,
        keep_template: bool,
        failed: Callable[[Exception], None],
        folder: str = NODE_CHECK_FOLDER,
    ) -> None:
        self._spec = spec
        self._workers_starter = starter
        self._undisturbed = undisturbed
        self._port = port
        self._keep_template = keep_template
        self._folder = folder
        self.python = spec.entrypoint.python or sys.executable
        self._workers: CheckWorkers | None = None
        self._ending: set[CheckWorkers] = set()
        self._own_starter: Starter | None = None
        self._closing: asyncio.Future[None] | None = None
        self._background = Background(failed)

    @property
    def pids(self) -> set[int]:
        """The pids of the check processes and of their template, while they run."""
        found = set(self._own_starter.pids) if self._own_starter is not None else set()
        for workers in (*self._ending, self._workers):
            if workers is not None:
                found |= workers.pids
        return found

    @property
    def are_idle(self) -> bool:
        """Whether there is something that `release` would end: the node waits for its ranks, maybe for long."""
        return self._workers is not None or self._template_is_idle

    async def ready(self, seconds: float) -> CheckWorkers:
        """The processes, which are started if none are ready. Raises CheckWorkersLost if that takes longer than
        `seconds`."""
        try:
            async with TimeLimit(seconds):
                return await self._ready_workers()
        except TimeoutError:
            raise CheckWorkersLost(
                f"the processes of the node check could not be started in {seconds:.3g} s; where starting takes "
                "longer, as from a slow disk, give it more with --rdzv-conf check_timeout=SECONDS",
                local=True,
            ) from None

    async def end(self) -> None:
        """End the processes; the template stays. Raises StuckProcess if the kernel does not end one."""
        workers, self._workers = self._workers, None
        if workers is not None:
            self._ending.add(workers)
            await self._end(workers)

    async def release(self) -> None:
        """End what holds a device, because nothing is to be checked now."""
        # `suspend` reports a process that the kernel does not end.
        with contextlib.suppress(StuckProcess):
            await self.end()
        self._close_idle_template()

    async def suspend(self) -> None:
        """End all of them, also those that another call had begun to end, because the workers start now. Raises
        StuckProcess if the kernel does not end one."""
        await self.end()
        for workers in list(self._ending):
            await self._end(workers)
        self._close_idle_template()

    async def close(self) -> None:
        """End everything permanently, after `suspend`."""
        if self._closing is not None:
            await asyncio.wait([self._closing])
        await self._close_starter()
        await self._background.close()

    async def _ready_workers(self) -> CheckWorkers:
        if self._workers is not None:
            if self._workers.idle:
                return self._workers
            # If the kernel does not end one, new processes meet the same device and report it.
            with contextlib.suppress(StuckProcess):
                await self.end()
        starter = await self._starter()
        await starter.prestarted(os.environ)
        argv = (self.python, "-u", self._folder)
        first, *others = check_environments(self._spec, os.environ)
        # Its store listens long before the first link: a client that connects too early waits for up to a second.
        self._workers = workers = CheckWorkers(argv, [{**first, STORE_PORT: str(self._port)}, *others])
        with self._undisturbed():
            await workers.start(lambda spec: starter.start(spec, self._folder))
        return workers

    async def _starter(self) -> Starter:
        if self._spec.start_method == "forkserver" and self._spec.entrypoint.kind != "program":
            await self._workers_starter.prestarted(os.environ)
            # If the script does not import torch itself, each check process would have to.
            if self._own_starter is None and all(self._workers_starter.has_imported(name) for name in PRELOAD):
                return self._workers_starter
        if self._closing is not None:
            await asyncio.wait([self._closing])
        if self._own_starter is None:
            entrypoint = Entrypoint("script", self._folder, python=self.python)
            own = replace(self._spec, entrypoint=entrypoint, start_method="forkserver", preload=PRELOAD)
            # That it falls back to spawning is not printed: the user cannot do much about it.
            self._own_starter = Starter(own, lambda sentence: None)
        return self._own_starter

    @property
    def _template_is_idle(self) -> bool:
        """Whether the separate template runs and is not expected to be needed."""
        return self._own_starter is not None and self._closing is None and not self._keep_template

    def _close_idle_template(self) -> None:
        # Nothing waits for this: the template holds no device.
        if self._template_is_idle:
            self._closing = self._background.start(self._close_starter())

    async def _close_starter(self) -> None:
        if self._own_starter is not None:
            await self._own_starter.close()
        self._own_starter = self._closing = None

    async def _end(self, workers: CheckWorkers) -> None:
        await workers.end()
        self._ending.discard(workers)
