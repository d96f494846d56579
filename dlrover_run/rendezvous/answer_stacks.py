"""A node's answer to a question for the stacks of its workers, for each backend."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dlrover_run.job_status.questions import StackQuery
from dlrover_run.job_status.stacks import NodeStacks
from dlrover_run.rendezvous.client import StackSource, ask_source
from dlrover_run.transport.messages import ReadStacks


async def answer_stacks(
    source: StackSource, query: StackQuery | ReadStacks, log: Callable[[str], None]
) -> NodeStacks | None:
    """The stacks of this node's workers, or their output, as the receiver will accept them; None if there are none that
    can be sent: the node then counts as one without an answer.

    Training does not depend on it, so nothing that goes wrong here may end the node: a worker may end meanwhile, or
    write what is no stack. `log` gets one line about that.
    """
    try:
        return msgspec.json.decode(msgspec.json.encode(await ask_source(source, query)), type=NodeStacks)
    except Exception as error:
        log(f"warning: the stacks of the workers of this node cannot be sent: {repr(error)[:300]}")
        return None
