"""The store of each round at MASTER_ADDR:MASTER_PORT: served by the agent of rank 0 as torchrun's does, unless the user
has rank 0 host it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dlrover_run.coordination.model import RankAssignment, RoundKey
from dlrover_run.processes.ports import HeldPort
from dlrover_run.workers.environment import serves_store

if TYPE_CHECKING:
    from dlrover_run.workers.store_process import StoreProcess


class StorePort:
    """The port of a round's store. `store` is None if the port is only held, for rank 0, which hosts the store."""

    def __init__(self, held: HeldPort, store: StoreProcess | None = None) -> None:
        self._held = held
        self.store = store

    @property
    def pids(self) -> set[int]:
        """The pid of the store, while it runs."""
        return set() if self.store is None else self.store.pids

    def release(self) -> None:
        """End the store, and release the port. Idempotent."""
        if self.store is not None:
            self.store.release()
        self._held.release()


class RoundStores:
    """Opens the store of each round: a fresh one, so that workers of two rounds cannot meet.

    `environment` is that of the launcher, `log` is called with a sentence for the user, and `on_client` with the round
    and the address of the first client of its store.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        log: Callable[[str], None],
        on_client: Callable[[RoundKey, str], None],
    ) -> None:
        self._serves = serves_store(environment)
        self._log = log
        self._on_client = on_client
        self._last: StoreProcess | None = None

    def open(self, held: HeldPort | None, ranks: RankAssignment) -> StorePort | None:
        """Serve the store of a round at the port `held`, or leave that to rank 0; None on a node without the store.
        Raises OSError if another process listens there."""
        if held is None:
            return None
        if not self._serves:
            return StorePort(held)
        # Imported only here: of several nodes one serves the store.
        from dlrover_run.workers.store_process import StoreProcess

        def note_end(how: str) -> None:
            self._log(f"the store of round {ranks.round} {how}: workers that still need it fail")

        store = StoreProcess(held, self._log, note_end, lambda address: self._on_client(ranks.key, address))
        store.listen()
        if self._last is not None and self._last.used:
            # The same script will need it again: so it is not waited for.
            store.start()
        self._last = store
        return StorePort(held, store)
