"""How workers are started if the template is slow, dies, or lacks a requested module; a stub replaces it."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from msgspec.structs import replace

from dlrover_run.processes.process import ProcessSpec
from dlrover_run.spec import Entrypoint, JobSpec
from dlrover_run.workers import starter
from dlrover_run.workers.starter import Starter
from dlrover_run.workers.template_client import Imported, TemplateError, UnsafeToFork

SPEC = JobSpec(Entrypoint("script", "x.py", python="python"), "job", start_method="forkserver")
PATIENCE = 60.0
"""Seconds after which a test counts as hung."""

START = ProcessSpec(name="rank 0", argv=("python", "x.py"), environment={}, record_imports=True)


class Stub:
    """A template whose answers the test sets."""

    def __init__(self, skipped: tuple[str, ...] = ()) -> None:
        self.skipped = skipped
        self.begun = asyncio.Event()
        self.prepared = asyncio.Event()
        self.prepared.set()
        self.pid = 7
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lesson: asyncio.Future[Imported] = asyncio.get_running_loop().create_future()
        self.asked = asyncio.Event()
        self.lessons = 0

    async def prepare(self, *args: object) -> Imported:
        self.begun.set()
        await self.prepared.wait()
        return Imported((), self.skipped)

    async def learn(self, goes_on: bool = False) -> Imported:
        self.lessons += 1
        self.asked.set()
        return await self.lesson

    async def fork(self, *command: object) -> int:
        await asyncio.sleep(0)  # So long that the others of the round make their requests too.
        raise TemplateError("it cannot fork")

    async def close(self) -> None:
        await asyncio.sleep(0)


def stubbed(monkeypatch: pytest.MonkeyPatch, *stubs: Stub) -> None:
    rest = iter(stubs)

    class Template:
        @staticmethod
        def start(*args: object, **options: object) -> Any:
            return next(rest)

    monkeypatch.setattr(starter, "Template", Template)
    monkeypatch.setattr(starter, "spawn", lambda start: 1)


def test_what_preload_could_not_have_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []

    async def run() -> None:
        first, second = (Stub(("nothing: no installed module has this name", "more: not asked for")) for _ in range(2))
        stubbed(monkeypatch, first, second)
        workers = Starter(replace(SPEC, preload=("os", "nothing")), warnings.append)
        await workers.prepare([{}])
        first.closed.set_result(None)
        await workers.prepare([{}])

    asyncio.run(run())
    assert warnings == ["--preload nothing: no installed module has this name; it is left to the workers"]


def test_workers_that_meet_a_dead_template_together_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []

    async def run() -> list[int]:
        stubbed(monkeypatch, Stub())
        workers = Starter(SPEC, warnings.append)
        await workers.prepare([{}])
        return list(await asyncio.gather(workers.start(START), workers.start(START)))

    assert asyncio.run(run()) == [1, 1]
    assert warnings == ["--start-method=forkserver: it cannot fork; workers are spawned instead"]


@pytest.mark.parametrize("unfit", [1, starter.MAX_UNFIT, starter.MAX_UNFIT + 1])
def test_modules_that_forbid_a_fork_are_left_out_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, unfit: int
) -> None:
    warnings: list[str] = []
    left_out: list[tuple[str, ...]] = []

    class Refusing(Stub):
        async def prepare(self, *args: object) -> Imported:
            names = args[3]
            assert isinstance(names, list)
            left_out.append(tuple(names))
            if len(names) < unfit:
                raise UnsafeToFork(f"after `import m{len(names)}` a thread runs", f"m{len(names)}")
            return Imported((), ())

    async def run() -> bool:
        stubbed(monkeypatch, *(Refusing() for _ in range(unfit + 1)))
        workers = Starter(SPEC, warnings.append)
        await workers.prepare([{}])
        return workers.forks

    forks = asyncio.run(run())
    assert forks == (unfit <= starter.MAX_UNFIT)
    names = [f"m{number}" for number in range(min(unfit, starter.MAX_UNFIT))]
    assert left_out == [tuple(names[:count]) for count in range(len(names) + 1)]
    assert len(warnings) == unfit
    assert warnings[0].endswith("each worker imports m0 itself, and is forked with the rest")
    assert ("spawned instead" in warnings[-1]) == (not forks)


def test_a_round_waits_for_an_import_and_its_cancellation_does_not_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(starter, "IMPORT_DELAY", 0.0)

    async def run() -> None:
        stub = Stub()
        stubbed(monkeypatch, stub)
        workers = Starter(SPEC, warnings.append)
        await workers.prepare([{}])
        workers.import_later()
        await asyncio.wait_for(stub.asked.wait(), PATIENCE)
        cancelled = asyncio.ensure_future(workers.prepare([{}]))
        waiting = asyncio.ensure_future(workers.prepare([{}]))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert not waiting.done()
        stub.lesson.set_exception(UnsafeToFork("a thread was left"))
        await waiting
        assert stub.lessons == 1
        assert await workers.start(START) == 1

    asyncio.run(run())
    assert warnings == ["--start-method=forkserver: a thread was left; workers are spawned instead"]


def test_workers_that_start_one_after_the_other_have_one_import_and_none_after_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starter, "IMPORT_DELAY", 0.0)

    async def run() -> None:
        stub = Stub()
        stubbed(monkeypatch, stub)
        workers = Starter(SPEC, pytest.fail)
        await workers.prepare([{}])
        workers.import_later()
        workers.import_later()
        await asyncio.wait_for(stub.asked.wait(), PATIENCE)
        workers.import_later()
        # A turn for the timer, and one for what it would begin.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        workers.import_later()
        workers.import_later()
        await workers.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert stub.lessons == 1

    asyncio.run(run())


def test_a_node_that_waits_for_its_place_has_a_template_ready_when_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        stub = Stub()
        stub.prepared.clear()
        stub.lesson.set_result(Imported((), ()))
        stubbed(monkeypatch, stub)
        workers = Starter(SPEC, pytest.fail)
        workers.prestart({"A": "a"})
        workers.prestart({})
        await asyncio.wait_for(stub.begun.wait(), PATIENCE)
        assert workers.pids == {7}, "no sweep may take it for something that was left behind"
        place = asyncio.ensure_future(workers.prepare([{}]))
        await asyncio.sleep(0)
        assert not place.done()
        stub.prepared.set()
        await asyncio.wait_for(place, PATIENCE)
        await workers.close()

    asyncio.run(run())


@pytest.mark.parametrize("by_round", [True, False])
def test_a_defect_while_a_template_is_prestarted_gives_forking_up_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, by_round: bool
) -> None:
    warnings: list[str] = []
    unseen: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        stubbed(monkeypatch)
        workers = Starter(SPEC, warnings.append)
        workers.prestart({})
        await asyncio.sleep(0)
        if by_round:
            await workers.prepare([{}])
            assert await workers.start(START) == 1
        await workers.close()
        del workers
        gc.collect()

    asyncio.run(run())
    assert not unseen
    assert len(warnings) == 1
    assert warnings[0].startswith("--start-method=forkserver: internal error: ")
    assert warnings[0].endswith("; please report it; workers are spawned instead")


def test_nothing_is_prestarted_where_workers_are_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        stubbed(monkeypatch)
        workers = Starter(replace(SPEC, start_method="spawn"), pytest.fail)
        workers.prestart({})
        await workers.close()

    asyncio.run(run())
