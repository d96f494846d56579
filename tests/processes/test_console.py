"""What workers find on a console and what a user sees there: order, terminals, prompts, slow readers."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.harness import (
    OURS,
    WAIT,
    WORKERS,
    Launcher,
    Mailbox,
    environment,
    finish,
    only_long,
    start,
    still_alive,
    watched,
)
from support.screens import Screen

ROUNDS = 2000

ALTERNATE = f"""
import os
for number in range({ROUNDS}):
    os.write(1, b"out %d\\n" % number)
    os.write(2, b"err %d\\n" % number)
"""
IN_ORDER = [f"{stream} {number}" for number in range(ROUNDS) for stream in ("out", "err")]

IMPATIENT = f"""
import sys; sys.path.insert(0, {str(WORKERS)!r})
from post import post
from dlrover_run.words.reasons import sentence
from dlrover_run.output import relay_client
relay_client.DRAIN_TIMEOUT = 0.01
end_round = relay_client.RelayClient.end_round
async def tell_and_end_round(relay, keys, timeout):
    post()
    return await end_round(relay, keys, timeout)
relay_client.RelayClient.end_round = tell_and_end_round
from dlrover_run.command_line.entry_point import run
from dlrover_run.command_line.program import DLROVER_RUN
sys.exit(run(DLROVER_RUN))
"""
"""A launcher that does not wait for its console while the job runs, and posts when its workers have exited."""

METHODS = ["spawn", "forkserver"]


@contextmanager
def terminal(rows: int = 24, columns: int = 80) -> Iterator[tuple[int, int]]:
    """Both ends of a terminal that is not the controlling terminal of any process."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    try:
        yield master, slave
    finally:
        for fd in (master, slave):
            os.close(fd)


def read_until(fd: int, pattern: str) -> str:
    """Read from `fd` up to and including `pattern`; a terminal's line ends become plain ones."""
    seen = ""
    while not re.search(pattern, seen):
        assert select.select([fd], [], [], WAIT)[0], f"{pattern!r} did not come; there is only {seen!r}"
        seen += os.read(fd, 1 << 16).decode().replace("\r\n", "\n")
    return seen


def script(directory: Path, source: str) -> str:
    path = directory / "script.py"
    path.write_text(source)
    return str(path)


def _lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("out ", "err "))]


@pytest.mark.torchrun
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sink", ["file", "pipe"])
def test_the_two_streams_of_a_worker_keep_their_order_in_one_sink(
    launcher: Launcher, tmp_path: Path, sink: str, method: str
) -> None:
    log = tmp_path / "log"
    with open(log, "wb") as file:
        process = start(
            launcher,
            [f"--start-method={method}", script(tmp_path, ALTERNATE)],
            cwd=tmp_path,
            stdout=file if sink == "file" else subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        ended = finish(process)
    assert ended.code == 0
    assert _lines_of(log.read_text() or ended.out) == IN_ORDER


@pytest.mark.torchrun
def test_the_two_streams_of_a_worker_keep_their_order_on_a_terminal(launcher: Launcher, tmp_path: Path) -> None:
    with terminal() as (master, slave):
        path = script(tmp_path, ALTERNATE + "print('end of it')\n")
        process = start(launcher, [path], cwd=tmp_path, stdout=slave, stderr=slave)
        assert _lines_of(read_until(master, "end of it")) == IN_ORDER
        assert finish(process).code == 0


@pytest.mark.torchrun
def test_each_of_two_sinks_gets_its_own_stream(launcher: Launcher, tmp_path: Path) -> None:
    ended = finish(start(launcher, [script(tmp_path, ALTERNATE)], cwd=tmp_path))
    assert _lines_of(ended.out) == IN_ORDER[::2]
    assert _lines_of(ended.err) == IN_ORDER[1::2]


@pytest.mark.torchrun
def test_a_worker_on_a_terminal_has_a_terminal_of_that_size(launcher: Launcher, tmp_path: Path) -> None:
    source = "import os\nprint([(os.isatty(n), *os.get_terminal_size(n)) for n in (0, 1, 2)])\n"
    with terminal(31, 117) as (master, slave):
        process = start(launcher, [script(tmp_path, source)], cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave)
        assert str([(True, 117, 31)] * 3) in read_until(master, r"\]\n")
        assert finish(process).code == 0


BETWEEN = """
import os, sys
out = getattr(sys, sys.argv[1])
if os.environ["RANK"] == "0":
    out.write("from rank 0")
    open("begun", "w").close()
    open("other", "r").close()
    out.write("\\n")
else:
    open("begun", "r").close()
    print("from rank 1", file=out)
    open("other", "w").close()
"""
"""What `print` does when rank 1 prints between the two writes of rank 0; named pipes order the writes."""


@pytest.mark.parametrize(
    ("sink", "stream"),
    [
        ("two pipes", "stderr"),
        ("one pipe", "stdout"),
        ("terminal", "stderr"),
        *only_long(("two pipes", "stdout"), ("one pipe", "stderr"), ("terminal", "stdout")),
    ],
)
def test_lines_of_two_workers_stay_whole(tmp_path: Path, sink: str, stream: str) -> None:
    for name in ("begun", "other"):
        os.mkfifo(tmp_path / name)
    args = ["--nproc-per-node=2", script(tmp_path, BETWEEN), stream]
    if sink == "terminal":
        with terminal() as (master, slave):
            process = start(OURS, args, cwd=tmp_path, stdout=slave, stderr=slave)
            shown = read_until(master, "from rank 0(?s:.*)from rank 1(?s:.*)\n|from rank 1(?s:.*)from rank 0(?s:.*)\n")
            assert finish(process).code == 0
    else:
        ended = finish(start(OURS, args, cwd=tmp_path, stderr=subprocess.STDOUT if sink == "one pipe" else -1))
        assert ended.code == 0
        shown = ended.err if (sink, stream) == ("two pipes", "stderr") else ended.out
    assert sorted(shown.splitlines()) == ["from rank 0", "from rank 1"]


@pytest.mark.parametrize(
    "args", [(), ("--nproc-per-node=2", "-t3"), *only_long((("-t3",),), (("--nproc-per-node=2",),))]
)
def test_a_prompt_is_shown_on_a_terminal_before_its_line_has_ended(tmp_path: Path, args: tuple[str, ...]) -> None:
    """Also where the output is written to a log file first, and where other workers write complete lines to the
    terminal.
    """
    source = "import os\nif os.environ['RANK'] == '0':\n    name = input('your name? ')\n    breakpoint()\n"
    source += "    print('hello', name)\n"
    with terminal() as (master, slave):
        command = [*args, "--log-dir=logs", script(tmp_path, source)]
        process = start(OURS, command, cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave)
        read_until(master, re.escape("your name? "))
        os.write(master, b"nobody\n")
        read_until(master, re.escape("(Pdb) "))
        os.write(master, b"c\n")
        read_until(master, "hello nobody")
        assert finish(process).code == 0


def _written_to_a_stuck_reader(mailbox: Mailbox) -> tuple[subprocess.Popen[bytes], str]:
    """A launcher with a short timeout whose worker has ended, and its output, of which nothing was read."""
    source = "import os\nos.write(1, b'x' * 500_000 + b'END')\n"
    process = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, script(mailbox.directory, source)],
        cwd=mailbox.directory,
        env=environment({"TEST_MAILBOX": mailbox.name}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    mailbox.receive()
    return process, "x" * 500_000 + "END"


def test_the_end_of_a_job_waits_for_a_slow_reader(mailbox: Mailbox) -> None:
    process, written = _written_to_a_stuck_reader(mailbox)
    with watched(process.pid) as launcher:
        assert still_alive(launcher, 1) == 1
    out, _ = process.communicate(timeout=WAIT)
    assert out.decode() == written
    assert process.returncode == 0


def test_a_signal_ends_the_wait_for_a_slow_reader(mailbox: Mailbox) -> None:
    process, _ = _written_to_a_stuck_reader(mailbox)
    with watched(process.pid) as launcher:
        process.send_signal(signal.SIGINT)
        assert still_alive(launcher, WAIT) == 0
    process.communicate(timeout=WAIT)
    assert process.returncode == 0  # The workers had all succeeded.


@pytest.mark.parametrize("gone", ["out", "both"])
def test_a_reader_that_closes_the_pipe_ends_neither_job_nor_launcher(tmp_path: Path, gone: str) -> None:
    process = start(
        OURS,
        [script(tmp_path, "import sys\nprint('first')\nprint('more', file=sys.stderr)\nsys.exit(3)\n")],
        cwd=tmp_path,
        stderr=subprocess.STDOUT if gone == "both" else subprocess.DEVNULL,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(WAIT) in ((3,) if gone == "both" else (1, 3))


CHECKED_NODE = """
import asyncio, os, sys
from dlrover_run.features.node_check.node import NodeCheckReporter
from dlrover_run.workers.reporter import ProgressReporter
from dlrover_run.console import console
from dlrover_run.features.node_check.decision.model import NodeCheckAssignment, NodeCheckProgress
from dlrover_run.features.node_check.decision.model import HealthStatus, NodeHealth
from dlrover_run.coordination.records.assignment import Assignment, Waiting
from dlrover_run.coordination.records.round import RankAssignment, RoundKey
from dlrover_run.words.reasons import sentence
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.rendezvous import kinds
from dlrover_run.spec import Entrypoint, JobSpec

console.REFRESH_SECONDS = 0.01

def nodes(*verdicts):
    return tuple(
        NodeHealth(node_id=str(n), incarnation=str(n), host=f"gpu-{n}", status=HealthStatus(v), tflops=612.0,
                   gigabytes=24.1)
        for n, v in enumerate(verdicts)
    )

def checking(*verdicts):
    parts = (NodeCheckProgress(nodes(*verdicts)),)
    return Assignment(waiting=Waiting(sentence("round 1 of a node check"), None, parts))

async def main(relay):
    relay.attach(print)
    loop, spoken = asyncio.get_running_loop(), asyncio.Queue()
    loop.add_reader(0, lambda: spoken.put_nowait(os.read(0, 1)))
    columns = lambda: console.terminal_columns(2, "xterm")
    lines = console.Console(relay.write, columns, lambda: console.terminal_lines(2))
    spec = JobSpec(entrypoint=Entrypoint("program", "x", ()), run_id="x", rendezvous=kinds.Master("node0", 29400))
    details = NodeCheckReporter(spec, lines)
    reporter = ProgressReporter(spec, lines, lambda: details)
    reporter.update(checking("pending", "pending"))
    await spoken.get()
    # A worker of the last round has not said its last word yet.
    worker = relay.open_stderr("0", show=True)
    os.write(worker, b"last words of a worker\\n")
    os.close(worker)
    await spoken.get()
    reporter.update(checking("pending", "fault"))
    await spoken.get()
    reporter.update(checking(*["pending"] * 30))
    await spoken.get()
    reporter.update(Assignment(
        ranks=RankAssignment(key=RoundKey(1, 1), restart_count=0, node_rank=0, nodes=2, workers=1, first_rank=0,
                  world_size=2, role_first_rank=0, role_world_size=2, store_address="a", store_port=1),
        parts=(NodeCheckAssignment(health_table=nodes("passed", "straggler")),),
    ))
    lines.info("this is the end")
    await relay.drain()
    await relay.close()

relay = RelayClient((2, 2))
asyncio.run(main(relay))
"""


def test_a_node_check_is_redrawn_in_place_on_a_terminal(tmp_path: Path) -> None:
    rows, columns = 8, 80
    screen = Screen(rows, columns)
    waiting = r"\r\x1b\[\d+Adlrover-run: waiting: round 1 of a node check"
    with (
        terminal(rows, columns) as (master, slave),
        subprocess.Popen(
            [sys.executable, script(tmp_path, CHECKED_NODE)],
            env=environment({"NO_COLOR": "1"}),
            stdin=subprocess.PIPE,
            stdout=slave,
            stderr=slave,
            bufsize=0,
        ) as process,
    ):
        go_on = process.stdin
        assert go_on is not None
        screen.feed(read_until(master, f"gpu-1 .*{waiting}"))
        assert [line.split()[0] for line in screen.lines[1:]] == ["node", "gpu-0", "gpu-1"]
        go_on.write(b"x")
        screen.feed(read_until(master, "last words of a worker\n"))
        go_on.write(b"x")
        screen.feed(read_until(master, f"fault{waiting}"))
        assert sum("last words of a worker" in line for line in screen.lines) == 1
        assert [line[:1] for line in screen.lines[-3:]] == [" ", " ", "!"]
        go_on.write(b"x")
        screen.feed(read_until(master, f"and 26 more: 26 open{waiting}"))
        # As much as fits, which is all but one line.
        assert "waiting" in screen.lines[-rows + 1]
        go_on.write(b"x")
        screen.feed(read_until(master, "this is the end\n"))
        assert process.wait(WAIT) == 0
    assert screen.lines[-6:] == [
        "dlrover-run: node check of 2 nodes: 1 passed, 1 straggler",
        "  node       compute  communication  status",
        "  gpu-0  612 TFLOP/s      24.1 GB/s  passed",
        "! gpu-1  612 TFLOP/s      24.1 GB/s  straggler",
        "dlrover-run: this is the end",
        "",
    ]


RESTARTED = """
import os, sys
sys.exit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
"""


@pytest.mark.parametrize("where", ["terminal", "verbose", "pipe"])
def test_one_line_tells_a_person_that_the_job_is_done(where: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RESTARTED)
    variables = {**environment(), **({"LOGLEVEL": "INFO"} if where == "verbose" else {})}
    argv = [*OURS.command, "--max-restarts=1", str(script)]
    if where == "terminal":
        with (
            terminal() as (master, slave),
            subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, env=variables),
        ):
            read_until(master, r"dlrover-run: done after [\d.]+ s, 1 restart")
        return
    done = subprocess.run(argv, capture_output=True, text=True, env=variables, timeout=WAIT)
    assert done.returncode == 0
    found = re.search(r"dlrover-run: done after [\d.]+ s, 1 restart\n", done.stderr)
    assert (found is not None) == (where == "verbose")
