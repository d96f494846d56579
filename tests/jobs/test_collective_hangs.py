"""Workers that hang are asked through NCCL where they are in their collectives; workers that train never are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.harness import Mailbox, finish, launch

from dlrover_run.events.reader import merged, read_logs
from dlrover_run.events.records import CollectivesRead, WorkerStalled

TESTS = Path(__file__).resolve().parents[1]

# Each process answers for both, as with NCCL; those of one node do at the same address.
SCRIPT = """
import os, pickle, socket, threading, time

sys.path.append(sys.argv[2])
from dlrover_run import training
from support.nccl_ras import Communicator, RasAnswers, RasJob, RasRank

rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
here = os.path.dirname(os.path.abspath(__file__))

def note(steps):
    with open(os.path.join(here, f"steps-{restart}-{rank}.new"), "w") as file:
        file.write(f"{os.getpid()} {steps}")
    os.replace(file.name, file.name.removesuffix(".new"))

def known(rank):
    try:
        with open(os.path.join(here, f"steps-{restart}-{rank}")) as file:
            return RasRank(rank, *[int(word) for word in file.read().split()])
    except FileNotFoundError:
        return None

def job():
    ranks = [one for one in map(known, range(2)) if one is not None]
    ranks = [RasRank(one.rank, one.pid, {"AllReduce": one.counts}) for one in ranks]
    return RasJob([Communicator(7, ranks)])

def serve():
    host, _, port = os.environ["NCCL_RAS_ADDR"].rpartition(":")
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind((host, int(port)))
        server.listen()
        while True:
            client, _ = server.accept()
            RasAnswers(job).converse(client)

def dump():
    # As torch does: a pipe for each process, and a file when a byte comes.
    pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + f"{rank}.pipe"
    if os.path.exists(pipe):
        os.unlink(pipe)
    os.mkfifo(pipe)
    group = {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}
    while True:
        with open(pipe, "rb") as file:
            file.read(1)
        steps = known(rank).counts
        entry = {"collective_seq_id": steps, "pg_id": 0, "process_group": ("0", "default_pg"), "state": "scheduled",
                 "profiling_name": "nccl:all_reduce", "input_sizes": [[1024, 4]], "input_dtypes": ["Float"]}
        status = {"0": {"last_enqueued_collective": steps, "last_completed_collective": 40}}
        found = {"version": "2.10", "pg_config": {"0": group}, "pg_status": status, "entries": [entry]}
        with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(rank), "wb") as file:
            pickle.dump(found, file, protocol=2)

if "TORCH_FR_DUMP_TEMP_FILE" in os.environ:
    threading.Thread(target=dump, daemon=True).start()
threading.Thread(target=serve, daemon=True).start()
for step in range(60):
    note(step)
    training.report(samples=1)
    time.sleep(0.05)
    if sys.argv[1] == "hang" and step == 40 and restart == 0:
        if rank == 0:
            note(step + 1)
        held = threading.Lock()
        held.acquire()
        held.acquire()
post(done=True)
"""


def _run(mailbox: Mailbox, how: str, *more: str) -> tuple[list[CollectivesRead], list[WorkerStalled]]:
    script = mailbox.script("asked.py", SCRIPT)
    journal = mailbox.directory / "journal"
    flags = ["--nproc-per-node=2", "--max-restarts=1", f"--journal={journal}", "--stall-timeout=3", *more]
    ended = finish(launch(mailbox, *flags, "--stall-action=restart", script, how, str(TESTS)))
    assert ended.code == 0, ended.err
    events = [entry.event for entry in merged(read_logs(journal))]
    return (
        [event for event in events if isinstance(event, CollectivesRead)],
        [event for event in events if isinstance(event, WorkerStalled)],
    )


@pytest.mark.torchrun
def test_workers_that_train_are_never_asked(mailbox: Mailbox) -> None:
    assert _run(mailbox, "train") == ([], [])


@pytest.mark.torchrun
def test_workers_that_hang_are_asked_and_what_they_say_is_kept(mailbox: Mailbox) -> None:
    logs = mailbox.directory / "logs"
    asked, stalls = _run(mailbox, "hang", f"--log-dir={logs}")
    assert stalls
    assert not any(one.problem for one in asked)
    assert {(one.source, one.workers) for one in asked} == {("ras", 2), ("flight_recorder", 2)}
    entered = {one.rank: {each["source"]: each["entered"] for each in one.collectives} for one in stalls}
    assert entered == {0: {"ras": 41, "flight_recorder": 41}, 1: {"ras": 40, "flight_recorder": 40}}
    shown = (logs / "latest" / "stacks.txt").read_text()
    assert "rank 0: waits in all_reduce 41 of the default group (16 KiB): entered 41, ended 40\n" in shown
    (kept,) = (logs / "latest" / "hangs").iterdir()
    assert kept.name.startswith("round-")
    assert kept.name.endswith("-incident-1")
    report = json.loads((kept / "nccl-ras.json").read_text())
    assert [one["collective_counts"]["AllReduce"] for one in report["communicators"][0]["ranks"]] == [41, 40]
    for rank, number in enumerate((41, 40)):
        dump = json.loads((kept / f"flight-recorder-rank-{rank}.json").read_text())
        assert dump["entries"][0]["collective_seq_id"] == number


@pytest.mark.torchrun
@pytest.mark.long
def test_each_node_asks_its_own_workers_and_all_name_the_operation(mailbox: Mailbox) -> None:
    script = mailbox.script("asked.py", SCRIPT)
    journal = mailbox.directory / "journal"
    flags = ["--local-nodes=2", "--nproc-per-node=1", "--max-restarts=1", f"--journal={journal}", "--stall-timeout=3"]
    ended = finish(launch(mailbox, *flags, "--stall-action=restart", script, "hang", str(TESTS)))
    assert ended.code == 0, ended.err
    assert ended.err.count("never entered all_reduce 41 of the default group, in which 1 rank waits") >= 2
    asked = [event for entry in merged(read_logs(journal)) if isinstance(event := entry.event, CollectivesRead)]
    assert {(one.source, one.workers) for one in asked} == {("ras", 1)}
