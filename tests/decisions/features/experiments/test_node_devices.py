"""The devices of a node, and the order in which its workers have them."""

from __future__ import annotations

import pytest

from dlrover_run.features.experiments.node import ordered, visible_devices


@pytest.mark.parametrize(
    ("given", "found"),
    [("4,5,6,7", ["4", "5", "6", "7"]), ("GPU-1a, GPU-2b", ["GPU-1a", "GPU-2b"]), ("", []), ("3", ["3"])],
)
def test_the_devices_are_those_of_the_variable(given: str, found: list[str]) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": given}) == found


@pytest.mark.parametrize(
    ("order", "found"),
    [
        ((), ["4", "5", "6", "7"]),
        ((0, 2, 1), ["4", "6", "5", "7"]),
        ((3, 0, 1, 2), ["7", "4", "5", "6"]),
        ((0, 0), ["4", "5", "6", "7"]),
        ((0, 1, 2, 3, 4), ["4", "5", "6", "7"]),
    ],
)
def test_an_order_exchanges_devices_and_adds_or_removes_none(order: tuple[int, ...], found: list[str]) -> None:
    assert ordered(["4", "5", "6", "7"], order) == found
