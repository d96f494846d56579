"""Cutting a stream of bytes into whole lines, prefixing them, picking some of them, remembering the last of them.

Pure: bytes in, bytes out. Nothing here loops over lines in Python unless a line is picked, so that a worker may write
100 MB a second.
"""

from __future__ import annotations

from dlrover_run.output.streams import TAIL_BYTES

MAX_LINE = 4 * 1024 * 1024
"""Bytes after which a line is ended for the worker that does not end it, so that it cannot fill the memory."""

MAX_MESSAGE = 128 * 1024
"""Bytes of the largest message between the agent and the relay, either way; a `TailBuffer` with its header fits."""


class LineCutter:
    """Holds an unfinished line back until its end has come.

    A carriage return ends a line too: a progress bar would otherwise not be seen until it is full. It becomes a
    newline, as in torchrun, unless `keep_returns` is set: then no byte is changed.
    """

    def __init__(self, longest: int = MAX_LINE, *, keep_returns: bool = False, after_return: bool = False) -> None:
        self._longest = longest
        self._keep_returns = keep_returns
        self._rest = bytearray()
        self._after_return = after_return

    @property
    def held(self) -> int:
        """Bytes of the unfinished line."""
        return len(self._rest)

    def feed(self, data: bytes) -> bytes:
        """The lines that are whole now, each with its newline; empty when there is none."""
        if not data:
            return b""
        if self._keep_returns:
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            if end == 0 and len(self._rest) + len(data) >= self._longest:
                end = len(data)
            return self._cut(data, end)
        after_return, self._after_return = self._after_return, data.endswith(b"\r")
        if after_return and data.startswith(b"\n"):
            data = data[1:]  # The second half of a line end of which the first half was shown already.
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = self._cut(data, data.rfind(b"\n") + 1)
        return self.finish() if not lines and len(self._rest) >= self._longest else lines

    def _cut(self, data: bytes, end: int) -> bytes:
        if end == 0:
            self._rest += data
            return b""
        lines = bytes(self._rest) + data[:end] if self._rest else data[:end]
        self._rest[:] = data[end:]
        return lines

    def take_unfinished(self) -> bytes:
        """The unfinished line as it is, which is held back no longer; what follows is the rest of it."""
        line = bytes(self._rest)
        self._rest.clear()
        return line

    def finish(self) -> bytes:
        """The partial line that is left, completed with a newline; empty when there is none."""
        if not self._rest:
            return b""
        line = bytes(self._rest) + b"\n"
        self._rest.clear()
        return line


def prefixed(lines: bytes, prefix: bytes) -> bytes:
    """Whole lines, each with `prefix` before it."""
    if not lines or not prefix:
        return lines
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


def piece_of(view: memoryview, most: int) -> memoryview:
    """The next part of `view` to write where other processes write too: as many whole lines as fit into `most` bytes,
    or one line that is longer, or all that is left where no line ends."""
    if len(view) <= most:
        return view
    end = bytes(view[:most]).rfind(b"\n") + 1
    looked, width = most, most
    while not end and looked < len(view):
        place = bytes(view[looked : looked + width]).find(b"\n")
        end = looked + place + 1 if place >= 0 else 0
        looked, width = looked + width, 2 * width
    return view[: end or len(view)]


def matching(lines: bytes, needles: tuple[bytes, ...]) -> bytes:
    """Those of the whole lines that contain any of the needles.

    The work grows with the lines that match, not with all lines.
    """
    found: list[bytes] = []
    # Where each needle is next; one that is absent is dropped, so that it is not looked for again after each match.
    places = {needle: lines.find(needle) for needle in needles}
    start = 0
    while start < len(lines):
        for needle, place in list(places.items()):
            if 0 <= place < start:
                places[needle] = place = lines.find(needle, start)
            if place < 0:
                del places[needle]
        if not places:
            break
        place = min(places.values())
        if place >= len(lines):
            break
        begin = max(start, lines.rfind(b"\n", start, place) + 1)
        start = lines.find(b"\n", place) + 1 or len(lines)
        found.append(lines[begin:start])
    return b"".join(found)


class TailBuffer:
    """The last `limit` bytes of a stream."""

    def __init__(self, limit: int = TAIL_BYTES) -> None:
        self._limit = limit
        self._kept = bytearray()
        self.cut = False
        """Whether bytes were dropped."""

    def add(self, data: bytes) -> None:
        if len(data) >= self._limit:
            self.cut = self.cut or bool(self._kept) or len(data) > self._limit
            self._kept[:] = data[-self._limit :]
            return
        self._kept += data
        if len(self._kept) > self._limit:
            self.cut = True
            del self._kept[: -self._limit]

    def content(self) -> bytes:
        return bytes(self._kept)
