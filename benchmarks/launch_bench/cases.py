"""What is measured. A new case is one more function and one more entry beside its like."""

from __future__ import annotations

from launch_bench.one_node import ONE_NODE
from launch_bench.two_nodes import TWO_NODES

CASES = (*ONE_NODE, *TWO_NODES)
