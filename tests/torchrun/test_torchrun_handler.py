"""The rendezvous as a plug-in of the real torchrun: separate rounds, and the loss of nodes and masters."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.harness import TORCHRUN, WAIT, Mailbox, environment, finish, launch

from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.round import Failure, RankAssignment, RoundKey
from dlrover_run.processes.tree import MASTER_NAME
from dlrover_run.spec import Entrypoint, JobSpec
from dlrover_run.torchrun.entry_point import handler_creator
from dlrover_run.torchrun.node_thread import NodeSnapshot, NodeThread

if importlib.util.find_spec("torch"):
    # Only then are the tests below run.
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousParameters,
    )

    from dlrover_run.torchrun import handler as handler_module
    from dlrover_run.torchrun.store import RoundStore, StoreFailure

pytestmark = pytest.mark.torchrun

# Trains until rank 0 gets SIGUSR2; rank 0 answers SIGUSR1 after its next step.
TRAIN = """
import os, signal, time
import torch, torch.distributed as dist

asked = set()
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: asked.add(number))
dist.init_process_group("gloo")
world = torch.ones(1)
dist.all_reduce(world)
secrets = [name for name, text in os.environ.items() if name.startswith("DLROVER_RDZV") or "s3cret" in text]
post(world=int(world.item()), port=os.environ["MASTER_PORT"], secrets=secrets)
while True:
    finish = torch.tensor(float(signal.SIGUSR2 in asked))
    dist.all_reduce(finish)
    if finish:
        break
    if signal.SIGUSR1 in asked:
        asked.remove(signal.SIGUSR1)
        post(stepped=True)
    time.sleep(0.02)  # The machine has other things to do than these steps.
dist.destroy_process_group()
"""

Report = dict[str, Any]
Torchrun = subprocess.Popen[str]


class Nodes:
    """Torchruns that rendezvous at one endpoint."""

    def __init__(self, mailbox: Mailbox, port: int) -> None:
        self.mailbox = mailbox
        self._port = port
        self._script = mailbox.script("train.py", TRAIN)
        self._started: list[Torchrun] = []

    def start(self, *args: str | Path, script: Path | None = None, **env: str | None) -> Torchrun:
        flags = ["--rdzv-backend=dlrover", f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=plug-in", *args]
        process = launch(self.mailbox, *flags, script or self._script, launcher=TORCHRUN, env=env)
        self._started.append(process)
        return process

    def round_of(self, size: int) -> list[Report]:
        """The reports of all ranks of a round of that size; those of other rounds are ignored."""
        rounds: dict[str, dict[int, Report]] = defaultdict(dict)
        while True:
            report = self.mailbox.receive()
            if report.get("world") == size:
                rounds[report["port"]][report["rank"]] = report
                if len(rounds[report["port"]]) == size:
                    return [rounds[report["port"]][rank] for rank in range(size)]

    def kill(self, torchrun: Torchrun) -> None:
        """Kill a torchrun and its workers at once, as when a machine is lost."""
        children = psutil.Process(torchrun.pid).children(recursive=True)
        workers = [child for child in children if child.name() != MASTER_NAME]
        torchrun.kill()
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        torchrun.communicate()

    def master(self) -> psutil.Process | None:
        """The master at the endpoint, if there is one."""
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == self._port:
                return psutil.Process(connection.pid)
        return None

    def end(self) -> None:
        """A master exits after its last node has left."""
        for torchrun in self._started:
            if torchrun.poll() is None:
                self.kill(torchrun)


def node_of(report: Report, torchruns: list[Torchrun]) -> tuple[Torchrun, Torchrun]:
    """Return, of two torchruns, the one whose worker has sent this, and the other one."""
    first, second = torchruns
    return (first, second) if psutil.Process(report["pid"]).ppid() == first.pid else (second, first)


@pytest.fixture
def nodes(mailbox: Mailbox, free_port: int) -> Iterator[Nodes]:
    """Torchruns, none of whose processes outlives the test."""
    nodes = Nodes(mailbox, free_port)
    yield nodes
    nodes.end()


def finish_training(ranks: list[Report], *torchruns: Torchrun) -> None:
    """Let the workers succeed, and all torchruns with them."""
    os.kill(ranks[0]["pid"], signal.SIGUSR2)
    for torchrun in torchruns:
        ended = finish(torchrun)
        assert ended.code == 0, ended.err


@pytest.mark.long
def test_a_round_after_a_failure_has_its_own_store(nodes: Nodes) -> None:
    flags = ["--nnodes=2", "--max-restarts=1"]
    torchruns = [nodes.start(*flags, DLROVER_RDZV_TOKEN="s3cret") for _ in range(2)]
    first = nodes.round_of(2)
    os.kill(first[1]["pid"], signal.SIGKILL)
    second = nodes.round_of(2)
    assert second[0]["port"] != first[0]["port"]
    assert [report["secrets"] for report in first + second] == [[]] * 4
    finish_training(second, *torchruns)


@pytest.mark.long
def test_a_node_that_dies_is_detected_and_a_new_one_is_admitted(nodes: Nodes) -> None:
    flags = ["--nnodes=1:2", "--max-restarts=3"]
    torchruns = [nodes.start(*flags) for _ in range(2)]
    both = nodes.round_of(2)
    lost, survivor = node_of(both[0], torchruns)
    # The node with rank 0 hosts the store, whose loss ends every job of c10d.
    nodes.kill(lost)
    nodes.round_of(1)
    newcomer = nodes.start(*flags)
    finish_training(nodes.round_of(2), survivor, newcomer)


@pytest.mark.long
def test_training_continues_without_the_master_and_a_later_failure_is_recovered(nodes: Nodes) -> None:
    flags = ["--nnodes=2", "--max-restarts=1"]
    torchruns = [nodes.start(*flags) for _ in range(2)]
    first = nodes.round_of(2)
    master = nodes.master()
    assert master is not None
    master.kill()
    psutil.wait_procs([master], WAIT)
    os.kill(first[0]["pid"], signal.SIGUSR1)
    assert nodes.mailbox.receive()["stepped"]
    os.kill(first[1]["pid"], signal.SIGKILL)
    second = nodes.round_of(2)
    assert second[0]["port"] != first[0]["port"]
    assert nodes.master() not in (None, master)
    finish_training(second, *torchruns)


@pytest.mark.long
def test_a_node_that_succeeded_does_not_wait_for_one_that_failed_permanently(nodes: Nodes) -> None:
    body = """
import os, signal
post()
if os.environ["RANK"] == "1":
    signal.pause()
"""
    script = nodes.mailbox.script("one_succeeds.py", body)
    torchruns = [nodes.start("--nnodes=2", script=script, LOGLEVEL="INFO") for _ in range(2)]
    reports = {report["rank"]: report for report in nodes.mailbox.gather(2)}
    failing, done = node_of(reports[1], torchruns)
    assert done.stderr is not None
    assert any("Waiting 300 seconds for other agents" in line for line in done.stderr)
    os.kill(reports[1]["pid"], signal.SIGKILL)
    assert finish(failing).code == 1
    # torchrun's own barrier would block it for 300 s, which is longer than this waits.
    assert finish(done).code == 0


@pytest.mark.long
def test_too_few_nodes_in_time_are_reported_in_a_sentence(nodes: Nodes) -> None:
    # Not join_timeout, within which a busy machine may not even have a master.
    flags = ["--nnodes=2", "--max-restarts=1", "--rdzv-conf=pend_timeout=0.5"]
    torchruns = [nodes.start(*flags) for _ in range(2)]
    both = nodes.round_of(2)
    survivor, lost = node_of(both[0], torchruns)
    nodes.kill(lost)
    ended = finish(survivor)
    assert ended.code == 1
    assert "RendezvousTimeoutError" in ended.err
    assert "after 0.5 s only 1 of at least 2 nodes is here" in ended.err


def test_a_wrong_setting_is_reported_before_anything_starts(nodes: Nodes) -> None:
    ended = finish(nodes.start("--nnodes=2", "--rdzv-conf=lost_after=soon"))
    assert ended.code == 1
    assert "--rdzv-conf lost_after 'soon' is not a number" in ended.err
    assert nodes.master() is None


def test_a_single_node_needs_no_rendezvous_and_no_master(mailbox: Mailbox) -> None:
    script = mailbox.script(
        "fail_once.py", "post()\nimport os\nos._exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    )
    ended = finish(launch(mailbox, "--rdzv-backend=dlrover", "--max-restarts=1", script, launcher=TORCHRUN))
    assert ended.code == 0, ended.err
    assert [report["restart"] for report in mailbox.pending()] == [0, 1]


@pytest.mark.long
def test_a_terminated_node_is_not_waited_for(nodes: Nodes) -> None:
    flags = ["--nnodes=1:2", "--max-restarts=1", "--rdzv-conf=lost_after=600"]
    torchruns = [nodes.start(*flags) for _ in range(2)]
    both = nodes.round_of(2)
    leaver, stays = node_of(both[1], torchruns)
    leaver.terminate()
    # If it were only lost, without a report that it leaves, the others would wait for it for ten minutes.
    alone = nodes.round_of(1)
    assert finish(leaver).code == 1
    finish_training(alone, stays)


def places(nodes: int) -> list[NodeThread]:
    """Nodes that all have ranks in one round, and no coordinator that could announce another one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    members = []
    for rank in range(nodes):
        ranks = RankAssignment(
            key=RoundKey(1, 1),
            restart_count=0,
            node_rank=rank,
            nodes=nodes,
            workers=1,
            first_rank=rank,
            world_size=nodes,
            role_first_rank=rank,
            role_world_size=nodes,
            store_address="127.0.0.1",
            store_port=port,
        )
        member = NodeThread(JobSpec(Entrypoint("program", "true"), "job"), print)
        member.view = NodeSnapshot(ranks=ranks)
        members.append(member)
    return members


def store_of(member: NodeThread) -> RoundStore:
    assert member.view.ranks is not None
    return RoundStore(member.view.ranks, member)


def test_nodes_continue_when_all_have_reached_the_store() -> None:
    with ThreadPoolExecutor() as pool:
        stores = [store_of(member) for member in places(3)]
        meetings = [pool.submit(store.wait_for_all, time.monotonic() + WAIT) for store in stores]
        assert [meeting.result(WAIT) for meeting in meetings] == [True] * 3


def test_no_node_continues_when_one_knows_of_another_round() -> None:
    host, turned, late = places(3)
    with ThreadPoolExecutor() as pool:
        stores = [store_of(member) for member in (host, turned, late)]
        patient = pool.submit(stores[0].wait_for_all, time.monotonic() + WAIT)
        turned.view = NodeSnapshot()
        assert not stores[1].wait_for_all(time.monotonic() + WAIT)
        assert not patient.result(WAIT)
        # All three have arrived by now, and still two of them do not continue.
        assert not stores[2].wait_for_all(time.monotonic() + WAIT)


def test_a_node_that_loses_the_store_requests_another_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have passed the store by then, and would wait for this node in the barrier of their workers."""

    def fail(*_: object) -> None:
        raise StoreFailure("the connection to the store was slow")

    member = places(2)[1]
    ranks = member.view.ranks
    assert ranks is not None
    reports: list[tuple[NodePhase, RoundKey, Failure | None]] = []

    def report(phase: NodePhase, key: RoundKey, failure: Failure | None = None) -> None:
        reports.append((phase, key, failure))
        member.view = NodeSnapshot(ranks=ranks, problem="the master is no part of this test")

    monkeypatch.setattr(handler_module, "NodeThread", lambda *_: member)
    monkeypatch.setattr(handler_module, "RoundStore", fail)
    monkeypatch.setattr(member, "join", lambda: None)
    monkeypatch.setattr(member, "report", report)
    handler = handler_module.DlroverRendezvous(RendezvousParameters("dlrover", "", "job", min_nodes=1, max_nodes=1))
    is_reported = pytest.raises(RendezvousConnectionError, match="no part of this test")
    with socket.create_server((ranks.store_address, ranks.store_port)), is_reported:
        handler.next_rendezvous()
    ((phase, key, failure),) = reports
    assert (phase, key) == (NodePhase.FAILED, ranks.key)
    assert failure is not None
    assert failure.lost_peer


def test_a_handler_gives_each_round_another_store_and_leaves_permanently() -> None:
    params = RendezvousParameters("dlrover", "", "job", min_nodes=1, max_nodes=1)
    handler = handler_creator()(params)
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == ("dlrover", "job", True)
    first = handler.next_rendezvous()
    assert (first.rank, first.world_size, handler.num_nodes_waiting()) == (0, 1, 0)
    first.store.set("key", "of the first round")
    second = handler.next_rendezvous()
    assert not second.store.check(["key"])
    assert second.bootstrap_store_info.master_port != first.bootstrap_store_info.master_port
    assert handler.num_nodes_waiting() == 0
    assert not handler.is_closed()
    assert handler.shutdown()
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError, match="has left"):
        handler.next_rendezvous()


IMPORTED = """
import sys
from importlib.metadata import entry_points
from torch.distributed.elastic.rendezvous.registry import _register_out_of_tree_handlers, handler_registry
before = set(sys.modules)
(entry,) = entry_points(group="torchrun.handlers", name="dlrover")
assert callable(entry.load()())
_register_out_of_tree_handlers()
assert "dlrover" in handler_registry._registry
ours = {name for name in set(sys.modules) | before if name.startswith("dlrover_run")}
assert ours == {"dlrover_run", "dlrover_run.torchrun", "dlrover_run.torchrun.entry_point"}, ours
assert not set(sys.modules) & {"grpc", "msgspec"}
"""


def test_an_import_of_torch_elastic_prints_nothing_and_loads_little() -> None:
    command = [sys.executable, "-X", "dev", "-c", IMPORTED]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=WAIT)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert "dlrover" not in ended.stderr
