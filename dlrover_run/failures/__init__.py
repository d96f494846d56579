"""Failures: how a worker exited, why, which worker failed first, and the text that describes it."""

from dlrover_run.failures.causes import (
    MAX_SUMMARY,
    Cause,
    cause_of,
    describe_exit,
    describe_exit_code,
    describe_signal,
    failed_before,
    left_no_message,
    lost_peer,
    may_be_oom_kill,
    raised_own_error,
    root_cause,
    summarize_error,
    trace_lines,
)
from dlrover_run.failures.collective_timeouts import LiveWorker, find_absent_workers, inspect_worker
from dlrover_run.failures.error_file import copy_root_cause, read_error_file
from dlrover_run.failures.oom_kills import OomKillCounters

__all__ = [
    "MAX_SUMMARY",
    "Cause",
    "LiveWorker",
    "OomKillCounters",
    "cause_of",
    "copy_root_cause",
    "describe_exit",
    "describe_exit_code",
    "describe_signal",
    "failed_before",
    "find_absent_workers",
    "inspect_worker",
    "left_no_message",
    "lost_peer",
    "may_be_oom_kill",
    "raised_own_error",
    "read_error_file",
    "root_cause",
    "summarize_error",
    "trace_lines",
]
