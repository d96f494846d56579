"""The parts of `benchmarks/node_check.py`."""
