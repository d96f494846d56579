"""Pythons that were built with old headers lack names of Linux; containers have limits of 10**9 descriptors.

`sitecustomize` takes the names away from a whole Python here. CPython 3.11.2 built without them has been tried by hand.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import OURS, environment, run

ROOT = Path(__file__).resolve().parents[2]

LACKING = {
    "os": (
        "memfd_create MFD_CLOEXEC MFD_ALLOW_SEALING MFD_HUGETLB pidfd_open P_PIDFD PIDFD_NONBLOCK eventfd eventfd_read "
        "eventfd_write EFD_CLOEXEC EFD_NONBLOCK copy_file_range getrandom GRND_NONBLOCK preadv2 pwritev2 RWF_NOWAIT "
        "unshare setns posix_openpt"
    ),
    "fcntl": (
        "F_ADD_SEALS F_GET_SEALS F_SEAL_SEAL F_SEAL_SHRINK F_SEAL_GROW F_SEAL_WRITE F_OFD_GETLK F_OFD_SETLK "
        "F_OFD_SETLKW"
    ),
    "signal": "pidfd_send_signal",
    "socket": "SO_INCOMING_CPU AF_VSOCK TCP_NOTSENT_LOWAT IP_BIND_ADDRESS_NO_PORT",
}
"""The names that depend on headers newer than those of glibc 2.17 and Linux 3.10."""

LACKS = {name: names.split() for name, names in LACKING.items()}

CUSTOMIZE = f"""\
import importlib
for module, names in {LACKS!r}.items():
    loaded = importlib.import_module(module)
    for name in names:
        if hasattr(loaded, name):
            delattr(loaded, name)
"""


@pytest.fixture
def poor(tmp_path: Path) -> dict[str, str | None]:
    """Variables of a Python without these names."""
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CUSTOMIZE)
    return {"PYTHONPATH": str(folder)}


def uses(file: Path) -> Iterator[tuple[str, str]]:
    """The names that a module takes from modules of the standard library whose contents depend on headers."""
    tree = ast.parse(file.read_text())
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {each.asname or each.name: each.name for each in node.names if each.name in LACKS}
        elif isinstance(node, ast.ImportFrom) and node.module in LACKS:
            yield from ((node.module, each.name) for each in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
            yield known[node.value.id], node.attr


def test_no_module_uses_a_name_that_old_headers_lack() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {module}.{name}"
        for package in ("dlrover_run", "tf_ps_runner")
        for file in sorted((ROOT / package).rglob("*.py"))
        for module, name in uses(file)
        if name in LACKS[module]
    ]
    assert found == []


DIES_ONCE = """\
import os, signal, sys
assert not hasattr(os, "memfd_create")
import dlrover_run.training
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
print("trained", flush=True)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_job_restarts_on_a_python_without_them(tmp_path: Path, method: str, poor: dict[str, str | None]) -> None:
    script = tmp_path / "train.py"
    script.write_text(DIES_ONCE)
    ended = run(
        OURS,
        [f"--start-method={method}", "--nproc-per-node=2", "--max-restarts=1", "--log-dir=logs", script],
        cwd=tmp_path,
        env=poor,
    )
    assert ended.code == 0, ended.err
    assert ended.out.count("trained") >= 2
    assert "spawned instead" not in ended.err


FALLBACKS = """\
import fcntl, os, select, signal, subprocess
from dlrover_run import linux
fd = linux.memfd_create("some name", linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING)
os.write(fd, b"held")
fcntl.fcntl(fd, linux.F_ADD_SEALS, linux.F_SEAL_WRITE | linux.F_SEAL_SHRINK | linux.F_SEAL_GROW | linux.F_SEAL_SEAL)
try:
    os.write(fd, b"more")
except PermissionError:
    print(os.readlink(f"/proc/self/fd/{fd}"), os.pread(fd, 9, 0))
    print(os.get_inheritable(fd), fcntl.fcntl(fd, linux.F_GET_SEALS))
child = subprocess.Popen(["sleep", "600"])
pidfd = linux.pidfd_open(child.pid)
print(os.get_inheritable(pidfd), bool(select.select([pidfd], [], [], 0)[0]))
linux.pidfd_send_signal(pidfd, signal.SIGKILL)
print(child.wait(), bool(select.select([pidfd], [], [], 0)[0]))
try:
    linux.pidfd_open(child.pid)
except ProcessLookupError as error:
    print(error.errno)
"""

ANSWER = """\
/memfd:some name (deleted) b'held'
False 15
False False
-9 True
3
"""


@pytest.mark.parametrize("whole", [True, False])
def test_the_calls_are_the_same_with_and_without_pythons_own(poor: dict[str, str | None], whole: bool) -> None:
    found = subprocess.check_output(
        [sys.executable, "-c", FALLBACKS], env=environment({} if whole else poor), text=True
    )
    assert found == ANSWER


def test_the_module_of_these_names_loads_no_ctypes() -> None:
    script = "import sys, dlrover_run.linux; print('ctypes' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "False\n"


HUGE_LIMIT = """\
import os
sysconf, closerange = os.sysconf, os.closerange
def counted(low, high):
    # What close(2) for each number would take is not waited for.
    assert high - low < 10**6, f"{high - low} descriptors"
    closerange(low, high)
os.closerange = counted
os.sysconf = lambda name: 2**30 if name == "SC_OPEN_MAX" else sysconf(name)
"""


def test_output_is_shown_where_the_limit_of_descriptors_is_huge(tmp_path: Path, poor: dict[str, str | None]) -> None:
    (Path(str(poor["PYTHONPATH"])) / "sitecustomize.py").write_text(CUSTOMIZE + HUGE_LIMIT)
    script = tmp_path / "train.py"
    script.write_text("print('trained', flush=True)")
    ended = run(OURS, [script], cwd=tmp_path, env=poor)
    assert (ended.code, ended.out, ended.err) == (0, "trained\n", "")
