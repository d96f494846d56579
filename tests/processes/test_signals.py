"""Signals to the launcher: which processes receive them, how long workers get, and the exit code of the launcher."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import sys
from asyncio import selector_events

import pytest
from support.harness import (
    WAIT,
    WORKERS,
    Launcher,
    Mailbox,
    agent_of,
    environment,
    finish,
    launch,
    only_long,
    still_alive,
    watched,
)

from dlrover_run.processes import event_loop

ON_SIGNAL = str(WORKERS / "on_signal.py")


@pytest.mark.torchrun
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", *only_long("SIGHUP", "SIGQUIT")])
def test_a_handled_signal_reaches_every_worker_once(launcher: Launcher, mailbox: Mailbox, name: str) -> None:
    process = launch(mailbox, "--nproc-per-node=2", ON_SIGNAL, launcher=launcher)
    mailbox.gather(2)
    process.send_signal(getattr(signal, name))
    ended = finish(process)
    assert [m["signal"] for m in mailbox.gather(2, timeout=0)] == [name, name]
    # Ours differs: the exit code shows which signal it was; torchrun's is 1, with a traceback.
    assert ended.code == (128 + getattr(signal, name) if launcher.is_ours else 1)
    if launcher.is_ours:
        assert "Traceback" not in ended.err
    assert mailbox.pending() == []


@pytest.mark.torchrun
def test_signals_to_handle_can_be_chosen(launcher: Launcher, mailbox: Mailbox) -> None:
    process = launch(mailbox, "--signals-to-handle=SIGUSR1,SIGTERM", ON_SIGNAL, launcher=launcher)
    mailbox.receive()
    process.send_signal(signal.SIGUSR1)
    ended = finish(process)
    assert mailbox.receive(0)["signal"] == "SIGUSR1"
    assert ended.code == (128 + signal.SIGUSR1 if launcher.is_ours else 1)


def test_a_preemption_notice_reaches_the_workers_once_and_gives_them_its_own_time(mailbox: Mailbox) -> None:
    process = launch(
        mailbox, "--nproc-per-node=2", "--preemption-notice=USR1@7200", "--shutdown-timeout=0", ON_SIGNAL, "stay"
    )
    mailbox.gather(2)
    process.send_signal(signal.SIGUSR1)
    assert [m["signal"] for m in mailbox.gather(2)] == ["SIGUSR1", "SIGUSR1"]
    # The notice again, and then the signal at the end of the time: only the latter is passed on.
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)
    assert [m["signal"] for m in mailbox.gather(2)] == ["SIGTERM", "SIGTERM"]
    process.send_signal(signal.SIGINT)
    assert [m["signal"] for m in mailbox.gather(2)] == ["SIGINT", "SIGINT"]
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 128 + signal.SIGUSR1
    assert "SIGUSR1 received, which announces the end of this node in 7200 s: the workers have 7195 s" in ended.err


def test_a_worker_that_continues_is_killed_before_the_end_of_the_notice(mailbox: Mailbox) -> None:
    process = launch(mailbox, "--preemption-notice=USR1@1", ON_SIGNAL, "stay")
    mailbox.receive()
    process.send_signal(signal.SIGUSR1)
    assert finish(process).code == 128 + signal.SIGUSR1
    assert mailbox.receive(0)["signal"] == "SIGUSR1"


def test_a_stopped_worker_is_resumed_to_handle_the_stop_signal(mailbox: Mailbox) -> None:
    process = launch(mailbox, "--shutdown-timeout=1000", ON_SIGNAL)
    os.kill(mailbox.receive()["pid"], signal.SIGSTOP)
    process.terminate()
    assert mailbox.receive()["signal"] == "SIGTERM"
    assert finish(process).code == 128 + signal.SIGTERM


def test_a_worker_that_ignores_the_signal_is_killed_after_its_grace_period(mailbox: Mailbox) -> None:
    process = launch(mailbox, "--nproc-per-node=2", "--shutdown-timeout=0.5", ON_SIGNAL, "stay")
    mailbox.gather(2)
    process.terminate()
    assert finish(process).code == 128 + signal.SIGTERM
    assert [m["signal"] for m in mailbox.gather(2, timeout=0)] == ["SIGTERM", "SIGTERM"]


def test_a_second_interrupt_kills_at_once(mailbox: Mailbox) -> None:
    process = launch(mailbox, "--nproc-per-node=2", "--shutdown-timeout=3600", ON_SIGNAL, "stay")
    mailbox.gather(2)
    process.send_signal(signal.SIGINT)
    # Both have received the first one before the second is sent, so this cannot be two merged signals.
    assert [m["signal"] for m in mailbox.gather(2)] == ["SIGINT", "SIGINT"]
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 128 + signal.SIGINT


def test_a_repeated_sigterm_is_forwarded_and_shortens_no_grace_period(mailbox: Mailbox) -> None:
    process = launch(mailbox, "--shutdown-timeout=3600", ON_SIGNAL, "stay")
    mailbox.receive()
    for _ in range(2):
        process.terminate()
        assert mailbox.receive()["signal"] == "SIGTERM"
    process.send_signal(signal.SIGINT)
    assert mailbox.receive()["signal"] == "SIGINT"
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 128 + signal.SIGTERM


def test_ctrl_c_in_a_terminal_is_one_interrupt(mailbox: Mailbox) -> None:
    """The terminal signals the whole foreground group; counted twice it would be a second Ctrl-C and kill at once."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(mailbox.directory)
        env = environment({"TEST_MAILBOX": mailbox.name})
        os.execve(sys.executable, [sys.executable, "-m", "dlrover_run", "--nproc-per-node=2", ON_SIGNAL], env)
    mailbox.gather(2)
    os.write(terminal, b"\x03")
    assert [m["signal"] for m in mailbox.gather(2)] == ["SIGINT", "SIGINT"]
    shown = b""
    with watched(pid) as guard:
        while still_alive(guard, 0):
            try:
                shown += os.read(terminal, 4096)
            except OSError:
                break
    # On its own line, whatever the terminal echoes for the key.
    line = rb"\^C\r\n\d\d:\d\d:\d\d \S*dlrover-run: SIGINT received: [^\r\n]*; press Ctrl-C again to kill them at once"
    assert re.search(line, shown), shown
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGINT
    os.close(terminal)


def test_nohup_keeps_the_job_alive_over_a_hangup(mailbox: Mailbox) -> None:
    process = launch(mailbox, ON_SIGNAL, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    mailbox.receive()
    process.send_signal(signal.SIGHUP)
    process.terminate()
    assert mailbox.receive()["signal"] == "SIGTERM"
    assert finish(process).code == 128 + signal.SIGTERM


def test_a_signal_while_workers_are_stopped_for_a_restart_ends_the_job(mailbox: Mailbox) -> None:
    script = mailbox.script(
        "half.py",
        "import os, signal\n"
        "os.environ['RANK'] == '1' and (post(), os._exit(7))\n"
        "signal.signal(signal.SIGTERM, lambda *_: post(told=True))\n"
        "post()\n"
        "wait_for_signals()\n",
    )
    process = launch(mailbox, "--nproc-per-node=2", "--max-restarts=5", "--shutdown-timeout=2", script)
    while "told" not in mailbox.receive():
        pass
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 128 + signal.SIGINT
    assert all(message["restart"] == 0 for message in mailbox.pending())


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_stopped_agent_does_not_keep_the_job_alive(mailbox: Mailbox, name: str) -> None:
    process = launch(mailbox, "--nproc-per-node=2", ON_SIGNAL)
    with watched(*(m["pid"] for m in mailbox.gather(2))) as workers:
        agent_of(process).suspend()
        process.send_signal(getattr(signal, name))
        assert finish(process).code == (-signal.SIGKILL if name == "SIGKILL" else 128 + signal.SIGTERM)
        assert still_alive(workers, WAIT) == 0


def test_a_signal_before_the_next_round_prevents_that_round(mailbox: Mailbox) -> None:
    """The console is blocked, so the launcher waits for it between the rounds, and the signal arrives there."""
    script = mailbox.script(
        "loud.py",
        "sys.stderr.write('x' * 900_000)\npost()\nsys.exit(3)\n",
    )
    process = launch(mailbox, "--max-restarts=5", script)
    assert mailbox.receive()["restart"] == 0
    process.terminate()
    _, _, afterwards = finish(process).err.partition("SIGTERM received")
    assert afterwards
    assert "; restart " not in afterwards


def test_a_job_that_a_signal_stopped_reports_it(mailbox: Mailbox) -> None:
    process = launch(mailbox, "--event-log-handler=console", ON_SIGNAL)
    mailbox.receive()
    process.terminate()
    ended = finish(process)
    last = next(line for line in reversed(ended.err.splitlines()) if line.startswith("{"))
    assert json.loads(last)["metadata"]["raw_error"] == "SIGTERM stopped the job"


def test_the_torchrun_code_is_returned_for_a_killed_agent_too(mailbox: Mailbox) -> None:
    process = launch(mailbox, "--compat-exit-codes", ON_SIGNAL)
    mailbox.receive()
    agent_of(process).kill()
    ended = finish(process)
    assert ended.code == 1
    assert "agent was killed by SIGKILL" in ended.err


def test_a_signal_while_the_loop_closes_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    close = selector_events.BaseSelectorEventLoop.close
    closed = []

    def close_then_signal(loop: selector_events.BaseSelectorEventLoop) -> None:
        close(loop)
        # The pipe of the loop is closed now, and its signal handlers are not removed yet.
        os.kill(os.getpid(), signal.SIGCHLD)
        closed.append(loop)

    async def handle_signals() -> str:
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, lambda: None)
        return "done"

    monkeypatch.setattr(selector_events.BaseSelectorEventLoop, "close", close_then_signal)
    assert event_loop.run(handle_signals()) == "done"
    assert len(closed) == 1
    assert capfd.readouterr().err == ""
    assert signal.set_wakeup_fd(-1) == -1


def test_more_signals_than_the_loop_reads_print_no_warning(capfd: pytest.CaptureFixture[str]) -> None:
    async def take_many() -> None:
        loop = asyncio.get_running_loop()
        taken = asyncio.Event()
        for number in (signal.SIGCHLD, signal.SIGUSR1):
            loop.add_signal_handler(number, taken.set)
        for _ in range(5000):
            os.kill(os.getpid(), signal.SIGCHLD)
        await taken.wait()

    event_loop.run(take_many())
    assert capfd.readouterr().err == ""
