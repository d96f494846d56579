"""Golden files: the sentences that people read, in text files beside the tests that render them.

A test asserts codes and facts; the golden file has the words. To accept changed words, whose diff is then read:

    UPDATE_GOLDEN=1 python -m pytest tests/decisions
"""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def assert_golden(golden: Path, text: str) -> None:
    """Compare a text with its golden file, which is written where UPDATE_GOLDEN is set."""
    for machine in (str(ROOT), f"{tempfile.gettempdir()}/"):
        assert machine not in text, f"{golden.name} would name a path of this machine: {machine}"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    kept = golden.read_text() if golden.exists() else ""
    if kept != text:
        lines = difflib.unified_diff(kept.splitlines(), text.splitlines(), "the golden file", "now", n=2, lineterm="")
        pytest.fail("\n".join([f"{golden.relative_to(ROOT)}: UPDATE_GOLDEN=1 accepts this", *lines]), pytrace=False)


def assert_screens(golden: Path, screens: Mapping[str, str]) -> None:
    """Compare texts with a golden file in which each stands below its title."""
    assert not any(line.startswith("## ") for text in screens.values() for line in text.splitlines())
    assert_golden(golden, "\n".join(f"## {title}\n\n{text}\n" for title, text in screens.items()))


def assert_answers(golden: Path, answer: Callable[[str], str]) -> list[str]:
    """Give each question of a golden file (`$ question`) its answer again, compare the file, and return the questions.
    A new question is written into the file by hand. Lines that begin with `# ` are headings."""
    parts, questions = [], []
    for line in golden.read_text().splitlines():
        if line.startswith("# "):
            parts.append(f"{line}\n")
        elif line.startswith("$ "):
            questions.append(line.removeprefix("$ "))
            parts.append(f"{line}\n{answer(questions[-1])}\n")
    assert_golden(golden, "\n".join(parts))
    return questions
