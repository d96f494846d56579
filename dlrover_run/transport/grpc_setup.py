"""gRPC, set up the way it has to be for thousands of quiet streams that must notice a dead peer.

Import grpc through here only: its support for forks must be off before it is loaded. With it on, a process that starts
others takes a second for each, or prints warnings into their terminals.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from dlrover_run.transport.messages import MAX_MASTER_MESSAGE, MAX_NODE_MESSAGE

PING_INTERVAL_MS = 5000
"""Milliseconds between two of gRPC's own pings on a connection, which find a peer whose machine has vanished."""

PING_TIMEOUT_MS = 5000
"""Milliseconds after which an unanswered ping ends the connection; without it gRPC waits a minute."""

MAX_STREAMS = 1000
"""Streams that one connection may have at a time. A node needs one; without a bound a stranger opens and resets them
faster than a master can take notice, at a kilobyte for each."""

MAX_PENDING_STREAMS = 4096
"""Streams that may wait to be looked at by a master; beyond this new ones are refused, and nodes come again.

Two thousand nodes that join at once all find room. gRPC's own bound of a thousand refused 85 of them.
"""

UNAUTHENTICATED_TIMEOUT_MS = 10_000
"""Milliseconds after which a master ends a connection that has not greeted it, or that has no stream; a node opens one
at once."""

Options = list[tuple[str, Any]]

_BOTH: Options = [
    ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    # Keepalive alone waits for 60 s on the ping's own timer.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A proxy that the cluster sets for web pages must not get between a node and its master.
    ("grpc.enable_http_proxy", 0),
]

SERVER_OPTIONS: Options = [
    *_BOTH,
    ("grpc.max_receive_message_length", MAX_NODE_MESSAGE),
    ("grpc.max_send_message_length", MAX_MASTER_MESSAGE),
    # Two servers could else share the port, and each would have half of the nodes.
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # Between the two numbers it refuses at random.
    ("grpc.server.max_pending_requests", MAX_PENDING_STREAMS * 3 // 4),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_STREAMS),
    # Each holds a descriptor, and by default for two minutes or for ever.
    ("grpc.server_handshake_timeout_ms", UNAUTHENTICATED_TIMEOUT_MS),
    ("grpc.max_connection_idle_ms", UNAUTHENTICATED_TIMEOUT_MS),
    # By default a server ends a connection that pings more often than it likes.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
]

CHANNEL_OPTIONS: Options = [
    *_BOTH,
    ("grpc.max_receive_message_length", MAX_MASTER_MESSAGE),
    ("grpc.max_send_message_length", MAX_NODE_MESSAGE),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 3000),
    # This is also the time-out of one connection attempt.
    ("grpc.min_reconnect_backoff_ms", 5000),
]


def load_grpc() -> ModuleType:
    """The module grpc, with `grpc.aio` in it. The environment is left as it was, for the workers inherit it."""
    before = dict(os.environ)
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    # Its own log goes to the terminal, in words for its authors, with each handshake that fails.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        import grpc
        import grpc.aio
    finally:
        for name in ("GRPC_ENABLE_FORK_SUPPORT", "GRPC_VERBOSITY"):
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
    module: ModuleType = grpc
    return module
