"""A restart as an experiment: a failure that comes again is traced to a GPU, a node, a rank's data, a checkpoint or the
code, by one change for each round.

`kinds` says when two failures are the same. Its rules for people are in docs/experiments.md.
"""
