"""The name of a process of the launcher, as `ps` and `top` show it."""

from __future__ import annotations

import ctypes
import os

from dlrover_run.workers.template import process_title

_PR_SET_NAME = 15


def name_process(name: str) -> None:
    """Set the name that `top` and `ps` show (15 bytes in `top`).

    It replaces the whole command line, so that `pkill -9 -f train.py` kills the watchdog and the workers of that script
    but not the processes that clean up after them.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))
    process_title.set_process_title((name,), os.environ)
