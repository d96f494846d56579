"""A worker that imports nothing and waits, so that the memory of its launcher can be read in peace."""

import time

from reporting import open_gate, report, wait_at

gate = open_gate()
report("ready", time.monotonic_ns())
wait_at(gate)
