"""The short look at this machine that comes before a node check, beside whatever else the agent does."""

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


async def find_ailments(spec: JobSpec, say: Callable[[str], None]) -> tuple[str, ...]:
    """What makes this machine unfit, a sentence each; `say` prints what may only be a nuisance."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[tuple[NodeProblem, ...]] = loop.create_future()

    def look() -> None:
        try:
            ailments = find_node_problems(spec.workers_per_node, spec.logs.log_dir, os.environ, spec.gpu_each)
        except Exception as error:
            # Such as an old pynvml, which lacks a function. The devices are tried all the same.
            ailments = (NodeProblem(f"the look at this machine failed: {type(error).__name__}: {error}"),)
        with contextlib.suppress(RuntimeError):  # The loop may have been closed meanwhile.
            loop.call_soon_threadsafe(tell, ailments)

    def tell(ailments: tuple[NodeProblem, ...]) -> None:
        if not found.done():
            found.set_result(ailments)

    # A driver may take seconds to answer, and a broken one never does: nobody waits for this thread at the end.
    with signals.blocked_in_new_threads():
        threading.Thread(target=look, name="health", daemon=True).start()
    ailments = await found
    for ailment in ailments:
        if not ailment.severe:
            say(f"warning: {ailment.text}")
    return tuple(ailment.text for ailment in ailments if ailment.severe)
