"""A deterministic test bed for coordination: whole jobs in virtual time, from one seed, with every fault there is.

What decides is the product's own: the master's `Jobs` and everything below it, the agent's `Standing`, `statement` and
`reconcile`, the node's `Search`, `Silence` and `Orders`. Simulated are clocks, processes, the network, the disk and the
workers. Where the records live in etcd the whole board of a node is the product's too, on an event loop that runs
asyncio's own tasks, and simulated is the store below it. A run that fails is repeated exactly, with a trace of its
events, by

    (cd tests && python -m simulation SEED [--etcd])
"""
