"""Code that a job has compiled outlives its restarts, and with `--job-cache` the job: the caches of torch.compile,
Triton and CUDA are in one directory on a disk of the node (`node`; `variables` says which variable points where).
"""
