"""A deterministic test bed for jobs with parameter servers: whole jobs in virtual time, from one seed.

What decides is the product's own: the coordinator with the pure function of clusters, and what an agent does next with
its tasks. Simulated are clocks, the network, the nodes and TensorFlow: servers that hold a model, a chief that restores
and saves it, workers that wait at the gate. A run that fails is repeated exactly, with a trace of its events, by

    (cd tests && python -m cluster_simulation SEED)
"""
