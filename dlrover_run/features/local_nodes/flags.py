"""The flags of nodes that are all started on this machine."""

from __future__ import annotations

from dlrover_run.command_line.feature import FeatureFlags
from dlrover_run.command_line.flag import Flag

LOCAL_CLUSTER = "A cluster on this machine"

# fmt: off
FLAGS = (
    Flag("local-nodes", LOCAL_CLUSTER,
        "Start this many nodes here and replace those that are lost. With a range, MIN nodes start at once and the "
        "others join later. It is the default of --nnodes; nodes beyond that are spares.",
        "N|MIN:MAX", extension=True),
    Flag("node-restarts", LOCAL_CLUSTER,
        "Total number of nodes that may be replaced.",
        "K", "3", extension=True, needs="local-nodes"),
    Flag("isolate-nodes", LOCAL_CLUSTER,
        "Give each node its own network namespace and address, which can be cut (needs root and ip).",
        extension=True, needs="local-nodes"),
    Flag("node-join-after", LOCAL_CLUSTER,
        "Time until the next of the later nodes joins, 0 with --autoscale; SIGUSR1 makes it join at once.",
        "SECONDS", "30", extension=True, needs="local-nodes"),
)
# fmt: on

FEATURE = FeatureFlags("local_nodes", FLAGS)
