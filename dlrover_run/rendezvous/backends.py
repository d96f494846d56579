"""Opens the client of the backend that holds a job's records."""

from __future__ import annotations

from collections.abc import Callable

from dlrover_run.rendezvous.client import OnChange, RendezvousClient
from dlrover_run.spec import JobSpec


def open_client(spec: JobSpec, on_change: OnChange, log: Callable[[str], None]) -> RendezvousClient:
    """Open the client of a job in the running event loop; `log` prints one line to the console.

    Raises SpecError if a package is missing.
    """
    if spec.backend == "master":
        # Imported only here: one node needs no gRPC.
        from dlrover_run.rendezvous.master.client import MasterClient

        return MasterClient(spec, on_change, log)
    if spec.backend == "etcd":
        # Imported only here: only this backend needs the message classes of etcd.
        from dlrover_run.rendezvous.kv.client import EtcdClient, renewal_timeout
        from dlrover_run.store.etcd.store import EtcdStore

        assert spec.etcd is not None, "the backend `etcd` has endpoints"
        store = EtcdStore(spec.etcd, renew_timeout=renewal_timeout(spec.rules))
        return EtcdClient(spec, on_change, log, store)
    from dlrover_run.rendezvous.local import LocalClient

    node_rank = spec.node_rank if spec.backend == "static" else None
    return LocalClient(spec.rules, node_rank, on_change, log, spec.display_name)
