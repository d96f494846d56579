"""How many nodes and workers a job has: what was typed, or what `--auto-config` finds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dlrover_run.command_line import flags
from dlrover_run.command_line.flags import Given
from dlrover_run.command_line.settings import Settings
from dlrover_run.coordination.rules import MOST_NODES
from dlrover_run.spec import SpecError

COUNT_VARIABLES = ("NODE_NUM", "WORKER_NUM")
"""What a cluster manager calls the number of nodes, the newer name first."""

_WORKERS = "auto"


class JobSize(NamedTuple):
    """The texts for `--nnodes` and `--nproc-per-node`, each with its place, and sentences about what was not set."""

    nodes: Given
    workers: Given
    warnings: tuple[str, ...] = ()


def find_size(settings: Settings, environ: Mapping[str, str]) -> JobSize:
    """The size of the job.

    The nodes that start here are as many as the job has, where nobody says otherwise. With `--auto-config` DLRover
    overrides what was typed. Whoever types a number means it, so here the number holds and a sentence says so. Raises
    SpecError when nothing tells how many nodes there are.
    """
    nodes, workers = settings.asked("nnodes") or settings.asked("local_nodes"), settings.asked("nproc_per_node")
    if not settings.on("auto_config"):
        return JobSize(nodes or settings.text("nnodes"), settings.text("nproc_per_node"))
    counted = next((Given(name, environ[name]) for name in COUNT_VARIABLES if environ.get(name, "").strip()), None)
    warnings = []
    if counted is not None:
        flags.whole_number(*counted, 1, MOST_NODES)
        if nodes is not None and nodes.text.strip() != counted.text.strip():
            warnings.append(
                f"{nodes.place} {nodes.text} holds for --auto-config too, not {counted.place}={counted.text}."
            )
    elif nodes is None and not settings.on("standalone"):
        raise SpecError(
            f"--auto-config finds no number of nodes: set {flags.either(COUNT_VARIABLES)}, or give --nnodes."
        )
    if workers is not None and workers.text != _WORKERS:
        warnings.append(f"{workers.place} {workers.text} holds for --auto-config too, which counts no devices then.")
    return JobSize(
        nodes or counted or settings.text("nnodes"), workers or Given("--auto-config", _WORKERS), tuple(warnings)
    )
