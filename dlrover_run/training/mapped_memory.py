"""Memory files that this process has mapped: a state is copied straight into one, and the same one serves again.

From the first use on no other process can write to a file, and this one only through its mapping, which is read-only
while the file is held. A child does not inherit the mapping, and it ends with this process. So nothing can change a
checkpoint of a worker that has ended.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import threading
import weakref
from typing import Any

from dlrover_run import linux
from dlrover_run.training.device_copies import DeviceCopies
from dlrover_run.training.state_plan import StatePlan

_SEALS = linux.F_SEAL_FUTURE_WRITE | linux.F_SEAL_SHRINK | linux.F_SEAL_GROW | linux.F_SEAL_SEAL

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, Linux 5.14."""

_POPULATED_AT_ONCE = 32 * 1024 * 1024
"""Bytes of a mapping that are prepared at a time: a save that comes meanwhile waits for one piece."""


class MappedMemory:
    """One memory file, mapped as long as this object lives. Raises OSError."""

    def __init__(self, fd: int, size: int, copies: DeviceCopies) -> None:
        self.size = size
        self.lock = threading.Lock()
        """Held by the thread that uses or prepares this memory."""
        self.wanted = False
        """Set by a save that waits for a thread to stop preparing this memory."""
        self._copies = copies
        self._address = _map(fd, size)
        self._registered = [False]
        unmap = weakref.finalize(self, _unmap, self._address, size, copies, self._registered, os.getpid())
        # At the end of the process the kernel does it.
        unmap.atexit = False
        fcntl.fcntl(fd, linux.F_ADD_SEALS, _SEALS)
        self._bytes = memoryview((ctypes.c_char * size).from_address(self._address)).cast("B")

    def populate(self) -> None:
        """Have the kernel give the pages now, until this memory is wanted; what is left is given when it is filled."""
        for start in range(0, self.size, _POPULATED_AT_ONCE):
            size = min(_POPULATED_AT_ONCE, self.size - start)
            if self.wanted or _libc().madvise(self._address + start, size, _POPULATE_WRITE):
                return

    def register(self, device: Any) -> str:
        """Pin it for this device of torch, once; why that failed, empty if it did not."""
        if self._registered[0]:
            return ""
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        problem = self._copies.register(self._address, self.size, device)
        self._registered[0] = not problem
        return problem

    def fill(self, plan: StatePlan) -> None:
        """Copy the content of a plan of this size. When this returns, all of it has arrived, and this process cannot
        change it any more. If it raises, a device may still write to the memory."""
        assert plan.length == self.size, "the plan fits"
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        try:
            for offset, size, content in plan:
                if isinstance(content, bytes):
                    self._bytes[offset : offset + size] = content
                else:
                    self._copies.copy_async(self._bytes[offset : offset + size], content)
        finally:
            self._copies.synchronize(plan.remote)
        self._protect(mmap.PROT_READ)

    def _protect(self, protection: int) -> None:
        if _libc().mprotect(self._address, self.size, protection):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


def _map(fd: int, size: int) -> int:
    libc = _libc()
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    # A child of the script, such as a loader of data, must not write to it, nor keep it.
    libc.madvise(address, size, mmap.MADV_DONTFORK)
    return int(address)


def _unmap(address: int, size: int, copies: DeviceCopies, registered: list[bool], pid: int) -> None:
    # A child has other memory there.
    if os.getpid() != pid:
        return
    if registered[0]:
        copies.unregister(address)
    _libc().munmap(address, size)


@functools.cache
def _libc() -> Any:
    # Not the module mmap: its objects hold the interpreter's lock while the kernel works, and a child unmaps them.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mprotect.argtypes = libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
