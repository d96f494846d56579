"""A server whose machine is cut off without a word: the others go on with another one at another address."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from job import MakeJob, Node, both_ways, check_learned

from dlrover_run.local_cluster.network import Network, node_address

pytestmark = [pytest.mark.tensorflow, pytest.mark.long]

CHIEF, WORKER, CUT, SPARE = range(4)
"""The numbers of the machines."""


@both_ways
def test_a_server_that_is_cut_off_is_replaced_at_another_address(
    make_job: MakeJob, network: Network, undisturbed: Callable[[str], float], script: str, free_port: int
) -> None:
    usual = undisturbed(script)
    job = make_job(script)
    namespaces = [network.connect(number) for number in range(4)]

    def start(number: int, role: str) -> Node:
        place = ("--rdzv-backend=master", f"--rdzv-endpoint={node_address(CHIEF)}:{free_port}")
        conf = f"--rdzv-conf=is_host={int(number == CHIEF)},lost_after=1,keep_alive_interval=1"
        with namespaces[number].entered():
            return job.start(
                *(f"--role={role}", "--ps=1", "--workers=1", *place, conf, f"--local-addr={node_address(number)}"),
                name=f"{role} {number}",
                env={"NODE_ID": str(number)},
            )

    chief, worker, cut = start(CHIEF, "chief"), start(WORKER, "worker"), start(CUT, "ps")
    cut.up("ps-0")
    spare = start(SPARE, "ps")
    job.train(100)
    spare.hear("tf-ps-run: ")
    for other in (CHIEF, WORKER, SPARE):
        network.cut(CUT, other)
    job.allow(50)
    spare.up("ps-1")
    assert chief.servers("chief-0")[0].startswith(f"{node_address(CUT)}:")
    assert chief.servers("chief-1")[0].startswith(f"{node_address(SPARE)}:")
    check_learned(job.finish(chief, worker, spare), usual)
    cut.signal(signal.SIGTERM)
    assert cut.finish() == 128 + signal.SIGTERM
