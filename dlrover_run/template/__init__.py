"""What runs inside the template: the interpreter that imports once and from which workers are forked.

Of this folder the launcher imports `title` and `sendable` alone. The template's interpreter may be another Python than
the launcher's, one in which this project is not installed, so `agent/forkserver.py` starts it with the path of this
folder and the modules here find each other under the private package name `_dlrover_template`. They use the standard
library alone, and little of it: whatever they import is already loaded in every worker.
"""
