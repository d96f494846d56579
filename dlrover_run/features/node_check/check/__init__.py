"""The program of a check process: it measures the devices and links of a node at the agent's request (`protocol.py`).

The user's interpreter, which may be another Python than the launcher's, is started with the path of this folder, or
forked from a template to run it. So the modules here use only the standard library and torch, and no other module
imports them.
"""
