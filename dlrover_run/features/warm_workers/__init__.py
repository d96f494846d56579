"""Warm workers (`--warm-workers`): beside each worker a process waits that has imported what the worker has, and has
opened its device. When a worker has died it takes the rank, so a restart waits for neither.

`node` owns these processes, which `workers/ahead.py` forks from the template; `choice` decides, pure, which are needed
and which may be used.
"""
