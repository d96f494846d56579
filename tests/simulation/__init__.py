"""A deterministic simulation of coordination: whole jobs in virtual time, from one seed, with faults of every kind.

The code of the product runs: the sessions and jobs of the master, the clients of a master and of etcd, the agent's
`NodeState`, `build_report` and `reconcile`, on an event loop that runs asyncio's own tasks. Simulated are clocks,
processes, network connections, the disk, the key-value store of etcd, and the tasks of both programs. The following
command repeats a failed run exactly, and prints a trace of its events:

(cd tests && python -m simulation SEED [--etcd] [--parameter-servers])
"""
