"""The launcher as process 1 of a container, for which a pid namespace stands: external signals, and orphans.

Process 1 is special to the kernel: it ignores signals without a handler, and it becomes the parent of all orphans.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest
from support.harness import WAIT, WORKERS, Launcher, Mailbox, finish, launch

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="a pid namespace needs root"),
]

ON_SIGNAL = str(WORKERS / "on_signal.py")

IN_CONTAINER = Launcher(
    "dlrover-run",
    # --kill-child ends the container if the test ends early.
    ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-m", "dlrover_run"),
)

Contain = Callable[..., tuple[subprocess.Popen[str], psutil.Process]]


@pytest.fixture
def contain(mailbox: Mailbox) -> Iterator[Contain]:
    """Start a launcher as process 1 of a container. Return the process that runs the container, and process 1 seen from
    outside. Both exist when the first worker has posted.
    """
    started: list[subprocess.Popen[str]] = []

    def start(*args: str, workers: int = 1) -> tuple[subprocess.Popen[str], psutil.Process]:
        runtime = launch(mailbox, *args, launcher=IN_CONTAINER)
        started.append(runtime)
        mailbox.gather(workers)
        (first,) = psutil.Process(runtime.pid).children()
        return runtime, first

    yield start
    for runtime in started:
        if runtime.poll() is None:
            runtime.kill()
            runtime.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_get_the_signal_of_the_kubelet_once(mailbox: Mailbox, contain: Contain, number: signal.Signals) -> None:
    runtime, first = contain("--nproc-per-node=2", ON_SIGNAL, workers=2)
    first.send_signal(number)
    ended = finish(runtime)
    assert [m["signal"] for m in mailbox.gather(2, timeout=0)] == [number.name] * 2
    assert mailbox.pending() == []
    assert ended.code == 128 + number, ended.err


def test_a_worker_that_ignores_the_signal_is_killed_within_the_grace_period_of_the_pod(
    mailbox: Mailbox, contain: Contain
) -> None:
    runtime, first = contain("--shutdown-timeout=0.5", ON_SIGNAL, "stay")
    first.terminate()
    ended = finish(runtime)
    assert mailbox.receive(0)["signal"] == "SIGTERM"
    assert ended.code == 128 + signal.SIGTERM, ended.err


def test_a_preemption_notice_reaches_process_one(mailbox: Mailbox, contain: Contain) -> None:
    runtime, first = contain("--preemption-notice=USR1@7200", "--exit-codes=kubernetes", ON_SIGNAL)
    first.send_signal(signal.SIGUSR1)
    ended = finish(runtime)
    assert mailbox.receive(0)["signal"] == "SIGUSR1"
    assert ended.code == 138, ended.err


def test_orphans_of_process_one_are_reaped(mailbox: Mailbox, contain: Contain) -> None:
    """A process that `kubectl exec` leaves, and a daemon of a worker."""
    runtime, first = contain(ON_SIGNAL)
    leave = "(read line < /dev/null; exec sleep 1000) & :"
    subprocess.run(["nsenter", "--target", str(first.pid), "--pid", "--mount", "sh", "-c", leave], check=True)
    (orphan,) = [each for each in first.children() if each.name() in ("sh", "sleep")]
    orphan.kill()
    # The pid of a zombie stays in use.
    assert orphan.wait(WAIT) is None
    assert not orphan.is_running()
    first.terminate()
    assert finish(runtime).code == 128 + signal.SIGTERM
    assert mailbox.receive(0)["signal"] == "SIGTERM"
