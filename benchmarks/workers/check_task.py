"""The node check without a job: `check_task.py N` checks this node with N workers, from a template that is warm.

It is the agent's part of the check, with the tasks that a coordinator gives the only node of a job: compute, link the
workers of the node if there are several, then release the node for the workers. The clock starts when the template has
imported torch and waits.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TypeVar

from reporting import report

from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.node_check.decision.model import (
    CheckKey,
    CheckTask,
    ComputeResult,
    LinkEnd,
    LinkResults,
    NodeCheckReport,
)
from dlrover_run.features.node_check.node.check_processes import PRELOAD
from dlrover_run.features.node_check.node.check_runner import NodeCheckRunner
from dlrover_run.features.node_check.rules import CHECK_ONCE, NodeCheckRules
from dlrover_run.processes import tree
from dlrover_run.rendezvous import kinds
from dlrover_run.spec import Entrypoint, JobSpec
from dlrover_run.workers.starter import Starter

ADDRESS = "127.0.0.1"
TIMEOUT = 60.0

T = TypeVar("T")


async def _no_problems() -> Sequence[str]:
    return ()


async def _found(changed: asyncio.Event, find: Callable[[], T | None]) -> T:
    while (found := find()) is None:
        await changed.wait()
        changed.clear()
    return found


async def check(workers: int) -> None:
    """Check this node once, and report the end of each step."""
    entrypoint = Entrypoint("script", __file__, python=sys.executable)
    rules = JobRules(parts=(NodeCheckRules(check=CHECK_ONCE),))
    place = kinds.Master("127.0.0.1", 1)
    spec = JobSpec(
        entrypoint, "check-cost", workers, rules, rendezvous=place, start_method="forkserver", preload=PRELOAD
    )
    starter = Starter(spec, print)
    changed = asyncio.Event()
    runner = NodeCheckRunner(spec, starter, nullcontext, changed.set, _no_problems, print)
    blank = NodeReport(node_id="n", incarnation="i", host="h", address=ADDRESS, port=1, workers=workers)
    try:
        await starter.prestarted(os.environ)
        report("task-begins")

        def computed() -> ComputeResult | None:
            runner.update(None)
            return NodeCheckReport.get(runner.add_to_report(blank).parts).compute_result

        if problem := (await _found(changed, computed)).problem:
            raise SystemExit(problem)
        report("task-computed")
        if workers > 1:
            end = LinkEnd(0, ADDRESS, NodeCheckReport.get(runner.add_to_report(blank).parts).check_port, workers)
            key = CheckKey(epoch=1, number=1, round=0)
            task = CheckTask(key=key, node=0, compute=False, links=((end,),), timeout=TIMEOUT)

            def linked() -> LinkResults | None:
                runner.update(task)
                return NodeCheckReport.get(runner.add_to_report(blank).parts).link_result

            if problem := (await _found(changed, linked)).results[0].problem:
                raise SystemExit(problem)
        report("task-linked")
        await runner.suspend()
        report("task-ended")
    finally:
        await runner.close()
        await starter.close()


tree.become_subreaper()
asyncio.run(check(int(sys.argv[1])))
