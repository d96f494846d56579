"""The matrix of `stalls.py`: the kinds of hangs and of innocent pauses, what came of a run, and the tables."""
