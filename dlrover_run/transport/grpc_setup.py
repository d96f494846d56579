"""gRPC, configured for thousands of quiet streams that must notice a dead peer.

Import grpc only through this module: fork support must be off before grpc is loaded. With it on, a process that starts
others takes a second for each, or prints warnings to the terminal.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from dlrover_run.processes import signals
from dlrover_run.rendezvous import kinds
from dlrover_run.transport import auth
from dlrover_run.transport.addresses import Address
from dlrover_run.transport.messages import MAX_MASTER_MESSAGE, MAX_NODE_MESSAGE

NEVER_MS = 2**31 - 1
"""gRPC's number of milliseconds for what never happens."""

MAX_STREAMS = 1000
"""Streams that one connection may have at a time. A node needs one. Without a limit a client could open and reset them
faster than a master notices, at a kilobyte each."""

MAX_PENDING_STREAMS = 4096
"""Streams that may wait until a master accepts them. Beyond this, new ones are refused and nodes retry.

Two thousand nodes that join at once all fit. gRPC's default of a thousand refused 85 of them.
"""

UNAUTHENTICATED_TIMEOUT_MS = 10_000
"""Milliseconds after which a master closes a connection that has not greeted it or has no stream. A node opens a stream
at once."""

Options = list[tuple[str, Any]]

_BOTH: Options = [
    # Without pings: node and master detect each other's silence by their heartbeats, whose times are rules of the job.
    # A second detector with times of its own would end the connection of a node whose pause these rules allow. This
    # also turns off the kernel's limit on unacknowledged data (TCP_USER_TIMEOUT), by default 20 s for a server.
    ("grpc.keepalive_time_ms", NEVER_MS),
    ("grpc.http2.ping_timeout_ms", NEVER_MS),
    # A proxy that the cluster configures for web pages must not get between a node and its master.
    ("grpc.enable_http_proxy", 0),
]

SERVER_OPTIONS: Options = [
    *_BOTH,
    ("grpc.max_receive_message_length", MAX_NODE_MESSAGE),
    ("grpc.max_send_message_length", MAX_MASTER_MESSAGE),
    # Otherwise two servers could share the port, each with half of the nodes.
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # Between these two numbers gRPC refuses at random.
    ("grpc.server.max_pending_requests", MAX_PENDING_STREAMS * 3 // 4),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_STREAMS),
    # Each such connection holds a descriptor, by default for two minutes or for ever.
    ("grpc.server_handshake_timeout_ms", UNAUTHENTICATED_TIMEOUT_MS),
    ("grpc.max_connection_idle_ms", UNAUTHENTICATED_TIMEOUT_MS),
]

CHANNEL_OPTIONS: Options = [
    *_BOTH,
    ("grpc.max_receive_message_length", MAX_MASTER_MESSAGE),
    ("grpc.max_send_message_length", MAX_NODE_MESSAGE),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 3000),
    # This is also the timeout of one connection attempt.
    ("grpc.min_reconnect_backoff_ms", 5000),
]


def load_grpc() -> ModuleType:
    """Import grpc with `grpc.aio`. The environment is restored afterwards, because the workers inherit it."""
    before = dict(os.environ)
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    # gRPC's own log goes to the terminal, written for its authors, with each handshake that fails.
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


def open_channel(addresses: Sequence[Address], authority: str, tls: kinds.TlsSpec | None, options: Options) -> Any:
    """Open a channel to the addresses, which are of one family. Raises auth.TlsFileError.

    `authority` is the endpoint as the user wrote it: TLS compares the certificate with that, not with the address.
    """
    grpc = load_grpc()
    kind = "ipv6" if addresses[0].family is socket.AF_INET6 else "ipv4"
    # The target is a URI, in which the percent sign before the interface of a link-local address must be escaped.
    target = f"{kind}:{','.join(map(str, addresses))}".replace("%", "%25")
    options = [*options, ("grpc.default_authority", authority)]
    # gRPC starts its threads here, and signals must not be delivered to them.
    with signals.blocked_in_new_threads():
        if tls is None:
            return grpc.aio.insecure_channel(target, options=options)
        credentials = grpc.ssl_channel_credentials(*auth.read_tls_files(tls))
        return grpc.aio.secure_channel(target, credentials, options=options)
