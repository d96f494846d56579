"""Failures: how a worker ended, what is known of it, which end came first, and how to say it in words."""

from dlrover_run.failures.causes import (
    MAX_WORDS,
    describe_end,
    error_words,
    failed_before,
    lost_its_peer,
    process_end,
    root_cause,
    signal_words,
    suspects_memory,
    trace_lines,
)
from dlrover_run.failures.error_file import copy_root_cause, read_error_file
from dlrover_run.failures.memory_watch import MemoryWatch

__all__ = [
    "MAX_WORDS",
    "MemoryWatch",
    "copy_root_cause",
    "describe_end",
    "error_words",
    "failed_before",
    "lost_its_peer",
    "process_end",
    "read_error_file",
    "root_cause",
    "signal_words",
    "suspects_memory",
    "trace_lines",
]
