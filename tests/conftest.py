"""Fixtures for the tests of whole launches."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

from shards import plugin as shards
from support.allowed_skips import SkipGuard
from support.check_nodes import checked, gate  # noqa: F401
from support.cluster import Cluster, quiet_port
from support.etcd_server import etcd, etcd_certificates, etcd_cluster  # noqa: F401
from support.harness import OURS, TORCHRUN, Launcher, Mailbox
from support.owned_directory import OwnedDirectory
from support.rendezvous_backends import RendezvousBackend, place, shared_etcd, shared_etcd_cluster  # noqa: F401

from dlrover_run.features.local_nodes.network import Network, why_not

# A shell makes its background processes ignore SIGINT and SIGQUIT, and nohup makes them ignore SIGHUP. All processes
# that are started here would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in (signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.SIG_DFL)

# Where this is set, as in many containers, each launcher compiles all of its modules, which takes longer than the rest
# of a short job. pip compiles what it installs, but not what is installed as editable.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A child that a test forks does not collect the garbage of earlier tests: to end a channel of gRPC waits for threads
# that a fork leaves behind.
os.register_at_fork(after_in_child=gc.freeze)


# What a launch keeps in the state directory of the user is removed with the run of the tests. The processes of
# pytest-xdist inherit it from the one that starts them: they end without removing anything.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _STATE = OwnedDirectory("dlrover-tests-state-")
    os.environ["XDG_STATE_HOME"] = _STATE.path


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _STATE.close()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep what was collected out of later collections of garbage, some of which tests ask for: each would take
    0.2 s of processor time."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    shards.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    shards.configure(config)
    if not hasattr(config, "workerinput"):  # the process that prints the summary
        config.pluginmanager.register(SkipGuard())


# The duration of an example shows nothing on a machine that runs other tests at the same time.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

# These test code that runs inside a worker with torch, and cannot be imported without it (see `make test-other`).
collect_ignore = (
    []
    if importlib.util.find_spec("torch")
    else [
        "decisions/training/test_sampler.py",
        "processes/test_check_tasks.py",
        "processes/test_checkpoint.py",
        "jobs/test_mnist_example.py",
        "torchrun/test_cli_differential.py",
        "torchrun/test_torch_survivors.py",
    ]
)


# torchrun loses jobs at random if restarts share its store; the tests compare everything else.
OWN_STORE = Launcher(TORCHRUN.name, ("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *TORCHRUN.command))


@pytest.fixture(params=[pytest.param(OWN_STORE, marks=pytest.mark.rival), OURS], ids=lambda launcher: launcher.name)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    """Each launcher in turn: a test with this fixture requires the same behaviour of both. The behaviour of torchrun
    depends only on its version, so `make test` runs ours only; `make test-long` and `make test-torch` run both."""
    chosen: Launcher = request.param
    return chosen


@pytest.fixture
def mailbox(tmp_path: Path) -> Iterator[Mailbox]:
    """A mailbox for the workers of one test."""
    box = Mailbox(tmp_path)
    yield box
    box.close()


@pytest.fixture
def cluster(mailbox: Mailbox, place: RendezvousBackend) -> Iterator[Cluster]:  # noqa: F811
    """Nodes that one test starts. The test fails if one of their processes is left at its end, or if something of
    their job is left in the rendezvous backend."""
    nodes = Cluster(mailbox, place)
    yield nodes
    nodes.close()
    nodes.check_place()


@pytest.fixture
def free_port() -> int:
    """A port on which no process listens, and which no other test is given."""
    return quiet_port()


@pytest.fixture
def network() -> Iterator[Network]:
    """The switch that connects the machines of a test; skips the test where no switch can be made."""
    if why := why_not():
        pytest.skip(f"no networks for nodes: {why}")
    with contextlib.closing(Network()) as there:
        yield there
