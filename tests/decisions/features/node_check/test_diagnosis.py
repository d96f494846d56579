"""The nodes that a node check names, in single cases and in thousands of random cases; `check_world` defines what the
check can detect."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from check_mistakes import mistakes
from hypothesis import given, settings
from hypothesis import strategies as st
from support.check_world import (
    LINKS,
    THRESHOLD,
    Computing,
    Kind,
    NodeTruth,
    World,
    check_world,
    draw_odd_world,
    draw_world,
    expected_statuses,
    whole,
    with_nodes,
)
from support.golden import assert_screens

from dlrover_run.features.node_check.decision import diagnosis as diagnosis_module
from dlrover_run.features.node_check.decision import evidence
from dlrover_run.features.node_check.decision.diagnosis import SLOW_TRIES, Diagnosis, diagnose
from dlrover_run.features.node_check.decision.evidence import CPU_TRIES
from dlrover_run.features.node_check.decision.model import (
    MAX_PROBLEM,
    CheckedNode,
    CheckKey,
    ComputeFact,
    ComputeResult,
    DeviceSpeed,
    HealthStatus,
    LinkFact,
    NodeCheck,
)
from dlrover_run.features.node_check.decision.pairing import first_round
from dlrover_run.features.node_check.decision.round import computed_fact

FAULT, STRAGGLER = HealthStatus.FAULT, HealthStatus.STRAGGLER
CUT = NodeTruth(cut=True)
SLOW = NodeTruth(slower=4.0)
SLOW_NETWORK = NodeTruth(drag=4.0)
CRASHES = NodeTruth(computing=Computing.FAILS)


def worlds(first: int, cases: int, odd: bool) -> list[tuple[World, int]]:
    """Draw worlds with the seed of their measurements; half of them are small."""
    drawn = []
    for seed in range(first, first + cases):
        source = random.Random(f"world {seed}")
        nodes = source.randint(2, 64 if seed % 2 else 9)
        drawn.append((draw_odd_world(source, nodes) if odd else draw_world(source, nodes), seed))
    return drawn


def all_mistakes(
    drawn: Sequence[tuple[World, int]], diagnose_with: Callable[[NodeCheck, float], Diagnosis] = diagnose
) -> Iterator[str]:
    """Lazily: a planted defect is found at the first of them."""
    for world, seed in drawn:
        for mistake in mistakes(
            world, check_world(world, seed, measure_links=seed % 10 == 0, diagnose_with=diagnose_with)
        ):
            yield f"seed {seed}, {len(world.nodes)} nodes: {mistake}"


def check(
    nodes: int, computed: Sequence[ComputeFact] = (), linked: Sequence[LinkFact] = (), trusted: Sequence[int] = ()
) -> NodeCheck:
    """Return a check as the coordinator passes it to `diagnose`; a node that is not in `computed` computed well."""
    named = {fact.node for fact in computed}
    return NodeCheck(
        key=CheckKey(1, 1, 0),
        since=0.0,
        nodes=tuple(
            CheckedNode(
                node_id=f"n{node}",
                incarnation="1",
                host=f"node{node}",
                address="10.0.0.1",
                port=1,
                workers=1,
                already_passed=node in trusted,
            )
            for node in range(nodes)
        ),
        compute_facts=(*computed, *(ComputeFact(node, 0.084) for node in range(nodes) if node not in named)),
        link_facts=tuple(linked),
    )


def statuses(answer: Diagnosis) -> list[str]:
    return [finding.status.value for finding in answer.findings]


class TestThousandsOfCases:
    @pytest.mark.parametrize("odd", [False, True], ids=["as in the issue", "newcomers, losses and two sizes"])
    def test_every_plant_that_can_be_recognised_is_named_and_no_healthy_node_is(self, odd: bool) -> None:
        assert list(all_mistakes(worlds(0, 200, odd))) == []

    @pytest.mark.long
    @pytest.mark.timeout(1200)
    @pytest.mark.parametrize("odd", [False, True], ids=["as in the issue", "newcomers, losses and two sizes"])
    def test_so_it_is_in_tens_of_thousands(self, odd: bool) -> None:
        assert list(all_mistakes(worlds(100_000, 30_000, odd))) == []

    @settings(deadline=None)
    @given(st.integers(2, 12), st.integers(0, 2**32), st.integers(0, 2**32))
    def test_whatever_is_drawn(self, nodes: int, truth: int, seed: int) -> None:
        world = draw_odd_world(random.Random(truth), nodes)
        assert mistakes(world, check_world(world, seed)) == []

    def test_the_cases_have_something_to_recognise_of_each_kind(self) -> None:
        kinds = [
            (status, truth.computing, truth.cut, truth.slower > 1, truth.drag > 1)
            for world, _ in worlds(0, 300, False)
            for node, status in expected_statuses(world).items()
            for truth in [world.nodes[node]]
        ]
        assert len(set(kinds)) == len(Kind) - len(LINKS)
        assert len(kinds) > 500


class TestBrokenRulesAreCaught:
    """The same cases with slightly wrong rules."""

    CASES = worlds(0, 200, False)

    def test_of_these_cases_the_right_rule_gets_none_wrong(self) -> None:
        assert list(all_mistakes(self.CASES)) == []

    @pytest.mark.parametrize("witnesses", [1, 2])
    def test_two_partners_are_not_enough(self, witnesses: int, monkeypatch: pytest.MonkeyPatch) -> None:
        two_bad_links = [World(whole(nodes).nodes, {(0, 1): 0.0, (0, 2): 0.0}) for nodes in range(4, 20, 2)]
        cases = [(world, seed) for seed, world in enumerate(two_bad_links)]
        assert list(all_mistakes(cases)) == []
        monkeypatch.setattr(diagnosis_module, "ENOUGH_WITNESSES", witnesses)
        monkeypatch.setattr(diagnosis_module, "MIN_WITNESSES", witnesses)
        assert any("healthy" in mistake for mistake in all_mistakes(cases))

    def test_one_partner_whose_own_links_are_not_tried_is_not_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(diagnosis_module, "ENOUGH_WITNESSES", 1)
        monkeypatch.setattr(diagnosis_module._Diagnoser, "_witnesses_of_failing", _all_who_failed)
        assert any("healthy" in mistake for mistake in all_mistakes(self.CASES))

    def test_the_mean_does_not_do_for_the_median(self, monkeypatch: pytest.MonkeyPatch) -> None:
        slow = [World((NodeTruth(slower=3.01),) * third + whole(2 * third).nodes) for third in range(1, 20)]
        cases = [(world, seed) for seed, world in enumerate(slow)]
        assert list(all_mistakes(cases)) == []

        def mean(speeds: Sequence[float]) -> float:
            return sum(speeds) / len(speeds)

        monkeypatch.setattr(evidence, "lower_median", mean)
        assert any("should be a straggler" in mistake for mistake in all_mistakes(cases))

    @pytest.mark.parametrize("tries", [1, 2])
    def test_fewer_slow_readings_are_not_enough(self, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(diagnosis_module, "SLOW_TRIES", tries)
        assert any("healthy" in mistake for mistake in all_mistakes(self.CASES))

    def test_the_first_reading_at_computing_does_not_do(self) -> None:
        def hasty(asked: NodeCheck, threshold: float) -> Diagnosis:
            firsts = {fact.node: fact for fact in reversed(asked.compute_facts)}
            often = tuple(fact for fact in firsts.values() for _ in range(SLOW_TRIES))
            return diagnose(NodeCheck(**{**_fields(asked), "compute_facts": often}), threshold)

        assert any("healthy" in mistake for mistake in all_mistakes(self.CASES, hasty))

    def test_a_partner_without_a_link_that_works_is_no_witness(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(diagnosis_module._Diagnoser, "_witnesses_of_failing", _all_who_failed)
        world = World((NodeTruth(),) + (CUT,) * 3)
        assert 0 in check_world(world).named


def _all_who_failed(self: diagnosis_module._Diagnoser, node: int) -> list[int]:
    return [other for other, speed in self._met(node) if speed is None]


def _fields(asked: NodeCheck) -> dict[str, object]:
    return {name: getattr(asked, name) for name in asked.__struct_fields__}


def quick(*pairs: tuple[int, int]) -> list[LinkFact]:
    return [LinkFact(one, other, 1.2) for one, other in pairs]


def named(world: World, seed: int = 0) -> dict[int, HealthStatus]:
    return check_world(world, seed).named


WELL, OLD = NodeTruth(), NodeTruth(trusted=True)
CROWDED = NodeTruth(workers=8, slower=4.0, drag=4.0)

WORLDS: dict[str, tuple[World, dict[int, HealthStatus]]] = {
    "of two nodes the one that computes slowly": (World((WELL, SLOW)), {1: STRAGGLER}),
    "of two nodes the one that cannot compute": (World((CRASHES, WELL)), {0: FAULT}),
    "when all first pairs fail those in doubt clear each other": (World((CUT, WELL, CUT, WELL)), {0: FAULT, 2: FAULT}),
    "one quick node among slow ones makes no stragglers": (World((WELL, SLOW, SLOW)), {}),
    "a trusted node is never named": (with_nodes(whole(6), n5=NodeTruth(cut=True, slower=5.0, trusted=True)), {}),
    "nodes with other numbers of workers are not compared": (World((CROWDED, *whole(4).nodes)), {}),
    "nodes with as many workers are compared": (
        World((CROWDED, *(NodeTruth(workers=8),) * 3, *whole(2).nodes)), {0: STRAGGLER},
    ),
    "two slow links blame no node without witnesses of its size": (
        World(whole(3).nodes + (NodeTruth(workers=4),) * 6, {(0, 1): 5.0, (0, 2): 7.0}), {},
    ),
    "a newcomer that cannot compute, among nodes that passed": (World((OLD, OLD, OLD, CRASHES)), {3: FAULT}),
    "a newcomer that computes slowly": (World((OLD, OLD, OLD, SLOW)), {3: STRAGGLER}),
    "a newcomer without a network": (World((OLD, OLD, OLD, CUT)), {3: FAULT}),
    "a newcomer with a slow network": (World((OLD, OLD, OLD, SLOW_NETWORK)), {3: STRAGGLER}),
}  # fmt: skip


@pytest.mark.parametrize(("world", "expected"), WORLDS.values(), ids=WORLDS)
def test_the_named_nodes(world: World, expected: dict[int, HealthStatus]) -> None:
    assert named(world) == expected


class TestFewNodes:
    def test_of_two_nodes_without_a_link_no_node_is_named_and_that_is_reported(self) -> None:
        outcome = check_world(World((NodeTruth(), CUT)))
        assert outcome.named == {}
        assert len(outcome.diagnosis.notes) == 1

    def test_of_three_nodes_the_one_without_a_network_is_named_when_both_links_have_failed_twice(self) -> None:
        outcome = check_world(World((NodeTruth(), CUT, NodeTruth())))
        assert outcome.named == {1: FAULT}
        assert [tasks.groups for tasks in outcome.held] == [((0, 1, 2),), ((0, 1),), ((1, 2),)]

    @pytest.mark.parametrize("works", [1, 2])
    def test_of_three_nodes_one_that_was_without_a_network_for_a_moment_is_not_blamed(self, works: int) -> None:
        failed = [LinkFact(0, other, problem="connection refused") for other in (1, 2)]
        once = diagnose(check(3, linked=[*quick((1, 2)), *failed]), THRESHOLD)
        assert statuses(once) == ["passed"] * 3
        assert once.link_again == ((0, 1), (0, 2))
        half = diagnose(check(3, linked=[*quick((1, 2)), *failed, failed[0]]), THRESHOLD)
        assert (statuses(half), half.link_again) == (["passed"] * 3, ((0, 2),))
        again = diagnose(check(3, linked=[*quick((1, 2)), *failed, *quick((0, works))]), THRESHOLD)
        assert (statuses(again), again.link_again, again.unresolved) == (["passed"] * 3, (), ())

    def test_three_nodes_that_agree_need_not_try_again(self) -> None:
        failed = [LinkFact(0, other, problem="connection refused") for other in (1, 2, 3)]
        answer = diagnose(check(4, linked=[*quick((1, 2), (2, 3)), *failed]), THRESHOLD)
        assert (statuses(answer)[0], answer.link_again) == ("fault", ())

    def test_of_three_nodes_the_one_with_a_slow_network_stands_out_and_both_its_links_are_tried_again(self) -> None:
        outcome = check_world(World((NodeTruth(), NodeTruth(), SLOW_NETWORK)))
        assert outcome.named == {2: STRAGGLER}
        assert [tasks.groups for tasks in outcome.held] == [((0, 1, 2),), ((0, 2),), ((1, 2),)]

    def test_of_three_nodes_one_that_was_disturbed_for_a_moment_passes(self) -> None:
        slow = [LinkFact(0, 1, 1.2), LinkFact(0, 2, 0.2), LinkFact(1, 2, 0.2)]
        assert diagnose(check(3, linked=slow), THRESHOLD).link_again == ((0, 2), (1, 2))
        again = check(3, linked=[*slow, LinkFact(0, 2, 1.1)])
        assert {finding.status for finding in diagnose(again, THRESHOLD).findings} == {HealthStatus.PASSED}

    @pytest.mark.parametrize("slower", [0.0, 5.0], ids=["bad", "slow"])
    def test_of_three_nodes_one_link_blames_no_node(self, slower: float) -> None:
        outcome = check_world(World(whole(3).nodes, {(0, 2): slower}))
        assert outcome.named == {}
        assert len(outcome.diagnosis.notes) == 1

    def test_of_four_nodes_one_in_a_slow_pair_is_named(self) -> None:
        for seed in range(50):
            assert named(World((SLOW_NETWORK, NodeTruth(), NodeTruth(), NodeTruth())), seed) == {0: STRAGGLER}

    def test_when_no_link_works_no_node_is_named(self) -> None:
        outcome = check_world(World((CUT,) * 5))
        assert outcome.named == {}
        assert len(outcome.diagnosis.notes) == 1

    def test_a_single_node_whose_workers_cannot_link_is_named_when_it_fails_twice(self) -> None:
        alone = NodeTruth(workers=2, cut=True)
        outcome = check_world(World((alone,)))
        assert outcome.named == {0: FAULT}
        assert len(outcome.held) == 2
        assert check_world(World((NodeTruth(workers=2),))).named == {}


class TestNodesThatAreNotNamed:
    def test_half_the_nodes_slow_are_another_kind_of_machine(self) -> None:
        outcome = check_world(World((SLOW, NodeTruth()) * 3))
        assert outcome.named == {}
        assert len(outcome.diagnosis.notes) == 1

    @pytest.mark.parametrize(("accident", "again"), [(Computing.SLOW_ONCE, 1), (Computing.SLOW_TWICE, 2)])
    def test_a_node_that_was_slow_by_accident_passes_and_no_other_node_computes_again(
        self, accident: Computing, again: int
    ) -> None:
        outcome = check_world(World((NodeTruth(computing=accident), NodeTruth(), NodeTruth())))
        assert outcome.named == {}
        assert [tasks.compute for tasks in outcome.held] == [(0,)] * again

    def test_of_one_that_was_slow_in_most_of_its_tries_that_is_reported(self) -> None:
        notes = [
            check_world(World((NodeTruth(computing=accident), NodeTruth(), NodeTruth()))).diagnosis.notes
            for accident in (Computing.SLOW_ONCE, Computing.SLOW_TWICE)
        ]
        assert notes[0] == ()
        assert len(notes[1]) == 1
        assert notes[1][0].startswith("node0 computed slowly in 2 of 3 tries, at 0.0")

    def test_a_slow_node_is_named_after_three_tries_and_no_other_node_computes_again(self) -> None:
        outcome = check_world(World((SLOW, NodeTruth(), NodeTruth())))
        assert outcome.named == {0: STRAGGLER}
        assert [tasks.compute for tasks in outcome.held] == [(0,), (0,)]

    def test_a_node_that_failed_once_passes_and_that_is_reported(self) -> None:
        outcome = check_world(World((NodeTruth(), NodeTruth(computing=Computing.FAILS_ONCE), NodeTruth())))
        assert outcome.named == {}
        assert outcome.diagnosis.findings[1].reason == "computed when asked again: local rank 0 was killed by SIGKILL"
        assert outcome.diagnosis.findings[1].gigabytes > 0

    def test_the_partner_of_a_slow_node_is_cleared(self) -> None:
        for seed in range(50):
            world = World((NodeTruth(slower=6.0, drag=6.0), *whole(3).nodes))
            assert named(world, seed) == {0: STRAGGLER}

    def test_a_node_that_has_left_is_no_witness_about_its_partners(self) -> None:
        leaves = NodeTruth(leaves=0)
        outcome = check_world(World((NodeTruth(), leaves, NodeTruth(), NodeTruth())))
        assert outcome.named == {}
        assert outcome.diagnosis.notes == ()
        assert outcome.held[1].groups, "who had only met the lost one is linked with another"


H100, A100 = "NVIDIA H100", "NVIDIA A100"


def on(*devices: str, tries: int = 1) -> list[ComputeFact]:
    """Return tries of each node on that device; an H100 is more than twice as fast as an A100."""
    speeds = {"cpu": 0.5, A100: 300.0}
    return [
        ComputeFact(node, speeds.get(device, 800.0), device=device)
        for _ in range(tries)
        for node, device in enumerate(devices)
    ]


class TestKindsOfDevice:
    """Nodes are compared with those that have the same device."""

    def diagnosis(self, facts: Sequence[ComputeFact], trusted: Sequence[int] = ()) -> Diagnosis:
        return diagnose(check(max(fact.node for fact in facts) + 1, computed=facts, trusted=trusted), THRESHOLD)

    def test_a_minority_with_another_model_is_not_slow_and_that_is_reported(self) -> None:
        answer = self.diagnosis(on(*[H100] * 6, A100, A100, tries=SLOW_TRIES))
        assert statuses(answer) == ["passed"] * 8
        assert answer.compute_again == ()
        assert len(answer.notes) == 1

    @pytest.mark.parametrize("others", [1, 7])
    def test_one_that_is_alone_with_its_model_is_compared_with_none(self, others: int) -> None:
        answer = self.diagnosis(on(A100, *[H100] * others, tries=SLOW_TRIES))
        assert statuses(answer) == ["passed"] * (1 + others)
        assert len(answer.notes) == 1

    def test_a_slow_one_among_those_of_its_model_is_named(self) -> None:
        slow = [ComputeFact(8, 100.0, device=A100)] * SLOW_TRIES
        answer = self.diagnosis([*on(*[H100] * 6, A100, A100), *slow])
        assert statuses(answer) == [*["passed"] * 8, "straggler"]

    def test_of_several_models_in_one_node_the_one_that_it_waits_for_counts(self) -> None:
        mixed = ComputeResult(devices=(DeviceSpeed(0, H100, 800.0), DeviceSpeed(1, A100, 300.0)))
        slowest_first = msgspec.structs.replace(mixed, devices=mixed.devices[::-1])
        answer = self.diagnosis([*on(H100, H100, A100, A100), computed_fact(4, slowest_first, 30.0)])
        assert statuses(answer) == ["passed"] * 5
        assert answer.compute_again == ()

    def test_the_best_try_shows_for_which_model_a_node_waits(self) -> None:
        # In the first try a GPU of the faster model was slowed down.
        disturbed = [ComputeFact(3, 100.0, device=H100), ComputeFact(3, 300.0, device=A100)]
        answer = self.diagnosis([*on(H100, H100, H100), *disturbed])
        assert (statuses(answer), answer.compute_again) == (["passed"] * 4, ())

    def test_an_unknown_device_counts_as_the_usual_one(self) -> None:
        newcomer = [ComputeFact(3, 200.0, device=H100)] * SLOW_TRIES
        answer = self.diagnosis([*on("", "", H100), *newcomer], trusted=[0, 1])
        assert statuses(answer)[3] == "straggler"
        assert answer.notes == ()


class TestLostAccelerator:
    """A node whose accelerator is lost computes on the CPU, without an error."""

    H200 = "NVIDIA H200"

    def diagnosis(self, *devices: str, trusted: Sequence[int] = (), tries: int = CPU_TRIES) -> Diagnosis:
        return diagnose(check(len(devices), computed=on(*devices, tries=tries), trusted=trusted), THRESHOLD)

    @pytest.mark.parametrize("others", [1, 2, 3, 7])
    def test_it_is_named_at_its_second_try_and_with_the_reason(self, others: int) -> None:
        answer = self.diagnosis("cpu", *[self.H200] * others)
        assert statuses(answer) == ["fault", *["passed"] * others]
        assert 0 not in answer.compute_again
        assert answer.notes == ()

    @pytest.mark.parametrize("before", [(), (H200,)], ids=["at first", "after it had one"])
    def test_after_one_try_without_it_the_node_computes_again(self, before: tuple[str, ...]) -> None:
        others = on("", self.H200, self.H200)[1:]
        tries = [ComputeFact(0, 400.0 if device != "cpu" else 0.5, device=device) for device in (*before, "cpu")]
        once = diagnose(check(3, computed=[*others, *tries]), THRESHOLD)
        assert (statuses(once), once.compute_again, once.notes) == (["passed"] * 3, (0,), ())
        assert once.failing == {0}
        back = ComputeFact(0, 790.0, device=self.H200)
        again = diagnose(check(3, computed=[*others, *tries, back]), THRESHOLD)
        assert (statuses(again), again.compute_again, again.notes) == (["passed"] * 3, (), ())
        gone = diagnose(check(3, computed=[*others, *tries, tries[-1]]), THRESHOLD)
        assert (statuses(gone), gone.compute_again) == (["fault", "passed", "passed"], ())

    def test_it_links_only_when_it_has_computed_again(self) -> None:
        asked = check(4, computed=on("cpu", *[self.H200] * 3))
        assert first_round(asked, False, THRESHOLD) == ((0,), ((1, 2, 3),))

    @pytest.mark.parametrize(
        ("devices", "trusted", "faults"),
        [
            pytest.param(("cpu", "cpu", H200, H200, H200), (), [0, 1], id="two of five"),
            pytest.param(("cpu", "cpu", H200), (), [], id="half of the others are not enough"),
            pytest.param(("cpu", "cpu", "cpu"), (), [], id="all compute on the CPU"),
            pytest.param(("cpu", H200, H200), (0,), [], id="a node that has passed is not named"),
        ],
    )
    def test_nodes_with_a_lost_accelerator(
        self, devices: tuple[str, ...], trusted: tuple[int, ...], faults: list[int]
    ) -> None:
        found = statuses(self.diagnosis(*devices, trusted=trusted))
        assert [node for node, status in enumerate(found) if status == "fault"] == faults

    def test_links_with_it_blame_no_node(self) -> None:
        facts = [*quick((1, 2)), *(LinkFact(0, other, problem="no such backend") for other in (1, 2))]
        computed = on("cpu", self.H200, self.H200, tries=CPU_TRIES)
        answer = diagnose(check(3, computed=computed, linked=facts), THRESHOLD)
        assert statuses(answer) == ["fault", "passed", "passed"]
        assert answer.unresolved == ()
        assert answer.notes == ()

    def test_the_device_of_a_node_is_its_slowest_and_the_cpu_where_one_rank_has_no_other(self) -> None:
        lost = ComputeResult(devices=(DeviceSpeed(0, self.H200, 400.0), DeviceSpeed(1, "cpu", 0.5)))
        assert computed_fact(0, lost, 30.0) == ComputeFact(0, 0.5, device="cpu")
        whole_node = ComputeResult(devices=(DeviceSpeed(1, self.H200, 400.0), DeviceSpeed(0, self.H200, 410.0)))
        assert computed_fact(0, whole_node, 30.0).device == self.H200


class TestNewcomers:
    def test_a_node_that_passed_with_a_slow_measurement_has_no_healthy_node_named(self) -> None:
        poor = NodeTruth(computing=Computing.SLOW_ONCE, trusted=True)
        for old in ((poor,), (poor, OLD), (poor, poor)):
            for beside in (False, True):
                assert check_world(World((*old, NodeTruth())), beside=beside).named == {}

    @pytest.mark.parametrize(("truth", "expected"), [(SLOW, {3: STRAGGLER}), (CRASHES, {3: FAULT}), (NodeTruth(), {})])
    def test_beside_training_only_its_computing_counts(
        self, truth: NodeTruth, expected: dict[int, HealthStatus]
    ) -> None:
        outcome = check_world(World((*(OLD,) * 3, truth)), beside=True)
        assert outcome.named == expected
        assert all(not tasks.groups for tasks in outcome.held)
        assert outcome.diagnosis.unresolved == ()


class TestReasonTexts:
    def test_the_texts_are_those_of_the_golden_file(self) -> None:
        killed = "local rank 1 was killed by SIGKILL"
        seven = check(
            7,
            computed=[
                *[ComputeFact(4, 0.021)] * SLOW_TRIES,
                *[ComputeFact(5, problem=killed)] * 2,
                ComputeFact(6, problem="a product is wrong on local rank 0", wrong=True),
            ],
            linked=[
                *quick((1, 2), (2, 3), (1, 4)),
                *(LinkFact(0, other, problem="connection refused") for other in (1, 2, 3)),
            ],
        )
        in_link = ComputeFact(0, problem=killed, linking=True)
        reasons = {
            "of seven nodes, node 0 has no link, 4 is slow, 5 was killed, 6 computes wrongly": "\n".join(
                f"node{place}: {finding.reason}" if finding.reason else f"node{place}"
                for place, finding in enumerate(diagnose(seven, THRESHOLD).findings)
            ),
            **{
                f"a process ended in a link, {times} times": diagnose(
                    check(2, computed=[ComputeFact(0, 0.084), *[in_link] * times]), THRESHOLD
                )
                .findings[0]
                .reason
                for times in (1, 2)
            },
            "the accelerator of a node is lost": diagnose(
                check(2, computed=on("cpu", "NVIDIA H200", tries=CPU_TRIES)), THRESHOLD
            )
            .findings[0]
            .reason,
            "one is slow among those of its model": diagnose(
                check(9, computed=[*on(*[H100] * 6, A100, A100), *[ComputeFact(8, 100.0, device=A100)] * SLOW_TRIES]),
                THRESHOLD,
            )
            .findings[8]
            .reason,
        }
        worlds = {
            "two nodes without a link": World((NodeTruth(), CUT)),
            "three nodes, and one link is bad": World(whole(3).nodes, {(0, 2): 0.0}),
            "three nodes, and one link is slow": World(whole(3).nodes, {(0, 2): 5.0}),
            "no link works": World((CUT,) * 5),
            "half the nodes are slow": World((SLOW, NodeTruth()) * 3),
        }
        notes = {title: "\n".join(check_world(world).diagnosis.notes) for title, world in worlds.items()}
        models = check(8, computed=on(*[H100] * 6, A100, A100, tries=SLOW_TRIES))
        notes["another model"] = "\n".join(diagnose(models, THRESHOLD).notes)
        assert_screens(Path(__file__).with_name("findings.txt"), reasons | notes)

    def test_two_nodes_of_one_host_are_distinguished(self) -> None:
        asked = check(3, linked=[LinkFact(0, 1, problem="refused"), *quick((0, 2), (1, 2))])
        same_host = NodeCheck(
            **{
                **_fields(asked),
                "nodes": tuple(CheckedNode(**{**_node_fields(node), "host": "vm"}) for node in asked.nodes),
            }
        )
        assert diagnose(same_host, THRESHOLD).notes == (
            "the link between node 0 on vm and node 1 on vm does not work (refused), though both have others that do",
        )

    def test_a_reason_fits_into_what_travels(self) -> None:
        failed = [ComputeFact(0, problem="x" * MAX_PROBLEM)] * 2
        assert len(diagnose(check(2, computed=failed), THRESHOLD).findings[0].reason) == MAX_PROBLEM
        links = [LinkFact(0, other, problem="y" * MAX_PROBLEM) for other in (1, 2)] * 2
        reason = diagnose(check(3, linked=[*links, *quick((1, 2))]), THRESHOLD).findings[0].reason
        assert reason.endswith("and node1 and node2 have links that do")

    def test_the_best_figures_of_each_are_kept(self) -> None:
        answer = diagnose(
            check(2, computed=[ComputeFact(0, 0.05), ComputeFact(0, 0.07)], linked=[LinkFact(0, 1, 1.5)]), THRESHOLD
        )
        assert (answer.findings[0].tflops, answer.findings[0].gigabytes) == (0.07, 1.5)

    def test_a_threshold_is_what_it_takes(self) -> None:
        facts = [*[ComputeFact(0, 0.03)] * SLOW_TRIES, *[ComputeFact(node, 0.084) for node in (1, 2)]]
        assert statuses(diagnose(check(3, computed=facts), 2.0))[0] == "straggler"
        assert statuses(diagnose(check(3, computed=facts), 3.0))[0] == "passed"


def _node_fields(node: CheckedNode) -> dict[str, object]:
    return {name: getattr(node, name) for name in node.__struct_fields__}
