"""All nodes of a job on one machine, each a real agent in its own process, and a supervisor that plays the cluster."""
