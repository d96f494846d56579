"""Which backend a job's records live in."""

from __future__ import annotations

from collections.abc import Callable

from dlrover_run.backends.board import Board, Listener
from dlrover_run.spec import JobSpec


def open_board(spec: JobSpec, listener: Listener, say: Callable[[str], None]) -> Board:
    """The board of a job; `say` prints one line for the person at the console. A running loop is needed.

    Raises SpecError when what the person has installed is not enough for it.
    """
    if spec.backend == "master":
        # Imported only here: one node needs no gRPC.
        from dlrover_run.backends.master_board import MasterBoard

        return MasterBoard(spec, listener, say)
    if spec.backend == "etcd":
        # Imported only here: nobody else needs the message classes of etcd.
        from dlrover_run.backends.etcd_board import EtcdBoard, renewal_timeout
        from dlrover_run.etcd.client import EtcdClient

        assert spec.etcd is not None, "the backend `etcd` comes with the place of one"
        store = EtcdClient(spec.etcd, renew_timeout=renewal_timeout(spec.rules))
        return EtcdBoard(spec, listener, say, store)
    from dlrover_run.backends.local import LocalBoard

    return LocalBoard(spec.rules, spec.node_rank if spec.backend == "static" else None, listener, say)
