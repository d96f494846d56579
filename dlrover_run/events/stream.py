"""The events of one agent on their way to its log, for what follows them while the job runs."""

from __future__ import annotations

from collections.abc import Callable

from dlrover_run.events.records import Event, Events
from dlrover_run.failures.guard import guarded


class EventStream(Events):
    """Passes the events of one agent on to `log`, and then to all that listen. A listener that fails is left out for
    that event."""

    def __init__(self, log: Events) -> None:
        self._log = log
        self._listeners: list[Callable[[Event], None]] = []

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Have each event from now on given to a listener too."""
        self._listeners.append(listener)

    def emit(self, event: Event) -> None:
        self._log.emit(event)
        for listener in self._listeners:
            # An event may be on the way to a restart.
            guarded("a listener to events", lambda: listener(event), None)  # noqa: B023 -- It is called at once.

    def close(self) -> bool:
        return self._log.close()

    @property
    def path(self) -> str:
        return self._log.path

    def lines(self) -> list[bytes]:
        return self._log.lines()
