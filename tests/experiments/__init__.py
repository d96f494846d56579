"""The published experiments with this kind of system, each as a test: a local cluster trains the real MNIST example, a
fault is put in, and what was trained is held against what a run without any fault would have trained.

`recorded_mnist` is the worker, `records` is what it tells, `history` judges it, `experiment` runs it. Each experiment
leaves its timeline in `timelines/`, or in the folder that the variable EXPERIMENT_TIMELINES names.
"""
