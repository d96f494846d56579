"""Opens the client of the backend that holds a job's records."""

from __future__ import annotations

from collections.abc import Callable

from dlrover_run.rendezvous.client import OnChange, RendezvousClient
from dlrover_run.spec import JobSpec


def open_client(spec: JobSpec, on_change: OnChange, say: Callable[[str], None]) -> RendezvousClient:
    """The board of a job; `say` prints one line for the person at the console. A running loop is needed.

    Raises SpecError when what the person has installed is not enough for it.
    """
    if spec.backend == "master":
        # Imported only here: one node needs no gRPC.
        from dlrover_run.rendezvous.master_client import MasterClient

        return MasterClient(spec, on_change, say)
    if spec.backend == "etcd":
        # Imported only here: nobody else needs the message classes of etcd.
        from dlrover_run.etcd.store import EtcdStore
        from dlrover_run.rendezvous.etcd_client import EtcdClient, renewal_timeout

        assert spec.etcd is not None, "the backend `etcd` comes with the place of one"
        store = EtcdStore(spec.etcd, renew_timeout=renewal_timeout(spec.rules))
        return EtcdClient(spec, on_change, say, store)
    from dlrover_run.rendezvous.local import LocalClient

    return LocalClient(spec.rules, spec.node_rank if spec.backend == "static" else None, on_change, say)
