"""The nodes that this launcher starts, as its flags give them."""

from __future__ import annotations

import msgspec


class LocalSettings(msgspec.Struct, frozen=True):
    """Nodes on this machine: `min_nodes` start at once, then one more every `join_after` seconds up to `max_nodes`.

    `restarts` is the total number of nodes that may be replaced. `isolated` gives each node its own network namespace.
    """

    min_nodes: int
    max_nodes: int
    restarts: int = 3
    isolated: bool = False
    join_after: float = 30.0
