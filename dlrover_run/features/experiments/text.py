"""The codes of what a restart changes, and of what a failure follows."""

from __future__ import annotations

from dlrover_run.words.reasons import ReasonCode, register


class ExperimentsCode(ReasonCode):
    DEVICES = (
        "the same failure as {seconds:.0f} s before; ranks {one} and {other} exchange their GPUs, to see whether it "
        "follows the GPU"
    )
    NODES = (
        "the same failure as {seconds:.0f} s before; {one} and {other} exchange their ranks, to see whether it follows "
        "the node"
    )
    CHECKPOINT = (
        "the same failure as {seconds:.0f} s before; the workers begin from a checkpoint before {step}, to see whether "
        "it comes from that one"
    )
    GPU = "it follows {device} of {node} ({there} of {failures:#failure} with it): the node leaves"
    NODE = "it follows {node} ({there} of {failures:#failure} there): the node leaves"
    NODE_DEVICE = "it follows {node}, each time on its {device} ({failures:#failure}): the node leaves"
    RANK = "it follows rank {rank} ({there} of {failures:#failure})"
    MOVED = ", on other devices or nodes too"
    CODE = "it comes with everything ({failures:#failure})"
    FROM_CHECKPOINT = "it comes from checkpoint {step}"
    AT_STEP = ", at step {step}"
    OF_CODE = ": the code"
    OF_RANK = ": its data, or code of its own"
    OR = ", or {names}"
    STOPPED = "stopped instead of {left} more {left:restart|restarts}"


register(ExperimentsCode, "experiments.")
