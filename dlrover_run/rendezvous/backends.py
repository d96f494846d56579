"""The table of backends: the names by which users ask for them, and how each is opened.

A row is the door behind which a backend imports what it needs: no other module names one. To add a key-value store,
write its five operations (`store/operations.py`) and a row; `docs/architecture.md` has the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dlrover_run.rendezvous import kinds

if TYPE_CHECKING:
    from dlrover_run.coordination.records.requests import OperatorRequest
    from dlrover_run.coordination.records.rules import JobRules
    from dlrover_run.job_status.questions import StackQuery
    from dlrover_run.job_status.stacks import JobStacks
    from dlrover_run.job_status.status import JobStatus
    from dlrover_run.rendezvous.client import OnChange, RendezvousClient
    from dlrover_run.spec import JobSpec
    from dlrover_run.store.operations import KeyValueStore

MASTER_VARIABLE = "DLROVER_MASTER_ADDR"
"""The address of a running master; used if no flag sets the rendezvous."""

Log = Callable[[str], None]
"""Prints one line to the console."""


class Asker(Protocol):
    """Asks about a running job as a program that is no node of it. The caller limits the time; both raise AskFailed."""

    async def ask(self, request: OperatorRequest | None = None) -> JobStatus:
        """The status of the job, after a request was taken."""

    async def ask_stacks(self, query: StackQuery) -> JobStacks:
        """The stacks of the job's workers."""


class Backend(NamedTuple):
    """One backend.

    `name` is that in the records of a job and in messages; `words` are the values of `--rdzv-backend` that mean it, and
    `aliases` those that are not offered, each with the line for the user. `kind` is its record in `JobSpec`. `open`
    returns the client of a node, in the running event loop, and raises SpecError if a package is missing; `asker`
    returns what asks about a job from outside, None if a job is known to its own nodes only. `port` is the default port
    of an endpoint. `package` are the package that it needs and the extra that installs it. `refresh` are the seconds
    after which a node reports the number of its steps again, if nothing else has changed.
    """

    name: str
    kind: type[kinds.Kind]
    open: Callable[[JobSpec, OnChange, Log], RendezvousClient]
    words: tuple[str, ...] = ()
    aliases: Mapping[str, str] = {}
    asker: Callable[[JobSpec], Asker] | None = None
    port: int = 0
    package: tuple[str, str] | None = None
    refresh: float | None = None


def _open_alone(spec: JobSpec, on_change: OnChange, log: Log) -> RendezvousClient:
    from dlrover_run.rendezvous.local import LocalClient

    return LocalClient(spec.rules, None, on_change, log, spec.display_name)


def _open_static(spec: JobSpec, on_change: OnChange, log: Log) -> RendezvousClient:
    from msgspec.structs import replace

    from dlrover_run.rendezvous.local import LocalClient

    assert isinstance(spec.rendezvous, kinds.Static), "a row is for one kind"
    rules = replace(spec.rules, store=spec.rendezvous.store)
    return LocalClient(rules, spec.node_rank, on_change, log, spec.display_name)


def _open_master(spec: JobSpec, on_change: OnChange, log: Log) -> RendezvousClient:
    from dlrover_run.rendezvous.master_client.client import MasterClient

    return MasterClient(spec, on_change, log)


def _ask_master(spec: JobSpec) -> Asker:
    from dlrover_run.rendezvous.master_client.asking import MasterAsker

    assert isinstance(spec.rendezvous, kinds.Master), "a row is for one kind"
    return MasterAsker(spec.rendezvous, spec.run_id)


def _open_etcd(spec: kinds.Store, rules: JobRules) -> KeyValueStore:
    from dlrover_run.rendezvous.kv.client import renewal_timeout
    from dlrover_run.store.etcd.store import EtcdStore

    return EtcdStore(spec, renew_timeout=renewal_timeout(rules))


OpenStore = Callable[[kinds.Store, "JobRules"], "KeyValueStore"]


def key_value(
    name: str,
    open_store: OpenStore,
    *,
    port: int,
    aliases: Mapping[str, str] | None = None,
    package: tuple[str, str] | None = None,
    refresh: float = 30.0,
) -> Backend:
    """The row of a key-value store. `open_store` returns the store with these members, in the running event loop, for
    a job with these rules; `refresh` is longer than with a master, as each report is a write that all members store."""

    def open_(spec: JobSpec, on_change: OnChange, log: Log) -> RendezvousClient:
        from dlrover_run.rendezvous.kv.client import StoreClient

        assert isinstance(spec.rendezvous, kinds.Store), "a row is for one kind"
        return StoreClient(spec, on_change, log, open_store(spec.rendezvous, spec.rules))

    def asker(spec: JobSpec) -> Asker:
        from dlrover_run.rendezvous.kv.asker import StoreAsker

        assert isinstance(spec.rendezvous, kinds.Store), "a row is for one kind"
        place = spec.rendezvous
        return StoreAsker(lambda: open_store(place, spec.rules), place, spec.run_id)

    return Backend(
        name,
        kinds.Store,
        open_,
        (name,),
        aliases or {},
        asker,
        port,
        package,
        refresh,
    )


TABLE: tuple[Backend, ...] = (
    Backend("memory", kinds.Alone, _open_alone),
    Backend("static", kinds.Static, _open_static, ("static",), port=29500),
    Backend("master", kinds.Master, _open_master, ("c10d", "master"), asker=_ask_master, port=29400, refresh=5.0),
    key_value(
        "etcd",
        _open_etcd,
        port=2379,
        aliases={"etcd-v2": "the v3 API is used, and v2 is not needed"},
        package=("etcd3", "etcd"),
    ),
)
"""The defaults of the ports are torchrun's, and etcd's own."""


def row(name: str) -> Backend | None:
    """The backend of this name, as the records of a job have it. Called by the operator's commands for what an agent
    reports of its job."""
    return next((backend for backend in TABLE if backend.name == name), None)


def of(rendezvous: kinds.Kind) -> Backend:
    """The backend of a job."""
    found = row(rendezvous.backend)
    assert found is not None, "the command line takes only what is in the table"
    return found


def by_word(word: str) -> Backend | None:
    """The backend that a value of `--rdzv-backend` means; None for a word that means none. Called by what reads the
    command line."""
    return next((backend for backend in TABLE if word in (*backend.words, *backend.aliases)), None)


def words(*, coordinated: bool = False) -> tuple[str, ...]:
    """The values that `--rdzv-backend` offers; or those for nodes that communicate. Called for the table of
    flags and for messages about a wrong word."""
    rows = (backend for backend in TABLE if backend.kind.coordinated or not coordinated)
    return tuple(word for backend in rows for word in backend.words)


def open_client(spec: JobSpec, on_change: OnChange, log: Log) -> RendezvousClient:
    """Open the client of a job in the running event loop; `log` prints one line to the console.

    Raises SpecError if a package is missing.
    """
    return of(spec.rendezvous).open(spec, on_change, log)
