"""Cutting, prefixing and selecting lines, compared with a simple implementation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlrover_run.output.relay.lines import LineCutter, LineWriter, matching, prefixed
from dlrover_run.output.sinks import Sink, piece_of

PIECES = st.lists(st.text(alphabet="ab\r\n", max_size=6).map(str.encode), max_size=8)
LINES = st.lists(st.text(alphabet="abc", max_size=4).map(lambda text: text.encode() + b"\n"), max_size=6)


def _universal(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


@given(PIECES)
def test_cutting_gives_the_same_lines_wherever_the_reads_end(pieces: list[bytes]) -> None:
    cutter = LineCutter()
    outs = [cutter.feed(piece) for piece in pieces]
    assert all(out == b"" or out.endswith(b"\n") for out in outs)
    whole = _universal(b"".join(pieces))
    assert b"".join(outs) == whole[: whole.rfind(b"\n") + 1]
    rest = whole[whole.rfind(b"\n") + 1 :]
    assert cutter.finish() == (rest + b"\n" if rest else b"")
    assert cutter.finish() == b""


def test_a_line_without_end_is_cut_before_it_fills_the_memory() -> None:
    cutter = LineCutter(longest=10)
    assert cutter.feed(b"x" * 6) == b""
    assert cutter.feed(b"y" * 6) == b"xxxxxxyyyyyy\n"
    assert cutter.feed(b"z\n") == b"z\n"


@given(PIECES)
def test_cutting_at_returns_changes_no_byte(pieces: list[bytes]) -> None:
    cutter = LineCutter(keep_returns=True)
    outs = [cutter.feed(piece) for piece in pieces]
    assert all(out == b"" or out.endswith((b"\n", b"\r")) for out in outs)
    assert b"".join(outs) + cutter.take_unfinished() == b"".join(pieces)
    assert cutter.finish() == b""


WRITES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.floats(0, 3)), max_size=40)
"""Steps: which of three workers writes how many more bytes of its output, and after how many seconds."""


@given(WRITES, st.lists(LINES, min_size=3, max_size=3), st.sampled_from([b"", b"> "]))
def test_writers_of_one_sink_never_join_their_lines(
    writes: list[tuple[int, int, float]], outputs: list[list[bytes]], prefix: bytes
) -> None:
    """Each line of a worker is shown, whole, or in parts that each begin a line where another worker came between."""
    shown = bytearray()
    sink = Sink(-1, lambda view: shown.extend(view) or len(view))
    sink.unfinished_after = 1.0
    left = [b"".join(f"{number}".encode() + line for line in lines) for number, lines in enumerate(outputs)]
    expected = [len(output.splitlines()) for output in left]
    writers = [LineWriter(sink, prefix, None) for _ in left]
    now = 0.0

    def put(writer: LineWriter, data: bytes) -> None:
        sink.put(data, writer)

    def show() -> None:
        for writer in writers:
            put(writer, writer.unfinished(now))
        sink.flush()

    for number, count, seconds in writes:
        now += seconds
        show()
        put(writers[number], writers[number].feed(left[number][:count], now))
        left[number] = left[number][count:]
        show()
    for number, rest in enumerate(left):
        put(writers[number], writers[number].feed(rest, now))
    for writer in writers:
        put(writer, writer.finish())
    sink.flush()
    lines = bytes(shown).splitlines()
    assert all(line.startswith(prefix) for line in lines)
    begun = [line[len(prefix) :] for line in lines]
    assert all(len({*line} & {*b"012"}) <= 1 for line in begun), "lines of two workers were joined"
    for number, count in enumerate(expected):
        assert sum(line.startswith(f"{number}".encode()) for line in begun) == count


@given(LINES)
def test_prefix_stands_before_each_line(lines: list[bytes]) -> None:
    assert prefixed(b"".join(lines), b"[r0]:") == b"".join(b"[r0]:" + line for line in lines)


@given(LINES, st.lists(st.text(alphabet="abc", max_size=2).map(str.encode), max_size=3))
def test_matching_picks_the_lines_that_contain_any_needle(lines: list[bytes], needles: list[bytes]) -> None:
    expected = [line for line in lines if any(needle in line for needle in needles)]
    assert matching(b"".join(lines), tuple(needles)) == b"".join(expected)


@given(st.text(alphabet="ab\n", max_size=60).map(str.encode), st.integers(1, 9))
def test_what_is_written_beside_others_is_whole_lines_that_fit_or_one_that_does_not(data: bytes, most: int) -> None:
    left = memoryview(data)
    while left:
        piece = bytes(piece_of(left, most))
        assert piece
        assert piece == left[: len(piece)]
        left = left[len(piece) :]
        # A newline is missing only where the data end without one.
        assert piece.endswith(b"\n") or not left
        if len(piece) > most:
            assert b"\n" not in piece[:-1]
        elif left:
            following = bytes(left).partition(b"\n")[0]
            assert len(piece) + len(following) + 1 > most, "another line had fitted"
