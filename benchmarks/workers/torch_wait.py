"""A worker that has imported torch and waits, so that the memory of the whole job can be read."""

import torch  # noqa: F401 - its memory is what is measured
from reporting import open_gate, report, wait_at

gate = open_gate()
report("ready")
wait_at(gate)
