"""Cut a stream of bytes into whole lines, prefix them, and filter them.

No function loops over lines in Python, except over lines that a filter selects: a worker may write 100 MB a second.
"""

from __future__ import annotations

from dlrover_run.output.sinks import Sink

MAX_LINE = 4 * 1024 * 1024
"""Bytes after which an unfinished line is ended, so that a worker that never ends a line cannot fill the memory."""


class LineCutter:
    """Holds back an unfinished line until its end has arrived.

    A carriage return ends a line too: a progress bar would otherwise be shown only when it is full. It becomes a
    newline, as in torchrun; with `keep_returns` no byte is changed.
    """

    def __init__(self, longest: int = MAX_LINE, *, keep_returns: bool = False) -> None:
        self._longest = longest
        self._keep_returns = keep_returns
        self._rest = bytearray()
        self._after_return = False

    @property
    def held(self) -> int:
        return len(self._rest)

    def feed(self, data: bytes) -> bytes:
        """The lines that are complete now, each with its newline; may be empty."""
        if not data:
            return b""
        if self._keep_returns:
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            if end == 0 and len(self._rest) + len(data) >= self._longest:
                end = len(data)
            return self._cut(data, end)
        after_return, self._after_return = self._after_return, data.endswith(b"\r")
        if after_return and data.startswith(b"\n"):
            data = data[1:]  # The second half of a \r\n whose first half was shown already.
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
        """Release the unfinished line as it is; the bytes that follow are the rest of it."""
        line = bytes(self._rest)
        self._rest.clear()
        return line

    def finish(self) -> bytes:
        """The unfinished line, completed with a newline; empty if there is none."""
        line = self.take_unfinished()
        return line + b"\n" if line else b""


class LineWriter:
    """Makes whole lines of one source's output, for a sink to which other sources write too.

    An unfinished line is shown once its source has been quiet for the sink's `unfinished_after` seconds, unless another
    source's unfinished line is the last on the sink. Output of another source after it starts a new line. The last line
    is completed when the output ends. With `needles` only lines that contain one of them are passed on.
    """

    def __init__(
        self, sink: Sink, prefix: bytes, needles: tuple[bytes, ...] | None, *, keep_returns: bool = False
    ) -> None:
        self._sink = sink
        self._prefix = prefix
        self._needles = needles
        self._cutter = LineCutter(keep_returns=keep_returns)
        self._due: float | None = None
        self._begun = False
        """Whether the beginning of the next line was shown already."""

    @property
    def due(self) -> float | None:
        """When the unfinished line must be shown if no more output arrives. None: there is no such line, or another
        unfinished line is the last on the sink."""
        return self._due if self._sink.unfinished_by is None or self._sink.unfinished_by is self else None

    def feed(self, data: bytes, now: float) -> bytes:
        """The output to show after the next bytes of the source; the rest is held back."""
        if not data:
            return b""
        shown = self._shown(self._cutter.feed(data))
        after = self._sink.unfinished_after
        self._due = now + after if self._cutter.held and after is not None else None
        return shown

    def postpone(self, now: float) -> None:
        """Begin the time of quiet anew, if there is an unfinished line that is not shown."""
        if self._due is not None and self._sink.unfinished_after is not None:
            self._due = now + self._sink.unfinished_after

    def unfinished(self, now: float) -> bytes:
        return self.all_held() if self.due is not None and now >= self.due else b""

    def all_held(self) -> bytes:
        """The unfinished line even if it is not due; the bytes that follow are the rest of it. With `needles` nothing:
        only whole lines can be selected."""
        if not self._cutter.held or self._needles is not None:
            return b""
        self._due = None
        text = self._cutter.take_unfinished()
        self._begun = True
        return text if self._sink.unfinished_by is self else self._prefix + text

    def finish(self) -> bytes:
        """The output that completes the unfinished line at the end of the source."""
        self._due = None
        shown = self._shown(self._cutter.finish())
        return shown or (b"\n" if self._sink.unfinished_by is self else b"")

    def _shown(self, lines: bytes) -> bytes:
        if not lines:
            return b""
        if self._needles is not None:
            lines = matching(lines, self._needles)
        continued = self._sink.unfinished_by is self
        if self._begun and not continued and lines.startswith(b"\n"):
            # The output of another source has ended the line that this newline belongs to.
            lines = lines[1:]
        self._begun = False
        return prefixed(lines, self._prefix)[len(self._prefix) if continued else 0 :]


def prefixed(lines: bytes, prefix: bytes) -> bytes:
    if not lines or not prefix:
        return lines
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


def matching(lines: bytes, needles: tuple[bytes, ...]) -> bytes:
    """The lines that contain any of the needles. The cost grows with the matching lines, not with all lines."""
    found: list[bytes] = []
    # The next place of each needle. An absent needle is dropped, so that it is not searched again after each match.
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
