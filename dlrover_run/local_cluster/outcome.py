"""What the command answers to a program that called for it, from what its nodes had to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dlrover_run import exit_codes
from dlrover_run.agent.result import JobResult


def verdict_of(code: int, verdicts: Sequence[JobResult], last_said: str) -> JobResult:
    """The verdict on a job that ends with `code`, as `supervision.exit_code` has it.

    `verdicts` are those of the nodes in the order of their ends, of which some may have been replaced; `last_said` is
    the last sentence at the console, for a job that none of them can tell of.
    """
    if code == exit_codes.SUCCESS:
        return JobResult(code, last_said)
    deciding = [verdict for verdict in verdicts if verdict.exit_code == code]
    # Who has the worker at hand that failed knows most; others only heard of it.
    with_root = [verdict for verdict in deciding if verdict.root is not None]
    found = next(iter([*with_root, *deciding]), None)
    if found is None:
        return JobResult(code, last_said, error=last_said)
    failed = [verdict for verdict in verdicts if verdict.root is not None or verdict.failure is not None]
    ends = {end.rank: end for verdict in failed for end in verdict.ends}
    return replace(found, ends=tuple(ends[rank] for rank in sorted(ends)))
