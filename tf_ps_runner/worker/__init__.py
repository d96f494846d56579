"""What runs inside a process of TensorFlow, in the interpreter of the script.

It needs the standard library alone, of any Python from 3.9 on, and TensorFlow where the script has imported it; nothing
of `dlrover_run` is here. `worker_path/tf_ps_boot.py` makes this package importable there. Without `TF_PS_AGENT` in the
environment all of it keeps still, and a script runs as under plain TensorFlow.
"""
