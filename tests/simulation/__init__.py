"""A deterministic test bed for coordination: whole jobs in virtual time, from one seed, with every fault there is.

The product's own code runs: the master's sessions and jobs, the clients of a master and of etcd, the agent's
`NodeState`, `build_report` and `reconcile`, on an event loop that runs asyncio's own tasks. Simulated are clocks,
processes, the connections of the network, the disk, the key-value store of etcd, and the tasks of both programs. A run
that fails is repeated exactly, with a trace of its events, by

(cd tests && python -m simulation SEED [--etcd] [--parameter-servers])
"""
