"""Overwrites secrets in the memory of a process that was forked from one that needs them, and does not itself."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from io import RawIOBase

MIN_LENGTH = 16
"""Bytes of the shortest secret that is overwritten. A shorter one may be part of this program's own names; the launcher
warns of such a token."""

_CHUNK = 1024 * 1024
_FLIP = bytes(255 - byte for byte in range(256))
_BLOT = b"*"
_WRITABLE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) rw.p ", re.MULTILINE)


def scrub(secrets: Iterable[str]) -> None:
    """Overwrite every copy of these in this process's own memory, wherever the parent had them: objects, buffers, and
    freed memory. They stay where the kernel does not allow writing to it."""
    # Searched for with all bits flipped, so that the search makes no copies of what it looks for.
    wanted = {form.translate(_FLIP) for text in secrets for form in _forms(text) if len(form) >= MIN_LENGTH}
    if not wanted:
        return
    window = bytearray(_CHUNK)
    try:
        with open("/proc/self/maps", "rb") as maps:
            areas = [(int(begin, 16), int(end, 16)) for begin, end in _WRITABLE.findall(maps.read())]
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            for begin, end in areas:
                # An area may be gone by now: the allocator unmaps what the list of the areas itself took.
                with contextlib.suppress(OSError):
                    _scrub_area(memory, begin, end, wanted, window)
    except (OSError, ValueError):
        return
    finally:
        window[:] = bytes(len(window))


def _forms(text: str) -> set[bytes]:
    """The bytes of a text as it travels, and as Python keeps it."""
    forms = {text.encode()}
    if not text.isascii():
        forms |= {text.encode("utf-16-le"), text.encode("utf-32-le")}
        with contextlib.suppress(UnicodeEncodeError):
            forms.add(text.encode("latin-1"))
    return forms


def _scrub_area(memory: RawIOBase, begin: int, end: int, wanted: set[bytes], window: bytearray) -> None:
    overlap = max(map(len, wanted))
    position = begin
    while position < end:
        memory.seek(position)
        with memoryview(window) as view:
            size = memory.readinto(view[: min(len(window), end - position)]) or 0
        if not size:
            return
        flipped = window[:size].translate(_FLIP)
        for secret in wanted:
            at = flipped.find(secret)
            while at >= 0:
                memory.seek(position + at)
                memory.write(_BLOT * len(secret))
                at = flipped.find(secret, at + len(secret))
        # What lies across the border of two windows is seen in the second one.
        position += size if size < len(window) or position + size >= end else size - overlap
