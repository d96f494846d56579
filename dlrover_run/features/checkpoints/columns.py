"""The column of `status` and `top` with the checkpoints that a node holds in memory. Pure."""

from __future__ import annotations

from dlrover_run.job_status.shown import Columns
from dlrover_run.job_status.status import NodeStatus
from dlrover_run.words.text import counted


def node_cells(node: NodeStatus) -> tuple[str] | None:
    use = node.memory
    if use is None:
        return None
    waiting = f", {counted(use.waiting, 'file')} to write" if use.waiting else ""
    return (f"{use.used / 2**30:.2f} of {use.limit / 2**30:.2f} GiB{waiting}",)


COLUMNS = Columns(("CHECKPOINTS IN MEMORY",), node_cells)
