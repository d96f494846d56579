"""The ranks of a group as a short text: `0-7` or `0-504:8,3`. Groups of tensor, pipeline and data parallelism are
ranges with a step, so that the text of a large group is short."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

MAX_TEXT = 80
"""Characters of such a text. Ranks that need more are left out altogether: their text is empty."""

MAX_MEMBERS = 100_000
"""Ranks that a text may stand for."""

RankSet = Annotated[str, Meta(max_length=MAX_TEXT, pattern=r"\A[0-9,:-]*\Z")]


def pack(ranks: Iterable[int]) -> str:
    """The text of these ranks; empty if it were longer than MAX_TEXT."""
    left = sorted(set(ranks))
    spans: list[str] = []
    while left and len(spans) <= MAX_TEXT // 2:
        first, step = left[0], left[1] - left[0] if len(left) > 1 else 1
        length = 1
        while length < len(left) and left[length] == first + length * step:
            length += 1
        if length == 2 and step > 1:
            # Two ranks are a range by chance only: the second one may begin a longer range.
            length = 1
        last = left[length - 1]
        suffix = "" if step == 1 or length == 1 else f":{step}"
        spans.append(str(first) if length == 1 else f"{first}-{last}{suffix}")
        left = left[length:]
    text = ",".join(spans)
    return "" if left or len(text) > MAX_TEXT else text


def unpack(text: str) -> frozenset[int]:
    """The ranks of a text; none for a text that `pack` does not make, as another node may send anything."""
    found: set[int] = set()
    for span in text.split(",") if text else ():
        ends, _, step = span.partition(":")
        first, _, last = ends.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()) or (step and not step.isdecimal()):
            return frozenset()
        ranks = range(int(first), int(last or first) + 1, max(1, int(step or 1)))
        if len(ranks) + len(found) > MAX_MEMBERS:
            return frozenset()
        found.update(ranks)
    return frozenset(found)
