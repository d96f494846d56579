"""The event log of a job: what happened, when, and why, as JSON lines that remain after the job.

`records` are the events, which the agent, the workers' round and the features emit; `writer` writes their file.
`features/inspect` reads it and answers from it. The journal of a master
(`master/journal.py`) is another file: the plans of a job, for the next master.
"""
