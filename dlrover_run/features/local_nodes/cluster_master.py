"""The master of the nodes of a local cluster: a process of the supervisor, which restarts it when it dies.

It has no journal. A new one recovers the plan from the reports of the nodes (`coordination/rounds/recovery.py`), while
the workers continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from dlrover_run.agent.host import explain_os_error
from dlrover_run.background import Background, wait_for_event
from dlrover_run.features.local_nodes.network import Network
from dlrover_run.rendezvous import kinds
from dlrover_run.rendezvous.master_client.launcher import MasterNotReady, MasterProcess
from dlrover_run.words.log_level import internal_error, log_frames

LOOPBACK = "127.0.0.1"

RESTART_PAUSE = 1.0
"""Seconds from a master that could not be started, or ended at once, to the next attempt. Nodes continue without."""

END_TIMEOUT = 5.0
"""Seconds that the master gets to end after all nodes, which takes milliseconds; then it is killed."""


class ClusterMaster:
    """Runs a master for the nodes; `log` prints one line on the console.

    It listens on the loopback interface, or in the switch of `network`, and admits only clients with the token of this
    cluster, which only its nodes get.
    """

    def __init__(self, network: Network | None, log: Callable[[str], None]) -> None:
        self._network = network
        self._log = log
        host = LOOPBACK if network is None else network.master_address
        self.spec = kinds.Master(host, port=0, is_host=False, token=secrets.token_hex(32), auth_required=True)
        """How a node reaches it; the port is known once `start` has returned."""
        self._process: MasterProcess | None = None
        self._exited = asyncio.Event()
        self._listens_since = 0.0
        self._restarting: asyncio.Task[None] | None = None
        self._background = Background(self._note_failed_restart)
        self._ending = False

    async def start(self) -> None:
        """Start the master. Raises MasterNotReady or OSError if it cannot be started."""
        self.spec = replace(self.spec, port=await self._begin())

    @property
    def pids(self) -> set[int]:
        """The pid of the master while it runs."""
        return {self._process.pid} if self._process is not None else set()

    async def end(self) -> None:
        """End the master, and wait for its end."""
        self._ending = True
        await self._background.close()
        if self._process is not None:
            self._process.end()
            await wait_for_event(self._exited, END_TIMEOUT)
            if self._process is not None:
                self._process.kill()
                await self._exited.wait()

    async def _begin(self) -> int:
        self._exited.clear()
        process = MasterProcess(self.spec, f"{self.spec.host}:{self.spec.port}", self._log, ends_with_parent=True)
        with self._network.switch.entered() if self._network is not None else contextlib.nullcontext():
            process.start(partial(self._on_end, process))
        self._process = process
        port = await process.ready()
        self._listens_since = asyncio.get_running_loop().time()
        return port

    def _on_end(self, process: MasterProcess) -> None:
        # One that was killed because it did not listen may end after its successor has started.
        if process is self._process:
            self._process = None
            self._exited.set()
            self._restart_later()

    def _restart_later(self) -> None:
        if not self._ending and self.spec.port and self._restarting is None:
            self._log("the master has ended; it is started again, and training goes on meanwhile")
            lived = asyncio.get_running_loop().time() - self._listens_since
            self._restarting = self._background.start(self._restart(RESTART_PAUSE if lived < RESTART_PAUSE else 0.0))

    def _note_failed_restart(self, error: Exception) -> None:
        self._log(f"the master is not started again: {internal_error(error)}")
        log_frames(self._log, error)

    async def _restart(self, pause: float) -> None:
        logged = ""
        while True:
            await asyncio.sleep(pause)
            try:
                await self._begin()
                break
            except (MasterNotReady, OSError) as why:
                line = f"the master cannot be started, which is tried again and again: {reason_of(why)}"
                if line != logged:
                    self._log(line)
                logged, pause = line, RESTART_PAUSE
        self._restarting = None
        if self._process is None:
            # It ended just after it had begun to listen.
            self._restart_later()


def reason_of(error: MasterNotReady | OSError) -> str:
    """Why a master could not be started, as a clause."""
    return explain_os_error(error) if isinstance(error, OSError) else str(error)
