"""The machines of the tests find each other by name, and are gone with the test, however it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness import WAIT, still_alive, watched
from machines import machines

from dlrover_run.local_cluster.network import why_not

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(why := why_not()), reason=f"no networks for nodes: {why}"),
]

TEST = """
import pathlib, sys
from machines import machines
with machines(["n1", "n2"], pathlib.Path(sys.argv[1])) as made:
    processes = [made[name].start(["sleep", "infinity"], pathlib.Path("/")) for name in ("n1", "n2")]
    while len(made["n2"].processes()) < 2:
        pass
    print(*(process.pid for name in ("n1", "n2") for process in made[name].processes()), flush=True)
    sys.stdin.read()
"""


def test_machines_find_each_other_by_name(tmp_path: Path) -> None:
    with machines(["n1", "n2"], tmp_path, "example.org") as made:
        for name in ("n2", "n2.example.org"):
            asked = made["n1"].start(["getent", "hosts", name], tmp_path, stdout=subprocess.PIPE)
            assert asked.communicate(timeout=WAIT)[0].split()[0] == made["n2"].address
        named = made["n1"].start(["hostname"], tmp_path, stdout=subprocess.PIPE)
        assert named.communicate(timeout=WAIT)[0] == "n1\n"


def test_a_machine_that_loses_its_power_takes_its_processes_with_it(tmp_path: Path) -> None:
    with machines(["n1", "n2"], tmp_path) as made:
        lost, other = (made[name].start(["sleep", "infinity"], tmp_path) for name in ("n1", "n2"))
        made["n1"].lose_power()
        assert lost.wait(WAIT) != 0
        assert other.poll() is None
    assert other.wait(WAIT) != 0


def test_a_test_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{TEST}", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout is not None
        pids = [int(word) for word in test.stdout.readline().split()]
        assert len(pids) >= 2
        with watched(*pids) as pidfds:
            test.kill()
            assert still_alive(pidfds, WAIT) == 0
