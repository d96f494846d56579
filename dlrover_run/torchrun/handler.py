"""The rendezvous handler that torchrun's agent asks for rounds: ours, between the coordinator and that agent.

Torchrun asks for a new round when a worker of its own has failed, or when `num_nodes_waiting` says that there is one;
it never says which. A round that nobody else has asked for yet is one that a failure is asking for.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils.logging import get_logger

from dlrover_run import cli
from dlrover_run.agent.host import display_name
from dlrover_run.command_line import credentials, rendezvous_options
from dlrover_run.coordination.records import OVER, Failure, NodePhase, PlanPhase, RankAssignment
from dlrover_run.launch_config import LaunchConfig
from dlrover_run.spec import JobSpec, SpecError
from dlrover_run.torchrun.node_thread import NodeSnapshot, NodeThread
from dlrover_run.torchrun.store import RoundStore, StoreFailure, is_superseded, wait_for_host

ASKED_AGAIN = "asked for a new round: torchrun restarts its workers"
LOST_STORE = "lost the store at which the nodes of the round meet"
GAVE_UP = "was given up: torchrun does not restart its workers any more"

# By its name it gets torchrun's format and LOGLEVEL.
_log: logging.Logger = get_logger("torch.distributed.elastic.rendezvous.dlrover")


class DlroverRendezvous(RendezvousHandler):
    """One torchrun's part in a job. Raises SpecError, which is a ValueError, when it cannot be had as asked for.

    Nothing is started and nobody called before the first `next_rendezvous`.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self._backend = params.backend
        self._run_id = params.run_id
        spec = job_spec(params, _log.warning)
        self._patience = spec.rules.join_timeout
        self._membership = NodeThread(spec, _log.warning)
        self._node_name = display_name(spec)
        self._seat: RankAssignment | None = None
        self._closed = False

    @property
    def use_agent_store(self) -> bool:
        """Workers meet at the store of their round, which no other round has."""
        return True

    def get_backend(self) -> str:
        """The name that torchrun knows this by."""
        return self._backend

    def get_run_id(self) -> str:
        """The job's name."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a place in a round and for all others of that round.

        Raises RendezvousTimeoutError when the job did not get enough nodes in time, RendezvousConnectionError when this
        node can take no part, RendezvousClosedError when the job has finished and RendezvousError when the store
        cannot be hosted.
        """
        if self._closed:
            raise RendezvousClosedError("this node has left the job.")
        self._membership.join()
        self._ask()
        tried = self._seat
        while True:
            seat = self._await_seat(tried)
            deadline = time.monotonic() + self._patience
            store = self._enter(seat, deadline)
            if store is not None:
                self._seat = seat
                self._membership.tell(NodePhase.RUNNING, seat.key)
                place = RendezvousStoreInfo(seat.store_address, seat.store_port)
                return RendezvousInfo(store, seat.node_rank, seat.nodes, place)
            if not self._membership.wait(partial(is_superseded, seat), max(0.0, deadline - time.monotonic())):
                raise RendezvousTimeoutError(
                    f"not all {seat.nodes} nodes of round {seat.round} came to its store at {seat.store_address}:"
                    f"{seat.store_port} within {self._patience:g} s (--rdzv-conf join_timeout)."
                )
            tried = seat

    def num_nodes_waiting(self) -> int:
        """1 when torchrun shall stop its workers and ask for the next round, else 0."""
        view = self._membership.view
        if self._seat is None or view.problem is not None or view.wanted.phase is PlanPhase.FINISHED:
            return 0
        return int(is_superseded(self._seat, view))

    def is_closed(self) -> bool:
        """Whether there is no further round for this node."""
        return self._closed or self._membership.view.wanted.phase in OVER

    def set_closed(self) -> None:
        """Leave the job. The others go on, as they do whenever a node leaves."""
        self._closed = True
        self._membership.leave()

    def shutdown(self) -> bool:
        """Leave the job, in a bounded time. Torchrun calls this unless a signal ended it."""
        self._closed = True
        seat = self._seat
        self._membership.leave(None if seat is None else self._failure(seat, GAVE_UP))
        return True

    def _ask(self) -> None:
        """Ask for a new round, unless there is one that torchrun has heard of or will."""
        if self._seat is not None and not is_superseded(self._seat, self._membership.view):
            self._membership.tell(NodePhase.FAILED, self._seat.key, self._failure(self._seat, ASKED_AGAIN))

    def _await_seat(self, tried: RankAssignment | None) -> RankAssignment:
        """A place in another round than the one that was tried last."""
        waited_for = ""

        def is_settled(view: NodeSnapshot) -> bool:
            if view.problem is not None or view.wanted.phase in OVER:
                return True
            return view.seat is not None and (tried is None or view.seat.key != tried.key)

        def is_news(view: NodeSnapshot) -> bool:
            waiting = view.wanted.waiting
            return is_settled(view) or (waiting is not None and waiting.text != waited_for)

        while True:
            self._membership.wait(is_news)
            view = self._membership.view
            if is_settled(view):
                break
            assert view.wanted.waiting is not None, "else there is no news"
            waited_for = view.wanted.waiting.text
            _log.info("waiting: %s", waited_for)
        if view.wanted.phase is PlanPhase.FAILED:
            raise RendezvousTimeoutError(view.wanted.reason)
        if view.wanted.phase is PlanPhase.FINISHED:
            raise RendezvousClosedError(f"the job has finished: {view.wanted.reason}")
        if view.problem is not None:
            raise RendezvousConnectionError(view.problem)
        assert view.seat is not None, "only that is left"
        _log.info(
            "round %d, node rank %d of %d: %s",
            view.seat.round,
            view.seat.node_rank,
            view.seat.nodes,
            view.wanted.reason,
        )
        return view.seat

    def _enter(self, seat: RankAssignment, deadline: float) -> RoundStore | None:
        """The store of that round once all its nodes are there; None when the round came to nothing."""
        try:
            if seat.node_rank == 0:
                store = self._host(seat)
            else:
                store = RoundStore(seat, self._membership) if wait_for_host(seat, self._membership, deadline) else None
            return store if store is not None and store.meet(deadline) else None
        except StoreFailure:
            # If not its host has gone but only a connection to it, nobody else would ask for another round.
            self._membership.tell(NodePhase.FAILED, seat.key, self._failure(seat, LOST_STORE, lost_peer=True))
            return None

    def _host(self, seat: RankAssignment) -> RoundStore | None:
        try:
            port = self._membership.take_port(seat.key)
            if port is None:
                return None
            try:
                return RoundStore(seat, self._membership)
            finally:
                port.release()
        except (OSError, SpecError, StoreFailure) as error:
            reason = str(error).splitlines()[0]
            raise RendezvousError(
                f"the store of this round cannot be hosted at {seat.store_address}:{seat.store_port} ({reason}): "
                "name an address that is this machine's own with --local-addr."
            ) from error

    def _failure(self, seat: RankAssignment, what: str, lost_peer: bool = False) -> Failure:
        return Failure(seat.first_rank, self._node_name, what, lost_peer)


RESTARTS = 1_000_000
"""How often the job may restart: always, for each torchrun keeps a count of its own and leaves when it has run out."""

_VARIABLES = (
    *rendezvous_options.RANK_VARIABLES,
    *rendezvous_options.ID_VARIABLES,
    rendezvous_options.MASTER_VARIABLE,
    *credentials.VARIABLES,
)


def job_spec(params: RendezvousParameters, warn: Callable[[str], None]) -> JobSpec:
    """The job of one node as the board and the coordinator need it; its workers are torchrun's business.

    The secrets leave this process's environment, which torchrun copies for its workers. Raises SpecError.
    """
    config = LaunchConfig(
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        # torchrun finds out by itself how many workers each node has.
        nproc_per_node=1,
        run_id=params.run_id,
        rdzv_endpoint=params.endpoint,
        rdzv_backend="master",
        rdzv_configs=params.config,
        max_restarts=RESTARTS,
        local_addr=params.local_addr,
    )
    environ = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    try:
        spec = cli.parse([*config.flags(), "--no-python", sys.executable], environ, warn=warn)
    finally:
        credentials.scrub_environment()
    # How often is too often is for each torchrun to say.
    return replace(spec, rules=replace(spec.rules, restart_window=0.0, early_failure_limit=0))
