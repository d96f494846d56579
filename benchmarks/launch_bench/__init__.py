"""The parts of `benchmarks/launch.py`: rivals, the room they run in, the cases, the sums and the report."""
