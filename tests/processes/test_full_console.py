"""A console in a file whose disk is full for a while: its output comes later, or a line says how much is missing."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.harness import Launcher, run

from dlrover_run.output import sinks
from dlrover_run.output.sinks import KEPT_BYTES, Sink

TRAIN = """
import os, sys, time
def shown(text):
    while text not in open(sys.argv[1]).read():
        os.sched_yield()
print("before", flush=True)
shown("before")
filler = os.open(sys.argv[1] + ".filler", os.O_WRONLY | os.O_CREAT)
try:
    while True:
        os.write(filler, bytes(512))
except OSError:
    pass
for line in range(200):
    print(f"while full {line} " + "x" * 1000, flush=True)
# The page that the file has is full, so the launcher tries to get another one.
while os.path.getsize(sys.argv[1]) % os.sysconf("SC_PAGE_SIZE"):
    os.sched_yield()
time.sleep(0.3)
os.ftruncate(filler, 0)
print("after", flush=True)
"""


def test_output_goes_on_when_a_full_disk_has_room_again(tmp_path: Path) -> None:
    inside = ("unshare", "--user", "--map-root-user", "--mount")
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no user may mount a file system on this machine")
    (tmp_path / "train.py").write_text(TRAIN)
    disk = tmp_path / "disk"
    disk.mkdir()
    shell = (
        f'mount -t tmpfs -o size=512k tmpfs {disk} || exit 9; "$@" > {disk}/out 2>&1; end=$?; cat {disk}/out; exit $end'
    )
    launcher = Launcher("dlrover-run", (*inside, "sh", "-c", shell, "sh", sys.executable, "-m", "dlrover_run"))
    done = run(launcher, ("train.py", disk / "out"), cwd=tmp_path)
    lines = [line for line in done.out.splitlines() if "dlrover-run:" not in line]
    assert done.code == 0, done.err
    assert [line.partition(" x")[0] for line in lines] == ["before", *(f"while full {n}" for n in range(200)), "after"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(at=100.0)
    monkeypatch.setattr(sinks, "time", SimpleNamespace(monotonic=lambda: clock.at))
    return clock


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_what_does_not_fit_into_the_queue_is_counted(tmp_path: Path, clock: SimpleNamespace, number: int) -> None:
    full = True
    tries = 0

    def write(view: memoryview) -> int:
        nonlocal tries
        tries += 1
        if full:
            raise OSError(number, "refused")
        return os.write(file, view)

    file = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    sink = Sink(file, write)
    piece = KEPT_BYTES // 4
    for count in range(10):
        line = bytes([ord("a") + count]) * (piece - 1) + b"\n"
        sink.put(line)
        sink.flush()
    assert (sink.dead, sink.postponed, sink.has_room, tries) == (False, True, True, 1)
    clock.at += sinks.RETRY_SECONDS
    sink.flush()
    assert tries == 2
    full = False
    sink.flush()
    assert tries == 2  # Not before its time.
    clock.at += sinks.RETRY_SECONDS
    sink.flush()
    assert (sink.postponed, sink.pending, sink.written_bytes) == (False, False, sink.put_bytes)
    text = (tmp_path / "out").read_bytes()
    assert text.startswith(f"\n... {6 * piece} bytes of output are missing here".encode())
    assert [line[:1] for line in text.splitlines()[2:]] == [b"g", b"h", b"i", b"j"]
    sink.close()
