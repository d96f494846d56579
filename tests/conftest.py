"""Fixtures for the tests of whole launches."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from check_nodes import checked, gate  # noqa: F401
from cluster import Cluster
from etcd_server import etcd, etcd_certificates, etcd_cluster  # noqa: F401
from harness import OURS, TORCHRUN, Launcher, Mailbox
from meeting_places import MeetingPlace, place, shared_etcd, shared_etcd_cluster  # noqa: F401

# These test what runs inside a worker with torch, and cannot even be imported without it (see `make test-other`).
collect_ignore = (
    []
    if importlib.util.find_spec("torch")
    else ["test_sampler.py", "test_checkpoint.py", "test_mnist_example.py", "test_cli_differential.py"]
)


@pytest.fixture(params=[TORCHRUN, OURS], ids=lambda launcher: launcher.name)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    """Each launcher in turn: a test that takes this holds the two to the same behaviour."""
    chosen: Launcher = request.param
    return chosen


@pytest.fixture
def mailbox(tmp_path: Path) -> Iterator[Mailbox]:
    """A mailbox for the workers of one test."""
    box = Mailbox(tmp_path)
    yield box
    box.close()


@pytest.fixture
def cluster(mailbox: Mailbox, place: MeetingPlace) -> Iterator[Cluster]:  # noqa: F811
    """Nodes that one test starts; whoever of them is left at its end makes it fail, and so does what is left of their
    job where they met."""
    nodes = Cluster(mailbox, place)
    yield nodes
    nodes.close()
    nodes.check_place()


@pytest.fixture
def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
