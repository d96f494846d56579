"""What runs inside the template: the interpreter that imports once and from which workers are forked.

The launcher itself imports only `process_title` and `termination_signals`. The template's interpreter may be another
Python than the launcher's, in which this project is not installed. So `workers/template_client.py` starts it with the
path of this folder, and the modules import each other from the package `_dlrover_template` (this `__init__` is not
executed there). They use only the standard library, and little of it: all that they import is loaded in every worker.
"""
