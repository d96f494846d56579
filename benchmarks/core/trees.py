"""Another checkout of the project, which `--against` compares with this one: one more launcher beside torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from core.report import REPOSITORY, commit_of
from core.run import FOREIGN

PACKAGES = ("dlrover_run", "tf_ps_runner")
PROBE_TIMEOUT = 120.0
"""Seconds in which an interpreter must say where it imports the product from, and compile it."""

_PROBE = f"""
import compileall, importlib.util, pathlib
for name in {PACKAGES}:
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise SystemExit("there is no " + name)
    root = pathlib.Path(spec.origin).resolve().parents[1]
    compileall.compile_dir(root / name, quiet=2)
    print(root)
"""
_IMPORTS_PRODUCT = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(PACKAGES)})\b", re.MULTILINE)


@dataclass(frozen=True)
class Tree:
    """A checkout of the project: its folder, and an interpreter that imports the product from there."""

    name: str
    root: Path
    python: str

    def script(self, path: Path) -> Path:
        """The script of this checkout that takes the place of one of `benchmarks/workers`.

        A script that imports the product is that of the checkout, whose modules may have other names. All others
        belong to the benchmark, and are the same for both.
        """
        own = self.root / path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path
        return own if own.is_file() and _IMPORTS_PRODUCT.search(own.read_text()) else path


def imported_from(python: str) -> Path:
    """The folder from which an interpreter imports the product, whose bytecode it compiles: a launcher that has none
    would compile in the time that is measured. Raises ValueError."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    try:
        found = subprocess.run(
            [python, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT,
            env=environment,
            cwd="/",
            check=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{python} does not run: {error}") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        raise ValueError(f"{python} does not import {' and '.join(PACKAGES)}: {last}") from None
    first, *others = dict.fromkeys(found.stdout.split("\n")[:-1])
    if others:
        raise ValueError(f"{python} imports {' and '.join(PACKAGES)} from {first} and {others[0]}")
    return Path(first)


def open_tree(text: str) -> Tree:
    """The checkout that TEXT names: its folder, which has a virtual environment `.venv`, or an interpreter.

    Raises ValueError if the interpreter imports the product from elsewhere, or from this checkout: a virtual
    environment that was copied does so, and the comparison would be one of a program with itself.
    """
    path = Path(text).expanduser().absolute()
    python = path / ".venv" / "bin" / "python" if path.is_dir() else path
    if not os.access(python, os.X_OK):
        raise ValueError(f"{python} is no interpreter: name the folder of a checkout with a .venv, or an interpreter")
    root = imported_from(str(python))
    if path.is_dir() and root != path.resolve():
        raise ValueError(f"{python} imports the product from {root}, not from {path}: install that checkout into it")
    if root == imported_from(sys.executable):
        raise ValueError(f"{python} imports the product from {root}, which is this checkout: name another one")
    commit = commit_of(root)
    return Tree(commit if commit != "unknown" else root.name, root, str(python))
