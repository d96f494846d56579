"""Leave the cluster: the process ends, and says by its exit code that this costs nothing.

It ends without the interpreter's own end, where TensorFlow may wait for servers that are no more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from tf_ps_runner.worker.channel import note

EXIT_MEMBERSHIP = 75
"""The exit code of a process that left because the cluster changes."""

CLOSING = 2.0
"""Seconds for the session to be closed, which tells the servers to forget it; after that the process ends all the
same, and the servers keep what they have for it until they end."""

_before: list[Callable[[], None]] = []
_once = threading.Lock()


def on_leave(listener: Callable[[], None]) -> None:
    """Have `listener()` called before this process leaves as it was told, between two steps."""
    _before.append(listener)


def tell_leaving() -> None:
    """Call the listeners, once each."""
    while _before:
        listener = _before.pop(0)
        try:
            listener()
        except Exception as error:
            note(f"what shall happen before this process leaves has failed: {type(error).__name__}: {error}")


def leave(session: Any = None) -> NoReturn:
    """End this process with exit code 75. Only the first thread that comes here does it; others wait for the end."""
    if not _once.acquire(blocking=False):
        threading.Event().wait()
    try:
        tell_leaving()
        if session is not None:
            closing = threading.Thread(target=_close, args=(session,), daemon=True)
            closing.start()
            closing.join(CLOSING)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    finally:
        os._exit(EXIT_MEMBERSHIP)


def _close(session: Any) -> None:
    with contextlib.suppress(Exception):
        session.close()
