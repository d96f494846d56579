"""The command line of tf-ps-run: jobs, errors, warnings, the help, and modules that a launch does not import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import isolate
from policy_parts import cluster_rules

from dlrover_run import exit_codes
from dlrover_run.command_line import options as those_of_dlrover_run
from dlrover_run.command_line.parser import UsageError
from dlrover_run.coordination.rules import MAX_NODES
from dlrover_run.policies.parameter_servers import rules
from dlrover_run.policies.parameter_servers.model import Capacity, Role
from dlrover_run.policies.parameter_servers.rules import ClusterRules
from dlrover_run.spec import SpecError, Std
from tf_ps_runner.cli import has_tensorflow, job_or_code, main, memory_size, parse, require_tensorflow
from tf_ps_runner.command_line import options
from tf_ps_runner.spec import PRELOAD, PsJobSpec

LIMIT = 60.0
"""Seconds that a child process of a test may take before the test gives up."""

MANY = "--rdzv-backend=master --rdzv-endpoint=node0"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with one script, and no variable of the machine that could change a job."""
    isolate(tmp_path, monkeypatch)
    for name in [name for name in os.environ if name.startswith(options.PREFIX)]:
        monkeypatch.delenv(name)
    return tmp_path


def job_of(text: str, **environ: str) -> PsJobSpec:
    """The job of these flags and variables."""
    return parse(text.split(), environ)


def warned(text: str, **environ: str) -> list[str]:
    """The warnings for these flags and variables."""
    warnings: list[str] = []
    parse(text.split(), environ, warn=warnings.append)
    return warnings


def refused(text: str, **environ: str) -> str:
    """Why there is no job of these flags and variables."""
    with pytest.raises(SpecError) as mistake:
        parse(text.split(), environ)
    return str(mistake.value)


def test_a_bare_script_is_a_chief_a_worker_and_a_server_on_this_machine() -> None:
    spec = job_of("train.py --lr 0.1")
    assert set(spec.capacity) == {Capacity(Role.CHIEF, 1), Capacity(Role.WORKER, 1), Capacity(Role.PS, 1)}
    assert (spec.job.backend, spec.job.rules.min_nodes, spec.job.rules.max_nodes) == ("memory", 1, 1)
    assert cluster_rules(spec.job.rules) == ClusterRules(min_workers=1, max_workers=1)
    assert (spec.job.entrypoint.target, spec.job.entrypoint.args) == ("train.py", ("--lr", "0.1"))
    assert (spec.job.start_method, spec.job.preload) == ("forkserver", PRELOAD)
    assert (spec.sparse, spec.hang_timeout, spec.checkpoint_dir) == (False, 0.0, None)


def test_a_machine_without_a_role_hosts_the_most_of_each_role() -> None:
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


def test_a_job_may_have_no_worker_but_the_chief() -> None:
    assert job_of("--workers=0 train.py").slots(Role.WORKER) == 0


@pytest.mark.parametrize("role", options.ROLE_CHOICES)
def test_a_machine_with_a_role_hosts_one_process_of_it_in_a_job_of_any_number_of_nodes(role: str) -> None:
    spec = job_of(f"--role={role} --ps=2 {MANY} train.py")
    assert spec.capacity == (Capacity(Role(role), 1),)
    assert (spec.job.backend, spec.job.rules.min_nodes, spec.job.rules.max_nodes) == ("master", 1, MAX_NODES)
    assert spec.job.master is not None
    assert (spec.job.master.host, spec.job.master.port, spec.job.run_id) == ("node0", 29400, "none")
    assert spec.job.role == role


def test_the_role_evaluator_adds_an_evaluator_to_the_job() -> None:
    spec = job_of(f"--role=evaluator {MANY} train.py")
    assert cluster_rules(spec.job.rules).evaluator == 1


def test_machines_without_roles_may_share_a_job() -> None:
    spec = job_of(f"--ps=4 --workers=8 {MANY} train.py")
    assert (spec.job.backend, spec.slots(Role.PS), spec.slots(Role.WORKER)) == ("master", 4, 8)


def test_the_master_variable_counts_only_for_a_machine_with_a_role() -> None:
    spec = job_of("--role=ps train.py", DLROVER_MASTER_ADDR="master:5000")
    assert spec.job.master is not None
    assert (spec.job.master.host, spec.job.master.port, spec.job.master.is_host) == ("master", 5000, False)
    assert job_of("train.py", DLROVER_MASTER_ADDR="master:5000").job.backend == "memory"


def test_the_node_id_of_a_pod_contains_its_role() -> None:
    ids = {
        job_of(f"--role={role} {MANY} train.py", WORKER_ID="0", WORKER_RANK="0").job.node_id
        for role in options.ROLE_CHOICES
    }
    assert ids == {"ps-0", "worker-0", "chief-0", "evaluator-0"}


def test_master_and_etcd_have_the_settings_that_dlrover_run_has(here: Path) -> None:
    (here / "token").write_text("a secret\n")
    spec = job_of(
        f"--role=ps {MANY} --rdzv-id=ads --rdzv-conf=token_file=token,state_dir=state,join_timeout=5 train.py"
    )
    assert spec.job.master is not None
    assert (spec.job.master.token, spec.job.master.state_dir) == ("a secret", str(here / "state"))
    assert (spec.job.rules.join_timeout, spec.job.run_id) == (5, "ads")
    assert "a secret" not in repr(spec)
    if not has_package("etcd3"):
        pytest.skip("the package etcd3 is not installed here")
    spec = job_of("--role=ps --rdzv-backend=etcd --rdzv-endpoint=a,b:3 --rdzv-conf=prefix=/jobs train.py")
    assert spec.job.etcd is not None
    assert (spec.job.etcd.endpoints, spec.job.etcd.prefix) == ((("a", 2379), ("b", 3)), "/jobs")
    assert spec.job.rules.lost_after == 0


def has_package(name: str) -> bool:
    """Whether it is installed here."""
    import importlib.util

    return importlib.util.find_spec(name) is not None


def test_a_job_on_one_machine_has_the_given_name_or_a_fresh_one() -> None:
    assert job_of("--rdzv-id=ads train.py").job.run_id == "ads"
    assert job_of("train.py").job.run_id != job_of("train.py").job.run_id


def test_every_time_and_limit_reaches_the_rules_of_the_job() -> None:
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


def test_the_table_has_the_defaults_of_the_rules() -> None:
    flags = options.TF_PS_RUN.by_dest
    assert flags["save_timeout"].default == f"{rules.SAVE_TIMEOUT:g}"
    assert flags["ready_timeout"].default == f"{rules.READY_TIMEOUT:g}"
    assert flags["end_grace"].default == f"{rules.END_GRACE:g}"
    assert flags["max_restarts"].default == f"{rules.RESTARTS}"


def test_each_variable_is_one_of_this_program_and_the_command_line_wins() -> None:
    names = {flag.variable for flag in options.TABLE if flag.variable is not None}
    assert all(name.startswith("TF_PS_RUN_") for name in names)
    assert job_of("train.py", TF_PS_RUN_PS="3", TF_PS_RUN_SPARSE="1").slots(Role.PS) == 3
    assert job_of("--ps=2 train.py", TF_PS_RUN_PS="3").slots(Role.PS) == 2
    # A cluster manager sets these for torch.
    assert job_of("train.py", PET_MAX_RESTARTS="nonsense", PET_RDZV_BACKEND="etcd").job.backend == "memory"


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


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "No script was given"),
        ("--nnodes=2 train.py", "--nnodes of dlrover-run is not supported by tf-ps-run"),
        ("--sparce train.py", "--sparce is not a flag of tf-ps-run; did you mean --sparse?"),
        ("--ps", "--ps needs a value: N|MIN:MAX."),
    ],
)
def test_a_line_that_cannot_be_read_points_to_the_help(
    text: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError):
        parse(text.split(), {})
    assert main(text.split()) == exit_codes.BAD_COMMAND_LINE
    printed = capsys.readouterr().err
    assert sentence in printed
    assert printed.endswith("Try 'tf-ps-run --help'.\n")


@pytest.mark.parametrize("role", ["--role=ps ", ""])
def test_an_endpoint_without_a_backend_is_a_masters(role: str) -> None:
    job = job_of(f"{role}--ps=2 --rdzv-endpoint=node0 train.py").job
    assert (job.backend, job.run_id) == ("master", "none")
    assert job.master is not None
    assert (job.master.host, job.master.port) == ("node0", 29400)


def test_a_range_of_servers_without_checkpoints_gives_a_warning() -> None:
    (warning,) = warned("--ps=1:2 train.py")
    assert "--checkpoint-dir=DIR" in warning
    assert warned("--ps=1:2 --checkpoint-dir=ckpt train.py") == []
    assert warned("--ps=1:2 --checkpoint-dir=hdfs://namenode/ckpt train.py") == []
    assert warned("--ps=2 train.py") == []


def test_flags_without_effect_give_a_warning() -> None:
    assert warned("--start-method=spawn --preload=json train.py") == [
        "--preload has no effect with --start-method=spawn."
    ]
    assert warned("--rdzv-conf scale_up_delay=5,last_call_timeout=3 train.py") == [
        "scale_up_delay of --rdzv-conf has no effect on a job with parameter servers."
    ]
    assert warned("--max-memory=8Gi train.py") == ["--max-memory has no effect without --worker-memory or --ps-memory."]
    assert warned("--rdzv-conf=nonsense=1,bind=a train.py") == [
        "--rdzv-conf contains 'nonsense', which is not a known key and has no effect.",
        "bind of --rdzv-conf has no effect: it requires several nodes, --rdzv-backend=c10d and --rdzv-endpoint.",
    ]


def test_modules_to_preload_come_after_those_that_every_job_needs() -> None:
    assert job_of("--preload=numpy,pandas --preload=numpy train.py").job.preload == (*PRELOAD, "numpy", "pandas")
    assert job_of("--start-method=spawn train.py").job.preload == ()


def test_output_streams_are_chosen_for_all_tasks_and_lines_have_a_prefix(here: Path) -> None:
    logs = job_of("--log-dir=logs -r 3 -t 1 train.py").job.logs
    assert (logs.log_dir, logs.redirects.default, logs.tee.default) == ("logs", Std.ALL, Std.OUT)
    assert logs.prefixed
    assert not (here / "logs").exists()


def test_an_interpreter_without_tensorflow_is_found_before_anything_starts(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = here / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    assert not has_tensorflow(str(bare))
    monkeypatch.setenv("PYTHON_EXEC", str(bare))
    assert main(["train.py"]) == exit_codes.BAD_COMMAND_LINE
    printed = capsys.readouterr().err
    assert printed == (
        f"tf-ps-run: There is no TensorFlow in {bare}: install it there (pip install 'dlrover-run[tf]'), or set "
        "PYTHON_EXEC to an interpreter that has it.\n"
    )


def test_an_interpreter_with_something_called_tensorflow_will_do_and_it_is_not_imported(here: Path) -> None:
    (here / "tensorflow").mkdir()
    (here / "tensorflow" / "__init__.py").write_text("raise SystemExit(3)")
    other = here / "python"
    other.write_text(f'#!/bin/sh\nPYTHONPATH={here} exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    require_tensorflow(str(other))


def test_a_module_that_another_interpreter_does_not_have_is_refused_before_anything_starts(here: Path) -> None:
    (here / "tensorflow").mkdir()
    (here / "tensorflow" / "__init__.py").write_text("raise SystemExit(3)")
    other = here / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    other.chmod(0o755)
    done = command("-m", "no_such.module", PYTHON_EXEC=str(other))
    assert done.returncode == exit_codes.BAD_COMMAND_LINE
    assert f"The module 'no_such.module' is neither in {here} nor installed for {other}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_interpreter_that_gives_no_answer_is_accepted(here: Path) -> None:
    other = here / "python"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    assert has_tensorflow(str(other))


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python -m tf_ps_runner` with these arguments, as a process."""
    return subprocess.run(
        [sys.executable, "-m", "tf_ps_runner", *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def drawn_help(*arguments: str) -> tuple[str, set[str]]:
    """The help of these arguments on a screen of 100 columns, and the flags in it."""
    done = command(*arguments, "--help", COLUMNS="100", NO_COLOR="1")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert "Keys of --rdzv-conf" in done.stdout
    return done.stdout, {line.split()[1] for line in lines if line.startswith("│ --")}


def test_the_help_names_every_flag_and_subcommand_and_keeps_to_the_screen() -> None:
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


def test_the_shell_is_offered_flags_and_their_words() -> None:
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
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_a_script_named_scale_is_given_after_two_dashes(here: Path) -> None:
    (here / "scale").write_text("")
    assert job_of("-- scale").job.entrypoint.target == "scale"


def test_secrets_of_the_environment_are_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLROVER_RDZV_TOKEN", "a secret")
    monkeypatch.setattr("tf_ps_runner.cli.require_tensorflow", lambda python: None)
    spec = job_or_code(["--role=ps", *MANY.split(), "train.py"])
    assert isinstance(spec, PsJobSpec)
    assert spec.job.master is not None
    assert spec.job.master.token == "a secret"
    assert "a secret" not in repr(spec) + "".join(capsys.readouterr())


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
