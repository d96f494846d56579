"""What an agent makes of errors of its own parts: which one is the cause, and that no other part suffers from it; and
the order in which it calls its features."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_run.agent import node_feature
from dlrover_run.agent.agent import Agent
from dlrover_run.agent.node_feature import NodeFeature, NodeFeatures
from dlrover_run.agent.result import JobResult, NodeRefused
from dlrover_run.background import Group
from dlrover_run.exit_reasons import ExitReason

RESULT = JobResult(exit_code=0, exit_reason=ExitReason.SUCCESS, reason="")


class RefusedAgent(Agent):
    """An agent of which only the group of its tasks is real: its loop is refused, and a task in the background fails
    when it is cancelled because of that."""

    def __init__(self) -> None:
        self.background = self._background = Group()
        self.concluded: list[Exception | None] = []
        parts: Any = SimpleNamespace(
            reap=lambda: None, listen=lambda pipes: None, info=lambda line: None, open=self._pass, kill=self._pass
        )
        self._orphans = self._shutdown = self._console = self._adapter = parts
        self._parent_pipes = ()

    async def _pass(self) -> None:
        """Nothing to do."""

    def _begin_to_observe(self) -> None:
        """Nothing to do."""

    def _begin_features(self) -> None:
        """Nothing to do."""

    async def _listen_to_operators(self) -> None:
        """Nothing to do."""

    async def _reconcile_until_done(self) -> None:
        begun = asyncio.Event()

        async def fail_at_the_end() -> None:
            try:
                begun.set()
                await asyncio.Event().wait()
            finally:
                raise OSError("a file cannot be removed")

        self.background.create_task(fail_at_the_end())
        await begun.wait()
        raise NodeRefused("the hook keeps this node out")

    async def _conclude(self, error: Exception | None) -> JobResult:
        self.concluded.append(error)
        return RESULT


def test_the_error_that_came_first_is_the_cause_and_not_what_fails_because_of_it() -> None:
    async def scene() -> None:
        agent = RefusedAgent()
        await agent.run()
        assert [str(error) for error in agent.concluded] == ["the hook keeps this node out"]

    asyncio.run(scene())


def test_a_feature_that_cannot_be_ended_is_named_and_the_others_are_ended() -> None:
    class Broken(NodeFeature):
        async def close(self, result: JobResult) -> None:
            raise ValueError("broken")

    class Sound(NodeFeature):
        ended = False

        async def close(self, result: JobResult) -> None:
            self.ended = True

    async def scene() -> None:
        nothing: Any = None
        features, sound = NodeFeatures(), Sound(nothing, nothing)
        features._begun = {"broken": Broken(nothing, nothing), "sound": sound}
        lines: list[str] = []
        agent = object.__new__(Agent)
        agent._console = SimpleNamespace(info=lines.append)  # type: ignore[assignment]
        await features.close(RESULT, agent._note_failed_close)
        assert lines == ["warning: broken cannot be ended: internal error: ValueError('broken'); please report it"]
        assert sound.ended

    asyncio.run(scene())


def test_a_feature_that_begins_later_is_called_in_its_place_and_begins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Named(NodeFeature):
        def __init__(self, name: str) -> None:
            super().__init__(nothing, nothing)
            self.name = name
            made.append(name)

    def row(name: str, *assignments: str) -> SimpleNamespace:
        begins = lambda _name, _job, assignment: assignment in assignments  # noqa: E731
        return SimpleNamespace(name=name, any_engine=True, node=begins, module=lambda _part: name)

    nothing: Any = None
    services: Any = SimpleNamespace(job=SimpleNamespace(rules=SimpleNamespace(engine="")))
    monkeypatch.setattr(node_feature, "FEATURES", (row("a", "later"), row("b", "first", "later"), row("c", "first")))
    loaded = lambda name: SimpleNamespace(NODE=lambda _services, _tasks: Named(name))  # noqa: E731
    monkeypatch.setattr(node_feature, "import_module", loaded)
    features = NodeFeatures()
    assignments: tuple[Any, ...] = ("first", "later", "later")
    for assignment in assignments:
        features.begin(services, nothing, assignment)
    assert [feature.name for feature in features.of(Named)] == ["a", "b", "c"]
    assert made == ["b", "c", "a"]


def test_a_report_that_makes_the_node_leave_is_seen_by_all_features_and_the_first_reason_counts() -> None:
    nothing: Any = None
    seen: list[Any] = []

    class Refusing(NodeFeature):
        def add_to_report(self, report: Any) -> Any:
            raise NodeRefused(f"reason {len(seen)}")

    class Seeing(NodeFeature):
        def add_to_report(self, report: Any) -> Any:
            seen.append(report)
            return report

    features = NodeFeatures()
    features._begun = {str(at): kind(nothing, nothing) for at, kind in enumerate((Refusing, Seeing, Refusing, Seeing))}
    report: Any = "report"
    with pytest.raises(NodeRefused, match=r"^reason 0$"):
        features.add_to_report(report)
    assert seen == [report, report]
