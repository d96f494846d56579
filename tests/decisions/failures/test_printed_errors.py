"""An error is recognised however a program prints it: the recorded output of Python, logging, rich, typer, loguru and
structlog (see `printed_errors/record.py`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.harness import OURS, only_long, run

from dlrover_run.failures.causes import (
    describe_exit,
    is_unexplained,
    lost_peer,
    raised_own_error,
    root_cause,
    summarize_error,
)
from dlrover_run.failures.tracebacks import exception_lines, last_failure
from dlrover_run.failures.worker_exit import WorkerExit

RECORDED = Path(__file__).parent / "printed_errors"
NAMES = sorted(path.stem.removeprefix("own-") for path in RECORDED.glob("own-*.txt"))
PAIR = "/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc"
GLOO = f"RuntimeError: [{PAIR}:534] Connection closed by peer [127.0.0.1]:29417"
RESET = "ConnectionResetError: [Errno 104] Connection reset by peer"


def end(rank: int, tail: str, after: float = 0.0, code: int = 1) -> WorkerExit:
    return WorkerExit(rank=rank, local_rank=rank, pid=rank, code=code, unix_time=1e9 + after, stderr_tail=tail)


def recorded(kind: str, name: str) -> str:
    return (RECORDED / f"{kind}-{name}.txt").read_text()


def plain(raised: str) -> str:
    return f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    load()\n{raised}\n'


@pytest.mark.parametrize("prefix", ["", "[rank1]: "], ids=["", "rank"])
@pytest.mark.parametrize("name", NAMES)
def test_an_own_error_and_a_lost_peer_are_told_apart(name: str, prefix: str) -> None:
    own, peer = (
        "step 1\n" + "".join(prefix + line for line in recorded(kind, name).splitlines(keepends=True))
        for kind in ("own", "peer")
    )
    group = "ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions): " if name == "group" else ""
    assert exception_lines(own) == [f"{group}ValueError: bad label 11 in shard-0017"]
    assert exception_lines(peer) == [f"{group}{GLOO}"]
    assert raised_own_error(own)
    assert not raised_own_error(peer)
    assert len(last_failure(own)) >= 5
    culprit, victim = end(1, own, after=1.0), end(0, peer)
    assert (lost_peer(culprit), lost_peer(victim)) == (False, True)
    assert root_cause([victim, culprit]) is culprit
    assert "ValueError: bad label 11" in describe_exit(culprit)


@pytest.mark.parametrize("kind", ["SyntaxError", "IndentationError"])
def test_a_script_that_does_not_compile(kind: str) -> None:
    text = f"warning: slow\n  File \"train.py\", line 3\n    return (1\n           ^\n{kind}: '(' was never closed\n"
    assert exception_lines(text) == [f"{kind}: '(' was never closed"]
    assert last_failure(text) == text.splitlines()[1:]
    imported = plain("").rstrip("\n") + "\n" + text.split("\n", 1)[1]
    assert len(last_failure(imported)) == 7
    assert exception_lines(imported) == [f"{kind}: '(' was never closed"]


@pytest.mark.parametrize(
    "own",
    [
        plain(RESET),
        plain("redis.exceptions.ConnectionError: Error at db:6379 (104, 'Connection reset by peer')"),
        plain("botocore.exceptions.HTTPClientError: An HTTP client raised: ('Connection aborted.', Remote())"),
        plain("ProtocolError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))"),
        plain("OSError: Connection closed by peer"),
        plain("BrokenPipeError: [Errno 32] Broken pipe"),
    ],
)
def test_a_connection_of_the_script_is_no_peer(own: str) -> None:
    culprit, victim = end(1, own, after=1.0), end(0, plain(GLOO))
    assert not lost_peer(culprit)
    assert root_cause([victim, culprit]) is culprit


@pytest.mark.parametrize(
    "raised",
    [
        GLOO,
        f"RuntimeError: [enforce fail at {PAIR}:545] Read error [10.0.0.2]:3: Connection reset by peer",
        "torch.distributed.DistNetworkError: Connection reset by peer",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "RuntimeError: Connection reset by peer",
        "torch.distributed.DistBackendError: [1] is setting up NCCL communicator: failed to recv, got 0 bytes. "
        "Connection was likely closed. Did the remote server shutdown or crash?",
    ],
)
def test_what_torch_says_of_a_peer(raised: str) -> None:
    assert lost_peer(end(0, plain(raised)))


def test_a_text_that_is_not_recognised_is_no_evidence() -> None:
    """Neither for nor against a worker: what else is known decides."""
    unknown, gloo = end(0, "E> fit() gave up\n"), end(0, f"E> fit() gave up: {GLOO}\nE> bye\n")
    own = end(1, plain("ValueError: bad label 11"), after=1.0)
    assert (is_unexplained(unknown), lost_peer(unknown), lost_peer(gloo)) == (True, False, True)
    assert root_cause([unknown, own]) is own
    assert root_cause([gloo, own]) is own
    # It is the best candidate beside a worker that has lost a peer.
    assert root_cause([end(1, plain(GLOO), after=-1.0), unknown]) is unknown
    assert root_cause([unknown, end(1, "E> also\n", after=1.0)]) is unknown
    # A signal, another code, or no text at all is no doubtful text.
    for certain in (end(0, "E> x\n", code=-9), end(0, "E> x\n", code=3), end(0, "")):
        assert not is_unexplained(certain)
        assert root_cause([certain, own]) is certain


def test_a_message_is_bounded_and_a_broken_record_is_a_line() -> None:
    deep = '{"exception": ' * 3000 + "}" * 3000
    for text in (deep, '{"exception": [{"exc_type": 1, "frames": {}}]}', "{}", '{"exception": "x"}', "+--- Traceback"):
        assert exception_lines(f"{text}\n") in ([], ["1: None"])
    assert summarize_error(end(0, plain("ValueError: " + "x" * 5000))) is not None


TRAIN = """
import os, signal, sys
from pathlib import Path
kind = "own" if os.environ["RANK"] == "1" else "peer"
text = Path(sys.argv[1], f"{kind}-{sys.argv[2]}.txt").read_text()
if kind == "peer":
    open("turn").close()
    sys.stderr.write(text)
    sys.exit(1)
sys.stderr.write(text)
sys.stderr.flush()
# The victim dies first: this rank takes its time to exit, as a logger that sends its last lines.
open("turn", "w").close()
signal.pause()
"""


@pytest.mark.parametrize("name", ["rich", *only_long("structlog-json", "group")])
def test_the_culprit_is_named_though_the_victim_dies_first(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    os.mkfifo(tmp_path / "turn")
    done = run(OURS, ("--nproc-per-node=2", "train.py", RECORDED, name), cwd=tmp_path)
    report = done.err.partition("Root Cause")[2].splitlines()
    assert "rank 1 raised" in report[1], done.err
    assert "ValueError: bad label 11" in " ".join(report[1:4]), done.err
