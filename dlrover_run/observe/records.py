"""The evidence of one moment, as records: what the search for a hang takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dlrover_run.observe.carriers import Carriers
from dlrover_run.observe.processes import WorkerFigures
from dlrover_run.observe.sock_diag import SocketCounters


class Traffic(NamedTuple):
    """The connections of one worker, without those to the store. `acked` and `received` are bytes since the round
    began, `sent_age` the seconds since it last sent data on one of the connections that carry most of its bytes, None
    if it has no such connection. `unsent` bytes wait for an acknowledgement, `unread` bytes for the worker to read
    them. `at_store` says whether it is connected to the store. `data_age` are the seconds since data was last sent or
    received on any connection that is no keep-alive, None without one. `unsent_peers` connections have bytes that wait
    for an acknowledgement. `carried` are the bytes of large exchanges, and `counted` those of all but heartbeats, both
    None where that is not known: then all bytes are as large exchanges (`observe.carriers`)."""

    acked: int = 0
    received: int = 0
    sent_age: float | None = None
    unsent: int = 0
    unread: int = 0
    at_store: bool = False
    data_age: float | None = None
    unsent_peers: int = 0
    carried: int | None = None
    counted: int | None = None


class Evidence(NamedTuple):
    """One worker at one time. `at` is in seconds of `time.monotonic`. `figures` is None in a sample of the connections
    alone. A `repeated` one has the traffic of the sample before."""

    rank: int
    at: float
    traffic: Traffic
    figures: WorkerFigures | None = None
    repeated: bool = False


BUSY_SHARE = 0.01
"""A connection counts as one of those that carry most of a worker's bytes if it carries this share of the largest."""


def summarize(sockets: Sequence[SocketCounters], store_port: int, carriers: Carriers) -> Traffic:
    """The traffic of the worker that holds these connections. `carriers` has taken them."""
    at_store = any(one.remote_port == store_port for one in sockets)
    others = [one for one in sockets if store_port not in (one.local_port, one.remote_port)]
    carrying = [one for one in others if not carriers.is_keepalive(one)]
    largest = max((one.acked + one.received for one in carrying), default=0)
    busy = [one for one in carrying if largest and one.acked + one.received >= largest * BUSY_SHARE]
    # A connection counts its opening as one byte; one that has sent nothing has no last time.
    ages = [one.sent_age for one in busy if one.acked > 1]
    return Traffic(
        acked=sum(one.acked for one in others),
        received=sum(one.received for one in others),
        sent_age=min(ages, default=None),
        unsent=sum(one.unsent for one in others),
        unread=sum(one.unread for one in others),
        at_store=at_store,
        data_age=min((min(one.sent_age, one.received_age) for one in carrying), default=None),
        unsent_peers=sum(one.unsent > 0 for one in others),
        carried=sum(map(carriers.carried, others)),
        counted=sum(map(carriers.counted, others)),
    )
