"""The rendezvous handler of torchrun's agent, between that agent and the coordinator.

Torchrun requests a new round after a failure of a worker, or when `num_nodes_waiting` reports a new round, and the
request does not have the reason. Without a newer round it counts as a failure.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace
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
from dlrover_run.command_line import credentials
from dlrover_run.command_line.rendezvous import ID_VARIABLES, RANK_VARIABLES
from dlrover_run.coordination.records.plan import OVER, PlanPhase
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.round import Failure, RankAssignment
from dlrover_run.launch_config import LaunchConfig
from dlrover_run.rendezvous.backends import MASTER_VARIABLE
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
        self._ranks: RankAssignment | None = None
        self._closed = False

    @property
    def use_agent_store(self) -> bool:
        """True: each round has a store of its own, which its workers use."""
        return True

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
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
        tried = self._ranks
        while True:
            ranks = self._wait_for_ranks(tried)
            deadline = time.monotonic() + self._join_timeout
            store = self._join_store(ranks, deadline)
            if store is not None:
                self._ranks = ranks
                self._node.report(NodePhase.RUNNING, ranks.key)
                address = RendezvousStoreInfo(ranks.store_address, ranks.store_port)
                return RendezvousInfo(store, ranks.node_rank, ranks.nodes, address)
            if not self._node.wait(partial(is_superseded, ranks), max(0.0, deadline - time.monotonic())):
                store_at = f"{ranks.store_address}:{ranks.store_port}"
                raise RendezvousTimeoutError(
                    f"not all {ranks.nodes} nodes of round {ranks.round} connected to its store at {store_at} within "
                    f"{self._join_timeout:g} s (--rdzv-conf join_timeout)."
                )
            tried = ranks

    def num_nodes_waiting(self) -> int:
        """1 if torchrun must stop its workers and request the next round, else 0."""
        view = self._node.view
        if self._ranks is None or view.problem is not None or view.assignment.phase is PlanPhase.FINISHED:
            return 0
        return int(is_superseded(self._ranks, view))

    def is_closed(self) -> bool:
        """Whether there is no further round for this node."""
        return self._closed or self._node.view.assignment.phase in OVER

    def set_closed(self) -> None:
        """Leave the job. The other nodes continue."""
        self._closed = True
        self._node.leave()

    def shutdown(self) -> bool:
        """Leave the job within `LEAVE_TIMEOUT`. Torchrun calls this unless a signal ended it."""
        self._closed = True
        ranks = self._ranks
        self._node.leave(None if ranks is None else self._failure(ranks, GIVEN_UP_BY_TORCHRUN))
        return True

    def _request_round(self) -> None:
        """Request a new round, unless there is a newer one already."""
        if self._ranks is not None and not is_superseded(self._ranks, self._node.view):
            self._node.report(NodePhase.FAILED, self._ranks.key, self._failure(self._ranks, RESTART_REQUESTED))

    def _wait_for_ranks(self, tried: RankAssignment | None) -> RankAssignment:
        """Wait for the ranks in another round than the one that was tried last."""
        shown = ""

        def is_decided(view: NodeSnapshot) -> bool:
            has_ranks = view.ranks is not None and (tried is None or view.ranks.key != tried.key)
            return has_ranks or view.problem is not None or view.assignment.phase in OVER

        def has_changed(view: NodeSnapshot) -> bool:
            waiting = view.assignment.waiting
            return is_decided(view) or (waiting is not None and waiting.text != shown)

        while True:
            self._node.wait(has_changed)
            view = self._node.view
            if is_decided(view):
                break
            assert view.assignment.waiting is not None, "has_changed was true for it"
            shown = view.assignment.waiting.text
            _log.info("waiting: %s", shown)
        if view.assignment.phase is PlanPhase.FAILED:
            raise RendezvousTimeoutError(view.assignment.reason)
        if view.assignment.phase is PlanPhase.FINISHED:
            raise RendezvousClosedError(f"the job has finished: {view.assignment.reason}")
        if view.problem is not None:
            raise RendezvousConnectionError(view.problem)
        ranks = view.ranks
        assert ranks is not None, "is_decided was true for it"
        _log.info("round %d, node rank %d of %d: %s", ranks.round, ranks.node_rank, ranks.nodes, view.assignment.reason)
        return ranks

    def _join_store(self, ranks: RankAssignment, deadline: float) -> RoundStore | None:
        """The store of that round once all its nodes are connected; None if the round did not begin."""
        try:
            if ranks.node_rank == 0:
                store = self._host(ranks)
            else:
                store = RoundStore(ranks, self._node) if wait_for_host(ranks, self._node, deadline) else None
            return store if store is not None and store.wait_for_all(deadline) else None
        except StoreFailure:
            # If only this connection broke and the store's host lives, no other node would request a new round.
            self._node.report(NodePhase.FAILED, ranks.key, self._failure(ranks, STORE_LOST, lost_peer=True))
            return None

    def _host(self, ranks: RankAssignment) -> RoundStore | None:
        try:
            port = self._node.take_port(ranks.key)
            if port is None:
                return None
            try:
                return RoundStore(ranks, self._node)
            finally:
                port.release()
        except (OSError, SpecError, StoreFailure) as error:
            reason = str(error).splitlines()[0]
            raise RendezvousError(
                f"the store of this round cannot be hosted at {ranks.store_address}:{ranks.store_port} ({reason}): "
                "give an address of this machine with --local-addr."
            ) from error

    def _failure(self, ranks: RankAssignment, what: str, lost_peer: bool = False) -> Failure:
        return Failure(ranks.first_rank, self._node_name, what, lost_peer)


RESTARTS = 1_000_000
"""Restarts of the job: unlimited, because each torchrun counts its own restarts and leaves after the last one."""

_VARIABLES = (
    *RANK_VARIABLES,
    *ID_VARIABLES,
    MASTER_VARIABLE,
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
