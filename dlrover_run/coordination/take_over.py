"""Whether a plan that was read from a journal or from etcd can be continued. It may decode and still not fit together:
written by hand, by another version, or damaged in a way that no checksum covers."""

from __future__ import annotations

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.words.log_level import MAX_ERROR_TEXT


def misfit(rules: JobRules, plan: Plan) -> str | None:
    """Why no coordinator can continue with this plan, a clause; None if one can.

    A trial in memory, which finds each index or name that leads nowhere: the plan is taken over, its nodes report, and
    everything that is made from a plan is made once. Called before a plan is taken over.
    """
    try:
        trial = Coordinator(rules, 0.0, plan.epoch + 1, plan)
        trial.rehearse(0.0)
        for member in plan.members:
            ranks = trial.ranks(member.key)
            trial.receive(
                NodeReport(
                    node_id=member.node_id,
                    incarnation=member.incarnation,
                    host=member.host,
                    address="",
                    port=0,
                    workers=member.workers,
                    role=member.role,
                    phase=NodePhase.WAITING if ranks is None else NodePhase.RUNNING,
                    ranks=ranks,
                ),
                0.0,
            )
        trial.rehearse(0.0)
    except Exception as error:
        return f"not a plan that fits together: {repr(error)[:MAX_ERROR_TEXT]}"
    return None
