"""How the workers of a round are stopped, and what they leave behind is ended, before the next round starts."""

from __future__ import annotations

from dlrover_run.agent.shutdown import ShutdownRequest
from dlrover_run.devices import holders
from dlrover_run.processes.orphans import OrphanKiller
from dlrover_run.workers.round import WorkerRound

LOST_PEER_GRACE = 1.0
"""Seconds between the stop signal and SIGKILL for a worker that holds a device and has lost a peer. It waits in a
collective of NCCL for that peer, where Python runs no handler, so it saves nothing however long it gets."""


def stop_workers(current: WorkerRound, shutdown: ShutdownRequest, timeout: float, restarts: int) -> None:
    """Send the workers that run the signal that stops them now; `timeout` is the grace period of `--shutdown-timeout`,
    and `restarts` how many the job has used."""
    number, grace, delivered_at = shutdown.stop_with(timeout)
    failed = current.has_failed or restarts > current.ranks.restart_count
    if failed and not shutdown.wanted and grace > LOST_PEER_GRACE and holders.is_present():
        for worker in current.group.running:
            if holders.holds_device(worker.pid):
                worker.stop(number, LOST_PEER_GRACE, delivered_at)
    for worker in current.group.running:
        if worker.stopped_with is None:
            worker.stop(number, grace, delivered_at)


def end_orphans(orphans: OrphanKiller, needs_port: bool) -> None:
    """End what the workers of a round have left behind, and return when it has ended if the next round needs what it
    may hold: the memory of a device, or, with `needs_port`, the port on which a child of rank 0 may still listen."""
    if needs_port or (holders.is_present() and orphans.any_orphan(holders.holds_device)):
        orphans.end_now()
    else:
        orphans.kill_orphans()
