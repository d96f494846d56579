"""Failures: how a worker ended, what is known of it, which end came first, and how to say it in words."""

from dlrover_run.failures.absence import LiveWorker, look_at, waited_for
from dlrover_run.failures.causes import (
    MAX_WORDS,
    describe_end,
    error_words,
    failed_before,
    lost_its_peer,
    process_end,
    root_cause,
    said_nothing,
    signal_words,
    suspects_memory,
    trace_lines,
)
from dlrover_run.failures.error_file import copy_root_cause, read_error_file
from dlrover_run.failures.memory_watch import MemoryWatch

__all__ = [
    "MAX_WORDS",
    "LiveWorker",
    "MemoryWatch",
    "copy_root_cause",
    "describe_end",
    "error_words",
    "failed_before",
    "look_at",
    "lost_its_peer",
    "process_end",
    "read_error_file",
    "root_cause",
    "said_nothing",
    "signal_words",
    "suspects_memory",
    "trace_lines",
    "waited_for",
]
