"""The flags of the node check and of `--auto-config`, alone and combined."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
from command_lines import isolate, parsed
from policy_parts import check_rules

from dlrover_run import exit_codes
from dlrover_run.api import LaunchConfig
from dlrover_run.cli import main
from dlrover_run.command_line import options
from dlrover_run.command_line.parser import DLROVER_RUN, parse_argv
from dlrover_run.coordination.rules import JobRules
from dlrover_run.coordination.validation import config_mismatch
from dlrover_run.policies.health.rules import CHECK_ALWAYS, CHECK_NEVER, CHECK_ONCE, HealthRules

AT_NODE0 = "--rdzv-backend=c10d --rdzv-endpoint=node0:4000"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory with one script, and no variable of the machine that could change a job."""
    isolate(tmp_path, monkeypatch)


def rules(line: str, **environ: str) -> JobRules:
    """The rules of a job about which there was nothing to say."""
    spec, said = parsed(line, **environ)
    assert said == []
    assert (spec.entrypoint.target, spec.entrypoint.args) == ("train.py", ("--lr",))
    return spec.rules


@pytest.mark.parametrize(
    ("line", "environ", "mode"),
    [
        ("", {}, CHECK_NEVER),
        ("--network-check", {}, CHECK_ONCE),
        ("--network_check", {}, CHECK_ONCE),
        ("--network-check=once", {}, CHECK_ONCE),
        ("--network_check=always", {}, CHECK_ALWAYS),
        ("--network-check --network-check=always", {}, CHECK_ALWAYS),
        ("--network-check=always --network-check", {}, CHECK_ONCE),
        ("--network-check=True", {}, CHECK_ONCE),
        ("", {"PET_NETWORK_CHECK": "1"}, CHECK_ONCE),
        ("", {"PET_NETWORK_CHECK": "Always"}, CHECK_ALWAYS),
        ("", {"PET_NETWORK_CHECK": "off"}, CHECK_NEVER),
        ("--network-check", {"PET_NETWORK_CHECK": "always"}, CHECK_ONCE),
        ("--network-check=0", {"PET_NETWORK_CHECK": "always"}, CHECK_NEVER),
        ("--comm-perf-test", {}, CHECK_ONCE),
        ("--comm_perf_test --network-check=always", {}, CHECK_ALWAYS),
        ("--precheck=0", {}, CHECK_NEVER),
        ("--precheck=1", {}, CHECK_ONCE),
        ("--precheck 2", {}, CHECK_ONCE),
        ("--precheck=0 --network-check", {}, CHECK_ONCE),
        ("--precheck=1 --network-check=always", {}, CHECK_ALWAYS),
        ("", {"PET_PRECHECK": "1"}, CHECK_ONCE),
    ],
)
@pytest.mark.parametrize("nodes", ["", f"--nnodes=2:4 {AT_NODE0}"])
def test_nodes_are_checked_when_a_flag_asks_for_it(line: str, environ: dict[str, str], mode: int, nodes: str) -> None:
    assert check_rules(rules(f"{nodes} {line}", **environ)).check == mode


def test_the_check_is_off_by_default_and_so_are_its_rules() -> None:
    assert rules(f"--nnodes=2 {AT_NODE0}") == JobRules(min_nodes=2, max_nodes=2)


def test_the_word_after_the_flag_is_the_script_whatever_it_is() -> None:
    assert parse_argv(["--network-check", "always", "once"]).script == "always"
    assert parse_argv(["--network-check", "-r3", "train.py"]).values == {"network_check": ["once"], "redirects": ["3"]}


@pytest.mark.parametrize(
    ("line", "measured"),
    [
        ("--network-check", 0),
        ("--precheck=1", 0),
        ("--comm-perf-test", 1),
        ("--precheck=2", 1),
        ("--precheck=1 --comm-perf-test", 1),
    ],
)
def test_every_link_is_measured_when_a_flag_asks_for_it(line: str, measured: int) -> None:
    assert check_rules(rules(line)).measure_links == measured


def test_what_counts_as_a_straggler_and_what_follows_are_rules() -> None:
    assert check_rules(rules("--network-check")).straggler_threshold == 2
    by_flag = rules("--network-check --exclude-straggler --straggler-threshold=1.75 --rdzv-conf=check_timeout=30")
    assert (
        check_rules(by_flag).exclude_stragglers,
        check_rules(by_flag).straggler_threshold,
        check_rules(by_flag).check_timeout,
    ) == (1, 1.75, 30)
    by_variable = {"PET_NETWORK_CHECK": "1", "PET_EXCLUDE_STRAGGLER": "true", "PET_STRAGGLER_THRESHOLD": "1.75"}
    assert rules("--exclude_straggler --rdzv-conf=check_timeout=30", **by_variable) == by_flag


@pytest.mark.parametrize(
    ("line", "environ", "place"),
    [
        ("--network-check", {}, "--network-check"),
        ("", {"PET_NETWORK_CHECK": "1"}, "PET_NETWORK_CHECK"),
        ("--comm-perf-test", {}, "--comm-perf-test"),
        ("--precheck=1", {}, "--precheck"),
        ("--precheck=2 --network-check=off", {}, "--precheck"),
    ],
)
def test_nodes_with_static_rendezvous_are_not_checked(
    line: str, environ: dict[str, str], place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["--nnodes=2", *line.split(), "train.py"]) == exit_codes.BAD_COMMAND_LINE
    assert capsys.readouterr().err.startswith(f"dlrover-run: {place} cannot be used with static rendezvous")


def test_a_single_static_node_is_checked() -> None:
    spec, said = parsed("--master-port=4000 --network-check")
    assert (spec.backend, check_rules(spec.rules).check, said) == ("static", CHECK_ONCE, [])


def test_options_of_the_check_are_warned_of_without_it() -> None:
    spec, said = parsed("--exclude-straggler --straggler-threshold=3 --rdzv-conf=check_timeout=5")
    assert (
        check_rules(spec.rules).exclude_stragglers,
        check_rules(spec.rules).straggler_threshold,
    ) == (0, 2)
    assert said == [
        "--exclude-straggler has no effect without --network-check.",
        "--straggler-threshold has no effect without --network-check.",
        "check_timeout of --rdzv-conf has no effect without --network-check.",
    ]
    assert parsed("", PET_EXCLUDE_STRAGGLER="0")[1] == []
    assert parsed("", PET_EXCLUDE_STRAGGLER="1")[1] == ["PET_EXCLUDE_STRAGGLER has no effect without --network-check."]


def test_a_threshold_that_may_flag_healthy_nodes_is_warned_of() -> None:
    spec, said = parsed("--network-check --straggler-threshold=1.5")
    assert check_rules(spec.rules).straggler_threshold == 1.5
    assert len(said) == 1
    assert said[0].startswith("--straggler-threshold 1.5 may flag healthy nodes")
    assert parsed("--network-check --straggler-threshold=1.7")[1] == []
    (by_variable,) = parsed("--network-check", PET_STRAGGLER_THRESHOLD="1.6")[1]
    assert by_variable.startswith("PET_STRAGGLER_THRESHOLD 1.6 may flag healthy nodes")


@pytest.mark.parametrize(
    ("environ", "nodes", "mode"),
    [
        ({"NODE_NUM": "3", "WORKER_NUM": "9"}, 3, CHECK_NEVER),
        ({"NODE_NUM": "", "WORKER_NUM": "4"}, 4, CHECK_ONCE),
        ({"NODE_NUM": "4", "PET_NETWORK_CHECK": "off"}, 4, CHECK_NEVER),
        ({"NODE_NUM": "4", "PET_NETWORK_CHECK": "always"}, 4, CHECK_ALWAYS),
        ({"NODE_NUM": "2", "PET_NETWORK_CHECK": "1"}, 2, CHECK_ONCE),
    ],
)
@pytest.mark.parametrize("line", ["--auto-config", "--auto_config"])
def test_auto_config_takes_the_number_of_nodes_from_the_cluster(
    line: str, environ: dict[str, str], nodes: int, mode: int
) -> None:
    spec, said = parsed(f"{line} {AT_NODE0}", **environ)
    assert (spec.workers_per_node, said) == (8, [])
    assert spec.rules == JobRules(nodes, nodes, policy=HealthRules(check=mode) if mode else None)


def test_auto_config_accepts_a_single_node() -> None:
    for line, environ in (("--auto-config", {"NODE_NUM": "1"}), ("--auto-config --standalone", {})):
        spec, said = parsed(line, **environ)
        assert (spec.backend, spec.workers_per_node, said) == ("memory", 8, [])


def test_explicit_numbers_take_precedence_over_auto_config_with_a_warning() -> None:
    """DLRover overrides it, and whoever typed a number wonders where it went."""
    spec, said = parsed(f"--auto-config --nnodes=4:6 --nproc-per-node=2 {AT_NODE0}", NODE_NUM="8")
    assert (
        spec.rules.min_nodes,
        spec.rules.max_nodes,
        spec.workers_per_node,
        check_rules(spec.rules).check,
    ) == (
        4,
        6,
        2,
        CHECK_ONCE,
    )
    assert [sentence.partition(" takes precedence over ")[0] for sentence in said] == [
        "--nnodes 4:6",
        "--nproc-per-node 2",
    ]
    spec, said = parsed(f"--auto-config {AT_NODE0}", NODE_NUM="8", PET_NPROC_PER_NODE="3")
    assert (spec.rules.max_nodes, spec.workers_per_node) == (8, 3)
    assert [sentence.partition(" takes precedence over ")[0] for sentence in said] == ["PET_NPROC_PER_NODE 3"]


@pytest.mark.parametrize("environ", [{}, {"NODE_NUM": "2"}])
def test_explicit_numbers_equal_to_those_of_auto_config_give_no_warning(environ: dict[str, str]) -> None:
    spec, said = parsed(f"--auto-config --nnodes=2 --nproc-per-node=auto {AT_NODE0}", **environ)
    assert (spec.rules.max_nodes, spec.workers_per_node, said) == (2, 8, [])


def test_auto_config_does_not_check_static_nodes() -> None:
    spec, said = parsed("--auto-config --node-rank=0", NODE_NUM="4")
    assert (spec.backend, spec.rules.max_nodes, check_rules(spec.rules).check) == ("static", 4, CHECK_NEVER)
    assert len(said) == 1
    assert said[0].startswith("--auto-config does not check nodes with static rendezvous")


def test_a_difference_in_rules_is_reported_with_the_names_of_the_flags() -> None:
    job = JobRules(
        policy=HealthRules(
            check=CHECK_ALWAYS, straggler_threshold=3, exclude_stragglers=1, measure_links=1, check_timeout=60
        )
    )
    assert config_mismatch(job, JobRules()) == (
        "the rules of the job's first node hold: --network-check is always, not off; check_timeout is 60, not 120; "
        "--straggler-threshold is 3, not 2; --exclude-straggler is on, not off; --comm-perf-test is on, not off"
    )


def test_reported_differences_use_the_names_of_flags() -> None:
    changed = {
        field.name: getattr(JobRules(), field.name) + 1
        for field in fields(JobRules)
        if field.name not in ("store", "detection_delay", "policy")
    }
    part = HealthRules(**{name: value + 1 for name, value in msgspec.structs.asdict(HealthRules()).items()})
    said = config_mismatch(JobRules(), JobRules(**changed, policy=part)).partition(": ")[2].split("; ")
    named = {name.removeprefix("--") for name in (sentence.split()[0] for sentence in said) if name.startswith("--")}
    assert named <= {flag.name for flag in options.TABLE}
    assert {flag.name for flag in options.TABLE if flag.panel == options.NODE_CHECK} - {"precheck"} <= named


@pytest.mark.parametrize(("said", "flag"), [(True, "once"), ("always", "always"), ("once", "once")])
def test_network_check_of_launch_config_is_a_switch_or_a_mode(said: bool | str, flag: str) -> None:
    config = LaunchConfig(1, 1, 1, network_check=said, comm_perf_test=True)
    assert config.flags()[-1] == "--comm-perf-test"
    assert f"--network-check={flag}" in config.flags()
    assert not [word for word in LaunchConfig(1, 1, 1).flags() if "check" in word or "straggler" in word]


def test_unsupported_dlrover_flags_are_not_in_the_table() -> None:
    assert not {f"--{name}" for name in options.UNSUPPORTED_DLROVER_FLAGS} & DLROVER_RUN.by_spelling.keys()
