"""A worker that imports nothing and waits, so that the memory of its launcher can be read."""

from reporting import open_gate, report, wait_at

gate = open_gate()
report("ready")
wait_at(gate)
