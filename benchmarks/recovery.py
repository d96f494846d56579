"""Recovery: a job is broken under each launcher, and trains again. See `benchmarks/README.md`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from core import pictures
from core.cases import Benchmark, Case, Limits
from core.launchers import (
    FORKSERVER,
    FT_LAUNCHER,
    LAST_STEP,
    OWN_STORE,
    SPAWN,
    SURVIVORS,
    TORCHRUN,
    Launcher,
)
from core.ratios import Late, Lost, Measured
from core.run import NANOSECOND, Report, Run, all_ranks
from core.steps import longest_pause, read_steps
from core.storms import Storm, effective_time
from core.two_nodes import newest_workers, train, two_nodes

from dlrover_run.coordination.records.rules import KEEP_ALIVE_ATTEMPTS, KEEP_ALIVE_INTERVAL
from dlrover_run.features.local_nodes import network
from dlrover_run.processes.tree import MASTER_NAME

OLD_ENDED = ", to the end of the old workers"
NEW_WORLD = ", to the new world"

CALM = 10.0
"""Seconds after the death of a master in which training must not stop. It is started again in the first of them."""

PAUSE_BEFORE = ", the same before it"
WORKER_BEFORE = ", a worker killed before it"
WORKER_AFTER = ", a worker killed after it"

SAME = 1.5
"""Up to this ratio, a recovery counts as equal to the one before it: recoveries of one launcher differ as much."""

KEEP_ALIVE = "the keep-alive time-out"
KEEP_ALIVE_CONF = f"keep_alive_interval={KEEP_ALIVE_INTERVAL:g},keep_alive_max_attempt={KEEP_ALIVE_ATTEMPTS}"
"""The same for all rivals: torchrun's own time-out is 15 s. torchrun takes whole seconds."""

MAX_TIMEOUTS = 3.0
"""Keep-alive time-outs in which the other node must train again."""


def time_recovery(run: Run, began_ns: int, world: int, survivors: Collection[int], limit: float) -> Measured:
    """The parts of a recovery that began at `began_ns`, up to the first step of all ranks of a new world of `world`
    workers. `survivors` are the watched process ids of the old workers that the fault spares.

    A part that does not end in `limit` seconds is unended. Raises Lost if the job ends.
    """
    with contextlib.suppress(Late):
        run.wait(f"step-of-{world}", world, limit, began_ns)
    return recovery_parts(run.reports, run.ends, began_ns, world, survivors, limit)


def recovery_parts(
    reports: Sequence[Report],
    ends: Mapping[int, int],
    began_ns: int,
    world: int,
    survivors: Collection[int],
    limit: float,
) -> Measured:
    """The parts of a recovery, from the reports of the workers and the ends of the old ones. Pure.

    The fault counts as noticed when the first survivor has ended: whether its launcher ended it or it failed for want
    of its peers, the old world trains no more. The new world is complete when its last rank has passed
    `init_process_group`. If a world formed and failed, the one counts that made the step.
    """
    steps = all_ranks(reports, f"step-of-{world}", world, began_ns)
    worlds = [report for report in reports if report.event == f"world-of-{world}" and report.at_ns > began_ns]
    if steps is not None:
        stepped = {report.pid for report in steps}
        worlds = [report for report in worlds if report.pid in stepped]
    complete = all_ranks(worlds, f"world-of-{world}", world, began_ns)
    moments = {
        OLD_ENDED: min((ends[pid] for pid in survivors if pid in ends), default=None),
        NEW_WORLD: max(report.at_ns for report in complete) if complete else None,
        "": max(report.at_ns for report in steps) if steps else None,
    }
    values = {part: limit if at is None else (at - began_ns) * NANOSECOND for part, at in moments.items()}
    unended = frozenset(part for part, at in moments.items() if at is None)
    return Measured(values, f"no step in {limit:g} s" if steps is None else "", unended)


def kill_worker(run: Run, workers: list[Report], limits: Limits) -> Measured:
    """SIGKILL of rank 1, to the first step of both ranks after that."""
    survivor = workers[0].pid
    run.watch([survivor])
    return time_recovery(run, run.kill(workers[1].pid), 2, [survivor], limits.recovery)


def worker_death(rival: Launcher, run: Run, limits: Limits) -> Measured:
    """A worker is killed; its node and its launcher stay."""
    return kill_worker(run, train(rival, run, two_nodes("2"), limits), limits)


def node_death(rival: Launcher, run: Run, limits: Limits) -> Measured:
    """All processes of the second node, which hosts neither the rendezvous nor the store, are killed at once."""
    workers = train(rival, run, two_nodes("1:2"), limits)
    lost = run.of_node(1)
    survivors = [worker.pid for worker in workers if worker.pid not in lost]
    run.watch(survivors)
    return time_recovery(run, run.kill_node(1), 1, survivors, limits.recovery)


def growth(rival: Launcher, run: Run, limits: Limits) -> Measured:
    """A second node is started beside one that trains alone."""
    run.ends_by_itself = False
    # The first node would wait 30 s for others before it trains alone. The round that is measured reaches its maximum
    # of nodes, so it has no last call.
    job = two_nodes("1:2", conf="last_call_timeout=5")
    rival.start(run, job)
    alone = run.wait("step-of-1", 1, limits.start)[0]
    run.settle(limits.settle)
    run.watch([alone.pid])
    began = rival.start(run, job)
    return time_recovery(run, began, job.nodes, [alone.pid], limits.recovery)


def master_death(rival: Launcher, run: Run, limits: Limits) -> Measured:
    """The master is killed: the longest pause between two steps then, and a worker killed before and after.

    With torchrun the launcher of the first node hosts the rendezvous, so that node is killed.
    """

    def find_master() -> int | None:
        return next((process.pid for process in run.processes() if process.command == MASTER_NAME), None)

    workers = train(rival, run, two_nodes("2"), limits)
    if find_master() is None:
        run.kill_node(0)
        run.settle(CALM)
        raise Lost("the other node goes on without a step")
    before = kill_worker(run, workers, limits)
    if before.unended:
        raise Lost("the worker that was killed before it did not come back")
    run.settle(limits.settle)
    calm = time.monotonic_ns()
    run.settle(limits.settle)
    workers = newest_workers(run)
    run.watch(worker.pid for worker in workers)
    # The launcher may have started another one meanwhile.
    master = find_master()
    if master is None:
        raise Lost("the master had ended by itself")
    killed = run.kill(master)
    run.settle(CALM)
    over = time.monotonic_ns()
    if any(worker.pid in run.ends for worker in workers):
        raise Lost("training stopped with the master")
    steps = read_steps(run.directory)
    after = kill_worker(run, workers, limits)
    assert before.values is not None
    assert after.values is not None
    values = {
        "": longest_pause(steps, killed, over),
        PAUSE_BEFORE: longest_pause(steps, calm, killed),
        WORKER_BEFORE: before.values[""],
        WORKER_AFTER: after.values[""],
    }
    return Measured(values, after.note, frozenset({WORKER_AFTER} if after.unended else ()))


def network_cut(rival: Launcher, run: Run, limits: Limits) -> Measured:
    """The cable of the second of two nodes is cut at the switch, to a step of the first node alone."""
    run.ends_by_itself = False
    # Otherwise torch and gloo take the address of the machine's name.
    run.environment["GLOO_SOCKET_IFNAME"] = "eth0"
    with contextlib.closing(network.Network()) as switch:
        job = replace(two_nodes("1:2"), address=network.node_address(0), port=29400)
        for node in (0, 1):
            conf = f"{KEEP_ALIVE_CONF},is_host={int(node == 0)}"
            with switch.connect(node).entered():
                rival.start(run, replace(job, own_address=network.node_address(node), conf=conf))
            run.settle(limits.settle)
        run.wait("step-of-2", job.nodes, limits.start)
        run.settle(limits.settle)
        lost = run.of_node(1)
        survivors = [worker.pid for worker in newest_workers(run) if worker.pid not in lost]
        run.watch(survivors)
        cut = time.monotonic_ns()
        switch.switch.ip("link set node-1 down")
        return time_recovery(run, cut, 1, survivors, limits.recovery)


ELASTIC = (SPAWN, FORKSERVER, TORCHRUN, OWN_STORE)
EVERYONE = (*ELASTIC, FT_LAUNCHER)


def both(spawn: float, forkserver: float, part: str = "") -> dict[tuple[str, str], float]:
    """The targets of the two start methods."""
    return {(SPAWN.name, part): spawn, (FORKSERVER.name, part): forkserver}


STORMS = (Storm(), Storm(12, 10.0), Storm(12, 5.0), Storm(30, 2.0))
"""A kill every 30 s for 5 minutes, every 10 s for 2 minutes, every 5 s and every 2 s for 1 minute."""
QUICK_STORMS = tuple(replace(storm, kills=2, undisturbed=3.0) for storm in STORMS)


def effective_times(storms: Sequence[Storm]) -> list[Case]:
    """The effective training time ratio in each storm."""
    return [
        Case(
            f"ettr-{storm.interval:g}",
            f"share of effective training time (ETTR), a worker killed every {storm.interval:g} s "
            f"for {storm.kills * storm.interval:g} s",
            unit="%",
            rivals=(SPAWN, FORKSERVER, LAST_STEP, SURVIVORS, OWN_STORE, FT_LAUNCHER),
            baseline=OWN_STORE.name,
            measure=effective_time(storm),
            warm_up=False,
            max_turns=1,
        )
        for storm in storms
    ]


def cases(storms: Sequence[Storm] = STORMS) -> tuple[Case, ...]:
    """All faults. None has a warm-up: the job has trained for a while when the fault occurs."""
    case = partial(Case, unit="s", rivals=ELASTIC, baseline=OWN_STORE.name, warm_up=False)
    return (
        case(
            "worker-death",
            "one of 2 workers killed, on 2 nodes, to the next step of both",
            rivals=EVERYONE,
            measure=worker_death,
            targets=both(1.0, 0.25),
            max_turns=5,
            turns_of={TORCHRUN.name: 3},
        ),
        case(
            "node-death",
            "launcher and worker of one of 2 nodes killed at once, to a step of the other alone",
            measure=node_death,
            targets=both(0.1, 0.1),
            max_turns=3,
            turns_of={TORCHRUN.name: 1, OWN_STORE.name: 2},
        ),
        case(
            "growth",
            "a second node started beside one that trains alone, to a step of both",
            measure=growth,
            targets=both(0.5, 0.25),
            max_turns=3,
            turns_of={TORCHRUN.name: 1},
        ),
        case(
            "master-death",
            "the master killed, the longest pause between two steps",
            baseline="",
            measure=master_death,
            targets=both(SAME, SAME, WORKER_AFTER),
            within={"": PAUSE_BEFORE, WORKER_AFTER: WORKER_BEFORE},
            max_turns=2,
            turns_of={TORCHRUN.name: 1, OWN_STORE.name: 1},
        ),
        case(
            "network-cut",
            "the network of one of 2 nodes cut without a word, to a step of the other alone",
            rivals=(SPAWN, FORKSERVER, OWN_STORE),
            baseline=KEEP_ALIVE,
            measure=network_cut,
            targets=both(MAX_TIMEOUTS, MAX_TIMEOUTS),
            known_baseline=KEEP_ALIVE_INTERVAL * KEEP_ALIVE_ATTEMPTS,
            max_turns=2,
            turns_of={OWN_STORE.name: 1},
            unavailable=network.why_not,
        ),
        *effective_times(storms),
    )


CAPTION = (
    "2 nodes on one machine with a worker each, gloo, one allreduce every 20 ms; shorter is better, except in ettr. "
    "Ratios are to torchrun with its own store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), which comes back every time"
)

BENCHMARK = Benchmark(
    "Recovering: dlrover-run, torchrun and others",
    "recovery/recovery",
    lambda options: cases(QUICK_STORMS if options.quick else STORMS),
    repetitions=5,
    draw=partial(
        pictures.bars,
        stages=(OLD_ENDED, NEW_WORLD),
        hidden=(PAUSE_BEFORE, WORKER_BEFORE),
        success="came back",
        caption=CAPTION,
    ),
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
