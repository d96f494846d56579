"""The output of `make` for a user who runs it for the first time."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.harness import WAIT

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("target", ["demo", "demo-tf"])
def test_a_download_is_announced_with_its_size(target: str, tmp_path: Path) -> None:
    where = [f"VENV={tmp_path / 'venv'}", f"TF={tmp_path / 'tf'}"]
    plan = subprocess.run(
        ["make", "--dry-run", target, *where], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    announced = 0
    for line in plan.splitlines():
        announced += bool(re.match(r"echo .*about \d+ MB to download", line))
        if " -m venv " in line:
            venvs = plan[: plan.index(line)].count(" -m venv ") + 1
            assert announced >= venvs, f"nothing was printed before {line}"
    assert announced == 2
    assert "bin/dlrover-run" not in plan, "another package may have replaced that script"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    ("target", "code", "words"), [("tensorflow-newest", 0, "are skipped"), ("{tf}/.made", 2, "give Python")]
)
def test_a_python_without_a_build_of_tensorflow_is_reported(target: str, code: int, words: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"""#!{sys.executable}
import sys
if sys.argv[1:] == ["--version"]:
    print("Python 3.14.0")
elif sys.argv[1] == "-c":
    sys.version_info = (3, 14, 0)
    exec(sys.argv[2])
else:
    sys.exit(f"asked for {sys.argv[1:]}")
"""
    )
    python.chmod(0o755)
    where = [f"VENV={tmp_path / 'venv'}", f"TF={tmp_path / 'tf'}", f"PYTHON={python}"]
    done = subprocess.run(
        ["make", target.format(tf=tmp_path / "tf"), *where], cwd=ROOT, capture_output=True, text=True, timeout=WAIT
    )
    printed = done.stdout + done.stderr
    assert (done.returncode, words in printed, "asked for" in printed) == (code, True, False), printed
    assert "no build for Python 3.14.0" in printed


def test_the_site_has_every_page_of_docs_and_no_other() -> None:
    named = re.findall(r"^ +- ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_the_tests_that_the_makefile_names_exist() -> None:
    text = (ROOT / "Makefile").read_text()
    named = re.findall(r"tests/[\w/]+(?:\.py)?", text)
    assert len(named) > 4
    for path in named:
        assert (ROOT / path).exists(), path


WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, *given):
        # What `make test-other` does not install.
        return None if name in ("torch", "numpy", "sklearn", "PIL") else super().find_spec(name, *given)

sys.meta_path = [Installed if finder is PathFinder else finder for finder in sys.meta_path]
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.long
def test_the_tests_of_test_other_are_collected_without_torch() -> None:
    (marks,) = re.findall(r'-other/bin/python -m pytest -m "([^"]+)"', (ROOT / "Makefile").read_text())
    given = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-m", marks]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *given], cwd=ROOT, capture_output=True, text=True, timeout=WAIT
    )
    assert done.returncode == 0, done.stdout[-2000:]
