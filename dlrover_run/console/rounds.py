"""The lines about rounds: start, rank assignment, waiting, restart, shutdown."""

from __future__ import annotations

import math

from dlrover_run.console.text import format_duration
from dlrover_run.coordination.records.round import RankAssignment
from dlrover_run.spec import LogSpec
from dlrover_run.words.text import counted, join_address


def render_restart(reason: str, attempt: int, of: int, after_seconds: float, window: float = 0.0) -> str:
    """A restart: its number and the limit (within `window` seconds, if not 0), how long the workers had run, the
    reason."""
    allowed = f" (at most {of} in {window:g} s)" if window else f" of {of}"
    return f"{_into_round(after_seconds)}, {clause(reason)}; restart {attempt}{allowed}"


def render_success(seconds: float, restarts: int) -> str:
    """The end of a job that has succeeded, after `seconds`."""
    often = f", {counted(restarts, 'restart')}" if restarts else ""
    return f"done after {format_duration(seconds)}{often}"


def render_membership_change(reason: str, ranks: RankAssignment, after_seconds: float) -> str:
    """A new round that uses no restart, because only the set of nodes has changed."""
    return f"{_into_round(after_seconds)}, {clause(reason)}; round {ranks.round} with {counted(ranks.nodes, 'node')}"


def _into_round(seconds: float) -> str:
    # Before the reason, which may end with the message of an exception.
    return f"{format_duration(seconds)} into the round"


def render_rendezvous(ranks: RankAssignment, event_log: str) -> str:
    """torchrun's block on a round: the same text and spacing."""
    local = range(ranks.workers)
    values = {
        "restart_count": ranks.restart_count,
        "master_addr": ranks.store_address,
        "master_port": ranks.store_port,
        "group_rank": ranks.node_rank,
        "group_world_size": ranks.nodes,
        "local_ranks": list(local),
        "role_ranks": [ranks.role_first_rank + rank for rank in local],
        "global_ranks": [ranks.first_rank + rank for rank in local],
        "role_world_sizes": [ranks.role_world_size] * ranks.workers,
        "global_world_sizes": [ranks.world_size] * ranks.workers,
        "event_log_handler": event_log,
    }
    lines = [f"  {name}={value}" for name, value in values.items()]
    return "\n".join(["Rendezvous complete for workers. Result:", *lines])


def render_start(workers: int, directory: str, logs: LogSpec) -> str:
    """The start of a job that writes files: the number of workers on this node, and the directory."""
    files = "logs" if logs.redirects.any() or logs.tee.any() or logs.plugin else "error files"
    return f"{counted(workers, 'worker')} on this node, {files} in {directory}"


def render_shutdown(processes: str, seconds: float | None, *, alone: bool, again: bool) -> str:
    """The effect of a signal that ends this launcher. `processes` get `seconds` to end (None: none runs). `alone`: the
    job has no other node. `again`: pressing the same key again kills the processes."""
    if seconds is None:
        return "this job stops" if alone else "this node leaves the job"
    then = f"the {processes} have {seconds:g} s to end"
    return f"{then}; press Ctrl-C again to kill them at once" if again else then


def render_rank_assignment(ranks: RankAssignment) -> str:
    """The ranks of this node in one line."""
    last = ranks.first_rank + ranks.workers - 1
    own = f"rank {last}" if ranks.workers == 1 else f"ranks {ranks.first_rank} to {last}"
    place = f"{own} of {ranks.world_size}, as node rank {ranks.node_rank} of {ranks.nodes}"
    return f"round {ranks.round}: {place}; the store is at {join_address(ranks.store_address, ranks.store_port)}"


def render_waiting(text: str, seconds: float | None) -> str:
    """A node without ranks: what it waits for, and for how long at most."""
    if seconds is None:
        return f"waiting: {text}"
    left = f"{math.ceil(seconds)} s" if seconds < 60 else format_duration(seconds)
    return f"waiting: {text}; at most {left} more"


def clause(sentence: str) -> str:
    """A sentence as a part of another one."""
    return " ".join(sentence.split()).rstrip(".")
