"""Steps that a worker prints: what counts as a step, that the search is bounded, and that the relay counts them."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_run.observe.page import AREA_BYTES, PAGE_BYTES, Area, StepSource, Writer, decode
from dlrover_run.observe.pages import ProgressPages
from dlrover_run.output.relay.log_steps import (
    BLOCK_BYTES,
    LINE_BYTES,
    MAX_CREDIT,
    SEARCH_SECONDS,
    SHARE,
    Budget,
    LogStepCounter,
    LogSteps,
)
from dlrover_run.output.relay_client import RelayClient, StepSearch

STEP = r"step (\d+)"


class Log:
    """The output of a worker that is searched, and what its progress page has."""

    def __init__(self, regex: str, budget: Budget | None = None) -> None:
        self.warnings: list[str] = []
        self._memory = mmap.mmap(-1, PAGE_BYTES)
        counter = LogStepCounter(Writer(self._memory, Area.LOG))
        self.feed = LogSteps(regex, counter, budget or free(), self.warnings.append).feed

    @property
    def steps(self) -> int:
        found = decode(self._memory[Area.LOG : Area.LOG + AREA_BYTES])
        return 0 if found is None else found.steps


def free() -> Budget:
    """A budget of which nothing is used."""
    return Budget(lambda: 0.0, lambda: 0.0)


@pytest.mark.parametrize(
    ("output", "steps"),
    [
        (b"", 0),
        (b"epoch 3\n", 0),
        (b"step 1\n", 1),
        (b"step 1", 0),
        (b"step 1\nstep 2\nstep 4\n", 4),
        (b"step 1000\nstep 1001\n", 2),
        (b"step 7\nstep 7\n", 1),
        (b"step 99\nstep 100\nstep 1\nstep 2\n", 4),
        (b"\rstep 1/9\rstep 2/9\rstep 3/9\n", 3),
        (b"\xff\xfe step 5\n", 1),
        (b"step " + b"9" * 40 + b"\n", 1),
    ],
)
def test_steps_are_counted_by_their_numbers(output: bytes, steps: int) -> None:
    log = Log(STEP)
    log.feed(output)
    assert log.steps == steps


def test_a_match_without_a_number_is_a_step() -> None:
    log = Log("^loss")
    log.feed(b"loss 0.5\nnote\nloss 0.4\n")
    assert log.steps == 2


def test_a_line_may_arrive_in_pieces() -> None:
    log = Log(STEP)
    for piece in (b"step 1\nst", b"ep", b" 1", b"7\n"):
        log.feed(piece)
    assert log.steps == 17


def test_only_the_end_of_a_large_block_is_searched_from_a_complete_line_on() -> None:
    log = Log(STEP)
    log.feed(b"step 1\n" + b"x" * BLOCK_BYTES + b"step 2\nstep 3\n")
    log.feed(b"step 4\n")
    # The first two lines are not in the end, and the cut line does not count.
    assert log.steps == 2


def test_the_beginning_of_a_line_is_searched() -> None:
    log = Log("here")
    log.feed(b"x" * LINE_BYTES + b"here\n")
    assert log.steps == 0


@pytest.mark.parametrize("regex", [r"(a+)+$", r"(a|aa)+$", r"(.*)(.*)(.*)(.*)[^a]x", r"a*a*a*c"])
def test_a_search_that_does_not_end_is_interrupted_and_named_once(regex: str) -> None:
    log = Log(regex)
    for _ in range(2):
        log.feed(b"a" * (LINE_BYTES - 1) + b"b\n")
    assert len(log.warnings) == 1
    assert regex in log.warnings[0]


def test_steps_found_before_an_interruption_count() -> None:
    log = Log(r"(?:step|(a+)+$)")
    log.feed(b"step\nstep\n" + b"a" * 200 + b"b\nstep\n")
    assert log.steps == 2
    log.feed(b"step\n")
    assert log.steps == 3


def test_searches_use_at_most_their_share() -> None:
    clock = {"now": 0.0, "used": 0.0}

    def search() -> bool:
        """Whether there was credit for a search, which took the maximum time."""
        if not budget.has_credit():
            return False
        with budget.charged():
            clock["used"] += SEARCH_SECONDS
        return True

    budget = Budget(lambda: clock["now"], lambda: clock["used"])
    for _ in range(10_000):
        search()
        clock["now"] += 0.01
    assert clock["used"] <= MAX_CREDIT + SHARE * clock["now"] + SEARCH_SECONDS
    assert clock["used"] >= 0.9 * SHARE * clock["now"]


def test_without_credit_lines_are_skipped() -> None:
    clock = {"used": 0.0}
    budget = Budget(lambda: 0.0, lambda: clock["used"])
    log = Log(STEP, budget)
    log.feed(b"step 1\n")
    with budget.charged():
        clock["used"] += MAX_CREDIT
    log.feed(b"step 2\n")
    assert log.steps == 1


@pytest.fixture
def pages() -> Iterator[ProgressPages]:
    opened = ProgressPages(2)
    yield opened
    opened.close()


def counted(pages: ProgressPages, rank: int = 0) -> tuple[int, StepSource] | None:
    found = pages.read(rank)
    return None if found is None else (found.steps, found.source)


def test_the_relay_counts_what_it_shows_what_it_hides_and_what_is_in_a_log(
    tmp_path: Path, pages: ProgressPages
) -> None:
    console = os.open(tmp_path / "console", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    relay = RelayClient((console, console))
    warnings: list[str] = []

    async def run() -> None:
        relay.attach(warnings.append)
        searches = [StepSearch(STEP, pages.path(rank)) for rank in (0, 1)]
        shown = relay.open_stderr("0", show=True, steps=searches[0])
        hidden = relay.open_stdout("0", None, show=False, steps=searches[0])
        (tmp_path / "log").write_text("step 1\nstep 2\n")
        relay.search_log(str(tmp_path / "log"), searches[1])
        for text in ("step 1\n", "step 2\n"):
            os.write(shown, text.encode())
            await relay.drain()
        os.write(hidden, b"step 3\n")
        await relay.drain()
        assert counted(pages) == (3, StepSource.LOG)
        with open(tmp_path / "log", "a") as log:
            log.write("step 5\n")
        await relay.drain()
        assert counted(pages, 1) == (5, StepSource.LOG)
        for fd in (shown, hidden):
            os.close(fd)
        await relay.end_round()
        # The pages of the next round have the paths of these.
        again = relay.open_stderr("0", show=False, steps=searches[0])
        os.write(again, b"step 1\n")
        os.close(again)
        await relay.end_round()
        assert counted(pages) == (4, StepSource.LOG)
        await relay.close()

    asyncio.run(run())
    os.close(console)
    assert warnings == []
    assert (tmp_path / "console").read_text() == "step 1\nstep 2\n"


@pytest.mark.parametrize(
    ("regex", "page", "lines", "warned"),
    [(r"(a+)+$", True, [b"a" * 1000 + b"b\n"] * 20, 1), (STEP, False, [b"step 1\n"], 0)],
    ids=["a search without an end", "no page"],
)
def test_output_is_shown_though_no_steps_can_be_counted(
    tmp_path: Path, pages: ProgressPages, regex: str, page: bool, lines: list[bytes], warned: int
) -> None:
    console = os.open(tmp_path / "console", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    relay = RelayClient((console, console))
    warnings: list[str] = []

    async def run() -> None:
        relay.attach(warnings.append)
        search = StepSearch(regex, pages.path(0) if page else "/nowhere")
        output = relay.open_stderr("0", show=True, steps=search)
        for line in lines:
            os.write(output, line)
        os.close(output)
        await relay.end_round()
        await relay.close()

    asyncio.run(run())
    os.close(console)
    assert len(warnings) == warned
    assert (tmp_path / "console").read_bytes() == b"".join(lines)
