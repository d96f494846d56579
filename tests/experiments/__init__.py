"""Published experiments with systems of this kind, each as a test: a local cluster trains the real MNIST example, a
test injects a fault, and the training is compared with a run without faults.

`recorded_mnist` is the worker, `history` checks its reports, `experiment` runs it.
"""
