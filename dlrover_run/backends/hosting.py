"""A master started by the node that the endpoint names: a process of its own, which outlives that node's launcher.

Binding the address is the mutex: of several agents on the host that start a master at once, one succeeds, and the
masters of the others end. The master ends itself when the last node has gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dlrover_run.backends.master_process import MasterProcess, NotListening, Say
from dlrover_run.spec import MasterSpec
from dlrover_run.wire.own_address import Address, Unknown, is_own, is_taken, look_up, why_not_free

IDLE_TIMEOUT = 15.0
"""Seconds without any node after which a master that we started ends: as long as a node may take to come back."""

START_PAUSE = 10.0
"""Seconds after a master could not be started until the next try, which will most often fail in the same way."""


class CannotHost(Exception):
    """This node alone can start the master, and every attempt will fail; the message is a sentence."""


class Hosting:
    """Has a master at the endpoint where this node is its host. `say` prints one line for the person at the console.

    `problem` says why no master could be started, None while there is no reason to think so.
    """

    def __init__(self, spec: MasterSpec, say: Say) -> None:
        self._spec = spec
        self._say = say
        self._told: set[str] = set()
        self._not_before = 0.0
        self.pids: set[int] = set()
        self.problem: str | None = None

    async def ensure(self, endpoint: Sequence[Address]) -> None:
        """Start a master unless somebody listens already or another node is the host.

        Returns as soon as one listens, or with `problem` set. Raises CannotHost.
        """
        if self._spec.is_host is False:
            return
        own = [address for address in endpoint if is_own(address)]
        if self._spec.is_host is None and not own:
            return
        try:
            places = await look_up(self._spec.bind, self._spec.port) if self._spec.bind else own
        except Unknown as unknown:
            self._fail(f"--rdzv-conf bind: {unknown}")
            return
        if not places:
            self._fail(
                f"--rdzv-conf is_host, but {self._spec.host} is no address of this machine: "
                "name the one to listen on with --rdzv-conf bind=ADDRESS"
            )
            return
        refusals = [why_not_free(place) for place in places]
        if any(error is not None and is_taken(error) for error in refusals):
            self.problem = None
        elif refusals[0] is not None:
            self._fail(f"{places[0]} cannot be listened on ({refusals[0].strerror}): name another --rdzv-endpoint")
        elif asyncio.get_running_loop().time() >= self._not_before:
            await self._start(places)

    async def _start(self, places: Sequence[Address]) -> None:
        place = places[0]
        self._warn(place)
        error = await self._run(place)
        if error is None or any(_taken(place) for place in places):
            # Another agent on this host may have been quicker.
            self.problem = None
            return
        self._not_before = asyncio.get_running_loop().time() + START_PAUSE
        self._fail(str(error))
        if error.mistaken:
            assert self.problem is not None, "it was just set"
            raise CannotHost(self.problem)

    async def _run(self, place: Address) -> NotListening | None:
        """Start a master and wait until it listens; or why it does not."""
        master = MasterProcess(self._spec, str(place), self._say, idle_timeout=IDLE_TIMEOUT)
        try:
            master.start(lambda: self._collect(master))
        except OSError as error:
            return NotListening(f"its process could not be started: {error.strerror or error}")
        self.pids.add(master.pid)
        try:
            await master.ready()
        except NotListening as why:
            return why
        return None

    def _collect(self, master: MasterProcess) -> None:
        self.pids.discard(master.pid)

    def _fail(self, reason: str) -> None:
        self.problem = f"no master can be started on this node: {reason}"
        self._tell(self.problem)

    def _warn(self, place: Address) -> None:
        """Say what will keep the other nodes out, or will let strangers in."""
        where = self._spec.host
        if place.loopback and not self._spec.bind and where not in ("localhost", place.host):
            self._tell(
                f"warning: {where} stands for {place.host} on this machine, which no other machine can reach; "
                "correct /etc/hosts, name the endpoint by its address, or give --rdzv-conf bind=ADDRESS"
            )
        if not place.loopback and not self._spec.token and self._spec.tls is None:
            self._tell(
                f"warning: the master listens on {place} with neither token nor TLS, so whoever reaches that port can "
                "take part in the job; set DLROVER_RDZV_TOKEN on all nodes, or --rdzv-conf tls_ca, tls_cert and tls_key"
            )

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._say(sentence)


def _taken(place: Address) -> bool:
    error = why_not_free(place)
    return error is not None and is_taken(error)
