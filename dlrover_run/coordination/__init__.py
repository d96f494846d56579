"""Coordination: the records that the processes of a job agree on, and the pure function that plans."""
