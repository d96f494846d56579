"""Reads the Python stacks of another process from outside: from its memory, by the layouts of CPython.

Nothing runs in that process, no signal is sent to it, and its memory is opened for reading only. So a look can not end
it, whatever it does at that moment: `faulthandler`, which walks the frames of a thread that changes them, can
(python/cpython#140815).
"""
