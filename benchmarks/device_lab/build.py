"""The libraries of the laboratory, which are compiled when they are needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent

COMPILE_TIMEOUT = 120.0
FLAGS = ("-O1", "-Wall", "-shared", "-fPIC", "-pthread")


def compiler() -> str | None:
    """The compiler of this machine, None if it has none."""
    return shutil.which("cc") or shutil.which("gcc")


def why_no_compiler() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    return None if compiler() else "there is no C compiler (cc or gcc)"


def compile_library(source: str, library: Path) -> Path:
    """Compile a source file of this folder, and return the library. Raises subprocess.CalledProcessError."""
    program = compiler()
    assert program is not None, why_no_compiler()
    command = [program, *FLAGS, "-o", str(library), str(HERE / source)]
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT)
    return library
