"""A skipped test fails a run in CI, unless the test is listed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = """
import sys
sys.path.insert(0, {tests!r})
from support.allowed_skips import SkipGuard
def pytest_configure(config):
    config.pluginmanager.register(SkipGuard())
"""


@pytest.mark.parametrize(
    ("name", "ci", "code"),
    [
        ("test_needs_a_tool", "1", pytest.ExitCode.TESTS_FAILED),
        ("test_needs_a_tool", "", pytest.ExitCode.OK),
        ("test_a_shell_completes_with_the_printed_script[zsh]", "1", pytest.ExitCode.OK),
    ],
)
def test_a_skip_fails_ci_unless_it_is_allowed_by_name(tmp_path: Path, name: str, ci: str, code: int) -> None:
    test, _, shell = name.partition("[")
    (tmp_path / "conftest.py").write_text(PLUGIN.format(tests=str(Path(__file__).parents[1])))
    (tmp_path / "test_application.py").write_text(
        "import pytest\n"
        f'@pytest.mark.parametrize("shell", [{shell.rstrip("]")!r}])\n'
        f"def {test}(shell): pytest.skip()\n"
        "def test_passes(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "CI": ci}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == code, done.stdout
    assert ("allowed" in done.stdout) == (code != pytest.ExitCode.OK)
