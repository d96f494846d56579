"""How many nodes a job should have, from the throughput that it has at each size. Pure."""
