"""The parts of `benchmarks/tf_recovery.py`: who takes part, what breaks, and the sums."""
