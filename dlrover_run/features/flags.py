"""The features that have flags, one line each, in the order in which their flags stand in the help.

Each launch imports these modules, so at their tops they import what a launch has anyway.
"""

from __future__ import annotations

from dlrover_run.features.autoscale import flags as autoscale
from dlrover_run.features.checkpoints import flags as checkpoints
from dlrover_run.features.events import flags as events
from dlrover_run.features.hangs import flags as hangs
from dlrover_run.features.hooks import flags as hooks
from dlrover_run.features.local_nodes import flags as local_nodes
from dlrover_run.features.node_check import flags as node_check
from dlrover_run.features.observe import flags as observe
from dlrover_run.features.survivors import flags as survivors

FEATURES = (
    autoscale.FEATURE,
    survivors.FEATURE,
    checkpoints.FEATURE,
    node_check.FEATURE,
    local_nodes.FEATURE,
    events.FEATURE,
    observe.FEATURE,
    hangs.FEATURE,
    hooks.FEATURE,
)
