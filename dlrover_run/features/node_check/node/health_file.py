"""The result of a node check, as JSON in the log directory of a run that has one.

`node_check.json` is an object with these fields; a speed that was not measured is null:

    version   1; raised when a field changes its meaning
    time      when it was written, in UTC, as in 2026-01-31T12:00:00Z
    node      this node, as below
    devices   of this node (at most 64, the slowest first), a list of
        local_rank, name which one, and what it is
        tflops           TFLOP/s of this device alone
    nodes     on the node with rank 0, a list of the nodes that train, in the order of their node ranks, and then of the
        nodes that were checked and do not train (at most 64, the most urgent ones, in the same order):
        node_id, host    which one
        status           "passed", "straggler", "fault" or "unchecked"
        dismissed        whether it leaves the job for that
        tflops           TFLOP/s (1e12 operations a second) of its slowest device
        gigabytes        GB/s (1e9 bytes a second) of its best link
        reason           the reason as text; may be empty
    links     on the same node with --comm-perf-test, of all links (at most 120, the slowest), a list of
        one, other       indices of `nodes`, equal for a link within a node
        gigabytes        GB/s of the best try, null when all failed
        problem          why they failed, as text; may be empty

A later check of the same run replaces the file atomically.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.features.node_check.decision.model import (
    DeviceSpeed,
    HealthStatus,
    LinkRow,
    NodeCheckAssignment,
    NodeHealth,
)
from dlrover_run.output.run_directory import RunDir

FILE_NAME = "node_check.json"
"""The file's name in the directory of the run."""

VERSION = 1
"""Of the fields above."""

_NODE = ("node_id", "host", "status", "dismissed", "tflops", "gigabytes", "reason")
_DEVICE = ("local_rank", "name", "tflops")
_LINK = ("one", "other", "gigabytes", "problem")
_SPEEDS = ("tflops", "gigabytes")


class HealthResult(msgspec.Struct, frozen=True):
    """A node's knowledge of a check: itself, its devices, and on the node with rank 0 all nodes and links."""

    node_health: NodeHealth
    devices: tuple[DeviceSpeed, ...] = ()
    others: tuple[NodeHealth, ...] = ()
    links: tuple[LinkRow, ...] = ()


class HealthFile:
    """Keeps the file up to date with this node's assignments. If it cannot be written, `warn` is called once with a
    sentence, and the job continues without it."""

    def __init__(self, run_dir: RunDir, warn: Callable[[str], None]) -> None:
        # A directory that the launcher removes at the end needs no file.
        self._directory = run_dir.path if run_dir.keep else None
        self._warn = warn
        self._warned = False
        self._known: HealthResult | None = None

    def follow(self, assignment: Assignment, devices: Sequence[DeviceSpeed]) -> None:
        """Write the result of a check and the speeds of this node's devices if they have changed. A node that has lost
        its ranks keeps its knowledge of the others."""
        part = NodeCheckAssignment.get(assignment.parts)
        if self._directory is None or part.health is None or part.health.status is HealthStatus.PENDING:
            return
        result = HealthResult(part.health, tuple(devices), part.health_table, part.link_table)
        if assignment.ranks is None and not part.health_table and self._known is not None:
            result = replace(result, others=self._known.others, links=self._known.links)
        if result == self._known:
            return
        problem = write_health_file(self._directory, result, time.time())
        if problem is None:
            # Otherwise the next assignment tries it again: a full disk may have room then.
            self._known = result
        elif not self._warned:
            self._warned = True
            self._warn(problem)


def write_health_file(directory: str, result: HealthResult, unix_time: float) -> str | None:
    """Write the file into the run's directory, which is created again if it was removed. Returns a sentence if that
    fails."""
    path = os.path.join(directory, FILE_NAME)
    unfinished = f"{path}.new"
    content = json.dumps(_content(result, unix_time), indent=1) + "\n"
    try:
        os.makedirs(directory, exist_ok=True)
        with open(unfinished, "w", encoding="ascii") as file:
            file.write(content)
        os.replace(unfinished, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        return f"warning: {path} cannot be written ({error.strerror}); the result of the node check is only shown here"
    return None


def _content(result: HealthResult, unix_time: float) -> dict[str, Any]:
    content: dict[str, Any] = {
        "version": VERSION,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_time)),
        "node": _fields(result.node_health, _NODE),
        "devices": [_fields(device, _DEVICE) for device in result.devices],
    }
    if result.others:
        content["nodes"] = [_fields(other, _NODE) for other in result.others]
    if result.links:
        content["links"] = [_fields(link, _LINK) for link in result.links]
    return content


def _fields(record: NodeHealth | DeviceSpeed | LinkRow, names: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(record, name) for name in names}
    return {name: value or None if name in _SPEEDS else value for name, value in values.items()}
