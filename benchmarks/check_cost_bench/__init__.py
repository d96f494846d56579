"""The parts of `benchmarks/check_cost.py`: who takes part, the cases, and what one time is more than another."""
