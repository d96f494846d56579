"""A real job whose nodes come from a command of the user, over a master and in etcd."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.cluster import SOON, Cluster
from support.harness import WAIT, until
from support.rendezvous_backends import EVERYWHERE
from test_autoscale_job import SCRIPT, SEARCH_TIMEOUT

pytestmark = [EVERYWHERE, pytest.mark.long]

TOKEN = "0123456789abcdef-of-the-job"

CONF = {
    **SOON,
    "autoscale_block": 0.8,
    "autoscale_warm_up": 0.5,
    "autoscale_tolerance": 0.1,
    "autoscale_node_timeout": 1,
}

RESIZE = """
import os, pathlib, sys
held = [name for name, value in os.environ.items() if sys.argv[2] in value]
pathlib.Path(sys.argv[1]).open("a").write(f"{os.environ['DLROVER_WANTED_NODES']} {sys.argv[3]} {held}\\n")
"""


def wait_for(cluster: Cluster, log: Path, lines: int) -> list[str]:
    """The lines of the command, once there are that many."""

    def find() -> list[str] | None:
        found = log.read_text().splitlines() if log.exists() else []
        return found if len(found) >= lines else None

    return until(find, lambda: f"the command did not run{cluster.outputs()}", SEARCH_TIMEOUT)


def test_a_node_that_is_requested_comes_and_one_that_does_not_pay_is_given_back(cluster: Cluster) -> None:
    script, resize, log, end = (cluster.directory / name for name in ("train.py", "resize.py", "log", "end"))
    script.write_text(SCRIPT)
    resize.write_text(RESIZE)
    command = f"{sys.executable} {resize} {log} {TOKEN} {{nodes}}"
    options: dict[str, Any] = {
        "script": script,
        "args": ["50,55", str(end)],
        "conf": CONF,
        "env": {"DLROVER_RDZV_TOKEN": TOKEN},
    }
    flags = ("--autoscale", f"--scale-command={command}")
    first = cluster.node("a", "1:2", *flags, **options)
    assert wait_for(cluster, log, 1) == ["2 2 []"]
    first.until_prints("--scale-command has requested 2 nodes")
    second = cluster.node("b", "1:2", *flags, **options)
    # The second one makes 10 % more, so it is given back.
    assert wait_for(cluster, log, 2)[1:] == ["1 1 []"]
    end.touch()
    assert first.finish(WAIT) == 0
    assert second.finish(WAIT) == 0
    assert log.read_text().splitlines() == ["2 2 []", "1 1 []"]
