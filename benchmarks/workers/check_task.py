"""The node check itself, without a job: `check_task.py N` checks this node with N workers from a template that is warm.

It is the part of the agent that does it in a job, told what a coordinator tells the only node of one: compute, then the
link within the node where there are several workers, then make room for the workers. The clock starts when the template
has read torch and waits.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TypeVar

from reporting import report

from dlrover_run.agent.health_check import PRELOAD, HealthCheckRunner
from dlrover_run.agent.starter import Starter
from dlrover_run.coordination.model import NodeReport
from dlrover_run.coordination.rules import CHECK_ONCE, JobRules
from dlrover_run.policies.health.model import CheckKey, CheckTask, ComputeResult, LinkEnd, LinkResults
from dlrover_run.process_tree import tree
from dlrover_run.spec import Entrypoint, JobSpec

ADDRESS = "127.0.0.1"
TIMEOUT = 60.0

T = TypeVar("T")


async def _nothing_ails() -> Sequence[str]:
    return ()


async def _heard(news: asyncio.Event, find: Callable[[], T | None]) -> T:
    while (found := find()) is None:
        await news.wait()
        news.clear()
    return found


async def check(workers: int) -> None:
    """Check this node once, and report when each step of that was over."""
    entrypoint = Entrypoint("script", __file__, python=sys.executable)
    rules = JobRules(check=CHECK_ONCE)
    spec = JobSpec(
        entrypoint, "check-cost", workers, rules, backend="master", start_method="forkserver", preload=PRELOAD
    )
    starter = Starter(spec, print)
    news = asyncio.Event()
    part = HealthCheckRunner(spec, starter, nullcontext, news.set, _nothing_ails, print)
    blank = NodeReport(node_id="n", incarnation="i", host="h", address=ADDRESS, port=1, workers=workers)
    try:
        await starter.warmed(os.environ)
        report("task-begins", time.monotonic_ns())
        part.update(None)

        def computed() -> ComputeResult | None:
            part.update(None)
            return part.add_to_report(blank).compute_result

        if problem := (await _heard(news, computed)).problem:
            raise SystemExit(problem)
        report("task-computed", time.monotonic_ns())
        if workers > 1:
            end = LinkEnd(0, ADDRESS, part.add_to_report(blank).check_port, workers)
            key = CheckKey(epoch=1, number=1, round=0)
            task = CheckTask(key=key, node=0, compute=False, links=((end,),), timeout=TIMEOUT)

            def linked() -> LinkResults | None:
                part.update(task)
                return part.add_to_report(blank).link_result

            if problem := (await _heard(news, linked)).results[0].problem:
                raise SystemExit(problem)
        report("task-linked", time.monotonic_ns())
        await part.suspend()
        report("task-ended", time.monotonic_ns())
    finally:
        await part.close()
        await starter.close()


tree.become_subreaper()
asyncio.run(check(int(sys.argv[1])))
