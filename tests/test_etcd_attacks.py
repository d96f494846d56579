"""What a person, an administrator or a stranger may do to a job in etcd, and what is seen of it. Real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from etcd_server import Etcd, serving
from meeting_places import InEtcd


@pytest.fixture
def place(etcd: Etcd) -> InEtcd:
    """One server that the test may do anything to."""
    return InEtcd(etcd)


class TestAnEtcdThatTakesOnlyShortWrites:
    """A node's status is short enough for it, and what the elected agent writes is not."""

    @pytest.fixture
    def etcd(self, tmp_path: Path) -> Iterator[Etcd]:
        with serving(tmp_path / "etcd", flags=["--max-request-bytes=1000"]) as etcd:
            yield etcd

    def test_the_elected_agent_says_so_and_ends(self, cluster: Cluster, place: InEtcd) -> None:
        node = cluster.node("a", "2")
        assert node.finish() == 2
        assert node.has_said("etcd takes no such request: etcdserver: request is too large.")
        assert node.has_said("Start etcd with a greater --max-request-bytes.")
        assert not node.has_said("lost etcd")
