"""A progress page whose writer is stepped between any two of its single stores, and whose reader between its loads.

The code of both is the product's. Only the memory between them is a model: the bytes of one assignment become visible
in pieces and in an order that are drawn, as a processor may show them, and a read copies them in pieces as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover_run.observe import pages
from dlrover_run.observe.page import (
    AREA_BYTES,
    PAGE_BYTES,
    SLOT_BYTES,
    Area,
    Phase,
    Progress,
    StepSource,
    Writer,
)
from dlrover_run.observe.pages import READ_ATTEMPTS

Split = Callable[[int], Sequence[tuple[int, int]]]
"""The pieces of so many bytes, each as the first byte and the one after the last, in their order."""

WORDS: Split = lambda size: [(first, min(first + 8, size)) for first in range(0, size, 8)]  # noqa: E731
BYTES: Split = lambda size: [(first, first + 1) for first in range(size)]  # noqa: E731
WHOLE: Split = lambda size: [(0, size)]  # noqa: E731


class Page:
    """The memory of a page as its writer sees it. `states` are what another process may see, one after each store."""

    def __init__(self, split: Split) -> None:
        self.states = [bytes(PAGE_BYTES)]
        self._split = split

    def __getitem__(self, where: slice) -> bytes:
        return self.states[-1][where]

    def __setitem__(self, where: slice, stored: bytes) -> None:
        assert where.stop - where.start == len(stored)
        for first, end in self._split(len(stored)):
            state = self.states[-1]
            begin = where.start + first
            self.states.append(state[:begin] + stored[first:end] + state[begin + end - first :])


class Written:
    """A page with records of a writer: `ends` has the number of stores after which each is complete."""

    def __init__(self, split: Split, count: int) -> None:
        self.page = Page(split)
        clock = itertools.count(10**15, 123_456_789_012)
        writer = Writer(self.page, Area.WORKER, now=lambda: next(clock))  # type: ignore[arg-type]
        self.records: list[Progress] = []
        self.ends = [0]
        for number in range(1, count + 1):
            # Each figure differs from the one before in many bytes.
            writer.add(
                StepSource.REPORT, 0x0101_0101_0101 * number, 0x0203_0405_0607 * number, 0.1 * number, 7**20 // number
            )
            if number % 3 == 0:
                self._note()
                writer.enter(Phase.SAVING if number % 2 else Phase.TRAINING)
            self._note()

    def _note(self) -> None:
        """The record that is complete now, as one reads it that waits for the end of the write."""
        found = read(self.page, itertools.repeat(len(self.page.states) - 1).__next__, WHOLE)
        assert found is not None
        assert found not in self.records
        self.records.append(found)
        self.ends.append(len(self.page.states) - 1)

    def complete_at(self, store: int) -> Progress | None:
        """The last record that was complete after so many stores."""
        number = max(place for place, end in enumerate(self.ends) if end <= store)
        return self.records[number - 1] if number else None


def read(page: Page, moment: Callable[[], int], split: Split) -> Progress | None:
    """What the reader finds that loads each of its pieces at a `moment`, a number of stores."""

    def pread(fd: int, size: int, offset: int) -> bytes:
        found = bytearray(size)
        for first, end in split(size):
            found[first:end] = page.states[moment()][offset + first : offset + end]
        return bytes(found)

    with patch.object(pages, "os", SimpleNamespace(pread=pread)):
        return pages._read(0, Area.WORKER)


@pytest.mark.parametrize("split", [WORDS, BYTES, lambda size: WORDS(size)[::-1]], ids=["words", "bytes", "backwards"])
def test_the_last_complete_record_is_read_between_any_two_stores(split: Split) -> None:
    """Also while the writer is stopped there for ever."""
    written = Written(split, 5)
    for store in range(len(written.page.states)):
        found = read(written.page, lambda store=store: store, WHOLE)  # type: ignore[misc]
        known = written.complete_at(store)
        # All bytes of the next one may be there before the last store, which changes none then.
        following = written.records[written.records.index(known) + 1 :][:1] if known else written.records[:1]
        assert found == known or [found] == following, store


def test_no_two_moments_of_a_read_show_a_torn_record() -> None:
    """Each slot at another moment: all pairs."""
    written = Written(WORDS, 4)
    slots: Split = lambda size: [(0, SLOT_BYTES), (SLOT_BYTES, AREA_BYTES)]  # noqa: E731
    last = len(written.page.states)
    for first, second in itertools.combinations(range(last), 2):
        moments = iter((first, second, *[last - 1] * 2 * READ_ATTEMPTS))
        assert read(written.page, moments.__next__, slots) in written.records


@st.composite
def splits(draw: st.DrawFn) -> Split:
    """Pieces of a drawn size, in order or not."""
    piece, seed = draw(st.sampled_from([1, 3, 4, 8, 16, 40])), draw(st.randoms(use_true_random=False))
    in_order = draw(st.booleans())

    def split(size: int) -> list[tuple[int, int]]:
        found = [(first, min(first + piece, size)) for first in range(0, size, piece)]
        if not in_order:
            seed.shuffle(found)
        return found

    return split


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6), splits(), splits(), st.data())
def test_no_interleaving_of_stores_and_loads_shows_a_torn_record(
    count: int, stored: Split, loaded: Split, data: st.DataObject
) -> None:
    written = Written(stored, count)
    last = len(written.page.states) - 1
    # Stores between two loads: the reader may be slower than the writer, and much slower.
    pace = data.draw(st.sampled_from([1, 2, 10, 50]))
    random = data.draw(st.randoms(use_true_random=False))
    at = data.draw(st.integers(0, last))

    def moment() -> int:
        nonlocal at
        found = at
        at = min(last, at + random.randrange(pace + 1))
        return found

    found = read(written.page, moment, loaded)
    assert found is None or found in written.records
    if at == last:
        assert read(written.page, moment, loaded) == written.records[-1]
