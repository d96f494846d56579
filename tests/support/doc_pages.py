"""The pages of the documentation: their code blocks, and the commands in these."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from support.harness import WAIT

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
EXAMPLES = sorted(ROOT.glob("examples/*/README.md"))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")
_INLINE = re.compile(r"`([^`\n]+)`")


class Block(NamedTuple):
    """One fenced code block, with the language that its fence names."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


class Command(NamedTuple):
    """One simple command of a shell: the variables that it sets for itself, and its arguments."""

    place: str
    variables: dict[str, str]
    words: list[str]


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return the code blocks of a page in these languages, or all of them."""
    text = page.read_text()
    found = [Block(page, text.count("\n", 0, at.start()) + 2, at[1], at[2]) for at in _FENCE.finditer(text)]
    return [block for block in found if not languages or block.language in languages]


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return _FENCE.sub("", page.read_text())


def commands(block: Block) -> list[Command]:
    """Return the simple commands of a block: those in pipes, lists and `$(...)` are separate."""
    text = block.text.replace("\\\n", " ")
    if block.language == "console":
        text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
    found = []
    for line in text.splitlines():
        parts = [*_SUBSTITUTION.findall(line), _SUBSTITUTION.sub("OUTPUT", line)]
        found += [command for part in parts for command in _simple_commands(block.place, part)]
    return found


def inline_commands(page: Path, *programs: str) -> list[Command]:
    """Return the commands of these programs in the prose, such as `make demo`. Examples with `...` are left out."""
    spans = [span for span in _INLINE.findall(prose(page)) if "..." not in span]
    found = [command for span in spans for command in _simple_commands(page.name, span)]
    return [command for command in found if len(command.words) > 1 and command.words[0] in programs]


def _simple_commands(place: str, line: str) -> list[Command]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quotation mark in prose
        return []
    found = []
    while words:
        end = next((at for at, word in enumerate(words) if set(word) <= set(";&|")), len(words))
        found.append(_without_variables(place, words[:end]))
        words = words[end + 1 :]
    return [command for command in found if command.words or command.variables]


def _without_variables(place: str, words: list[str]) -> Command:
    variables = {}
    while words and (at := re.match(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL)):
        variables[at[1]] = at[2]
        words = words[1:]
    return Command(place, variables, words)


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings have on the usual sites."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    """The targets of a page's links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def normalized(text: str) -> list[str]:
    """The lines of a console without what differs between runs: numbers, the host and the directory."""
    text = re.sub(r"\d+(\.\d+)?", "N", text)
    text = re.sub(r"(host +:) \S+|\([\w.-]+\)(?= joined)", r"\1 HOST", text)
    text = re.sub(r'"[^"]*/(\w+\.py)"', r'"\1"', text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def run_block(
    text: str, directory: Path, stand_ins: Mapping[str, str], environ: Mapping[str, str], code: int = 0
) -> list[str]:
    """Run a block with bash, with shell scripts in place of these programs, and return the lines that it prints."""
    for name, script in stand_ins.items():
        (directory / name).write_text(f"#!/bin/bash\n{script}\n")
        (directory / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=directory,
        env={"PATH": f"{directory}:/usr/bin:/bin", **environ},
        stdout=subprocess.PIPE,
        text=True,
        timeout=WAIT,
    )
    assert done.returncode == code
    return done.stdout.splitlines()
