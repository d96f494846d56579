"""Keeps an explanation of a failure from failing itself.

An explanation runs between the end of a worker and the restart for which that end is the reason. It reads files,
counters and text that may be missing or strange just because of the failure, so no exception in one may reach the
restart.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from dlrover_run.words.log_level import is_debug

T = TypeVar("T")


def guarded(what: str, explain: Callable[[], T], default: T) -> T:
    """What `explain` returns; `default` if it raises. With LOGLEVEL=DEBUG the exception is printed, with `what` as the
    name of the explanation.

    The agents call it for everything that they look up or compute only to tell a user why a process has ended.
    """
    try:
        return explain()
    except Exception as error:
        show_unexplained(what, error)
        return default


def show_unexplained(what: str, error: Exception) -> None:
    """Print the exception with LOGLEVEL=DEBUG, with `what` as the name of the explanation."""
    if is_debug(os.environ):
        with contextlib.suppress(Exception):
            import traceback

            print(f"debug: no explanation from {what}: {error!r}", file=sys.stderr)
            traceback.print_exception(error)
