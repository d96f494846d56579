"""What the entry point `dlrover` of the group `torchrun.handlers` names.

Every process that imports torch.distributed.elastic loads this module, worker or not, so it imports nothing: what the
rendezvous needs is loaded when somebody asks for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
    from torch.distributed.elastic.rendezvous.api import RendezvousHandlerCreator


def handler_creator() -> RendezvousHandlerCreator:
    """The function that makes a handler of this backend."""
    return _create


def _create(params: RendezvousParameters) -> RendezvousHandler:
    from dlrover_run.torchrun.handler import DlroverRendezvous

    return DlroverRendezvous(params)
