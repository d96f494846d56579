"""What a check process runs: it takes orders of the agent's and tries what this node's devices and links can do.

The user's interpreter, which may be another Python than the launcher's, is started with the path of this folder, or
forked from a template to run it; so the modules here use the standard library and torch alone, and nobody else imports
them. One order is one line of JSON on standard input (`orders.py`), one answer one line on what was standard output.
"""
