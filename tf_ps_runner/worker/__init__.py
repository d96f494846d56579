"""What runs inside a TensorFlow process, in the interpreter of the script.

It needs only the standard library of Python 3.9 or later, and TensorFlow if the script has imported it; nothing of
`dlrover_run` is here. `worker_path/tf_ps_boot.py` makes this package importable there. Without `TF_PS_AGENT` in the
environment it does nothing, and a script runs as under plain TensorFlow.
"""
