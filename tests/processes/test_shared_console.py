"""A node that shares its console with others: each line is marked, and no line is redrawn."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from msgspec.structs import replace
from support.harness import WAIT, Finished, Mailbox, environment, finish
from support.virtual_loop import run_virtually
from test_console import ALTERNATE, IN_ORDER, read_until, script, terminal

from dlrover_run.console.console import REFRESH_SECONDS, REPEAT_SECONDS, Console
from dlrover_run.console.text import prefix_with_node
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.spec import Entrypoint, JobSpec, LogSpec, Std, StreamMap

RUN = """
import sys, msgspec
from dlrover_run.launcher_process import run_launcher
from dlrover_run.features.registry import decode_part
from dlrover_run.spec import JobSpec
sys.exit(run_launcher(msgspec.json.decode(sys.argv[1], type=JobSpec, dec_hook=decode_part)).code)
"""

LOGS = LogSpec(prefixed=True, prefix_template="[node 1 rank ${rank}]: ")


def node(target: str, workers: int = 1, logs: LogSpec = LOGS, **more: Any) -> JobSpec:
    """The configuration of one of several nodes on a machine, without restarts."""
    return JobSpec(
        entrypoint=Entrypoint("script", target, python=sys.executable),
        run_id="shared",
        workers_per_node=workers,
        rules=JobRules(max_restarts=0),
        logs=logs,
        console_name="node 1",
        **more,
    )


def start(spec: JobSpec, directory: Path, **popen: Any) -> subprocess.Popen[str]:
    """Run a launch from Python in the background, with pipes for its output."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen}
    return subprocess.Popen(
        [sys.executable, "-c", RUN, msgspec.json.encode(spec).decode()],
        cwd=directory,
        env=environment({"TMPDIR": str(directory), "TERM": "xterm", **options.pop("env", {})}),
        stdin=subprocess.DEVNULL,
        text=True,
        **options,
    )


def run(spec: JobSpec, directory: Path, **popen: Any) -> Finished:
    return finish(start(spec, directory, **popen))


def of_workers(text: str) -> list[str]:
    """The lines that workers wrote; all others must be those of the launcher, with the name of the node."""
    lines = text.splitlines()
    own = [line for line in lines if not re.match(r"\[node 1 rank \d+\]: ", line)]
    assert all(line.startswith("[node 1] ") for line in own), text
    return [line for line in lines if line not in own]


WORKER = """
import os, sys
rank = int(os.environ["RANK"])
os.write(1, b"out %d\\n\\n50%%\\r100%%\\r\\nunfinished out" % rank)
os.write(2, b"err %d\\nunfinished err" % rank)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_every_line_of_each_worker_has_its_prefix_on_its_own_descriptor(tmp_path: Path, method: Any) -> None:
    ended = run(node(script(tmp_path, WORKER), 2, start_method=method), tmp_path)
    assert ended.code == 0, ended.err
    words = ["out {}", "", "50%", "100%", "unfinished out"]
    for rank in (0, 1):
        prefix = f"[node 1 rank {rank}]: "
        assert [line for line in of_workers(ended.out) if line.startswith(prefix)] == [
            prefix + word.format(rank) for word in words
        ]
    assert len(ended.out.splitlines()) == 2 * len(words)
    assert sorted(of_workers(ended.err)) == [
        f"[node 1 rank {rank}]: {word}" for rank in (0, 1) for word in (f"err {rank}", "unfinished err")
    ]


@pytest.mark.parametrize("log_dir", ["/dev/null", "logs"])
def test_a_log_file_keeps_what_the_worker_wrote(tmp_path: Path, log_dir: str) -> None:
    """Standard output goes to a file and is shown, unless no file may be written; standard error is only shown."""
    logs = replace(LOGS, log_dir=str(tmp_path / log_dir), tee=StreamMap(Std.OUT))
    source = "import os\nos.write(1, b'out\\nend')\nos.write(2, b'err\\nend')\n"
    ended = run(node(script(tmp_path, source), logs=logs), tmp_path)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["[node 1 rank 0]: out", "[node 1 rank 0]: end"]
    assert of_workers(ended.err) == ["[node 1 rank 0]: err", "[node 1 rank 0]: end"]
    written = [path.read_bytes() for path in tmp_path.rglob("*.log")]
    assert written == ([] if log_dir == "/dev/null" else [b"out\nend"])


def test_the_report_quotes_the_output_of_the_worker_after_the_name_of_the_node(tmp_path: Path) -> None:
    source = "import os\ndef inner():\n    raise KeyError('the key')\nif os.environ['RANK'] == '1':\n    inner()\n"
    ended = run(node(script(tmp_path, source), 2), tmp_path)
    assert ended.code == 1
    assert "[node 1 rank 1]: KeyError: 'the key'" in of_workers(ended.err)
    report = [line.removeprefix("[node 1] ") for line in ended.err.splitlines() if line.startswith("[node 1] ")]
    assert "The launcher exits with code 1." in report
    assert any(re.match(r" +KeyError: 'the key'", line) for line in report)
    assert not any("[node 1" in line for line in report)
    assert "=" * (80 - len("[node 1] ")) in report  # The rest of 80 columns after the name.


def test_on_a_terminal_lines_are_prefixed_and_no_worker_can_move_its_cursor(tmp_path: Path) -> None:
    source = (
        "import os, sys\nprint('terminals:', [os.isatty(n) for n in (0, 1, 2)])\n" + ALTERNATE + "raise SystemExit(3)"
    )
    with terminal() as (master, slave):
        process = start(node(script(tmp_path, source)), tmp_path, stdout=slave, stderr=slave)
        seen = read_until(master, r"exits with code 3\.\n.*\n")
        assert process.wait(WAIT) == 3
    # Colors move no cursor.
    assert "\x1b" not in re.sub(r"\x1b\[[\d;]*m", "", seen)
    prefix = "[node 1 rank 0]: "
    workers = [line.removeprefix(prefix) for line in of_workers(seen)]
    # A program that redraws would overwrite the lines of other nodes.
    assert workers == ["terminals: [False, False, False]", *IN_ORDER]


def test_a_line_without_an_agent_has_the_name_too(mailbox: Mailbox) -> None:
    (mailbox.directory / "file").write_text("")
    unusable = replace(LOGS, log_dir=str(mailbox.directory / "file"))
    ended = run(node("unimportant.py", logs=unusable), mailbox.directory)
    assert ended.code == 2
    assert re.fullmatch(r"\[node 1\] dlrover-run: --log-dir: .* is not a directory.*\n", ended.err)
    worker = mailbox.script("hold.py", "import signal\npost()\nsignal.pause()\n")
    process = start(node(str(worker)), mailbox.directory, env={"TEST_MAILBOX": mailbox.name})
    mailbox.receive()
    descendants = psutil.Process(process.pid).children(recursive=True)
    next(each for each in descendants if each.name() == "dlrover-agent").kill()
    ended = finish(process)
    assert ended.code == -signal.SIGKILL or ended.code == 128 + signal.SIGKILL
    assert " dlrover-run: the launcher's agent was killed by SIGKILL" in ended.err
    assert all(line.startswith("[node 1") for line in ended.err.splitlines())


def lines_of(name: str, play: Any) -> list[str]:
    """The output of a console to a terminal, in virtual time."""
    written: list[str] = []

    async def speak() -> None:
        await play(Console(written.append, lambda: 120, name=name))

    run_virtually(speak())
    return written


def test_a_console_with_a_node_name_redraws_nothing() -> None:
    async def play(console: Console) -> None:
        assert console.columns is None
        console.show_waiting("for b", 30, lambda columns, lines: ["a table"])
        await asyncio.sleep(2.5 * REFRESH_SECONDS)
        console.info("hello")
        console.show_waiting("for c", None)
        await asyncio.sleep(2 * REPEAT_SECONDS)
        console.clear_waiting()
        console.print("three\n\nlines")

    assert lines_of("node 1", play) == [
        "[node 1] dlrover-run: waiting: for b; at most 29 s more\n",
        "[node 1] dlrover-run: hello\n",
        "[node 1] dlrover-run: waiting: for c\n",
        "[node 1] three\n[node 1] \n[node 1] lines\n",
    ]


def test_the_mark_precedes_each_line_and_takes_its_columns() -> None:
    async def play(console: Console) -> None:
        assert console.columns == console.width == 120

    lines_of("", play)
    assert prefix_with_node("a\n b", "") == "a\n b"
    assert prefix_with_node("a\n b", "node 10") == "[node 10] a\n[node 10]  b"
    assert Console(print, lambda: 120, name="node 1").width == 80 - len("[node 1] ")
