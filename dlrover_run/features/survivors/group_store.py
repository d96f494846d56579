"""The store of a job whose workers outlive their round: it belongs to the agent, and lasts for more than one round."""

from __future__ import annotations

from collections.abc import Callable

from dlrover_run.processes.ports import HeldPort
from dlrover_run.workers.store_process import StoreProcess


class GroupStore:
    """The store that this node runs, or could run, at `port`. It ends with the agent, also by SIGKILL.

    `log` is called with a sentence for the user, `on_end` when it has ended by itself. Then `port` is another one,
    because a port stands for one store.
    """

    def __init__(self, log: Callable[[str], None], on_end: Callable[[], None]) -> None:
        self._log = log
        self._on_end = on_end
        self._store = self._hold()

    @property
    def port(self) -> int:
        """The port of the store."""
        return self._store.number

    @property
    def pids(self) -> set[int]:
        """The pid of the process, while it runs."""
        return self._store.pids

    def start(self) -> None:
        """Start the process, if it does not run. Raises OSError."""
        self._store.listen()
        self._store.start()

    def close(self) -> None:
        """End the process, and release the port."""
        self._store.release()

    def _hold(self) -> StoreProcess:
        return StoreProcess(HeldPort(), self._log, self._note_end)

    def _note_end(self, how: str) -> None:
        self._store = self._hold()
        self._log(f"the store of the workers {how}: the next round has another one, and its workers start anew")
        self._on_end()
