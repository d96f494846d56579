"""The table of flags: what features bring to it, its order, and what a flag needs."""

from __future__ import annotations

import re

import pytest

from dlrover_run.cli import parse
from dlrover_run.command_line.flag import FAILURES, OTHER, SIZE, Flag
from dlrover_run.command_line.flags import CORE, OF_FEATURES, PANELS, TABLE, arranged
from dlrover_run.command_line.program import DLROVER_RUN, Program
from dlrover_run.command_line.sources import FlagValues
from dlrover_run.features.autoscale.settings import AutoscaleSettings
from dlrover_run.features.registry import decode_part
from dlrover_run.launch_request import decode, encode
from dlrover_run.spec import FlagValue, JobSpec
from tf_ps_runner.command_line.options import TF_PS_RUN


def test_every_feature_brings_flags_of_its_own() -> None:
    names = [flag.name for feature in OF_FEATURES.values() for flag in feature.flags]
    assert len(names) == len(set(names)) > 10
    assert not {*names} & {flag.name for flag in CORE}
    assert {*names} | {flag.name for flag in CORE} == {flag.name for flag in TABLE}


def test_a_flag_of_a_feature_stands_behind_the_one_that_it_names_or_at_the_end_of_its_panel() -> None:
    core = (Flag("a", SIZE, ""), Flag("b", SIZE, ""), Flag("c", FAILURES, ""), Flag("help", OTHER, ""))
    new = [Flag("x", SIZE, "", after="a"), Flag("y", SIZE, ""), Flag("z", "A panel of its own", "")]
    assert "".join(flag.name[0] for flag in arranged(core, new)) == "axbyczh"
    assert [flag.name for flag in arranged(core, [Flag("x", SIZE, "", after="no-such-flag")])][:3] == ["a", "b", "x"]


def test_the_panels_stand_in_their_order() -> None:
    panels = list(dict.fromkeys(flag.panel for flag in TABLE))
    shared = [panel for panel in panels if panel in PANELS]
    assert shared == [panel for panel in PANELS if panel]
    assert len(panels) > len(shared), "features have panels of their own"


@pytest.mark.parametrize("program", [DLROVER_RUN, TF_PS_RUN], ids=lambda program: program.name)
def test_a_flag_needs_flags_that_exist_and_words_that_they_take(program: Program) -> None:
    needs = [flag.needs for flag in program.table if flag.needs]
    assert len(needs) >= 3
    for need in needs:
        names, equals, words = need.replace("!=", "=").partition("=")
        flags = [program.by_dest[name.replace("-", "_")] for name in names.split("|")]
        assert not equals or {*words.split("|")} <= {*flags[0].choices}
    for flag in program.table:
        if flag.after:
            assert DLROVER_RUN.by_dest[flag.after.replace("-", "_")].panel == DLROVER_RUN.by_dest[flag.dest].panel


@pytest.mark.parametrize(
    ("argv", "clause"),
    [
        ("--reconfigure-timeout=3", "without --survivors=keep"),
        ("--stall-timeout=3 --stall-action=off", "with --stall-action=off"),
        ("--exclude-straggler", "without --network-check"),
        ("--node-restarts=1", "without --local-nodes"),
        ("--preload=json", "without --start-method=forkserver"),
    ],
)
def test_a_flag_without_what_it_needs_is_said_to_have_no_effect(argv: str, clause: str) -> None:
    warnings: list[str] = []
    parse([*argv.split(), "--no-python", "true"], {}, warn=warnings.append)
    flag = re.split("[ =]", argv)[0]
    assert warnings == [f"{flag} has no effect {clause}."]


@pytest.mark.parametrize("argv", ["--preload=json --start-method=fork", "--precheck=1 --straggler-threshold=3"])
def test_a_flag_with_what_it_needs_is_not_warned_of(argv: str) -> None:
    warnings: list[str] = []
    parse([*argv.split(), "--no-python", "true"], {}, warn=warnings.append)
    assert warnings == []


def test_the_settings_of_a_feature_reach_the_agent() -> None:
    flags = "--autoscale --nnodes=1:2 --rdzv-backend=c10d --rdzv-endpoint=node0"
    spec = parse([*flags.split(), "--scale-command=true {nodes}", "--no-python", "true"], {})
    sent = decode(encode(spec), JobSpec, decode_part)
    assert sent.settings_of("autoscale", AutoscaleSettings).command == ("true", "{nodes}")
    alone = parse(["--no-python", "true"], {})
    assert alone.settings_of("autoscale", AutoscaleSettings) == AutoscaleSettings()


def test_the_first_of_its_sources_that_has_one_gives_the_value_of_a_flag() -> None:
    by_cluster = {"nnodes": FlagValue("SLURM_NNODES", "4")}
    environ = {"PET_NNODES": "3"}
    nothing: dict[str, list[str]] = {}
    for given, variables, cluster, value in (
        ({"nnodes": ["2"]}, environ, by_cluster, ("--nnodes", "2")),
        (nothing, environ, by_cluster, ("PET_NNODES", "3")),
        (nothing, {}, by_cluster, ("SLURM_NNODES", "4")),
        (nothing, {}, {}, ("--nnodes", "1")),
    ):
        flags = FlagValues(given, variables, DLROVER_RUN.by_dest).with_cluster(cluster)
        assert flags.get("nnodes") == value
        assert (flags.known("nnodes") is None) == (value[1] == "1")
        assert (flags.explicit("nnodes") is None) == (value[1] in "14")
        assert flags.source_of(flags.get("nnodes"), "nnodes") == (
            "default of --nnodes" if value[1] == "1" else value[0]
        )
