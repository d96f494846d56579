"""The parts of `benchmarks/recovery.py`: the faults, what follows each of them, the sums, the record and the plot."""
