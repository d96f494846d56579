"""`dlrover-run logs` of a job of two nodes in etcd: asked on a node, and from elsewhere by its endpoint."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from support.etcd_server import Etcd
from support.harness import OURS, Mailbox, finish, launch, run, start

BODY = """
import os
import signal
print(f"first of {os.environ['RANK']}", flush=True)
# A signal that comes before it is waited for is kept.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
post(rank=int(os.environ["RANK"]), pid=os.getpid())
signal.sigwait({signal.SIGUSR1})
print(f"last of {os.environ['RANK']}", flush=True)
signal.sigwait({signal.SIGUSR2})
"""


def test_the_output_of_each_worker_is_read_here_and_from_elsewhere(
    tmp_path: Path, mailbox: Mailbox, etcd: Etcd
) -> None:
    name = f"logs-etcd-{os.getpid()}"
    place = ["--rdzv-backend=etcd", f"--rdzv-endpoint={etcd.endpoints}", f"--rdzv-id={name}"]
    script = mailbox.script("talk.py", BODY)
    nodes = [
        launch(mailbox, "--nnodes=2", "--nproc-per-node=1", *place, script, stderr=subprocess.STDOUT) for _ in range(2)
    ]
    try:
        workers = mailbox.gather(2)
        for words in ([name], place):
            found = run(OURS, ["logs", *words], cwd=tmp_path)
            assert found.code == 0, found.err
            assert sorted(found.out.splitlines()) == ["[rank 0]: first of 0", "[rank 1]: first of 1"]
        following = start(OURS, ["logs", "-f", name, "--rank=1"], cwd=tmp_path)
        assert following.stdout is not None
        assert following.stdout.readline() == "first of 1\n"
        for worker in workers:
            os.kill(worker["pid"], signal.SIGUSR1)
        # The agent of another node waits only a while for the question of a reader after the end of its workers.
        assert following.stdout.readline() == "last of 1\n"
        for worker in workers:
            os.kill(worker["pid"], signal.SIGUSR2)
        assert [finish(node).code for node in nodes] == [0, 0]
        rest = finish(following)
        assert (rest.code, rest.out) == (0, ""), rest.err
    finally:
        for node in nodes:
            if node.poll() is None:
                node.terminate()
                finish(node)
