"""Why a master does not decide, on the consoles of nodes whose master runs elsewhere and has a log of its own."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.harness import Mailbox, finish, launch
from support.master_process import COMMAND, master

BODY = """
import os
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
post(rank=int(os.environ["RANK"]), restart=restart, pid=os.getpid())
if restart == 0:
    wait_for_signals()
"""

PLANTED = """
import os, sys
from dlrover_run.coordination import coordinator
from dlrover_run.master.command import main
decide, flag = coordinator.decide, sys.argv.pop(1)
def planted(*args):
    if os.path.exists(flag):
        raise ZeroDivisionError("planted")
    return decide(*args)
coordinator.decide = planted
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("fault", ["decision", "journal"])
def test_each_node_prints_once_why_nothing_is_decided(tmp_path: Path, mailbox: Mailbox, fault: str) -> None:
    flag, script = tmp_path / "fault", mailbox.script("restarts.py", BODY)
    program, expected = COMMAND, "the master cannot write "
    if fault == "decision":
        expected = "internal error in a decision: ZeroDivisionError('planted'); the plan stays as it is"
        program = (sys.executable, "-c", PLANTED, str(flag))
    nodes: list[subprocess.Popen[str]] = []
    with master("--state-dir", tmp_path / "state", program=program) as elsewhere:
        meeting = ("--nnodes=2", "--rdzv-backend=master", f"--rdzv-endpoint={elsewhere.address}", "--max-restarts=1")
        try:
            nodes += [launch(mailbox, *meeting, script) for _ in range(2)]
            first = mailbox.gather(2)
            if fault == "decision":
                flag.touch()
            else:
                _, hard = resource.prlimit(elsewhere.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            os.kill(first[0]["pid"], signal.SIGKILL)
            said = [read_until(node, expected) for node in nodes]
            if fault == "decision":
                flag.unlink()
            else:
                resource.prlimit(elsewhere.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
            assert [worker["restart"] for worker in mailbox.gather(2)] == [1, 1]
            for node, before in zip(nodes, said, strict=True):
                ended = finish(node)
                assert ended.code == 0, ended.err
                assert (before + ended.err).count(expected) == 1
        finally:
            for node in nodes:
                if node.poll() is None:
                    node.kill()
                    finish(node)


def read_until(node: subprocess.Popen[str], text: str) -> str:
    """What a launcher prints up to a line with that text."""
    assert node.stderr is not None
    lines = []
    while not lines or text not in lines[-1]:
        lines.append(node.stderr.readline())
        assert lines[-1], "".join(lines)
    return "".join(lines)
