"""A training script whose first line comes after `import torch`."""

import time

import torch  # noqa: F401 - importing it is what is measured

first_line = time.monotonic_ns()

from reporting import report  # noqa: E402 - the clock is read first, this is not part of what is measured

report("first_line", first_line)
