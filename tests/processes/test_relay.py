"""The relay with real processes, pipes and terminals. A file or a pipe stands in for the console."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import tty
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.harness import open_descriptors

from dlrover_run.output import relay_start
from dlrover_run.output.channels import PIPE_BYTES
from dlrover_run.output.destinations import LogFile
from dlrover_run.output.opening import open_destination
from dlrover_run.output.relay.log_watcher import LogWatcher
from dlrover_run.output.relay.sources import READ_BYTES, LogSource
from dlrover_run.output.relay_client import STUCK_TIMEOUT, RelayClient
from dlrover_run.output.ring import TAIL_BYTES
from dlrover_run.output.sinks import QUEUE_LIMIT

Answer = TypeVar("Answer")

PATIENCE = 60.0
"""Seconds after which a test here counts as hung."""

NO_PATIENCE = 0.2
"""The timeout of a drain while the console is blocked."""

WRITE_LINES = """
import sys
rank, count, out = sys.argv[1], int(sys.argv[2]), sys.stdout if sys.argv[3] == "1" else sys.stderr
fd = out.fileno()
with open(fd, "w", buffering=65536, closefd=False) as stream:
    for number in range(count):
        stream.write(f"rank {rank} line {number} " + "x" * (number % 200) + "\\n")
"""

WRITE_LINES_IN_PARTS = """
import sys
rank, count, parts = map(int, sys.argv[1:])
with open(2, "w", buffering=65536, closefd=False) as stream:
    for number in range(count):
        if number % (count // parts) == 0:
            stream.flush()
            sys.stdin.buffer.read(1)
        stream.write(f"rank {rank} line {number} " + "x" * (number % 200) + "\\n")
"""


def _worker(rank: int, count: int, fd: int, out: int) -> subprocess.Popen[bytes]:
    where: dict[str, Any] = {"stdout": fd} if out == 1 else {"stderr": fd}
    return subprocess.Popen([sys.executable, "-c", WRITE_LINES, str(rank), str(count), str(out)], **where)


def _lines(rank: int, count: int) -> list[str]:
    return [f"rank {rank} line {number} " + "x" * (number % 200) for number in range(count)]


def _log(path: Path) -> int:
    fd = open_destination(LogFile(str(path)), -1)
    assert fd is not None
    return fd


@pytest.fixture
def never_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that is not scheduled on a busy machine looks like one that is stuck."""
    monkeypatch.setattr("dlrover_run.output.relay_client.STUCK_TIMEOUT", PATIENCE)


@pytest.fixture
def console(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Two files as standard output and standard error."""
    fds = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600) for name in ("out", "err")]
    yield fds[0], fds[1]
    for fd in fds:
        os.close(fd)


def piped() -> tuple[RelayClient, int]:
    """A relay whose console is a pipe, and the read end of that pipe."""
    reader, writer = os.pipe()
    relay = RelayClient((writer, writer))
    os.close(writer)
    return relay, reader


@pytest.fixture
def prepare_relay(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has relays execute lines of Python before their first line, since they are programs of their own."""
    program = relay_start.PROGRAM.partition("; from ")

    def prepare(source: str) -> None:
        code = f"exec({source!r})".replace("{", "{{").replace("}", "}}")
        monkeypatch.setattr(relay_start, "PROGRAM", f"{program[0]}; {code}; from {program[2]}")

    return prepare


def play(
    relay: RelayClient, scene: Callable[[], Coroutine[Any, Any, Answer]], warn: Callable[[str], None] = pytest.fail
) -> Answer:
    """Run a scene with the relay, and close the relay after it."""

    async def whole() -> Answer:
        relay.attach(warn)
        answer = await scene()
        await relay.close()
        return answer

    return asyncio.run(whole())


def _write(fd: int, data: bytes) -> None:
    """Write the last output of a worker."""
    os.write(fd, data)
    os.close(fd)


def _kill(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    _wait_for(pidfd)


async def _replaced(relay: RelayClient, pid: int) -> None:
    """Wait until another process is the relay."""

    async def look() -> None:
        while relay.pid == pid:
            await asyncio.sleep(0.01)

    await asyncio.wait_for(look(), PATIENCE)


def _wait_for(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(PATIENCE * 1000), "the process did not end"
    os.close(pidfd)


def _read_exactly(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += os.read(fd, count - len(data))
    return data


def _read_all(fd: int) -> bytes:
    data = bytearray()
    while chunk := os.read(fd, PIPE_BYTES):
        data += chunk
    return bytes(data)


def _beginning(shown: str, mark: str) -> list[str]:
    """The lines with that mark, without it."""
    return [line.removeprefix(mark) for line in shown.splitlines() if line.startswith(mark)]


def test_plain_stderr_is_copied_byte_for_byte_and_its_end_is_known(tmp_path: Path, console: tuple[int, int]) -> None:
    relay = RelayClient(console)
    count = 30_000

    async def scene() -> dict[str, str]:
        shown, hidden = relay.open_stderr("0", show=True), relay.open_stderr("1", show=False)
        workers = [_worker(0, count, shown, 2), _worker(1, 1000, hidden, 2)]
        os.close(shown)
        os.close(hidden)
        assert [worker.wait(PATIENCE) for worker in workers] == [0, 0]
        return await relay.end_round(["0", "1", "unknown"])

    tails = play(relay, scene)
    expected = "\n".join(_lines(0, count)) + "\n"
    assert (tmp_path / "err").read_text() == expected
    assert tails.keys() == {"0", "1"}
    assert expected.endswith(tails["0"])
    assert TAIL_BYTES - 300 < len(tails["0"]) <= TAIL_BYTES
    assert tails["0"].startswith("rank 0 line ")
    assert tails["1"].endswith(_lines(1, 1000)[-1] + "\n")


def test_prefixed_outputs_are_shown_line_by_line_and_remembered_without_prefix(
    tmp_path: Path, console: tuple[int, int]
) -> None:
    relay = RelayClient(console, shared=True)

    async def scene() -> None:
        stdout = relay.open_stdout("0", "[out 0]: ")
        stderr, hidden = (
            relay.open_stderr(key, show=show, prefix=f"[err {key}]: ") for key, show in (("0", True), ("1", False))
        )
        os.write(stdout, b"one\ntw")
        os.write(stderr, b"50%\r100%\r\nla")
        os.write(hidden, b"no one sees\r")
        await relay.drain()
        # An incomplete line is held back, because another worker's line may come before the rest of it.
        assert (tmp_path / "out").read_bytes() == b"[out 0]: one\n"
        assert (tmp_path / "err").read_bytes() == b"[err 0]: 50%\n[err 0]: 100%\n"
        os.write(stdout, b"o\n\nthree")
        # One worker closes its output; the other's is still open when the round ends.
        _write(stderr, b"st words")
        tails = await relay.end_round(["0", "1"])
        assert tails == {"0": "50%\r100%\r\nlast words", "1": "no one sees\r"}
        os.close(stdout)
        os.close(hidden)

    play(relay, scene)
    assert (tmp_path / "out").read_bytes() == b"[out 0]: one\n[out 0]: two\n[out 0]: \n[out 0]: three\n"
    assert (tmp_path / "err").read_bytes() == b"[err 0]: 50%\n[err 0]: 100%\n[err 0]: last words\n"


@pytest.mark.parametrize("prefix", [None, "> "])
def test_an_unfinished_line_of_an_idle_worker_is_shown(prefix: str | None) -> None:
    relay, reader = piped()
    begin = (prefix or "").encode()

    async def scene() -> None:
        one, other = (relay.open_stderr(key, show=True, prefix=prefix, whole_lines=True) for key in ("0", "1"))
        for fd, written, shown in (
            (one, b"loading ...", begin + b"loading ..."),
            # The next output of another worker starts a new line, and the missing newline is not shown a second time.
            (other, b"a line\n", b"\n" + begin + b"a line\n"),
            (one, b"\ndone\n", begin + b"done\n"),
            (one, b"saving ...", begin + b"saving ..."),
            (one, b" done\n", b" done\n"),
        ):
            os.write(fd, written)
            assert os.read(reader, 100) == shown
        os.close(one)
        os.close(other)

    play(relay, scene)
    os.close(reader)


def test_an_unfinished_prefixed_line_is_completed_as_soon_as_its_worker_has_exited() -> None:
    relay, reader = piped()

    async def scene() -> None:
        _write(relay.open_stderr("0", show=True, prefix="> "), b"the end")
        assert os.read(reader, 100) == b"> the end\n"

    play(relay, scene)
    os.close(reader)


def test_two_relays_that_share_a_slow_pipe_break_no_line_of_each_other() -> None:
    reader, writer = os.pipe()
    # As small as possible, so that there is hardly ever room for all waiting output.
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    relays = [RelayClient((writer, writer), shared=True) for _ in range(2)]
    os.close(writer)
    count = 5_000

    async def run() -> bytes:
        workers = []
        for rank, relay in enumerate(relays):
            relay.attach(pytest.fail)
            stderr = relay.open_stderr("0", show=True, prefix=f"[{rank}]: ")
            workers.append(_worker(rank, count, stderr, 2))
            os.close(stderr)
        reading = asyncio.get_running_loop().run_in_executor(None, _read_all, reader)
        # Their pipes hold less than their output, so they exit while others read.
        await asyncio.gather(*(asyncio.to_thread(worker.wait, PATIENCE) for worker in workers))
        for rank, relay in enumerate(relays):
            relay.write("".join(f"[{rank}]: more {number}\n" for number in range(count)))
        await asyncio.gather(*(relay.end_round() for relay in relays))
        await asyncio.gather(*(relay.close() for relay in relays))
        return await reading

    shown = asyncio.run(run()).decode()
    os.close(reader)
    for rank in (0, 1):
        assert _beginning(shown, f"[{rank}]: ") == [
            *_lines(rank, count),
            *(f"more {number}" for number in range(count)),
        ]
    assert shown.count("\n") == 4 * count


REFUSING = """
import os
from dlrover_run.output.relay import log_watcher
def refuse(result):
    raise OSError({number}, os.strerror({number}))
log_watcher._checked = refuse
"""


def _refusing(number: int) -> Callable[[int], int]:
    def refuse(result: int) -> int:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [0, errno.EMFILE, errno.ENOSPC, errno.ENOSYS])
def test_new_lines_are_shown_without_a_request(
    tmp_path: Path, prepare_relay: Callable[[str], None], number: int
) -> None:
    """The number is the error with which the kernel refuses to watch a file."""
    if number:
        prepare_relay(REFUSING.format(number=number))
    relay, reader = piped()
    warnings: list[str] = []

    async def scene() -> None:
        log = _log(tmp_path / "log")
        relay.add_tail(str(tmp_path / "log"), 1, "> ")
        for line in range(3):
            os.write(log, b"%d\n" % line)
            assert os.read(reader, 100) == b"> %d\n" % line
        os.close(log)
        await relay.end_round()

    play(relay, scene, warnings.append)
    os.close(reader)
    assert len(warnings) == bool(number)
    assert all(f"no inotify watch for log files ({os.strerror(number)})" in warning for warning in warnings)


def test_only_the_logs_that_were_refused_a_watch_are_read_at_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with select.epoll() as poller:
        warnings: list[str] = []
        watcher = LogWatcher(poller, warnings.append)
        logs = []
        for number in range(1, 4):
            path = str(tmp_path / f"{number}")
            log = LogSource(number, os.open(path, os.O_RDONLY | os.O_CREAT), path, None)
            log.grown = False
            logs.append(log)
            with monkeypatch.context() as now:
                if number == 2:
                    now.setattr("dlrover_run.output.relay.log_watcher._checked", _refusing(errno.ENOSPC))
                watcher.add(log)
        watcher.due = 0.0
        watcher.resume(logs)
        assert [log.grown for log in logs] == [False, True, False]
        assert watcher.due
        watcher.remove(logs[1], [])
        watcher.due = 0.0
        watcher.resume([logs[0], logs[2]])
        assert watcher.due is None
        assert len(warnings) == 1
        os.close(watcher.fd)
        for log in logs:
            log.finish()


REFUSING_READS = """
import errno, os
read, refusals = os.read, [errno.ESTALE, errno.EIO, errno.EIO]
def reads(fd, count):
    if refusals and os.readlink(f"/proc/self/fd/{fd}").endswith("/log"):
        raise OSError(refusals.pop(), "planted")
    return read(fd, count)
os.read = reads
"""


@pytest.mark.timeout(60)
def test_a_log_that_cannot_be_read_for_a_moment_is_read_again_although_nothing_is_added(
    tmp_path: Path, prepare_relay: Callable[[str], None]
) -> None:
    prepare_relay(REFUSING_READS)
    relay, reader = piped()

    async def scene() -> None:
        log = _log(tmp_path / "log")
        os.write(log, b"the last line before a hang\n")
        relay.add_tail(str(tmp_path / "log"), 1, "> ")
        assert os.read(reader, 100) == b"> the last line before a hang\n"
        os.close(log)
        await relay.end_round()

    play(relay, scene)
    os.close(reader)


def _truncate(log: Path) -> None:
    os.truncate(log, 0)


def _move(log: Path) -> None:
    log.rename(log.with_name("log.1"))


def _replace(log: Path) -> None:
    other = log.with_name("other")
    other.write_text("what another program has written\n")
    other.replace(log)


def _remove(log: Path) -> None:
    log.unlink()


def _remove_directory(log: Path) -> None:
    shutil.rmtree(log.parent)


@pytest.mark.parametrize("happens", [_truncate, _move, _replace, _remove, _remove_directory])
def test_a_log_is_followed_whatever_another_program_does_with_it(
    tmp_path: Path, happens: Callable[[Path], None]
) -> None:
    """The worker writes into the file that it has open, and that is shown."""
    path = tmp_path / "attempt" / "log"
    path.parent.mkdir()
    relay, reader = piped()

    async def scene() -> None:
        log = _log(path)
        relay.add_tail(str(path), 1, "> ")
        os.write(log, b"before\n")
        assert os.read(reader, 100) == b"> before\n"
        happens(path)
        for line in (b"1\n", b"2\n"):
            os.write(log, line)
            assert os.read(reader, 100) == b"> " + line
        os.close(log)
        await relay.end_round()

    play(relay, scene)
    os.close(reader)


@pytest.mark.usefixtures("never_stuck")
def test_a_blocked_console_blocks_neither_file_nor_client(tmp_path: Path) -> None:
    relay, reader = piped()
    count = 20_000

    async def scene() -> bytes:
        log = _log(tmp_path / "log")
        relay.add_tail(str(tmp_path / "log"), 1, "> ", [f"line {count - 1} "], str(tmp_path / "filtered"))
        stderr = relay.open_stderr("0", show=True)
        worker = _worker(0, count, log, 1)
        os.close(log)
        assert worker.wait(PATIENCE) == 0
        _write(stderr, b"last words\n")
        assert await relay.tails(["0", "1"]) == {"0": "last words\n"}
        assert await relay.end_round(["0"], timeout=NO_PATIENCE) == {"0": "last words\n"}
        assert (tmp_path / "filtered").read_text() == f"> {_lines(0, count)[-1]}\n"
        # The console is read again, and the relay continues without having lost anything.
        reading = asyncio.get_running_loop().run_in_executor(None, _read_all, reader)
        await relay.end_round(timeout=PATIENCE)
        await relay.close()
        return await reading

    shown = play(relay, scene).decode().splitlines()
    os.close(reader)
    assert (tmp_path / "log").read_bytes().count(b"\n") == count
    shown.remove("last words")
    assert shown == [f"> {line}" for line in _lines(0, count)]


def test_a_reader_that_closed_its_pipe_stops_neither_workers_nor_files(tmp_path: Path) -> None:
    relay, reader = piped()
    warnings: list[str] = []
    count = 20_000

    async def scene() -> dict[str, str]:
        log = _log(tmp_path / "log")
        relay.add_tail(str(tmp_path / "log"), 1, "> ", ["line 99 "], str(tmp_path / "filtered"))
        stderr = relay.open_stderr("1", show=True)
        os.close(reader)
        workers = [_worker(0, 100, log, 1), _worker(1, count, stderr, 2)]
        os.close(log)
        os.close(stderr)
        assert [worker.wait(PATIENCE) for worker in workers] == [0, 0]
        return await relay.end_round(["1"])

    tails = play(relay, scene, warnings.append)
    assert tails["1"].endswith(_lines(1, count)[-1] + "\n")
    assert (tmp_path / "filtered").read_text() == f"> {_lines(0, 100)[-1]}\n"
    assert len(warnings) == 1
    assert "takes no more output (Broken pipe)" in warnings[0]


def test_a_terminal_stays_a_terminal() -> None:
    master, slave = os.openpty()
    tty.setraw(slave)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 33, 77, 0, 0))
    relay = RelayClient((slave, slave))
    size = "import os, sys; s = os.get_terminal_size(2); sys.stderr.buffer.write(b'%d %d' % (s.lines, s.columns)); "
    worker = (
        size
        + "sys.stderr.buffer.write(b' %d' % os.isatty(2) + b' a\\nb\\r\\x04\\x03\\xff\\t.' + b'y' * 100000 + b'END')"
    )
    expected = b"33 77 1 a\nb\r\x04\x03\xff\t." + b"y" * 100_000 + b"END"

    async def scene() -> None:
        stderr = relay.open_stderr("0", show=True)
        child = subprocess.Popen([sys.executable, "-c", worker], stderr=stderr)
        assert _read_exactly(master, len(expected)) == expected
        assert child.wait(PATIENCE) == 0
        # The console's new size reaches the worker's terminal with the next bytes.
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 40, 90, 0, 0))
        os.write(stderr, b"!")
        assert os.read(master, 10) == b"!"
        await relay.drain()
        assert os.get_terminal_size(stderr) == (90, 40)
        os.close(stderr)
        assert (await relay.end_round(["0"]))["0"].endswith("yyyEND!")

    play(relay, scene)
    os.close(master)
    os.close(slave)


def test_lines_of_the_agent_come_after_those_of_the_workers_and_are_complete(console: tuple[int, int]) -> None:
    relay = RelayClient(console)
    words = "\ud800" + "wörter " * 20_000 + "end\n"

    async def scene() -> None:
        _write(relay.open_stderr("0", show=True), b"worker\n")
        await relay.drain()
        relay.write(words)
        await relay.drain(timeout=None)
        await relay.close()
        relay.write("late\n")

    play(relay, scene)
    shown = os.pread(console[1], 1 << 20, 0).decode()
    assert shown == "worker\n\\ud800" + words[1:] + "late\n"


def test_bytes_taken_before_a_drain_are_no_progress_and_a_stuck_console_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dlrover_run.output.relay_client.DRAIN_TIMEOUT", NO_PATIENCE)
    relay, reader = piped()
    timeouts: list[float | None] = []
    wait = asyncio.wait

    async def watched_wait(futures: Any, *, timeout: float | None = None) -> Any:
        timeouts.append(timeout)
        return await wait(futures, timeout=timeout)

    async def scene() -> None:
        await relay.drain()  # The relay runs.
        relay.write("x" * 1_000_000)
        await relay.drain(timeout=NO_PATIENCE)
        relay.stop_waiting()
        monkeypatch.setattr("asyncio.wait", watched_wait)
        await relay.drain(timeout=None)
        assert len(_read_exactly(reader, 1_000_000)) == 1_000_000
        await relay.drain(timeout=None)
        relay.write("y" * 1_000_000)
        await relay.drain(timeout=None)

    play(relay, scene)
    os.close(reader)
    assert timeouts[:3] == [STUCK_TIMEOUT, STUCK_TIMEOUT, NO_PATIENCE]


def test_messages_beyond_the_limit_of_a_file_reach_the_console() -> None:
    """The file of the launcher's messages grows with the job, and `ulimit -f` counts for files in memory."""
    reader, writer = os.pipe()
    relay = RelayClient((writer, writer))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def scene() -> None:
        relay.write("first\n")
        await relay.drain()
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
        try:
            relay.write("second\n")
            relay.write("3\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        await relay.drain()
        await relay.close()

    play(relay, scene)
    assert sorted(os.read(reader, 64).decode().splitlines()) == ["3", "first", "second"]
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("kind", ["as it is", "prefixed", "teed"])
def test_a_killed_relay_is_replaced_and_loses_what_it_had_read_at_most(
    tmp_path: Path, console: tuple[int, int], kind: str
) -> None:
    """It is killed repeatedly while it is busy."""
    relay = RelayClient(console)
    count, kills = 30_000, 2
    warnings: list[str] = []
    filtered = str(tmp_path / "filtered")

    def output(rank: int) -> int:
        if kind != "teed":
            return relay.open_stderr(str(rank), show=True, prefix=f"[{rank}]" if kind == "prefixed" else None)
        path = tmp_path / f"{rank}.log"
        fd = _log(path)
        relay.add_tail(str(path), 2, f"[{rank}]", [f"line {count - 1} "], filtered)
        return fd

    async def scene() -> None:
        children = []
        for rank in (0, 1):
            fd = output(rank)
            command = [sys.executable, "-c", WRITE_LINES_IN_PARTS, str(rank), str(count), str(kills + 1)]
            children.append(await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stderr=fd))
            os.close(fd)
        for number in range(kills + 1):
            # One part for each kill: a fast relay, or a slow test, still has work left at each of them.
            grown = os.fstat(console[1]).st_size
            for child in children:
                assert child.stdin is not None
                child.stdin.write(b".")
            if number == kills:
                break
            while os.fstat(console[1]).st_size <= grown + 100_000:
                await asyncio.sleep(0)
            pid = relay.pid
            _kill(pid)
            relay.write("the agent's own words\n")
            await _replaced(relay, pid)
        for child in children:
            assert await asyncio.wait_for(child.wait(), PATIENCE) == 0
        tails = await asyncio.wait_for(relay.end_round(["0", "1"], timeout=PATIENCE), PATIENCE)
        assert kind == "teed" or tails["1"].endswith(_lines(1, count)[-1] + "\n")

    play(relay, scene, warnings.append)
    assert ["was killed by SIGKILL" in text for text in warnings] == [True] * kills
    text = (tmp_path / "err").read_text()
    words = "the agent's own words\n"
    assert text.count(words) in (kills - 1, kills), "a message may be what the second one had read"
    # What a relay had read and not written is lost: of each of two sources one read, and the queue.
    limit = kills * (2 * READ_BYTES + QUEUE_LIMIT)
    expected = {rank: _lines(rank, count) for rank in (0, 1)}
    size = sum(len(line) + 1 for lines in expected.values() for line in lines)
    if kind == "as it is":
        assert size - limit <= len(text.replace(words, "")) <= size + kills
        return
    missing = 0
    for rank in (0, 1):
        shown = _beginning(text, f"[{rank}]")
        known = set(expected[rank])
        whole = [line for line in shown if line in known]
        assert len(shown) - len(whole) <= 2 * kills, "more lines are broken than relays were killed"
        left = iter(expected[rank])
        assert all(line in left for line in whole), "a line is shown twice, or not in its place"
        missing += sum(len(line) + 1 for line in known - set(whole))
    assert missing <= limit + 1000 * kills
    if kind == "teed":
        picked = Path(filtered).read_text().splitlines()
        assert sorted(picked) == [f"[{rank}]{_lines(rank, count)[-1]}" for rank in (0, 1)]


def test_a_terminal_works_after_the_relay_was_killed() -> None:
    master, slave = os.openpty()
    tty.setraw(slave)
    relay = RelayClient((slave, slave))

    async def scene() -> None:
        stderr = relay.open_stderr("0", show=True)
        assert os.isatty(stderr)
        os.write(stderr, b"before\n")
        await relay.drain()
        pid = relay.pid
        _kill(pid)
        os.write(stderr, b"between\n")
        await _replaced(relay, pid)
        os.write(stderr, b"after\n")
        assert await relay.end_round(["0"]) == {"0": "before\nbetween\nafter\n"}
        os.close(stderr)

    play(relay, scene, lambda text: None)
    expected = b"before\n\nbetween\nafter\n"
    assert _read_exactly(master, len(expected)) == expected
    os.close(slave)
    os.close(master)


@pytest.mark.parametrize("why", ["cannot be started", "dies at once"])
def test_without_a_relay_workers_continue_and_the_job_ends(
    tmp_path: Path, console: tuple[int, int], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr("dlrover_run.output.relay_process.REPLACE_PAUSE", 0.0)
    monkeypatch.setattr("dlrover_run.output.relay_process.MAX_FAILURES", 5)
    program = [sys.executable, "-c", "raise SystemExit(1)"] if why == "dies at once" else ["/nonexistent/relay"]
    relay = RelayClient(console)
    monkeypatch.setattr(relay_start, "_command", lambda: program)
    warnings: list[str] = []
    count = 20_000
    private = tmp_path / "private"
    private.mkdir()

    async def scene() -> None:
        relay.remove_at_end(str(private))
        stderr = relay.open_stderr("0", show=True)
        os.write(stderr, b"before\n")
        await relay.drain()
        _kill(relay.pid)
        # More than the pipe holds, so that it exits only if its output is read.
        command = [sys.executable, "-c", WRITE_LINES, "0", str(count), "2"]
        worker = await asyncio.create_subprocess_exec(*command, stderr=stderr)
        os.close(stderr)
        # The end of a job waits for its output without a timeout.
        await asyncio.wait_for(relay.drain(timeout=None), PATIENCE)
        assert await asyncio.wait_for(worker.wait(), PATIENCE) == 0
        tails = await asyncio.wait_for(relay.end_round(["0"], timeout=None), PATIENCE)
        assert tails["0"].endswith(_lines(0, count)[-1] + "\n")
        before = open_descriptors()
        late = relay.open_stderr("1", show=True)
        os.write(late, b"the worker of the next round\n")
        assert await relay.tails(["1"]) == {"1": "the worker of the next round\n"}
        os.close(late)
        assert await relay.end_round(["1"], timeout=None) == {"1": "the worker of the next round\n"}
        assert len(open_descriptors() - before) == 1, "the end of its output is kept"
        relay.write("the job has ended\n")

    play(relay, scene, warnings.append)
    assert (tmp_path / "err").read_text() == "before\nthe job has ended\n"
    assert ["output is not shown any more" in text for text in warnings] == [False] * (len(warnings) - 1) + [True]
    assert not private.exists()


def test_what_no_relay_has_read_for_a_stuck_console_is_shown_by_the_next_one(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    relay = RelayClient((writer, writer))
    text = b"".join(b"line %d\n" % number for number in range(100_000))

    async def scene() -> None:
        (tmp_path / "log").write_bytes(text)
        relay.add_tail(str(tmp_path / "log"), 1, "")
        assert await relay.end_round(timeout=NO_PATIENCE) == {}
        pid = relay.pid
        _kill(pid)
        await _replaced(relay, pid)
        shown = bytearray()
        while not shown.endswith(b"line 99999\n"):
            await asyncio.sleep(0)
            shown += await asyncio.to_thread(os.read, reader, PIPE_BYTES)
        assert len(text) - len(shown) <= READ_BYTES + QUEUE_LIMIT + 100, "with an unfinished line"
        await relay.drain()

    play(relay, scene, lambda text: None)
    os.close(writer)
    os.close(reader)


AGENT = """
import asyncio, os, sys
from dlrover_run.output.relay_client import RelayClient
relay = RelayClient()
async def main():
    relay.attach(print)
    stderr = relay.open_stderr("0", show=True)
    stdout = relay.open_stdout("0", "[0]: ")
    relay.add_tail(sys.argv[1], 1, "> ")
    relay.remove_at_end(sys.argv[2])
    await relay.drain()
    with open(sys.argv[1], "a") as log:
        log.write("line\\n" * 1000 + "partial")
    os.write(stderr, b"last words")
    os.write(stdout, b"all\\nbut")
    os.write(int(sys.argv[3]), b"%d\\n" % relay.pid)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_the_relay_drains_and_exits_when_the_agent_is_killed(tmp_path: Path) -> None:
    private = tmp_path / "private"
    (private / "attempt_0").mkdir(parents=True)
    reader, writer = os.pipe()
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        command = [sys.executable, "-c", AGENT, str(tmp_path / "log"), str(private), str(writer)]
        agent = subprocess.Popen(command, stdout=out, stderr=err, pass_fds=[writer])
    os.close(writer)
    with open(reader) as reader_pid:
        pid = int(reader_pid.readline())
        pidfd = os.pidfd_open(pid)
        with open(f"/proc/{pid}/comm") as name:
            assert name.read() == "dlrover-relay\n"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.kill(pid, number)
        assert not select.select([pidfd], [], [], 0)[0]
        agent.kill()
        assert agent.wait(PATIENCE) == -signal.SIGKILL
        # Only the test and the agent have this pipe open: the relay has closed what it did not need.
        assert reader_pid.read() == ""
    _wait_for(pidfd)
    shown = (tmp_path / "out").read_text().splitlines()
    assert [line for line in shown if line.startswith("> ")] == ["> line"] * 1000 + ["> partial"]
    assert [line for line in shown if not line.startswith("> ")] == ["[0]: all", "[0]: but"]
    assert (tmp_path / "err").read_text() == "last words"
    assert not private.exists()


def test_successive_rounds(tmp_path: Path, console: tuple[int, int]) -> None:
    relay = RelayClient(console)

    async def scene() -> list[int]:
        descriptors = []
        for number in range(4):
            log = _log(tmp_path / f"log{number}")
            relay.add_tail(str(tmp_path / f"log{number}"), 1, "> ", ["1"], str(tmp_path / f"filtered{number}"))
            stderr = relay.open_stderr("0", show=True)
            _write(log, b"round %d" % number)
            _write(stderr, b"error %d\n" % number)
            assert await relay.end_round(["0"]) == {"0": f"error {number}\n"}
            descriptors.append(len(os.listdir(f"/proc/{relay.pid}/fd")))
        return descriptors

    descriptors = play(relay, scene)
    assert (tmp_path / "out").read_text() == "".join(f"> round {number}\n" for number in range(4))
    assert (tmp_path / "err").read_text() == "".join(f"error {number}\n" for number in range(4))
    assert [(tmp_path / f"filtered{number}").read_text() for number in range(4)] == ["", "> round 1\n", "", ""]
    assert len(set(descriptors)) == 1


def test_a_log_that_another_program_truncates_or_moves_is_followed(tmp_path: Path, console: tuple[int, int]) -> None:
    """As logrotate does, with `copytruncate` and without: the worker appends to the file that it has open."""
    relay = RelayClient(console)
    log = tmp_path / "log"
    worker = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def scene() -> None:
        relay.add_tail(str(log), 1, "> ")
        os.write(worker, b"a line before\nan unfinished one")
        await relay.drain(timeout=30.0)
        os.truncate(log, 0)
        os.write(worker, b"after truncation\n")
        await relay.drain(timeout=30.0)
        log.rename(tmp_path / "log.1")
        log.touch()
        os.write(worker, b"after a move\n")
        await relay.end_round()

    play(relay, scene)
    os.close(worker)
    shown = (tmp_path / "out").read_text().splitlines()
    assert shown[0] == "> a line before"
    assert "an unfinished one" in shown[1]
    assert shown[-2].endswith("after truncation")
    assert shown[-1] == "> after a move"


def test_a_filtered_log_that_cannot_be_written_is_reported(tmp_path: Path, console: tuple[int, int]) -> None:
    relay = RelayClient(console)
    warnings: list[str] = []

    async def scene() -> None:
        (tmp_path / "log").write_text("needle\n")
        relay.add_tail(str(tmp_path / "log"), 1, "> ", ["needle"], str(tmp_path / "none" / "filtered"))
        await relay.end_round()

    play(relay, scene, warnings.append)
    assert (tmp_path / "out").read_text() == "> needle\n"
    assert warnings == ["the filtered log takes no more output (No such file or directory); the workers go on"]


@pytest.mark.usefixtures("never_stuck")
def test_a_worker_that_has_exited_is_removed_while_another_continues(tmp_path: Path, console: tuple[int, int]) -> None:
    relay = RelayClient(console)

    async def scene() -> None:
        before = open_descriptors()
        ended, goes_on = (relay.open_stderr(key, show=True, prefix=f"{key}: ") for key in ("a", "b"))
        log = _log(tmp_path / "a.log")
        relay.add_tail(str(tmp_path / "a.log"), 1, "a: ")
        _write(ended, b"last words")
        _write(log, b"logged")
        relay.release(["a"], [str(tmp_path / "a.log")])
        assert await relay.tails(["a", "b"]) == {"b": ""}
        _write(goes_on, b"still here\n")
        assert await relay.end_round(["b"]) == {"b": "still here\n"}
        assert len(open_descriptors() - before) == 2, "the end of each output is kept"

    play(relay, scene)
    assert (tmp_path / "err").read_text() == "a: last words\nb: still here\n"
    assert (tmp_path / "out").read_text() == "a: logged\n"


def test_a_relay_without_descriptors_says_so_and_its_successor_loses_no_line(console: tuple[int, int]) -> None:
    """The kernel drops a descriptor for which a process has no room, and passes the message on without it."""
    relay = RelayClient(console)
    warnings: list[str] = []

    async def scene() -> None:
        pid = relay.pid
        first = relay.open_stderr("0", show=True)
        _write(first, b"the first words\n")
        await asyncio.wait_for(relay.end_round(["0"], timeout=PATIENCE), PATIENCE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3))
        second = relay.open_stderr("1", show=True)
        await _replaced(relay, pid)
        _write(second, b"the last words\n")
        await asyncio.wait_for(relay.end_round(["1"], timeout=PATIENCE), PATIENCE)

    play(relay, scene, warnings.append)
    assert "[Errno 24] too many files are open to take the output of a worker" in warnings[0]
    assert ["ended with code 70" in text for text in warnings] == [False, True]
    shown = Path(f"/proc/self/fd/{console[1]}").read_text().split("\n")
    assert [line for line in shown if line] == ["the first words", "the last words"]
