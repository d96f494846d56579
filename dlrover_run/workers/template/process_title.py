"""Make `ps` and /proc show the name of a process of the launcher, or the command line and environment of a worker.

The kernel reads both from two ranges of the process's memory. PR_SET_MM_MAP moves these ranges and needs no privilege.
If the kernel was built without it, the old command line is overwritten in place, truncated to its length.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence

_PR_SET_NAME = 15
PR_SET_MM = 35
PR_SET_MM_MAP = 14

_kept: list[mmap.mmap] = []


class _MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_int32),
    ]


def name_process(name: str) -> None:
    """Set the name that `top` and `ps` show (15 bytes in `top`). The processes of the launcher call it at their start.

    It replaces the whole command line, so that `pkill -9 -f train.py` kills the watchdog and the workers of that script
    but not the processes that clean up after them.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))
    set_process_title((name,), os.environ)


def set_process_title(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Set /proc/PID/cmdline and /proc/PID/environ; what cannot be set stays unchanged."""
    try:
        with open("/proc/self/stat") as stat:
            text = stat.read()
        # The second field is the name in parentheses and may contain anything; the third field has index 0 here.
        fields = [int(field) if field.lstrip("-").isdigit() else 0 for field in text[text.rindex(")") + 2 :].split()]
        if not _repoint(argv, env, fields):
            _overwrite(argv, fields)
    except (OSError, ValueError, IndexError, AttributeError):
        return


def _repoint(argv: Sequence[str], env: Mapping[str, str], fields: Sequence[int]) -> bool:
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    memory = mmap.mmap(-1, len(words) + len(variables) or 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(words + variables)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    field = {number: fields[number - 3] for number in (26, 27, 28, 45, 46, 47)}
    arguments_end = start + len(words)
    wanted = _MemoryMap(
        *(field[26], field[27], field[45], field[46], field[47], libc.sbrk(0), field[28]),
        *(start, arguments_end, arguments_end, arguments_end + len(variables)),
        *(0, 0, -1),
    )
    if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(wanted), ctypes.sizeof(wanted), 0) != 0:
        return False
    _kept.append(memory)
    return True


def _overwrite(argv: Sequence[str], fields: Sequence[int]) -> None:
    start, end = fields[48 - 3], fields[49 - 3]
    if end - start < 2:
        return
    # If the last byte is not NUL, the kernel takes the range for one string that ends at its first NUL.
    words = b" ".join(os.fsencode(word) for word in argv)[: end - start - 2]
    ctypes.memmove(start, words.ljust(end - start - 1, b"\0") + b".", end - start)
