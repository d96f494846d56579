"""docs/get-started.md is run: its script by its commands, and each line that it shows is printed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.cluster import quiet_port
from support.doc_pages import DOCS, blocks, commands, normalized, prose
from support.harness import OURS, WAIT, start

PAGE = DOCS / "get-started.md"
START, AFTER_KILL, SECOND_NODE = (block for block in blocks(PAGE, "console"))
(SCRIPT,) = blocks(PAGE, "python")
(TWO_NODES,) = [block for block in blocks(PAGE, "bash") if "--nnodes" in block.text]


class Terminal:
    """A launcher in a directory with the script, and what it has printed so far."""

    def __init__(self, words: list[str], directory: Path, name: str = "terminal") -> None:
        (directory / "train.py").write_text(SCRIPT.text)
        self._file = directory / name
        with self._file.open("w") as output:
            self._process = start(OURS, words, cwd=directory, stdout=output, stderr=subprocess.STDOUT)

    def wait_for(self, pattern: str, count: int = 1) -> list[str]:
        """Return what the pattern matches, once it has matched that often."""
        limit = time.monotonic() + WAIT
        while len(found := re.findall(pattern, self.printed, re.MULTILINE)) < count:
            assert time.monotonic() < limit, f"no {pattern!r}:\n{self.printed}"
            assert self._process.poll() is None, self.printed
            time.sleep(0.1)
        return found

    @property
    def printed(self) -> str:
        return self._file.read_text()

    def interrupt(self) -> int:
        """Press Ctrl-C, and return the exit code."""
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(WAIT)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(WAIT)


def shown(text: str) -> list[str]:
    """The lines of a console of the page, without the command and without what it leaves out."""
    lines = [line for line in text.splitlines() if not line.startswith("$ ") and line != "..."]
    return normalized("\n".join(lines))


def not_printed(expected: list[str], text: str) -> list[str]:
    # A round of a busy machine may be older than a minute when the worker is killed.
    printed = normalized(re.sub(r"\d+ min( \d+ s)?(?= into)", "1 s", text))
    return [line for line in expected if line not in printed]


def test_a_killed_worker_is_replaced_as_the_page_shows(tmp_path: Path) -> None:
    (command,) = commands(START)
    assert command.words[0] == OURS.name
    terminal = Terminal(command.words[1:], tmp_path)
    try:
        terminal.wait_for(r"^step 40:")
        assert not_printed(shown(START.text), terminal.printed) == []
        (victim,) = re.findall(r"^rank 1 of 2, process (\d+),", terminal.printed, re.MULTILINE)
        os.kill(int(victim), signal.SIGKILL)
        terminal.wait_for(r"^rank \d of 2, .* begins after step [1-9]\d*$", 2)
        terminal.wait_for(r"^step 60:")
        assert not_printed(shown(AFTER_KILL.text), terminal.printed) == []
        assert terminal.interrupt() == 128 + signal.SIGINT
    finally:
        terminal.close()


def test_a_second_node_joins_and_leaves_as_the_page_says(tmp_path: Path) -> None:
    (command,) = [command for command in commands(TWO_NODES) if command.words]
    assert command.words[0] == OURS.name
    words = [word.replace(":29400", f":{quiet_port()}") for word in command.words[1:]]
    first = Terminal(words, tmp_path, "first")
    try:
        first.wait_for(r"^step 20:")
        second = Terminal(words, tmp_path, "second")
        try:
            (begins,) = first.wait_for(r"^rank 0 of 2, .* begins after step (\d+)$")
            # The save of that step returned only once the change was made, so its line was not printed.
            (last,) = re.findall(r"^step (\d+):", first.printed.partition(" joined")[0], re.MULTILINE)[-1:]
            assert int(begins) - int(last) in (0, 20)
            assert not_printed(shown(SECOND_NODE.text), first.printed) == []
            second.wait_for(r"^rank 1 of 2, ")
            second.interrupt()
            first.wait_for(r"^rank 0 of 1, .* begins after step [1-9]\d*$")
            assert first.interrupt() == 128 + signal.SIGINT
        finally:
            second.close()
    finally:
        first.close()


@pytest.mark.parametrize(("what", "most"), [("words", 600), ("lines of the script", 32)])
def test_the_page_stays_short(what: str, most: int) -> None:
    count = len(prose(PAGE).split()) if what == "words" else len(SCRIPT.text.splitlines())
    assert count <= most
