"""All nodes of a job on one machine: each a real agent in a process of its own, and a supervisor in a cluster's part."""
