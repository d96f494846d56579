"""A client of etcd v3 that keeps working while members die: it knows nothing of jobs."""
