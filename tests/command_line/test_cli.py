"""The command line of dlrover-run: defaults, values, variables, checks before a start, and the entry point."""

from __future__ import annotations

import os
import re
import signal
import sys
import types
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.command_lines import isolate, run_python
from support.places import place_of

from dlrover_run import exit_codes
from dlrover_run.cli import parse
from dlrover_run.command_line.entry_point import run
from dlrover_run.command_line.flags import BY_DEST, TABLE
from dlrover_run.command_line.parse import parse_argv
from dlrover_run.command_line.program import DLROVER_RUN
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.hangs.stragglers.rules import StragglerRules
from dlrover_run.spec import DEFAULT_SIGNALS, JobSpec, LogSpec, PreemptionNotice, SpecError, Std, StreamMap, UsageError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with one script, and no variable of the machine that could change a job."""
    isolate(tmp_path, monkeypatch)
    return tmp_path


def test_a_bare_script_is_one_worker_with_torchruns_defaults() -> None:
    spec = parse(["train.py"], {})
    assert (spec.workers_per_node, spec.rendezvous.backend, spec.node_rank, place_of(spec).master) == (
        1,
        "memory",
        None,
        None,
    )
    assert spec.rules == JobRules(lost_after=0.0, parts=(StragglerRules(watched=1),))
    assert (spec.role, spec.start_method, spec.signals, spec.shutdown_timeout) == (
        "default",
        "spawn",
        DEFAULT_SIGNALS,
        30,
    )
    assert spec.logs == LogSpec()
    assert spec.entrypoint.python == sys.executable


def test_a_job_without_a_name_gets_a_new_one_each_time() -> None:
    assert parse(["train.py"], {}).run_id != parse(["train.py"], {}).run_id


def test_two_spellings_of_an_own_flag_are_one_flag() -> None:
    assert parse(["--forw=USR1,SIGUSR2", "train.py"], {}).forward_signals == (signal.SIGUSR1, signal.SIGUSR2)
    assert parse_argv(["--forward=USR1", "train.py"]).values == {"forward_signals": ["USR1"]}
    with pytest.raises(UsageError, match=r"--pre is ambiguous: give --preload, --preemption-notice or --precheck\."):
        parse_argv(["--pre=1", "train.py"])


def test_own_flags_yield_to_torchruns_abbreviations() -> None:
    """`--s` is a prefix of `--show-completion` too, but only torchrun's flags are candidates."""
    with pytest.raises(UsageError) as mistake:
        parse_argv(["--s", "train.py"])
    offered = {word.strip(",.") for word in str(mistake.value).split() if word.startswith("--")}
    assert offered == {"--s", "--standalone", "--start-method", "--signals-to-handle", "--shutdown-timeout"}


def test_the_page_lists_every_exit_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "launcher.md").read_text()
    table = page.partition("## Exit codes")[2].partition("\n## ")[0]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert listed == {code for name, code in vars(exit_codes).items() if name.isupper()}


def test_no_two_flags_share_a_spelling() -> None:
    assert len(DLROVER_RUN.by_spelling) == sum(len(flag.spellings) for flag in TABLE)


def test_own_flags_may_be_abbreviated_where_torchrun_has_no_such_flag() -> None:
    assert parse_argv(["--prel", "torch", "train.py"]).values == {"preload": ["torch"]}
    assert parse_argv(["--vers"]).request == BY_DEST["version"]


def test_variables_give_defaults_and_the_command_line_takes_precedence() -> None:
    environ = {"PET_NPROC_PER_NODE": "4", "PET_MAX_RESTARTS": "2", "PET_REDIRECTS": "0:3"}
    spec = parse(["--max-restarts", "5", "train.py"], environ)
    assert (spec.workers_per_node, spec.rules.max_restarts) == (4, 5)
    assert spec.logs.redirects == StreamMap(by_rank={0: Std.ALL})


@pytest.mark.parametrize("word", ["1", "true", "YES", "on", "2"])
def test_a_variable_enables_a_switch(word: str) -> None:
    assert parse(["train.py"], {"PET_VIRTUAL_LOCAL_RANK": word}).virtual_local_rank


@pytest.mark.parametrize(
    ("words", "variable", "scheme"),
    [
        *(([], word, "precise") for word in ("0", "false", "No", "off")),
        (["--compat-exit-codes"], "0", "torchrun"),
        (["--exit-codes=kubernetes"], "0", "kubernetes"),
        (["--exit-codes=torchrun"], "0", "torchrun"),
        (["--exit-codes=torchrun", "--compat-exit-codes"], "0", "torchrun"),
    ],
)
def test_the_values_of_exit_codes(words: list[str], variable: str, scheme: str) -> None:
    assert parse([*words, "train.py"], {"PET_COMPAT_EXIT_CODES": variable}).exit_codes == scheme


def test_a_preemption_notice_has_the_syntax_of_slurm() -> None:
    assert parse(["train.py"], {}).preemption is None
    given = parse(["--preemption-notice=USR1@120", "train.py"], {}).preemption
    assert given == PreemptionNotice(signal.SIGUSR1, 120)
    assert given.grace == 115
    # A short notice leaves half of its time to the workers.
    assert PreemptionNotice(signal.SIGUSR2, 4).grace == 2
    assert parse(["train.py"], {"PET_PREEMPTION_NOTICE": "SIGUSR2@30"}).preemption == PreemptionNotice(
        signal.SIGUSR2, 30
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--preemption-notice=USR1",), "is not a signal and a time: give them as in USR1@120"),
        (("--preemption-notice=USR1@",), "is not a signal and a time"),
        (("--preemption-notice=USR1,USR2@60",), "is not a signal and a time"),
        (("--preemption-notice=CONT@60",), "is not a signal and a time"),
        (("--preemption-notice=@60",), "is not the name of a signal"),
        (("--preemption-notice=KILL@60",), "no process can handle"),
        (("--preemption-notice=USR1@soon",), "is not a number"),
        (("--preemption-notice=USR1@0",), "0"),
        (("--preemption-notice=TERM@60",), "contains SIGTERM, as --signals-to-handle SIGTERM,SIGINT"),
        (("--preemption-notice=USR1@60", "--forward-signals=USR1"), "contains SIGUSR1, as --forward-signals USR1"),
    ],
)
def test_an_invalid_notice_is_refused(words: tuple[str, ...], problem: str) -> None:
    with pytest.raises(SpecError) as mistake:
        parse([*words, "train.py"], {})
    assert str(mistake.value).startswith("--preemption-notice")
    assert problem in str(mistake.value)


def test_two_values_of_exit_codes_are_refused() -> None:
    with pytest.raises(SpecError, match="--compat-exit-codes means --exit-codes=torchrun"):
        parse(["--exit-codes=kubernetes", "--compat-exit-codes", "train.py"], {})


def test_flags_without_a_variable_in_torchrun_have_none_here() -> None:
    spec = parse(["train.py"], {"PET_LOGS_SPECS": "x", "PET_NUMA_BINDING": "x", "PET_HELP": "1", "PET_NONSENSE": "x"})
    assert (spec.logs.plugin, spec.numa_binding) == (None, None)


def test_the_shutdown_timeout_falls_back_on_torchs_variable() -> None:
    environ = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}
    assert parse(["train.py"], environ).shutdown_timeout == 7
    assert parse(["--shutdown-timeout", "3", "train.py"], environ).shutdown_timeout == 3


MASTER = ("--rdzv-backend=c10d", "--rdzv-endpoint=node0:29400")
STATIC = ("--master-addr=node0", "--node-rank=0")


@pytest.mark.parametrize(
    ("words", "policies"),
    [
        (("--stall-action=off",), set()),
        ((), {"stragglers"}),
        (("--nnodes=2", *MASTER), {"stalls", "stragglers"}),
        (("--nnodes=2", *STATIC), set()),
        (("--stall-action=off", "--survivors=keep"), {"survivors"}),
        (("--stall-action=off", "--survivors=restart", "--reconfigure-timeout=5"), set()),
        (("--stall-action=off", "--survivors=keep", "--nnodes=2", *MASTER), {"survivors"}),
        (("--stall-action=off", "--survivors=keep", "--nnodes=2", *STATIC), set()),
        (("--stall-action=off", "--nnodes=2", *MASTER), set()),
    ],
)
def test_stalls_stragglers_and_survivors_have_policies_where_the_nodes_communicate(
    words: tuple[str, ...], policies: set[str]
) -> None:
    parts = parse([*words, "train.py"], {}).rules.parts
    found = {part.feature for part in parts if part.applies}
    assert found & {"stalls", "stragglers", "survivors"} == policies


def test_only_words_are_resolved_by_counting_devices() -> None:
    asked: list[str] = []

    def count(kind: str, environ: Mapping[str, str]) -> int:
        asked.append(kind + environ["CUDA_VISIBLE_DEVICES"])
        return 3

    environ = {"CUDA_VISIBLE_DEVICES": "0,1,2"}
    assert parse(["--nproc-per-node", "gpu", "train.py"], environ, count_workers=count).workers_per_node == 3
    assert parse(["--nproc-per-node", "2", "train.py"], environ, count_workers=count).workers_per_node == 2
    assert asked == ["gpu0,1,2"]


@pytest.mark.parametrize(("given", "each"), [("gpu", True), ("auto", False), ("cpu", False), ("2", False)])
def test_workers_that_are_counted_as_gpus_need_one_each(given: str, each: bool) -> None:
    assert parse(["--nproc-per-node", given, "train.py"], {}, count_workers=lambda *_: 3).gpu_each is each


def test_preload_accumulates_and_counts_each_module_once() -> None:
    spec = parse(["--preload", "torch,numpy.linalg", "--preload", "torch,PIL", "--start-method=fork", "train.py"], {})
    assert spec.preload == ("torch", "numpy.linalg", "PIL")
    assert spec.start_method == "forkserver"
    assert parse(["train.py"], {"PET_PRELOAD": "a,b"}).preload == ("a", "b")


def test_signals_are_listed_once_in_order() -> None:
    spec = parse(["--signals-to-handle", "SIGUSR1, SIGTERM,SIGUSR1", "train.py"], {})
    assert spec.signals == (signal.SIGUSR1, signal.SIGTERM)


def test_port_zero_on_one_node_is_any_port() -> None:
    assert parse(["--master-port=0", "--rdzv-id=a", "train.py"], {}).rendezvous.backend == "memory"


def test_the_endpoint_takes_precedence_over_the_masters_address() -> None:
    flags = [
        "--nnodes=2",
        "--node-rank=1",
        "--rdzv-endpoint=[::1]",
        "--master-addr=other",
        "--master-port=5",
        "train.py",
    ]
    spec = parse(flags, {})
    assert (spec.rendezvous.backend, place_of(spec).store, spec.node_rank) == ("static", ("::1", 5), 1)


def test_a_script_with_a_reserved_name_runs_by_its_path_and_other_programs_by_their_name(here: Path) -> None:
    (here / "status").write_text("")
    with pytest.raises(SpecError, match="'status' is a subcommand"):
        parse(["--nnodes=1", "status"], {})
    assert parse(["./status"], {}).entrypoint.target == "./status"
    assert parse(["train.py", "status"], {}).entrypoint.args == ("status",)
    (here / "top").write_text("#!/bin/sh\n")
    (here / "top").chmod(0o755)
    assert parse(["--no-python", "top"], {"PATH": str(here)}).entrypoint.target == "top"


def test_a_stream_map_may_name_ranks_that_this_node_does_not_have() -> None:
    """Nodes with different numbers of workers are started by one command line."""
    printed: list[str] = []
    spec = parse(["--nproc-per-node", "2", "-r", "0:3,10:3", "-t", "1:1,9:3", "train.py"], {}, warn=printed.append)
    assert [spec.logs.redirects.of(rank) for rank in range(2)] == [Std.ALL, Std.NONE]
    assert [spec.logs.tee.of(rank) for rank in range(2)] == [Std.NONE, Std.OUT]
    assert printed == []
    parse(["-t", "1:3", "train.py"], {}, warn=printed.append)
    assert [sentence.split()[0] for sentence in printed] == ["--tee"]


@pytest.mark.parametrize(
    "environ",
    [
        {"PET_NODE_RANK": "1", "SLURM_NODEID": "1", "MASTER_ADDR": "127.0.0.1"},
        {"PET_NODE_RANK": "0", "PET_MASTER_ADDR": "node0", "MASTER_ADDR": "node1"},
        {"PET_NODE_RANK": "0", "PET_RDZV_ENDPOINT": "node0:1", "MASTER_ADDR": "node1"},
    ],
)
def test_static_nodes_with_a_rank_and_an_address_give_no_warning(environ: dict[str, str]) -> None:
    warnings: list[str] = []
    parse(["--nnodes=2", "train.py"], environ, warn=warnings.append)
    parse(["--nnodes=1", "--node-rank=0", "--master-port=29500", "train.py"], environ, warn=warnings.append)
    assert warnings == [], "a single node needs neither"


def test_quotes_around_the_whole_of_rdzv_conf_are_removed() -> None:
    """PyTorch's own test of torchrun passes them to a launcher that no shell starts."""
    printed: list[str] = []
    conf = "'join_timeout=5,last_call_timeout=1,timeout=5'"
    rules = parse([f"--rdzv-conf={conf}", "train.py"], {}, warn=printed.append).rules
    assert (rules.join_timeout, rules.last_call_timeout) == (5.0, 1.0)
    assert parse(["train.py"], {"PET_RDZV_CONF": '"join_timeout=7"'}, warn=printed.append).rules.join_timeout == 7.0
    assert parse(["--rdzv-conf=''", "train.py"], {}, warn=printed.append).rules == parse(["train.py"], {}).rules
    assert printed == []


def test_an_empty_log_directory_is_ignored_and_the_null_device_is_kept() -> None:
    assert parse(["train.py"], {"PET_LOG_DIR": ""}).logs.log_dir is None
    for directory in ("/dev/null", "new/logs"):
        assert parse([f"--log-dir={directory}", "train.py"], {}).logs.log_dir == directory


def test_the_prefix_template_comes_from_its_flag_first() -> None:
    """Then from the flag's variable, then from torch's. An empty one is ignored, as in torchrun."""
    flag = "--log-line-prefix-template"
    theirs = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "theirs"}
    environ = {**theirs, "PET_LOG_LINE_PREFIX_TEMPLATE": "ours"}
    assert parse([flag, "${hostname}", "train.py"], environ).logs.prefix_template == "${hostname}"
    assert parse(["train.py"], environ).logs.prefix_template == "ours"
    assert parse([f"{flag}=", "train.py"], environ).logs.prefix_template == "theirs"
    assert parse(["train.py"], theirs).logs.prefix_template == "theirs"


def test_a_directory_or_an_archive_with_a_main_is_a_script(here: Path) -> None:
    (here / "package").mkdir()
    (here / "package" / "__main__.py").write_text("")
    with zipfile.ZipFile(here / "job.zip", "w") as archive:
        archive.writestr("__main__.py", "")
    for target in ("package", "job.zip", "/dev/null", "-"):
        assert parse([target], {}).entrypoint.target == target


def test_standard_input_is_read_by_one_worker_and_once(here: Path) -> None:
    for args, why in (
        (["--nproc-per-node=2"], "2 workers share"),
        (["--max-restarts=1"], "a restart would need again"),
    ):
        with pytest.raises(SpecError, match=f"standard input, which {why}, and it can be read only once: name a file"):
            parse([*args, "-"], {})


def test_a_module_is_searched_here_and_in_pythonpath_without_being_run(here: Path) -> None:
    boom = "raise RuntimeError('imported')"
    (here / "pkg").mkdir()
    (here / "pkg" / "__init__.py").write_text(boom)
    (here / "far").mkdir()
    (here / "far" / "remote.py").write_text(boom)
    assert parse(["-m", "pkg.train"], {}).entrypoint.target == "pkg.train"
    assert parse(["-m", "remote"], {"PYTHONPATH": str(here / "far")}).entrypoint.kind == "module"
    assert parse(["-m", "json.tool"], {}).entrypoint.kind == "module"
    with pytest.raises(SpecError, match="neither in"):
        parse(["-m", "remote"], {})
    assert "pkg" not in sys.modules


def test_another_interpreter_is_probed_for_the_module(here: Path) -> None:
    """An interpreter without any packages, whose processes find what is in the working directory."""
    other = here / "my-python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    other.chmod(0o755)
    environ = {"PYTHON_EXEC": str(other), "PATH": os.environ["PATH"]}
    (here / "mine.py").write_text("raise RuntimeError('imported')")
    for module in ("mine", "json.tool"):
        assert parse(["-m", module], environ).entrypoint.target == module
    for module in ("pytest", "no_such.module"):
        with pytest.raises(SpecError, match=f"'{module}' is neither in {here} nor installed for {other}"):
            parse(["-m", module], environ)
    with pytest.raises(SpecError, match=r"'mine\.py' is named like a file"):
        parse(["-m", "mine.py"], environ)


def test_another_interpreter_must_exist_but_its_probe_may_fail() -> None:
    environ = {"PYTHON_EXEC": "/bin/sh", "PATH": os.environ["PATH"]}
    entrypoint = parse(["-m", "only.there"], environ).entrypoint
    assert (entrypoint.kind, entrypoint.python) == ("module", "/bin/sh")
    with pytest.raises(SpecError, match="The interpreter named by PYTHON_EXEC 'pypy-x' is not in PATH"):
        parse(["train.py"], environ | {"PYTHON_EXEC": "pypy-x"})


def test_run_path_takes_precedence_over_the_other_two() -> None:
    entrypoint = parse(["--run-path", "--no-python", "-m", "train.py", "-m"], {}).entrypoint
    assert (entrypoint.kind, entrypoint.target, entrypoint.args) == ("run_path", "train.py", ("-m",))


def test_a_logs_plugin_must_be_installed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = here / "plug-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: plug\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\nmine = plug:Logs\n")
    monkeypatch.syspath_prepend(str(here))
    assert parse(["--logs-specs", "mine", "train.py"], {}).logs.plugin == "mine"
    with pytest.raises(SpecError, match=r"--logs-specs 'other' .*mine"):
        parse(["--logs-specs", "other", "train.py"], {})


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    """The jobs that were launched; none really starts, and each returns 7."""
    jobs: list[JobSpec] = []
    stand_in = types.ModuleType("dlrover_run.launch")

    def launch(spec: JobSpec) -> int:
        jobs.append(spec)
        if spec.role == "refused":
            raise SpecError("Found out late.")
        return 7

    stand_in.launch = launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dlrover_run.launch", stand_in)
    return jobs


def test_the_program_launches_the_job_and_returns_its_exit_code(
    launched: list[JobSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(DLROVER_RUN, ["--nproc-per-node=2", "train.py", "--nnodes=9"]) == 7
    assert [job.entrypoint.args for job in launched] == [("--nnodes=9",)]
    assert capsys.readouterr() == ("", "")


def test_the_program_prints_an_error_as_one_line_and_returns_2(
    launched: list[JobSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(DLROVER_RUN, ["--max-restarts=x", "train.py"]) == 2
    assert capsys.readouterr().err == (
        "dlrover-run: --max-restarts 'x' is not an integer: give an integer from 0 to 1000000.\n"
    )
    assert run(DLROVER_RUN, ["--zzz"]) == 2
    assert capsys.readouterr().err == "dlrover-run: --zzz is not a flag of dlrover-run.\nTry 'dlrover-run --help'.\n"
    assert launched == []
    assert run(DLROVER_RUN, ["--role=refused", "train.py"]) == 2
    assert capsys.readouterr().err == "dlrover-run: Found out late.\n"


def test_the_program_prints_warnings_and_launches(launched: list[JobSpec], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(DLROVER_RUN, ["--rdzv-conf=a=1", "train.py"]) == 7
    assert re.fullmatch("dlrover-run: warning: --rdzv-conf contains 'a'.*\n", capsys.readouterr().err)


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(DLROVER_RUN, ["--nnodes=2", "--version", "--nonsense"]) == 0
    name, number = capsys.readouterr().out.split()
    assert name == "dlrover-run"
    assert number[0].isdigit()


def test_parse_starts_no_job_for_a_request() -> None:
    with pytest.raises(UsageError, match="--help prints information"):
        parse(["-h"], {})


def test_a_launch_imports_neither_typer_nor_rich_nor_torch(here: Path) -> None:
    """Every launch pays for what the parsing of the command line imports."""
    probe = (
        "import sys; from dlrover_run.cli import parse; parse(['-r3', '--rdzv-conf=a=1', 'train.py'], {});"
        "print({name.partition('.')[0] for name in sys.modules} & {'typer', 'rich', 'click', 'torch', 'pydantic'})"
    )
    done = run_python("-c", probe)
    assert (done.returncode, done.stdout, done.stderr) == (0, "set()\n", "")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("train.py", "The script 'train.py' does not exist in a working directory that has been removed"),
        ("-m nothing_of_this_name", "is neither in a working directory that has been removed nor installed"),
        ("--log-dir=logs -m this", "--log-dir 'logs' cannot be created in a working directory that has been removed"),
    ],
)
def test_a_deleted_working_directory_is_named_in_the_error(text: str, sentence: str, here: Path) -> None:
    script = here / "train.py"
    (here / "gone").mkdir()
    os.chdir(here / "gone")
    (here / "gone").rmdir()
    with pytest.raises(SpecError) as refused:
        parse(text.split(), {})
    assert sentence in str(refused.value)
    assert parse([str(script)], {}).entrypoint.target == str(script)
    assert parse(["-m", "this"], {}).entrypoint.target == "this"


@pytest.mark.parametrize(
    ("flags", "settings"),
    [([], {"limit": None}), (["--checkpoint-memory=8Gi"], {"limit": 8192}), (["--checkpoint-memory=0"], None)],
)
def test_the_memory_for_checkpoints_is_limited(here: Path, flags: list[str], settings: object) -> None:
    assert parse([*flags, "train.py"], {}).settings.get("checkpoints") == settings


@pytest.mark.parametrize("text", ["-1", "much", "1K"])
def test_a_limit_that_is_no_size_of_memory_is_refused(here: Path, text: str) -> None:
    with pytest.raises(SpecError, match="--checkpoint-memory"):
        parse([f"--checkpoint-memory={text}", "train.py"], {})
