"""`LaunchConfig` has every flag of the table, with its default, or this file says why it has not."""

from __future__ import annotations

import dataclasses

import pytest
from support.command_lines import launched

from dlrover_run.api import LaunchConfig
from dlrover_run.command_line.flags import TABLE
from dlrover_run.features.autoscale.rules import WEAK, AutoscaleRules
from dlrover_run.features.autoscale.settings import AutoscaleSettings
from dlrover_run.spec import SpecError

FIELDS = {field.name: field for field in dataclasses.fields(LaunchConfig)}

BY_ANOTHER_NAME = {
    "nnodes": "min_nodes",
    "node_rank": "rdzv_configs",
    "rdzv_id": "run_id",
    "rdzv_conf": "rdzv_configs",
    "numa_binding": "numa_options",
    **dict.fromkeys(("log_dir", "redirects", "tee", "local_ranks_filter"), "logs_specs"),
}
"""torch's names for what flags mean."""

NOT_IN_PYTHON = {
    **dict.fromkeys(("module", "no_python", "run_path"), "the entry point of `elastic_launch` says what is run"),
    **dict.fromkeys(("cluster", "hostfile", "auto_config"), "a program in Python has found out where it runs"),
    **dict.fromkeys(("standalone", "master_addr", "master_port"), "torch has no such field"),
    **dict.fromkeys(("local_nodes", "node_restarts", "isolate_nodes", "node_join_after"), "for a terminal: it prints"),
    **dict.fromkeys(("reload", "reload_dir"), "for a terminal, in which a person edits"),
    "precheck": "a second name of `network_check` and `comm_perf_test`",
    "compat_exit_codes": "a second name of `exit_codes`",
}

OF_TORCH = {"role": "default_role", "max_restarts": 3, "rdzv_backend": ""}
"""The defaults of torch's class that differ from those of torchrun, and ours for the backend."""


def test_the_python_api_has_every_flag() -> None:
    flags = {flag.dest for flag in TABLE if not flag.request}
    assert flags - FIELDS.keys() - BY_ANOTHER_NAME.keys() == NOT_IN_PYTHON.keys()
    assert {*BY_ANOTHER_NAME.values()} <= FIELDS.keys()
    assert not (BY_ANOTHER_NAME.keys() | NOT_IN_PYTHON.keys()) & FIELDS.keys()


def test_a_field_has_the_default_of_its_flag() -> None:
    for flag in TABLE:
        if flag.dest not in FIELDS or FIELDS[flag.dest].default is dataclasses.MISSING:
            continue
        default = FIELDS[flag.dest].default
        if flag.dest in OF_TORCH:
            assert default == OF_TORCH[flag.dest]
        elif flag.default is None or not flag.value:
            assert default in (None, False, ()), flag.name
        elif default is not None:
            assert str(default) == flag.default, flag.name


def test_a_config_without_anything_gives_only_what_differs_from_a_command_line() -> None:
    assert sorted(LaunchConfig(1, 2, 3).flags()) == [
        "--cluster=none",
        "--max-restarts=3",
        "--nnodes=1:2",
        "--nproc-per-node=3",
        "--role=default_role",
    ]


def test_fields_of_features_reach_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LaunchConfig(
        *(1, 4, 1),
        rdzv_backend="c10d",
        rdzv_endpoint="node0",
        autoscale=True,
        scale_command="true {nodes}",
        survivors="keep",
        reconfigure_timeout=5.0,
        preemption_notice="USR1@60",
        exit_codes="kubernetes",
        journal="/dev/null",
        preload=["json", "csv"],
        start_method="forkserver",
    )
    spec = launched(config, monkeypatch)
    parts = {part.feature: part for part in spec.rules.parts}
    assert isinstance(parts["autoscale"], AutoscaleRules)
    assert (parts["autoscale"].scaling, "survivors" in parts) == (WEAK, True)
    assert spec.settings_of("autoscale", AutoscaleSettings).command == ("true", "{nodes}")
    assert (spec.exit_codes, spec.journal, spec.preload) == ("kubernetes", "/dev/null", ("json", "csv"))
    assert spec.preemption is not None
    assert spec.preemption.seconds == 60


def test_a_value_that_the_flag_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="--survivors 'maybe' is not valid"):
        launched(LaunchConfig(1, 1, 1, survivors="maybe"), monkeypatch)
