"""The entry point `dlrover` of the group `torchrun.handlers`.

Every process that imports torch.distributed.elastic loads this module, worker or not, so it imports nothing: the
rendezvous is loaded when a handler is created.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
    from torch.distributed.elastic.rendezvous.api import RendezvousHandlerCreator


def handler_creator() -> RendezvousHandlerCreator:
    return _create


def _create(params: RendezvousParameters) -> RendezvousHandler:
    from dlrover_run.torchrun.handler import DlroverRendezvous

    return DlroverRendezvous(params)
