"""tf-ps-run: keeps TensorFlow jobs with parameter servers alive while processes and machines come and go.

`hooks`, and what it needs, is for the interpreter of the script; everything else is the launcher's, which never imports
TensorFlow. Nothing is imported here, so that a script gets only what it asks for.
"""
