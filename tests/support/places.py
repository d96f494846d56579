"""Where the nodes of a parsed job meet, as tests compare it."""

from __future__ import annotations

from typing import NamedTuple

from dlrover_run.rendezvous import kinds
from dlrover_run.spec import JobSpec


class Place(NamedTuple):
    """The record of a master or of a store, or the address of node 0 with static ranks; all None for a job alone."""

    master: kinds.Master | None = None
    etcd: kinds.Store | None = None
    store: tuple[str, int] | None = None


def place_of(spec: JobSpec) -> Place:
    where = spec.rendezvous
    return Place(
        where if isinstance(where, kinds.Master) else None,
        where if isinstance(where, kinds.Store) else None,
        where.store if isinstance(where, kinds.Static) else None,
    )
