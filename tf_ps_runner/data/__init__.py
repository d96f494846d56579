"""The data of a job: which task has which part of the input, how much of it was used, and access to the queues."""
