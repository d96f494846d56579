"""What the nodes of a job are to run: a node of another job that meets at the same endpoint under the same name must
not wait as a spare of this one, and end as if it had run. Pure.

Only the entry point counts, by its file name: torchrun allows other arguments on each node, and paths differ between
machines. A node that the job still needs takes part with a warning, because some jobs run several programs on purpose.
"""

from __future__ import annotations

from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.records.plan import Plan


def job_program(plan: Plan, nodes: Nodes) -> str:
    """What the nodes of the round run; empty where that is unknown, or not the same on all of them."""
    programs = {state.report.program for member in plan.members if (state := nodes.get(member.key)) is not None}
    return programs.pop() if len(programs) == 1 else ""


def differs(job: str, own: str) -> bool:
    return bool(job and own and job != own)


def describe_other_program(name: str, job: str, own: str) -> str:
    """Why a node that would run `own` is no spare of the job `name`, and what to do."""
    return (
        f"the job {name!r} runs {job} and has all of its nodes, and this node would run {own}; give that an --rdzv-id "
        "or an --rdzv-endpoint of its own"
    )


def describe_mixed_programs(job: str, own: str) -> str:
    """A warning for a node that takes part with another program."""
    return f"the other nodes of the job run {job}, and this node runs {own}"
