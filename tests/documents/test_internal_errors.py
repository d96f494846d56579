"""Each warning about a defect of ours has the same words, and its place with LOGLEVEL=DEBUG: by `words/log_level`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dlrover_run.words.log_level import MAX_ERROR_TEXT, internal_error, log_frames

ROOT = Path(__file__).resolve().parents[2]

OF_ITS_OWN = {
    "dlrover_run/words/log_level.py": 1,
    # It ends the agent: it prints the whole traceback.
    "dlrover_run/launch.py": 1,
    # The plan stays, and the words say so; its frames are logged where its caller wants them.
    "dlrover_run/coordination/driver.py": 1,
    # To a browser; the server raises it again.
    "dlrover_run/features/operate/web/server.py": 1,
    # In a process that has no logger, by its last message.
    "dlrover_run/features/checkpoints/process.py": 1,
    "dlrover_run/features/hangs/node/watch_health.py": 1,
}
"""Where the words are written, by module."""


FILES = [path for package in ("dlrover_run", "tf_ps_runner") for path in (ROOT / package).rglob("*.py")]


def test_the_words_of_an_internal_error_are_made_in_one_module() -> None:
    found = {
        str(path.relative_to(ROOT)): len(re.findall(r'f"[^"]*internal error[^"]*{', path.read_text())) for path in FILES
    }
    assert {name: count for name, count in found.items() if count} == OF_ITS_OWN


@pytest.mark.parametrize(
    "path", [path for path in FILES if re.search(r"\binternal_error\(", path.read_text())], ids=lambda path: path.stem
)
def test_every_module_that_reports_one_logs_its_place_too(path: Path) -> None:
    assert re.search(r"\blog_frames\(", path.read_text())


def test_the_place_of_an_internal_error_is_logged_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    try:
        raise ZeroDivisionError("planted" * MAX_ERROR_TEXT)
    except ZeroDivisionError as error:
        monkeypatch.delenv("LOGLEVEL", raising=False)
        log_frames(lines.append, error)
        assert not lines
        monkeypatch.setenv("LOGLEVEL", "debug")
        log_frames(lines.append, error)
        text = internal_error(error, " of the leader")
    assert text.startswith("internal error of the leader: ZeroDivisionError('planted")
    assert text.endswith("; please report it")
    assert len(text) < MAX_ERROR_TEXT + 60
    (place,) = lines
    assert f"{__file__}:" in place
    assert "in test_the_place_of_an_internal_error_is_logged_on_request" in place
