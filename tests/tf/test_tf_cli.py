"""The command line of tf-ps-run: jobs, errors, warnings, the help, and modules that a launch does not import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command_lines import fake_etcd3, isolate, run_python
from support.places import place_of
from support.policy_parts import cluster_rules

from dlrover_run import exit_codes
from dlrover_run.command_line import flags as those_of_dlrover_run
from dlrover_run.command_line.entry_point import job_or_code, run
from dlrover_run.command_line.values import memory_size
from dlrover_run.coordination.records.rules import MAX_NODES
from dlrover_run.features import registry
from dlrover_run.features.autoscale.rules import STRONG, WEAK, AutoscaleRules
from dlrover_run.spec import SpecError, Std
from tf_ps_runner.cli import has_tensorflow, parse, require_tensorflow
from tf_ps_runner.cluster import rules
from tf_ps_runner.cluster.engine import ClusterEngine
from tf_ps_runner.cluster.model import Capacity, Role
from tf_ps_runner.cluster.rules import ClusterRules
from tf_ps_runner.command_line import options
from tf_ps_runner.command_line.options import TF_PS_RUN
from tf_ps_runner.spec import PRELOAD, PsJobSpec

SECRET = "a-secret-of-this-job-alone"

MANY = "--rdzv-backend=master --rdzv-endpoint=node0"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with one script, and no variable of the machine that could change a job."""
    isolate(tmp_path, monkeypatch)
    for name in [name for name in os.environ if name.startswith(options.PREFIX)]:
        monkeypatch.delenv(name)
    return tmp_path


def job_of(text: str, **environ: str) -> PsJobSpec:
    """The job of these flags and variables, which give no warning."""
    warnings: list[str] = []
    spec = parse(text.split(), environ, warn=warnings.append)
    assert warnings == []
    return spec


def test_a_bare_script_is_a_chief_a_worker_and_a_server_on_this_machine() -> None:
    spec = job_of("train.py --lr 0.1")
    assert set(spec.capacity) == {Capacity(Role.CHIEF, 1), Capacity(Role.WORKER, 1), Capacity(Role.PS, 1)}
    assert (spec.job.rendezvous.backend, spec.job.rules.min_nodes, spec.job.rules.max_nodes) == ("memory", 1, 1)
    assert cluster_rules(spec.job.rules) == ClusterRules(min_workers=1, max_workers=1)
    assert (spec.job.entrypoint.target, spec.job.entrypoint.args) == ("train.py", ("--lr", "0.1"))
    assert (spec.job.start_method, spec.job.preload) == ("forkserver", PRELOAD)
    assert (spec.sparse, spec.hang_timeout) == (False, 0.0)


def test_a_machine_without_a_role_hosts_the_maximum_of_each_role() -> None:
    spec = job_of("--ps=1:4 --workers=2:8 --evaluator --checkpoint-dir=. train.py")
    assert {part.role: part.slots for part in spec.capacity} == {
        Role.CHIEF: 1,
        Role.WORKER: 8,
        Role.PS: 4,
        Role.EVALUATOR: 1,
    }
    cluster = cluster_rules(spec.job.rules)
    assert cluster is not None
    assert (cluster.min_ps, cluster.max_ps, cluster.min_workers, cluster.max_workers) == (1, 4, 2, 8)


@pytest.mark.parametrize(("flag", "scaling"), [("--autoscale", STRONG), ("--autoscale=sync", WEAK)])
@pytest.mark.parametrize(
    "size", ["--workers=0:3", "--ps=1:2 --checkpoint-dir=.", "--workers=1:3 --ps=1:2 --checkpoint-dir=."]
)
def test_a_job_with_a_range_may_choose_within_it(flag: str, scaling: int, size: str) -> None:
    rules = job_of(f"{flag} {size} --rdzv-conf=autoscale_block=2 train.py").job.rules
    assert (AutoscaleRules.get(rules.parts).scaling, AutoscaleRules.get(rules.parts).block) == (scaling, 2.0)
    assert rules.engine == "parameter_servers"
    assert registry.job_of(rules).engine.__class__ is ClusterEngine


def test_a_job_of_one_size_has_nothing_to_choose() -> None:
    with pytest.raises(SpecError, match="--workers=MIN:MAX"):
        job_of("--autoscale --workers=2 --ps=2 train.py")
    with pytest.raises(SpecError, match="autoscale"):
        job_of("--autoscale=often --workers=0:2 train.py")


@pytest.mark.parametrize(
    ("line", "key"),
    [("--workers=0:2", "autoscale_block"), ("--workers=0:2 --autoscale", "autoscale_max_batch")],
)
def test_a_key_of_the_autoscaler_without_effect_is_warned_of(line: str, key: str) -> None:
    warnings: list[str] = []
    parse([*f"{line} --rdzv-conf={key}=2 train.py".split()], {}, warn=warnings.append)
    assert [key in warning for warning in warnings] == [True]


@pytest.mark.parametrize("role", options.ROLE_CHOICES)
def test_a_machine_with_a_role_hosts_one_process_of_it_in_a_job_of_any_number_of_nodes(role: str) -> None:
    spec = job_of(f"--role={role} --ps=2 {MANY} train.py")
    assert spec.capacity == (Capacity(Role(role), 1),)
    assert (spec.job.rendezvous.backend, spec.job.rules.min_nodes, spec.job.rules.max_nodes) == ("master", 1, MAX_NODES)
    assert place_of(spec.job).master is not None
    assert (place_of(spec.job).master.host, place_of(spec.job).master.port, spec.job.run_id) == ("node0", 29400, "none")
    assert spec.job.role == role


def test_machines_without_roles_may_share_a_job_and_an_evaluator_is_part_of_it_by_its_role() -> None:
    spec = job_of(f"--ps=4 --workers=8 {MANY} train.py")
    assert (spec.job.rendezvous.backend, spec.slots(Role.PS), spec.slots(Role.WORKER)) == ("master", 4, 8)
    assert cluster_rules(job_of(f"--role=evaluator {MANY} train.py").job.rules).evaluator == 1
    assert job_of("--workers=0 train.py").slots(Role.WORKER) == 0


def test_the_master_variable_counts_only_for_a_machine_with_a_role() -> None:
    spec = job_of("--role=ps train.py", DLROVER_MASTER_ADDR="master:5000")
    assert place_of(spec.job).master is not None
    assert (place_of(spec.job).master.host, place_of(spec.job).master.port, place_of(spec.job).master.is_host) == (
        "master",
        5000,
        False,
    )
    assert job_of("train.py", DLROVER_MASTER_ADDR="master:5000").job.rendezvous.backend == "memory"


def test_the_node_id_of_a_pod_contains_its_role() -> None:
    ids = {
        job_of(f"--role={role} {MANY} train.py", WORKER_ID="0", WORKER_RANK="0").job.node_id
        for role in options.ROLE_CHOICES
    }
    assert ids == {"ps-0", "worker-0", "chief-0", "evaluator-0"}


def test_master_and_etcd_have_the_settings_that_dlrover_run_has(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "token").write_text(f"{SECRET}\n")
    (here / "token").chmod(0o600)
    spec = job_of(
        f"--role=ps {MANY} --rdzv-id=ads --rdzv-conf=token_file=token,state_dir=state,join_timeout=5 train.py"
    )
    assert place_of(spec.job).master is not None
    assert (place_of(spec.job).master.token, place_of(spec.job).master.state_dir) == (SECRET, str(here / "state"))
    assert (spec.job.rules.join_timeout, spec.job.run_id) == (5, "ads")
    assert SECRET not in repr(spec)
    fake_etcd3(monkeypatch)
    spec = job_of("--role=ps --rdzv-backend=etcd --rdzv-endpoint=a,b:3 --rdzv-conf=prefix=/jobs train.py")
    assert place_of(spec.job).etcd is not None
    assert (place_of(spec.job).etcd.endpoints, place_of(spec.job).etcd.prefix) == ((("a", 2379), ("b", 3)), "/jobs")
    assert spec.job.rules.lost_after == 0


def test_a_job_on_one_machine_has_the_given_name_or_a_fresh_one() -> None:
    assert job_of("--rdzv-id=ads train.py").job.run_id == "ads"
    assert job_of("train.py").job.run_id != job_of("train.py").job.run_id


def test_every_timeout_and_limit_reaches_the_rules_of_the_job() -> None:
    spec = job_of(
        "--max-restarts=7 --save-timeout=1.5 --ready-timeout=20 --end-grace=0 --hang-timeout=9 --shutdown-timeout=4 "
        "--worker-memory=4Gi --ps-memory=512Mi --max-memory=8Gi --sparse -m json.tool"
    )
    assert cluster_rules(spec.job.rules) == ClusterRules(
        min_workers=1,
        max_workers=1,
        max_restarts=7,
        save_timeout=1.5,
        ready_timeout=20,
        end_grace=0,
        worker_memory=4096,
        ps_memory=512,
        max_memory=8192,
    )
    assert (spec.hang_timeout, spec.job.shutdown_timeout, spec.sparse) == (9, 4, True)
    assert (spec.job.entrypoint.kind, spec.job.entrypoint.target) == ("module", "json.tool")


def test_stalls_are_looked_for_unless_they_are_not_wanted() -> None:
    assert job_of("train.py").job.settings["hangs"] == {"action": "report", "timeout": None}
    job = job_of("--stall-action=restart --stall-timeout=9 train.py").job
    assert job.settings["hangs"] == {"action": "restart", "timeout": 9}
    warnings: list[str] = []
    parse(["--stall-action=off", "--stall-timeout=9", "train.py"], {}, warn=warnings.append)
    (warning,) = warnings
    assert "--stall-timeout" in warning


def test_the_table_has_the_defaults_of_the_rules() -> None:
    flags = options.TF_PS_RUN.by_dest
    assert flags["save_timeout"].default == f"{rules.SAVE_TIMEOUT:g}"
    assert flags["ready_timeout"].default == f"{rules.READY_TIMEOUT:g}"
    assert flags["end_grace"].default == f"{rules.END_GRACE:g}"
    assert flags["max_restarts"].default == f"{rules.RESTARTS}"


def test_each_variable_belongs_to_this_program_and_the_command_line_takes_precedence() -> None:
    names = {flag.variable for flag in options.TABLE if flag.variable is not None}
    assert all(name.startswith("TF_PS_RUN_") for name in names)
    assert job_of("train.py", TF_PS_RUN_PS="3", TF_PS_RUN_SPARSE="1").slots(Role.PS) == 3
    assert job_of("--ps=2 train.py", TF_PS_RUN_PS="3").slots(Role.PS) == 2
    # A cluster manager sets these for torch.
    assert job_of("train.py", PET_MAX_RESTARTS="nonsense", PET_RDZV_BACKEND="etcd").job.rendezvous.backend == "memory"


def test_shared_flags_have_the_same_spellings_in_both_programs() -> None:
    shared = options.TF_PS_RUN.by_dest.keys() & those_of_dlrover_run.BY_DEST.keys()
    assert {"rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "log_dir", "redirects", "tee"} <= shared
    for dest in shared:
        ours, theirs = options.TF_PS_RUN.by_dest[dest], those_of_dlrover_run.BY_DEST[dest]
        assert (ours.spellings, bool(ours.value)) == (theirs.spellings, bool(theirs.value))


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("4Gi", 4096),
        ("512Mi", 512),
        ("1.5Gi", 1536),
        ("1048576", 1),
        ("2097152Ki", 2048),
        ("1Ti", 1 << 20),
        ("4G", 3814),
        ("1000M", 953),
        ("4GiB", 4096),
        ("4 Gi", 4096),
    ],
)
def test_a_size_of_memory_is_read_in_each_unit(text: str, mib: int) -> None:
    assert memory_size("--ps-memory", text) == mib


@pytest.mark.parametrize("text", ["", "4", "Gi", "-4Gi", "4gi", "1e9", "4Xi", "0Gi", "100Ti", "nan", "4Gi4Gi"])
def test_an_invalid_size_of_memory_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="4Gi or 512Mi"):
        memory_size("--ps-memory", text)


@pytest.mark.parametrize("text", ["-", "--role=worker --rdzv-endpoint=node0 -"])
def test_a_script_on_standard_input_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="several tasks cannot read: name a file"):
        job_of(text)


@pytest.mark.parametrize("role", ["--role=ps ", ""])
def test_an_endpoint_without_a_backend_is_that_of_a_master(role: str) -> None:
    job = job_of(f"{role}--ps=2 --rdzv-endpoint=node0 train.py").job
    assert (job.rendezvous.backend, job.run_id) == ("master", "none")
    assert place_of(job).master is not None
    assert (place_of(job).master.host, place_of(job).master.port) == ("node0", 29400)


@pytest.mark.parametrize(
    "text", ["--ps=1:2 --checkpoint-dir=ckpt train.py", "--ps=1:2 --checkpoint-dir=hdfs://namenode/ckpt train.py"]
)
def test_a_range_of_servers_with_checkpoints_gives_no_warning(text: str) -> None:
    job_of(text)


def test_modules_to_preload_come_after_those_that_every_job_needs() -> None:
    assert job_of("--preload=numpy,pandas --preload=numpy train.py").job.preload == (*PRELOAD, "numpy", "pandas")
    assert job_of("--start-method=spawn train.py").job.preload == ()


def test_output_streams_are_chosen_for_all_tasks_and_lines_have_a_prefix(here: Path) -> None:
    logs = job_of("--log-dir=logs -r 3 -t 1 train.py").job.logs
    assert (logs.log_dir, logs.redirects.default, logs.tee.default) == ("logs", Std.ALL, Std.OUT)
    assert logs.prefixed
    assert not (here / "logs").exists()


@pytest.fixture
def interpreter(here: Path) -> Callable[[str], str]:
    """Creates a separate interpreter that runs this one; `{python}` is its path."""

    def make(line: str) -> str:
        path = here / "python"
        path.write_text(f"#!/bin/sh\n{line.format(python=sys.executable, here=here)}\n")
        path.chmod(0o755)
        return str(path)

    (here / "tensorflow").mkdir()
    (here / "tensorflow" / "__init__.py").write_text("raise SystemExit(3)")
    return make


def test_an_interpreter_without_tensorflow_is_detected_before_anything_starts(
    interpreter: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = interpreter('exec {python} -I -S "$@"')
    assert not has_tensorflow(bare)
    monkeypatch.setenv("PYTHON_EXEC", bare)
    assert run(TF_PS_RUN, ["train.py"]) == exit_codes.BAD_COMMAND_LINE
    assert capsys.readouterr().err == (
        f"tf-ps-run: There is no TensorFlow in {bare}: install it there (pip install 'dlrover-run[tf]'), or set "
        "PYTHON_EXEC to an interpreter that has it.\n"
    )


def test_an_interpreter_with_a_module_called_tensorflow_is_accepted_without_an_import(
    interpreter: Callable[[str], str],
) -> None:
    require_tensorflow(interpreter('PYTHONPATH={here} exec {python} "$@"'))


def test_an_interpreter_whose_probe_fails_is_accepted(interpreter: Callable[[str], str]) -> None:
    assert has_tensorflow(interpreter("exit 1"))


def test_a_module_that_another_interpreter_does_not_have_is_refused_before_anything_starts(
    interpreter: Callable[[str], str], here: Path
) -> None:
    other = interpreter('exec {python} -S "$@"')
    done = command("-m", "no_such.module", PYTHON_EXEC=other)
    assert done.returncode == exit_codes.BAD_COMMAND_LINE
    assert f"The module 'no_such.module' is neither in {here} nor installed for {other}" in done.stderr
    assert done.stderr.count("\n") == 1


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m tf_ps_runner` with these arguments in a separate process."""
    return run_python("-m", "tf_ps_runner", *arguments, **variables)


def drawn_help(*arguments: str) -> tuple[str, set[str]]:
    """The help for these arguments on a screen of 100 columns, and the flags in it."""
    done = command(*arguments, "--help", COLUMNS="100", NO_COLOR="1")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert "Keys of --rdzv-conf" in done.stdout
    return done.stdout, {line.split()[1] for line in lines if line.startswith("│ --")}


def test_the_help_names_every_flag_and_subcommand_and_fits_the_screen() -> None:
    page, flags = drawn_help()
    assert flags == {f"--{flag.name}" for flag in options.TABLE}
    assert "Usage: tf-ps-run [FLAGS] SCRIPT [ARGS]..." in page
    _, _, commands = page.partition("╭─ Commands ")
    assert next(line.split()[1] for line in commands.splitlines() if re.match("│ [a-z]", line)) == "scale"


def test_the_help_of_a_subcommand_names_its_flags() -> None:
    page, flags = drawn_help("scale")
    rendezvous = {"--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"}
    assert flags == {"--ps", "--workers", "--timeout", "--help"} | rendezvous
    assert "Usage: tf-ps-run scale [FLAGS]" in page


def test_the_version_is_that_of_the_package() -> None:
    done = command("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("tf-ps-run ")


def test_the_shell_completes_flags_and_their_choices() -> None:
    def offered(line: str) -> set[str]:
        variables = {"COMP_WORDS": line, "COMP_CWORD": f"{len(line.split()) - 1}"}
        return set(command(_TF_PS_RUN_COMPLETE="complete_bash", **variables).stdout.split())

    assert {"--ps-memory"} <= offered("tf-ps-run --ps-")
    assert offered("tf-ps-run --role w") == {"worker"}
    assert offered("tf-ps-run sc") == {"scale"}
    assert offered("tf-ps-run scale --work") == {"--workers"}
    assert offered("tf-ps-run train.py --ps") == set()


def test_a_launch_loads_neither_typer_nor_tensorflow_nor_grpc() -> None:
    code = (
        "import sys; from tf_ps_runner.cli import parse;"
        f"parse({['-r3', '--ps=2', '--role=ps', *MANY.split(), 'train.py']!r}, {{}});"
        "print(sorted({'typer', 'click', 'rich', 'tensorflow', 'grpc', 'asyncio', 'numpy'} & sys.modules.keys()))"
    )
    done = run_python("-c", code)
    assert done.stdout == "[]\n"


def test_a_script_named_scale_is_given_after_two_dashes(here: Path) -> None:
    (here / "scale").write_text("")
    assert job_of("-- scale").job.entrypoint.target == "scale"


def test_secrets_of_the_environment_are_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLROVER_RDZV_TOKEN", SECRET)
    monkeypatch.setattr("tf_ps_runner.cli.require_tensorflow", lambda python: None)
    spec = job_or_code(TF_PS_RUN, ["--role=ps", *MANY.split(), "train.py"])
    assert isinstance(spec, PsJobSpec)
    assert place_of(spec.job).master is not None
    assert place_of(spec.job).master.token == SECRET
    assert SECRET not in repr(spec) + "".join(capsys.readouterr())


def test_the_page_lists_every_flag_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tf-ps-run.md").read_text()
    flags = page.partition("## Flags")[2].partition("\n## ")[0]
    rows = [line for line in flags.splitlines() if line.startswith("| `-")]
    for flag in options.TABLE:
        if flag.request:
            assert f"`--{flag.name}`" in flags
            continue
        (row,) = [row for row in rows if re.search(f"`--{flag.name}[ `]", row.split(" | ")[0])]
        default = row.split(" | ")[1].strip().strip("`")
        if flag.default:
            assert default in (flag.default, "as dlrover-run"), row
    assert len(rows) == sum(not flag.request for flag in options.TABLE)
