"""Inspects this machine before a health check, in a thread, while the agent does other work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable

from dlrover_run.devices import NodeProblem
from dlrover_run.devices.health import find_node_problems
from dlrover_run.process_tree import signals
from dlrover_run.spec import JobSpec


async def severe_node_problems(spec: JobSpec, warn: Callable[[str], None]) -> tuple[str, ...]:
    """The problems that make this machine unfit, one sentence each; `warn` prints the problems that may be harmless."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[tuple[NodeProblem, ...]] = loop.create_future()

    def inspect() -> None:
        try:
            problems = find_node_problems(spec.workers_per_node, spec.logs.log_dir, os.environ, spec.gpu_each)
        except Exception as error:
            # For example an old pynvml that lacks a function. The devices are tested all the same.
            problems = (NodeProblem(f"the look at this machine failed: {type(error).__name__}: {error}"),)
        with contextlib.suppress(RuntimeError):  # The loop may be closed by now.
            loop.call_soon_threadsafe(finish, problems)

    def finish(problems: tuple[NodeProblem, ...]) -> None:
        if not found.done():
            found.set_result(problems)

    # A driver may take seconds to answer, and a broken one never answers: the agent does not join this thread.
    with signals.blocked_in_new_threads():
        threading.Thread(target=inspect, name="health", daemon=True).start()
    problems = await found
    for problem in problems:
        if not problem.severe:
            warn(f"warning: {problem.text}")
    return tuple(problem.text for problem in problems if problem.severe)
