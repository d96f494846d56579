"""The start of a task that fails: which descriptors it leaves open."""

from __future__ import annotations

import asyncio
import contextlib
import os
from types import SimpleNamespace
from typing import Any

from dlrover_run.agent.reconcile import Reserve, Start
from dlrover_run.events.records import NO_EVENTS
from dlrover_run.output.run_directory import RunDir
from dlrover_run.spec import Entrypoint, JobSpec
from tf_ps_runner.agent.report import EventPrinter
from tf_ps_runner.agent.supervisor import TaskSupervisor
from tf_ps_runner.cluster.model import PlannedTask, Role, TaskKey
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.spec import PsJobSpec

CHIEF = TaskKey(Role.CHIEF, 0)


def planned(port: int) -> NodeOrder:
    task = PlannedTask(key=CHIEF, rank=0, version=1, node_id="n", incarnation="i", host="h", address="h", port=port)
    return NodeOrder(version=1, tasks=(task,), servers=("h:1",), chief="h:2")


def test_a_start_that_is_ended_early_closes_no_descriptor_of_an_earlier_one() -> None:
    problems: list[Exception] = []
    pipes: list[int] = []

    def open_stderr(*_: object, **__: object) -> int:
        pipes.extend(os.pipe())
        return pipes[-1]

    relay = SimpleNamespace(
        remove_at_end=lambda path: os.rmdir(path), open_stderr=open_stderr, single_console=True, release=lambda *_: None
    )
    channel = SimpleNamespace(address="@a", expect=lambda key: "token", finish=lambda key: None)
    services = SimpleNamespace(
        run_dir=RunDir(None, False), relay=relay, wake=lambda: None, shutdown=None, events=NO_EVENTS,
        orphans=SimpleNamespace(paused=contextlib.nullcontext),
    )  # fmt: skip

    async def refuse(start: object) -> int:
        raise OSError("no process can be started")

    async def run() -> None:
        waits = asyncio.Event()
        starter = SimpleNamespace(prepare=lambda environments: waits.wait(), start=refuse)
        spec = PsJobSpec(JobSpec(Entrypoint("script", "train.py"), "job"))
        parts: Any = services, starter, channel, EventPrinter(lambda line: None), problems.append
        tasks = TaskSupervisor(spec, *parts)
        tasks.carry_out(Reserve(CHIEF), planned(0))
        order = planned(tasks.statuses[0].port)
        waits.set()
        tasks.carry_out(Start(CHIEF), order)
        while not problems:
            await asyncio.sleep(0)
        waits.clear()
        tasks.carry_out(Start(CHIEF), order)
        await asyncio.sleep(0)
        await tasks.close()

    asyncio.run(run())
    os.close(pipes[0])
    assert [str(problem) for problem in problems] == ["no process can be started"]
