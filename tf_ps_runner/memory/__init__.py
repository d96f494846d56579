"""The memory limits of tasks: how they are enforced, and how an out-of-memory kill is detected."""

MIB = 1 << 20
"""Bytes of a MiB, in which the records count."""
