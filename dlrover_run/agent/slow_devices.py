"""Finds devices of this node that compute much slower than its others, for a warning. Pure.

A health check compares nodes by their slowest device. It finds nothing if there is only one node, or if each node has
one slow device.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlrover_run.console.health_table import format_tflops
from dlrover_run.policies.health.evidence import lower_median
from dlrover_run.policies.health.model import CPU, DeviceSpeed


def find_slow(devices: Sequence[DeviceSpeed], threshold: float) -> list[DeviceSpeed]:
    """Those that are more than `threshold` times slower than what is usual in the node. Ranks on the CPU share it, and
    that one of them is slow is no evidence of it."""
    if not devices:
        return []
    reached = lower_median([device.tflops for device in devices])
    return [device for device in devices if device.name != CPU and device.tflops * threshold < reached]


def quicker(first: Sequence[DeviceSpeed], second: Sequence[DeviceSpeed]) -> list[DeviceSpeed]:
    """The better of two tries of each local rank: one may be disturbed, but is never quicker than it is."""
    best: dict[int, DeviceSpeed] = {}
    for device in (*first, *second):
        known = best.get(device.local_rank)
        if known is None or known.tflops < device.tflops:
            best[device.local_rank] = device
    return list(best.values())


def describe_slow(devices: Sequence[DeviceSpeed], threshold: float) -> list[str]:
    """A sentence for each of those that `find_slow` finds."""
    return [
        f"warning: local rank {device.local_rank} ({device.name}) computes at {format_tflops(device.tflops)} where the "
        f"others of this node reach {format_tflops(lower_median([device.tflops for device in devices]))}"
        for device in find_slow(devices, threshold)
    ]
