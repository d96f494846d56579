"""Cutting, prefixing and picking lines, against the plain way of doing it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlrover_run.output.relay_lines import LineCutter, Ring, matching, piece_of, pieces_of, prefixed

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


@given(st.text(alphabet="aß\n", max_size=60), st.integers(1, 9))
def test_a_long_text_is_cut_where_lines_end(text: str, most: int) -> None:
    pieces = list(pieces_of(text, most))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= most for piece in pieces)
    assert all(piece.endswith("\n") or "\n" not in piece for piece in pieces[:-1])


@given(st.lists(st.binary(max_size=7), max_size=8))
def test_ring_holds_the_end(pieces: list[bytes]) -> None:
    ring = Ring(limit=5)
    for piece in pieces:
        ring.add(piece)
    whole = b"".join(pieces)
    assert ring.content() == whole[-5:]
    assert ring.cut == (len(whole) > 5)
