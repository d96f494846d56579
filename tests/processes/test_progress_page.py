"""Progress pages with real writers: other processes, which are stopped, killed and forked."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from support.harness import WAIT

from dlrover_run.observe.page import VARIABLE, Area, Progress, StepSource, open_writer
from dlrover_run.observe.pages import ProgressPages

SAME = """
import mmap, os
from dlrover_run.observe import page
# One that stores each step, as a worker with long steps does.
fd = os.open(os.environ[page.VARIABLE], os.O_RDWR)
writer = page.Writer(mmap.mmap(fd, page.PAGE_BYTES), page.Area.WORKER)
print(flush=True)
while True:
    # All figures grow together, so a torn record would be seen.
    writer.add(page.StepSource.REPORT, 1, 1, 1.0)
"""

WRITES = 50_000

BOUNDED = f"""
import mmap, os, sys
from dlrover_run.observe import page

class Words(mmap.mmap):
    # A whole record is copied before another process looks, nearly always: here each word is a store of its own.
    def __setitem__(self, where, stored):
        for first in range(where.start, where.stop, 8):
            mmap.mmap.__setitem__(self, slice(first, min(first + 8, where.stop)), stored[:8])
            stored = stored[8:]

fd = os.open(os.environ[page.VARIABLE], os.O_RDWR)
writer = page.Writer(Words(fd, page.PAGE_BYTES), page.Area.WORKER)
print(flush=True)
sys.stdin.readline()
for step in range(1, {WRITES} + 1):
    writer.add(page.StepSource.REPORT, 1, 0x0101_0101_0101, 3.0, step * step)
"""


@pytest.fixture
def pages() -> Iterator[ProgressPages]:
    opened = ProgressPages(2)
    yield opened
    opened.close()


@contextlib.contextmanager
def running(script: str, page: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, VARIABLE: page},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=WAIT)


def printed(script: str, page: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, VARIABLE: page},
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=True,
    ).stdout


def read(pages: ProgressPages) -> Progress:
    found = pages.read(0)
    assert found is not None
    return found


def test_a_reader_never_sees_a_torn_record(pages: ProgressPages) -> None:
    assert pages.read(0) is None
    with running(SAME, pages.path(0)) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        seen = 0
        while seen < 100_000:
            found = pages.read(0)
            if found is not None:
                assert found.steps == found.samples == found.waited >= seen
                seen = found.steps
    assert pages.read(1) is None


def test_each_record_that_is_read_while_a_process_writes_at_full_speed_is_one_of_its_records(
    pages: ProgressPages,
) -> None:
    with running(BOUNDED, pages.path(0)) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdout.readline()
        writer.stdin.write("\n")
        writer.stdin.flush()
        seen = 0
        while writer.poll() is None or seen < WRITES:
            assert not writer.returncode
            found = pages.read(0)
            if found is None:
                continue
            steps = found.steps
            assert found[:3] == (steps, 0x0101_0101_0101 * steps, 3.0 * steps)
            assert found.left == steps * steps
            assert seen <= steps <= WRITES
            seen = steps
    assert seen == WRITES


def test_the_last_record_of_a_stopped_and_of_a_killed_writer_is_read(pages: ProgressPages) -> None:
    with running(SAME, pages.path(0)) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(50):
            while pages.read(0) is None:
                pass
            writer.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
            stopped = read(pages)
            assert stopped.steps == stopped.samples == stopped.waited
            assert read(pages) == stopped
            writer.send_signal(signal.SIGCONT)
        writer.kill()
        writer.wait(WAIT)
        assert read(pages).steps >= stopped.steps


def test_a_child_of_the_worker_does_not_write(pages: ProgressPages) -> None:
    forked = """
import os
from dlrover_run.observe import page
page.add(page.StepSource.REPORT)
child = os.fork()
page.add(page.StepSource.REPORT)
if child == 0:
    os._exit(page.own_writer() is not None)
print(os.waitpid(child, 0)[1])
"""
    assert printed(forked, pages.path(0)) == "0\n"
    assert read(pages).steps == 2
    spawned = """
import subprocess, sys
from dlrover_run.observe import page
page.add(page.StepSource.REPORT)
child = "from dlrover_run.observe import page; print(page.own_writer())"
subprocess.run([sys.executable, "-c", child], check=True)
"""
    assert printed(spawned, pages.path(0)) == "None\n"
    assert read(pages).steps == 3


def test_the_last_steps_of_a_worker_are_stored_when_it_ends(pages: ProgressPages) -> None:
    short = """
from dlrover_run.observe import page
for _ in range(100):
    page.add(page.StepSource.REPORT)
"""
    assert printed(short, pages.path(0)) == ""
    assert read(pages).steps == 100


@pytest.mark.parametrize(
    ("how", "is_known"), [("", True), ("raise SystemExit(3)", True), ("1 / 0", True), ("os._exit(3)", False)]
)
def test_when_the_script_was_over_is_known_unless_the_process_was_cut_off(
    pages: ProgressPages, how: str, is_known: bool
) -> None:
    script = f"""
import os
from dlrover_run.observe import page
page.add(page.StepSource.REPORT)
{how}
"""
    began = time.monotonic_ns()
    with running(script, pages.path(0)) as worker:
        worker.wait(WAIT)
    found = read(pages)
    assert bool(found.ended) is is_known
    if is_known:
        assert began < found.at < found.ended < time.monotonic_ns()


def test_the_relay_writes_beside_the_worker_and_the_worker_takes_precedence(pages: ProgressPages) -> None:
    log = open_writer(pages.path(0), Area.LOG)
    assert log is not None
    log.add(StepSource.LOG, 17, 0, 0.0)
    assert read(pages)[:5:4] == (17, StepSource.LOG)
    assert printed("from dlrover_run.observe import page; page.add(4)", pages.path(0)) == ""
    assert read(pages)[:5:4] == (1, StepSource.REPORT)


def test_a_worker_cannot_truncate_its_page(pages: ProgressPages) -> None:
    with pytest.raises(PermissionError):
        os.truncate(pages.path(0), 0)


@pytest.mark.parametrize("page", ["", "/nowhere", "/dev/null"])
def test_without_a_page_a_report_has_no_effect(page: str) -> None:
    assert printed("from dlrover_run.observe import page; page.add(4); print(page.own_writer())", page) == "None\n"
