"""Reads the events of a job: why it ended, where its time went, what is slow. Nothing here runs in a launcher."""
