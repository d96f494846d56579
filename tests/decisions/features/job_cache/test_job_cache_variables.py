"""Where a worker finds the caches of compiled code, and which disks several nodes share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_run.cli import parse
from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.devices.disks import network_disk
from dlrover_run.features.job_cache import node
from dlrover_run.features.job_cache.node import JobCache
from dlrover_run.features.job_cache.settings import JobCacheSettings
from dlrover_run.features.job_cache.variables import CUDA, GRAPHS, INDUCTOR, TRITON, own_variables, shared_by_nodes
from dlrover_run.spec import SpecError

MOUNTS = """\
22 1 0:21 / / rw - ext4 /dev/sda1 rw
23 22 0:22 / /home rw shared:1 - nfs4 server:/home rw
24 23 0:23 / /home/local rw - xfs /dev/sdb1 rw
25 22 0:24 / /scratch\\040one rw - lustre mds:/scratch rw
26 22 0:25 / /mnt rw - ext4 /dev/sdc1 rw
27 22 0:26 / /mnt rw - fuse.juicefs JuiceFS:x rw
28 22 0:27 / /containers rw - fuse.fuse-overlayfs fuse-overlayfs rw
a line that is none
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp/a", ""),
        ("/home", "nfs4"),
        ("/home/alice/.triton", "nfs4"),
        ("/home/local/alice", ""),
        ("/homes/alice", ""),
        ("/scratch one/cache", "lustre"),
        # The later mount hides the earlier one.
        ("/mnt/data", "fuse.juicefs"),
        ("/containers/a", ""),
    ],
)
def test_which_disk_several_machines_share(tmp_path: Path, path: str, kind: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert network_disk(path, mounts) == kind
    assert network_disk(path, tmp_path / "missing") == ""


def test_ranks_share_what_is_safe_to_share() -> None:
    first, second = own_variables("/cache", 0), own_variables("/cache", 1)
    assert first[INDUCTOR] == second[INDUCTOR]
    assert first[TRITON] != second[TRITON]
    assert all(value == "1" or value.startswith("/cache/") for value in first.values())


def test_only_caches_on_a_network_disk_are_moved() -> None:
    def kind(path: str) -> str:
        return "nfs" if path.startswith("/home") else ""

    assert shared_by_nodes({"HOME": "/home/alice"}, "/tmp", kind) == {TRITON, CUDA}
    assert shared_by_nodes({"HOME": "/home/alice", "TRITON_HOME": "/data"}, "/tmp", kind) == {CUDA}
    assert shared_by_nodes({"HOME": "/root"}, "/home/tmp", kind) == {INDUCTOR}
    assert shared_by_nodes({"HOME": "/root"}, "/tmp", kind) == set()


class Relay:
    def __init__(self) -> None:
        self.owned: list[str] = []

    def remove_at_end(self, path: str) -> None:
        self.owned.append(path)


def opened(directory: str = "") -> tuple[JobCache, Relay, list[str]]:
    lines: list[str] = []
    relay = Relay()
    services: Any = SimpleNamespace(
        job=SimpleNamespace(settings_of=lambda name, kind: JobCacheSettings(directory)),
        relay=relay,
        console=SimpleNamespace(info=lines.append),
    )
    cache = JobCache(services, SimpleNamespace())  # type: ignore[arg-type]
    cache.open()
    return cache, relay, lines


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (INDUCTOR, TRITON, CUDA, GRAPHS):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_directory_of_the_user_has_all_caches_and_stays(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache, relay, lines = opened(str(tmp_path / "cache"))
    assert cache.environment(RoundKey(), 1) == own_variables(str(tmp_path / "cache"), 1)
    assert (relay.owned, lines) == ([], [])


def test_what_the_user_has_set_stays(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ.setenv(TRITON, "/own")
    assert opened(str(tmp_path))[0].environment(RoundKey(), 0).keys() == {INDUCTOR, CUDA, GRAPHS}


def test_on_a_network_disk_each_host_has_a_folder(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ.setattr(node, "network_disk", lambda path: "nfs")
    environ.setattr(node.os, "uname", lambda: SimpleNamespace(nodename="n07"))
    cache, _, _ = opened(str(tmp_path))
    assert cache.environment(RoundKey(), 0)[INDUCTOR] == str(tmp_path / "n07/inductor")


def test_without_a_flag_only_a_home_on_a_network_disk_is_left(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ.setenv("HOME", "/home/alice")
    environ.setattr(node.tempfile, "gettempdir", lambda: str(tmp_path))
    environ.setattr(node, "network_disk", lambda path: "nfs" if path.startswith("/home") else "")
    cache, relay, _ = opened()
    found = cache.environment(RoundKey(), 0)
    assert found.keys() == {TRITON, CUDA}
    (owned,) = relay.owned
    assert Path(owned).parent == tmp_path
    assert all(value.startswith(owned) for value in found.values())


@pytest.mark.parametrize("kind", ["", "nfs"])
def test_without_a_flag_nothing_is_set_where_all_is_local_or_nothing_is(environ: pytest.MonkeyPatch, kind: str) -> None:
    environ.setattr(node, "network_disk", lambda path: kind)
    cache, relay, _ = opened()
    assert (cache.environment(RoundKey(), 0), relay.owned) == ({}, [])


def test_a_directory_that_cannot_be_made_is_a_warning(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache, _, (line,) = opened(str(tmp_path / "file/cache"))
    assert line.startswith("warning: ")
    assert cache.environment(RoundKey(), 0) == {}


def test_the_flag_names_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    for flags, directory in ((["--job-cache=a"], str(tmp_path / "a")), ([], "")):
        spec = parse([*flags, "x.py"], {})
        assert spec.settings_of("job_cache", JobCacheSettings) == JobCacheSettings(directory)
    with pytest.raises(SpecError, match="--job-cache 'file/a' cannot be created"):
        parse(["--job-cache=file/a", "x.py"], {})
