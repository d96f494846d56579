"""tf-ps-run: runs TensorFlow jobs with parameter servers, and restarts the processes that fail.

`hooks` and the modules that it imports run in the interpreter of the script; the others in the launcher, which never
imports TensorFlow. Nothing is imported here, so that a script loads only what it needs.
"""
