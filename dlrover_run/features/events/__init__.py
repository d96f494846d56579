"""The event log of a job: what happened, when, and why, as JSON lines that remain after the job.

`records` are the events, `writer` and `reader` their files. What is read is answered by pure functions: `ledger`
accounts for every second of every rank, `why` explains restarts, slowness and starts. The journal of a master
(`master/journal.py`) is another file: the plans of a job, for the next master.
"""
