"""docs/trouble.md quotes what the product prints: its commands are run, and other lines are those of a golden file."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.cluster import quiet_port
from support.doc_pages import DOCS, ROOT, Block, blocks, commands
from support.harness import OURS, WAIT, start

from dlrover_run import exit_codes

PAGE = DOCS / "trouble.md"
CONSOLES = blocks(PAGE, "console")
FOREIGN_PORT = "29401"
"""The port of the page at which another program listens."""
CODES = (
    exit_codes.TOO_FEW_NODES,
    *(exit_codes.CANNOT_JOIN,) * 3,
    exit_codes.SUCCESS,
    1,
)
"""The exit codes of the page's commands, in their order."""


def steady(text: str) -> str:
    """A text without line breaks and without what differs between runs and machines."""
    text = re.sub(r"^\d\d:\d\d:\d\d ", "", text, flags=re.MULTILINE)
    text = re.sub(r"here: [\w.-]+;|here \([\w.-]+\)", "here HOST", text)
    text = re.sub(r"Name or service not known|Temporary failure in name resolution", "NOT RESOLVED", text)
    text = re.sub(r"workers ran \S+,", "workers ran PYTHON,", text)
    text = re.sub(r'"[^"]*/(\w+\.py)"', r'"\1"', text)
    return " ".join(re.sub(r"\d+", "N", text).split())


@contextmanager
def foreign_program() -> Iterator[int]:
    """A program that is no master, and the port at which it listens."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("block", "code"), list(zip(CONSOLES, CODES, strict=True)), ids=[f"line {block.line}" for block in CONSOLES]
)
def test_each_command_prints_what_the_page_shows(block: Block, code: int, tmp_path: Path) -> None:
    (command,) = commands(block)
    (tmp_path / "train.py").write_text("import a_library_of_mine\n")
    assert command.words[0] == OURS.name
    with foreign_program() as port:
        ports = {"29400": str(quiet_port()), FOREIGN_PORT: str(port)}
        words = [re.sub(r":(2940\d)$", lambda at: f":{ports[at[1]]}", word) for word in command.words[1:]]
        with (tmp_path / "printed").open("w") as output:
            environment: dict[str, str | None] = {"VIRTUAL_ENV": None, **command.variables}
            process = start(OURS, words, cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT)
            assert process.wait(WAIT) == code
    printed = steady((tmp_path / "printed").read_text())
    shown = "".join(line for line in block.text.splitlines(keepends=True) if not line.startswith("$ "))
    for part in shown.split("...\n"):
        assert steady(part) in printed


def test_each_other_line_is_in_a_golden_file() -> None:
    golden = " ".join(steady(file.read_text()) for file in sorted((ROOT / "tests" / "decisions").rglob("*.txt")))
    lines = [line for block in blocks(PAGE, "") for line in block.text.splitlines()]
    assert len(lines) == 2
    for line in lines:
        # The rank and the line of the script belong to the worker that hangs.
        for part in re.sub(r"^no progress for .*?: rank \d+ |, at \S+ in \w+$", "", line).split("; "):
            assert steady(part) in golden


def test_the_limit_of_memory_is_named_as_the_page_says() -> None:
    sources = (ROOT / "tests" / "decisions" / "failures" / "test_failures.py").read_text()
    (quoted,) = re.findall(r"`(the kernel's memory limit[^`]*)`", PAGE.read_text())
    assert f'"{quoted}"' in sources
