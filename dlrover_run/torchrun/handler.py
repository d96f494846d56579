"""The rendezvous handler of torchrun's agent, between that agent and the coordinator.

Torchrun requests a new round when one of its workers has failed, or when `num_nodes_waiting` reports that there is one;
it does not say which. If there is no newer round yet, the request is taken for a failure.
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
from dlrover_run.coordination.model import OVER, Failure, NodePhase, PlanPhase, RankAssignment
from dlrover_run.launch_config import LaunchConfig
from dlrover_run.spec import JobSpec, SpecError
from dlrover_run.torchrun.node_thread import NodeSnapshot, NodeThread
from dlrover_run.torchrun.store import RoundStore, StoreFailure, is_superseded, wait_for_host

RESTART_REQUESTED = "requested a new round: torchrun restarts its workers"
STORE_LOST = "lost its connection to the store of the round"
GIVEN_UP_BY_TORCHRUN = "gave up: torchrun does not restart its workers any more"

# A logger of this name has torchrun's format and LOGLEVEL.
_log: logging.Logger = get_logger("torch.distributed.elastic.rendezvous.dlrover")


class DlroverRendezvous(RendezvousHandler):
    """The rendezvous of one torchrun. Raises SpecError, which is a ValueError, if its parameters are wrong.

    Nothing is started and no connection is made before the first `next_rendezvous`.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self._backend = params.backend
        self._run_id = params.run_id
        spec = job_spec(params, _log.warning)
        self._join_timeout = spec.rules.join_timeout
        self._node = NodeThread(spec, _log.warning)
        self._node_name = display_name(spec)
        self._seat: RankAssignment | None = None
        self._closed = False

    @property
    def use_agent_store(self) -> bool:
        """True: each round has a store of its own, and its workers use that."""
        return True

    def get_backend(self) -> str:
        """The name of this backend in torchrun."""
        return self._backend

    def get_run_id(self) -> str:
        """The job's name."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a node rank in a round and for all other nodes of that round.

        Raises RendezvousTimeoutError if the job did not get enough nodes in time, RendezvousConnectionError if this
        node cannot take part, RendezvousClosedError if the job has finished, RendezvousError if the store cannot be
        hosted.
        """
        if self._closed:
            raise RendezvousClosedError("this node has left the job.")
        self._node.join()
        self._request_round()
        tried = self._seat
        while True:
            seat = self._wait_for_seat(tried)
            deadline = time.monotonic() + self._join_timeout
            store = self._join_store(seat, deadline)
            if store is not None:
                self._seat = seat
                self._node.report(NodePhase.RUNNING, seat.key)
                place = RendezvousStoreInfo(seat.store_address, seat.store_port)
                return RendezvousInfo(store, seat.node_rank, seat.nodes, place)
            if not self._node.wait(partial(is_superseded, seat), max(0.0, deadline - time.monotonic())):
                raise RendezvousTimeoutError(
                    f"not all {seat.nodes} nodes of round {seat.round} connected to its store at {seat.store_address}:"
                    f"{seat.store_port} within {self._join_timeout:g} s (--rdzv-conf join_timeout)."
                )
            tried = seat

    def num_nodes_waiting(self) -> int:
        """1 if torchrun must stop its workers and request the next round, else 0."""
        view = self._node.view
        if self._seat is None or view.problem is not None or view.assignment.phase is PlanPhase.FINISHED:
            return 0
        return int(is_superseded(self._seat, view))

    def is_closed(self) -> bool:
        """Whether there is no further round for this node."""
        return self._closed or self._node.view.assignment.phase in OVER

    def set_closed(self) -> None:
        """Leave the job. The other nodes continue, as whenever a node leaves."""
        self._closed = True
        self._node.leave()

    def shutdown(self) -> bool:
        """Leave the job within `LEAVE_TIMEOUT`. Torchrun calls this unless a signal ended it."""
        self._closed = True
        seat = self._seat
        self._node.leave(None if seat is None else self._failure(seat, GIVEN_UP_BY_TORCHRUN))
        return True

    def _request_round(self) -> None:
        """Request a new round, unless there is a newer one already."""
        if self._seat is not None and not is_superseded(self._seat, self._node.view):
            self._node.report(NodePhase.FAILED, self._seat.key, self._failure(self._seat, RESTART_REQUESTED))

    def _wait_for_seat(self, tried: RankAssignment | None) -> RankAssignment:
        """Wait for the node rank in another round than the one that was tried last."""
        waited_for = ""

        def is_settled(view: NodeSnapshot) -> bool:
            if view.problem is not None or view.assignment.phase in OVER:
                return True
            return view.seat is not None and (tried is None or view.seat.key != tried.key)

        def is_news(view: NodeSnapshot) -> bool:
            waiting = view.assignment.waiting
            return is_settled(view) or (waiting is not None and waiting.text != waited_for)

        while True:
            self._node.wait(is_news)
            view = self._node.view
            if is_settled(view):
                break
            assert view.assignment.waiting is not None, "is_news was true for it"
            waited_for = view.assignment.waiting.text
            _log.info("waiting: %s", waited_for)
        if view.assignment.phase is PlanPhase.FAILED:
            raise RendezvousTimeoutError(view.assignment.reason)
        if view.assignment.phase is PlanPhase.FINISHED:
            raise RendezvousClosedError(f"the job has finished: {view.assignment.reason}")
        if view.problem is not None:
            raise RendezvousConnectionError(view.problem)
        assert view.seat is not None, "is_settled was true for it"
        _log.info(
            "round %d, node rank %d of %d: %s",
            view.seat.round,
            view.seat.node_rank,
            view.seat.nodes,
            view.assignment.reason,
        )
        return view.seat

    def _join_store(self, seat: RankAssignment, deadline: float) -> RoundStore | None:
        """The store of that round once all its nodes are connected; None if the round did not begin."""
        try:
            if seat.node_rank == 0:
                store = self._host(seat)
            else:
                store = RoundStore(seat, self._node) if wait_for_host(seat, self._node, deadline) else None
            return store if store is not None and store.meet(deadline) else None
        except StoreFailure:
            # If only this connection broke and the store's host lives, no other node would request a new round.
            self._node.report(NodePhase.FAILED, seat.key, self._failure(seat, STORE_LOST, lost_peer=True))
            return None

    def _host(self, seat: RankAssignment) -> RoundStore | None:
        try:
            port = self._node.take_port(seat.key)
            if port is None:
                return None
            try:
                return RoundStore(seat, self._node)
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
"""Restarts of the job: unlimited, because each torchrun counts its own and leaves when they are used up."""

_VARIABLES = (
    *rendezvous_options.RANK_VARIABLES,
    *rendezvous_options.ID_VARIABLES,
    rendezvous_options.MASTER_VARIABLE,
    *credentials.VARIABLES,
)


def job_spec(params: RendezvousParameters, warn: Callable[[str], None]) -> JobSpec:
    """The job of one node for client and coordinator, from torchrun's parameters; torchrun starts the workers.

    The secrets leave this process's environment, which torchrun copies for its workers. Raises SpecError.
    """
    config = LaunchConfig(
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        # Torchrun itself determines the number of workers of each node.
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
    # Each torchrun has its own limit of restarts.
    return replace(spec, rules=replace(spec.rules, restart_window=0.0, early_failure_limit=0))
