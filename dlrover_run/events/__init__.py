"""The event log of a job: what happened, when, and why, as JSON lines that remain after the job.

`records` are the events, which the agent, the workers' round and the features emit; `writer` writes their file, and
`reader` reads it. `ledger` says where the time of each worker's place went, after the end and while the job runs
(`live`). `features/inspect` answers questions from them. The journal of a master
(`master/journal.py`) is another file: the plans of a job, for the next master.
"""
