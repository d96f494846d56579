"""The published experiments with this kind of system, each as a test: a local cluster trains the real MNIST example, a
fault is put in, and what was trained is compared with what a run without any fault would have trained.

`recorded_mnist` is the worker, `history` checks what it reports, `experiment` runs it.
"""
