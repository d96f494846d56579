"""The command line: defaults, sentences about mistakes, what is found before a start, the help and the completion."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import types
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from dlrover_run import exit_codes
from dlrover_run.cli import main, parse
from dlrover_run.command_line import options
from dlrover_run.command_line.argv import UsageError, cut
from dlrover_run.coordination.rules import Rules
from dlrover_run.spec import DEFAULT_SIGNALS, JobSpec, LogSpec, SpecError, Std, StreamMap

LIMIT = 60.0
"""Seconds that a child process of a test may take before the test gives up."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with one script, and no variable of the machine that could change a job."""
    for name in [name for name in os.environ if name.startswith("PET_") or name == "PYTHON_EXEC"]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_bare_script_is_one_worker_with_torchruns_defaults() -> None:
    spec = parse(["train.py"], {})
    assert (spec.workers_per_node, spec.backend, spec.node_rank, spec.master) == (1, "memory", None, None)
    assert spec.rules == Rules(lost_after=0.0)
    assert (spec.role, spec.start_method, spec.signals, spec.shutdown_timeout) == (
        "default",
        "spawn",
        DEFAULT_SIGNALS,
        30,
    )
    assert spec.logs == LogSpec()
    assert spec.entrypoint.python == sys.executable


def test_a_job_without_a_name_gets_another_one_each_time() -> None:
    assert parse(["train.py"], {}).run_id != parse(["train.py"], {}).run_id


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--nnodes 0 train.py", "--nnodes '0' is out of range: give N or MIN:MAX with 0 < MIN <= MAX."),
        ("--nnodes 3:1 train.py", "--nnodes '3:1' is out of range"),
        ("--nnodes 1:2:3 train.py", "--nnodes '1:2:3' has more than two parts"),
        ("--nnodes two train.py", "--nnodes 'two' is not a number of nodes"),
        ("--nnodes 1:3 train.py", "--nnodes '1:3' is an elastic range, and static has none: give --rdzv-backend=c10d"),
        ("--nnodes 20001 train.py", "--nnodes 20001 with --node-unit 1 cannot be had: a job has 1 to 20000 nodes"),
        ("--node-unit 2 train.py", "--nnodes 1 with --node-unit 2 cannot be had: no multiple of 2 lies between 1 and"),
        ("--node-unit 0 train.py", "--node-unit '0' is out of range: give an integer from 1 to 20000."),
        ("--spares -1 train.py", "--spares '-1' is out of range: give an integer from 0 to 20000."),
        ("--nproc-per-node 0 train.py", "--nproc-per-node '0' is out of range: give an integer of 1 or more."),
        ("--nproc-per-node tpu train.py", "'tpu' is not known: give a number of workers, auto, gpu, cpu or xpu."),
        ("--standalone --nnodes 2 train.py", "--standalone is for one node, and --nnodes asks for 2: leave one out."),
        ("--nnodes 2 --rdzv-backend etcd train.py", "--rdzv-backend 'etcd' needs a place where the nodes meet: give"),
        ("--rdzv-backend etcd --rdzv-endpoint a:x train.py", "--rdzv-endpoint 'a:x' has a bad port"),
        ("--nnodes 2 --rdzv-backend c10d train.py", "--rdzv-backend 'c10d' needs a place where the nodes meet: give"),
        (
            "--rdzv-backend zeus train.py",
            "'zeus' is not known: give c10d, etcd or static, or leave it out for one node.",
        ),
        ("--nnodes 2 --node-rank 2 train.py", "--node-rank '2' is out of range: give 0 to 1, since --nnodes is 2."),
        ("--master-port 1 --node-rank 1 train.py", "--node-rank '1' is out of range: give 0, or more --nnodes."),
        ("--node-rank -1 train.py", "--node-rank '-1' is out of range: give an integer of 0 or more."),
        ("--master-port 65536 train.py", "--master-port '65536' is out of range: give an integer from 0 to 65535."),
        ("--nnodes 2 --master-port 0 train.py", "Port 0 is another port on every node"),
        ("--nnodes 2 --master-addr a/b train.py", "--master-addr 'a/b' is not a host"),
        ("--rdzv-endpoint node0:http train.py", "--rdzv-endpoint 'node0:http' has a bad port"),
        ("--rdzv-endpoint node0:65536 train.py", "has a bad port: give HOST:PORT with a port from 0 to 65535."),
        (
            "--rdzv-endpoint :5 train.py",
            "--rdzv-endpoint ':5' has no good host: give HOST:PORT, where HOST is a host name",
        ),
        ("--rdzv-endpoint ::1 train.py", "where HOST is a host name, an IPv4 address or an IPv6 address in brackets."),
        ("--local-addr a/b train.py", "--local-addr 'a/b' is not a host: give a host name"),
        ("--rdzv-conf timeout train.py", "has 'timeout' in it, which is no key=value: give key=value,key=value."),
        ("--rdzv-conf timeout=0 train.py", "--rdzv-conf timeout '0' is out of range: give an integer of 1 or more."),
        ("--rdzv-conf is_host=perhaps train.py", "--rdzv-conf is_host 'perhaps' is not known"),
        ("--max-restarts -1 train.py", "--max-restarts '-1' is out of range: give an integer from 0 to 1000000."),
        ("--max-restarts 2147483648 train.py", "'2147483648' is out of range: give at most 1000000."),
        ("--max-restarts 1000001 train.py", "'1000001' is out of range: give an integer from 0 to 1000000."),
        ("--max-restarts 1.5 train.py", "--max-restarts '1.5' is not an integer: give an integer from 0 to 1000000."),
        ("--monitor-interval 0 train.py", "--monitor-interval '0' is out of range: give a number of seconds above 0."),
        ("--monitor-interval nan train.py", "--monitor-interval 'nan' is out of range"),
        ("--shutdown-timeout -1 train.py", "--shutdown-timeout '-1' is out of range: give a number of seconds, 0 or"),
        ("--shutdown-timeout inf train.py", "--shutdown-timeout 'inf' is out of range"),
        ("--start-method thread train.py", "--start-method 'thread' is not known: give spawn, fork or forkserver."),
        ("--event-log-handler x train.py", "--event-log-handler 'x' is not known: give null or console."),
        ("--numa-binding x train.py", "'x' is not known: give node, socket, exclusive or core-complex."),
        ("-r 4 train.py", "--redirects '4' does not say which streams: give 0 (nothing), 1 (stdout)"),
        ("-t 0:1, train.py", "--tee '0:1,' does not say which streams"),
        ("-t=-1:3 train.py", "--tee '-1:3' does not say which streams"),
        ("-r " + "9" * 5000 + ":3 train.py", ":3' does not say which streams"),
        ("--local-ranks-filter 0,x train.py", "--local-ranks-filter '0,x' is not a list of local ranks"),
        ("--local-ranks-filter=-1 train.py", "--local-ranks-filter '-1' names a negative rank"),
        ("--signals-to-handle SIGTERM,SIGFOO train.py", "has 'SIGFOO' in it, which is no signal's name"),
        ("--signals-to-handle SIGKILL train.py", "names SIGKILL, which no process can handle: leave SIGKILL out."),
        ("--signals-to-handle SIGTERM,SIGCHLD train.py", "which tells of the workers' ends: leave SIGCHLD out."),
        ("--signals-to-handle SIGSTOP train.py", "names SIGSTOP, which no process can handle"),
        ("--forward-signals=usr1 train.py", "--forward-signals 'usr1' has 'usr1' in it, which is no signal's name"),
        ("--forward-signals=SIGFOO,USR1 train.py", "--forward-signals 'SIGFOO,USR1' has 'SIGFOO' in it"),
        ("--preload torch,,numpy train.py", "--preload 'torch,,numpy' has '' in it, which is no module's name"),
        ("--log-dir train.py train.py", "--log-dir 'train.py' cannot be made, since "),
        ("--log-dir train.py/logs train.py", "--log-dir 'train.py/logs' cannot be made, since "),
        ("--logs-specs no-such train.py", "--logs-specs 'no-such' is not in the entry point group torchrun.logs_specs"),
        ("--no-python --module ls", "--no-python and --module exclude each other"),
        ("missing.py", "The script 'missing.py' does not exist in "),
        ("/missing/train.py", "The script '/missing/train.py' does not exist: check the path"),
        ("--run-path missing.py", "The script 'missing.py' does not exist in "),
        (".", "The script '.' is a directory without a __main__.py"),
        ("--no-python no-such-program", "The program 'no-such-program' is not in PATH: check its name"),
        ("--no-python ./no-such-program", "The program './no-such-program' does not exist"),
        ("--no-python ./.", "The program './.' is a directory: name a file in it."),
        ("--no-python ./train.py", "The program './train.py' is not executable: run `chmod +x ./train.py`."),
        ("status", "'status' is reserved for a command, and there is no such command here yet: run a script of this"),
        ("--nnodes 2 stop train.py", "'stop' is reserved for a command"),
        ("--run-path top", "'top' is reserved for a command"),
        ("-m no_such_package.train", "The module 'no_such_package.train' is neither in "),
        ("-m train.py", "The module 'train.py' is named like a file: write -m train, or leave -m out."),
        ("-m .train", "--module '.train' is not a module's name"),
    ],
)
def test_a_mistake_is_one_sentence_that_says_what_would_do(text: str, sentence: str) -> None:
    with pytest.raises(SpecError) as mistake:
        parse(text.split(), {"PATH": os.environ["PATH"]})
    assert sentence in str(mistake.value)
    assert "\n" not in str(mistake.value)
    assert str(mistake.value).endswith(".")


def test_two_spellings_of_a_flag_of_our_own_are_one_flag() -> None:
    assert parse(["--forw=USR1,SIGUSR2", "train.py"], {}).forward_signals == (signal.SIGUSR1, signal.SIGUSR2)
    assert cut(["--forward=USR1", "train.py"]).values == {"forward_signals": ["USR1"]}
    with pytest.raises(UsageError, match=r"it may be --preload or --precheck\."):
        cut(["--pre=1", "train.py"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "No script was given: name what the workers run after the flags."),
        ("--nproc 2 train.py", "--nproc is ambiguous: it may be --nproc-per-node or --nproc_per_node."),
        ("--ma 2 train.py", "--ma is ambiguous: it may be --master-addr, --master-port or --max-restarts."),
        (
            "--max_restart=3=4 --stdalone train.py",
            "--stdalone is not a flag of dlrover-run; did you mean --standalone?",
        ),
        ("--zzz train.py", "--zzz is not a flag of dlrover-run."),
        (
            "--accelerator=ascend-npu train.py",
            "--accelerator is a flag of DLRover's that is not here: leave it out, since",
        ),
        (
            "--numa_affinity train.py",
            "--numa_affinity is a flag of DLRover's that is not here: give --numa-binding=node",
        ),
        ("--role", "--role needs a value: NAME."),
        ("--role --standalone train.py", "--role needs a value (NAME), and '--standalone' is a flag: write --role="),
        ("--exclude-straggler=1 train.py", "--exclude-straggler takes no value, but '--exclude-straggler=1' gives it"),
        ("--standalone=1 train.py", "--standalone takes no value, but '--standalone=1' gives it one."),
    ],
)
def test_a_line_that_cannot_be_read_says_why(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as mistake:
        parse(text.split(), {})
    assert sentence in str(mistake.value)


def test_our_own_flags_yield_to_torchruns_abbreviations() -> None:
    """`--s` begins `--show-completion` too, but only torchrun's flags are candidates."""
    with pytest.raises(UsageError) as mistake:
        cut(["--s", "train.py"])
    offered = {word.strip(",.") for word in str(mistake.value).split() if word.startswith("--")}
    assert offered == {"--s", "--standalone", "--start-method", "--signals-to-handle", "--shutdown-timeout"}


def test_the_readme_lists_every_exit_code() -> None:
    page = (Path(__file__).parents[1] / "README.md").read_text()
    table = page.partition("### Exit codes")[2].partition("###")[0]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert listed == {code for name, code in vars(exit_codes).items() if name.isupper()}


def test_no_two_flags_share_a_spelling() -> None:
    assert len(options.BY_SPELLING) == sum(len(flag.spellings) for flag in options.TABLE)


def test_our_own_flags_may_be_abbreviated_where_torchrun_has_nothing() -> None:
    assert cut(["--prel", "torch", "train.py"]).values == {"preload": ["torch"]}
    assert cut(["--vers"]).request == options.BY_DEST["version"]


def test_variables_give_defaults_and_the_command_line_wins() -> None:
    environ = {"PET_NPROC_PER_NODE": "4", "PET_MAX_RESTARTS": "2", "PET_REDIRECTS": "0:3"}
    spec = parse(["--max-restarts", "5", "train.py"], environ)
    assert (spec.workers_per_node, spec.rules.max_restarts) == (4, 5)
    assert spec.logs.redirects == StreamMap(by_rank={0: Std.ALL})


@pytest.mark.parametrize("word", ["1", "true", "YES", "on", "2"])
def test_a_variable_turns_a_switch_on(word: str) -> None:
    assert parse(["train.py"], {"PET_VIRTUAL_LOCAL_RANK": word}).virtual_local_rank


@pytest.mark.parametrize("word", ["0", "false", "No", "off"])
def test_a_variable_leaves_a_switch_off_and_the_flag_wins(word: str) -> None:
    assert not parse(["train.py"], {"PET_COMPAT_EXIT_CODES": word}).compat_exit_codes
    assert parse(["--compat-exit-codes", "train.py"], {"PET_COMPAT_EXIT_CODES": word}).compat_exit_codes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PET_STANDALONE", "maybe"),
        ("PET_STANDALONE", ""),
        ("PET_MASTER_PORT", ""),
        ("PET_NNODES", "x"),
        ("PET_RDZV_BACKEND", "zeus"),
        ("PET_EVENT_LOG_HANDLER", "x"),
        ("PET_SIGNALS_TO_HANDLE", ""),
        ("PET_PRELOAD", "a-b"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon"),
    ],
)
def test_a_bad_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(SpecError, match=f"^{name} '{value}' "):
        parse(["train.py"], {name: value})


def test_what_torchrun_has_no_variable_for_has_none_here() -> None:
    spec = parse(["train.py"], {"PET_LOGS_SPECS": "x", "PET_NUMA_BINDING": "x", "PET_HELP": "1", "PET_NONSENSE": "x"})
    assert (spec.logs.plugin, spec.numa_binding) == (None, None)


def test_the_shutdown_timeout_falls_back_on_torchs_variable() -> None:
    environ = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}
    assert parse(["train.py"], environ).shutdown_timeout == 7
    assert parse(["--shutdown-timeout", "3", "train.py"], environ).shutdown_timeout == 3


def test_only_a_word_is_counted() -> None:
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


def test_preload_adds_up_and_counts_each_module_once() -> None:
    spec = parse(["--preload", "torch,numpy.linalg", "--preload", "torch,PIL", "--start-method=fork", "train.py"], {})
    assert spec.preload == ("torch", "numpy.linalg", "PIL")
    assert spec.start_method == "forkserver"
    assert parse(["train.py"], {"PET_PRELOAD": "a,b"}).preload == ("a", "b")


@pytest.mark.parametrize(("method", "said"), [("spawn", 1), ("forkserver", 0)])
def test_preload_without_a_template_is_a_warning(method: str, said: int) -> None:
    told: list[str] = []
    parse(["--preload=torch", f"--start-method={method}", "train.py"], {}, warn=told.append)
    assert told == ["--preload has no effect without --start-method=forkserver."] * said


def test_signals_are_taken_once_in_order() -> None:
    spec = parse(["--signals-to-handle", "SIGUSR1, SIGTERM,SIGUSR1", "train.py"], {})
    assert spec.signals == (signal.SIGUSR1, signal.SIGTERM)


def test_port_zero_on_one_node_is_any_port() -> None:
    assert parse(["--master-port=0", "--rdzv-id=a", "train.py"], {}).backend == "memory"


def test_the_endpoint_goes_before_the_masters_address() -> None:
    flags = [
        "--nnodes=2",
        "--node-rank=1",
        "--rdzv-endpoint=[::1]",
        "--master-addr=other",
        "--master-port=5",
        "train.py",
    ]
    spec = parse(flags, {})
    assert (spec.backend, spec.rules.store, spec.node_rank) == ("static", ("::1", 5), 1)


def test_what_has_no_effect_is_said_in_a_line() -> None:
    said: list[str] = []
    line = (
        "--node-rank 3 --rdzv-conf 'join_timeout=5,bind=::,read_timeout=7 --local-ranks-filter 0,9 --spares 0 train.py"
    )
    parse(line.split(), {}, warn=said.append)
    assert said == [
        "--node-rank 3 has no effect, since this job has one node and no static rendezvous.",
        '--rdzv-conf has "\'join_timeout", which nothing reads.',
        "bind of --rdzv-conf has no effect: it takes several nodes, --rdzv-backend=c10d and --rdzv-endpoint.",
        "--spares has no effect: it takes several nodes, --rdzv-backend=c10d (or etcd) and --rdzv-endpoint.",
        "--local-ranks-filter names 9, and this node has only local rank 0.",
    ]


def test_a_script_with_a_reserved_name_runs_by_its_path_and_other_programs_by_their_name(here: Path) -> None:
    (here / "status").write_text("")
    with pytest.raises(SpecError, match="'status' is reserved for a command"):
        parse(["status"], {})
    assert parse(["./status"], {}).entrypoint.target == "./status"
    assert parse(["train.py", "status"], {}).entrypoint.args == ("status",)
    (here / "top").write_text("#!/bin/sh\n")
    (here / "top").chmod(0o755)
    assert parse(["--no-python", "top"], {"PATH": str(here)}).entrypoint.target == "top"


def test_a_map_may_name_local_ranks_that_this_node_does_not_have() -> None:
    """Nodes with different numbers of workers are started by one command line."""
    said: list[str] = []
    spec = parse(["--nproc-per-node", "2", "-r", "0:3,10:3", "-t", "1:1,9:3", "train.py"], {}, warn=said.append)
    assert [spec.logs.redirects.of(rank) for rank in range(2)] == [Std.ALL, Std.NONE]
    assert [spec.logs.tee.of(rank) for rank in range(2)] == [Std.NONE, Std.OUT]
    assert said == []
    parse(["-t", "1:3", "train.py"], {}, warn=said.append)
    assert said == ["--tee has no effect on this node: this node has only local rank 0."]


STATIC = ["--nnodes=2", "train.py"]


@pytest.mark.parametrize(
    ("environ", "sentences"),
    [
        ({}, ["--node-rank is not given, so this node takes rank 0 of 2."]),
        (
            {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "job-0.svc", "PET_NNODES": "2"},
            [
                "--node-rank is not given, so this node takes rank 0 of 2; JOB_COMPLETION_INDEX=1 is not read: "
                "give --node-rank=$JOB_COMPLETION_INDEX.",
                "MASTER_ADDR=job-0.svc is not read, so rank 0 is expected at 127.0.0.1:29500: "
                "give --master-addr=$MASTER_ADDR or set PET_MASTER_ADDR.",
            ],
        ),
        (
            {"SLURM_NODEID": "0"},
            [
                "--node-rank is not given, so this node takes rank 0 of 2; SLURM_NODEID=0 is not read: "
                "give --node-rank=$SLURM_NODEID."
            ],
        ),
        ({"PET_NODE_RANK": "1", "SLURM_NODEID": "1", "MASTER_ADDR": "127.0.0.1"}, []),
        ({"PET_NODE_RANK": "0", "PET_MASTER_ADDR": "node0", "MASTER_ADDR": "node1"}, []),
        ({"PET_NODE_RANK": "0", "PET_RDZV_ENDPOINT": "node0:1", "MASTER_ADDR": "node1"}, []),
    ],
)
def test_static_nodes_are_told_which_defaults_stand_for_what_was_not_given(
    environ: dict[str, str], sentences: list[str]
) -> None:
    said: list[str] = []
    parse(STATIC, environ, warn=said.append)
    assert said == sentences
    parse(["--nnodes=1", "--node-rank=0", "--master-port=29500", "train.py"], environ, warn=said.append)
    assert said == sentences, "one node needs neither"


def test_quotes_around_the_whole_of_rdzv_conf_are_taken_off() -> None:
    """PyTorch's own test of torchrun types it so, to a launcher that no shell starts."""
    said: list[str] = []
    conf = "'join_timeout=5,last_call_timeout=1,timeout=5'"
    rules = parse([f"--rdzv-conf={conf}", "train.py"], {}, warn=said.append).rules
    assert (rules.join_timeout, rules.last_call_timeout) == (5.0, 1.0)
    assert parse(["train.py"], {"PET_RDZV_CONF": '"join_timeout=7"'}, warn=said.append).rules.join_timeout == 7.0
    assert parse(["--rdzv-conf=''", "train.py"], {}, warn=said.append).rules == parse(["train.py"], {}).rules
    assert said == []


def test_an_empty_log_directory_is_none_and_the_null_device_is_kept() -> None:
    assert parse(["train.py"], {"PET_LOG_DIR": ""}).logs.log_dir is None
    assert parse(["--log-dir=/dev/null", "train.py"], {}).logs.log_dir == "/dev/null"
    assert parse(["--log-dir=new/logs", "train.py"], {}).logs.log_dir == "new/logs"


def test_the_prefix_template_comes_from_torchs_variable() -> None:
    environ = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]: "}
    assert parse(["train.py"], environ).logs.prefix_template == "[${rank}]: "


def test_the_prefix_template_comes_from_its_flag_first() -> None:
    """Then from the flag's variable, and an empty one is none, as in torchrun."""
    flag = "--log-line-prefix-template"
    environ = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "theirs", "PET_LOG_LINE_PREFIX_TEMPLATE": "ours"}
    assert parse([flag, "${hostname}", "train.py"], environ).logs.prefix_template == "${hostname}"
    assert parse(["train.py"], environ).logs.prefix_template == "ours"
    assert parse([f"{flag}=", "train.py"], environ).logs.prefix_template == "theirs"


def test_a_directory_or_an_archive_with_a_main_is_a_script(here: Path) -> None:
    (here / "package").mkdir()
    (here / "package" / "__main__.py").write_text("")
    with zipfile.ZipFile(here / "job.zip", "w") as archive:
        archive.writestr("__main__.py", "")
    for target in ("package", "job.zip", "/dev/null", "-"):
        assert parse([target], {}).entrypoint.target == target


def test_a_module_is_looked_for_here_and_in_pythonpath_without_being_run(here: Path) -> None:
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


def test_another_interpreter_is_asked_for_its_modules(here: Path) -> None:
    """One that has nothing installed, and whose processes find what is in the working directory."""
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


def test_another_interpreter_must_exist_and_is_trusted_where_it_does_not_answer() -> None:
    environ = {"PYTHON_EXEC": "/bin/sh", "PATH": os.environ["PATH"]}
    entrypoint = parse(["-m", "only.there"], environ).entrypoint
    assert (entrypoint.kind, entrypoint.python) == ("module", "/bin/sh")
    with pytest.raises(SpecError, match="The interpreter named by PYTHON_EXEC 'pypy-x' is not in PATH"):
        parse(["train.py"], environ | {"PYTHON_EXEC": "pypy-x"})


def test_run_path_wins_over_the_other_two() -> None:
    entrypoint = parse(["--run-path", "--no-python", "-m", "train.py", "-m"], {}).entrypoint
    assert (entrypoint.kind, entrypoint.target, entrypoint.args) == ("run_path", "train.py", ("-m",))


def test_a_plugin_for_logs_is_found_among_the_installed_ones(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = here / "plug-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: plug\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\nmine = plug:Logs\n")
    monkeypatch.syspath_prepend(str(here))
    assert parse(["--logs-specs", "mine", "train.py"], {}).logs.plugin == "mine"
    with pytest.raises(SpecError, match=r"installed are .*mine"):
        parse(["--logs-specs", "other", "train.py"], {})


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    """The jobs that were launched; nothing really starts, and each ends with 7."""
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


def test_main_launches_what_was_asked_and_answers_its_code(
    launched: list[JobSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--nproc-per-node=2", "train.py", "--nnodes=9"]) == 7
    assert [job.entrypoint.args for job in launched] == [("--nnodes=9",)]
    assert capsys.readouterr() == ("", "")


def test_main_prints_a_mistake_as_one_line_and_answers_2(
    launched: list[JobSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--max-restarts=x", "train.py"]) == 2
    assert capsys.readouterr().err == (
        "dlrover-run: --max-restarts 'x' is not an integer: give an integer from 0 to 1000000.\n"
    )
    assert main(["--zzz"]) == 2
    assert capsys.readouterr().err == "dlrover-run: --zzz is not a flag of dlrover-run.\nTry 'dlrover-run --help'.\n"
    assert launched == []
    assert main(["--role=refused", "train.py"]) == 2
    assert capsys.readouterr().err == "dlrover-run: Found out late.\n"


def test_main_says_what_has_no_effect_and_goes_on(launched: list[JobSpec], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rdzv-conf=a=1", "train.py"]) == 7
    assert capsys.readouterr().err == "dlrover-run: warning: --rdzv-conf has 'a', which nothing reads.\n"


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nnodes=2", "--version", "--nonsense"]) == 0
    name, number = capsys.readouterr().out.split()
    assert name == "dlrover-run"
    assert number[0].isdigit()


def test_parse_starts_no_job_for_a_request() -> None:
    with pytest.raises(UsageError, match="--help answers by itself"):
        parse(["-h"], {})


def test_a_launch_imports_neither_typer_nor_rich_nor_torch(here: Path) -> None:
    """What the reading of the command line costs is paid before each launch."""
    probe = (
        "import sys; from dlrover_run.cli import parse; parse(['-r3', '--rdzv-conf=a=1', 'train.py'], {});"
        "print({name.partition('.')[0] for name in sys.modules} & {'typer', 'rich', 'click', 'torch', 'pydantic'})"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "set()\n", "")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("train.py", "The script 'train.py' does not exist in a working directory that has been removed"),
        ("-m nothing_of_this_name", "is neither in a working directory that has been removed nor installed"),
        ("--log-dir=logs -m this", "--log-dir 'logs' cannot be made in a working directory that has been removed"),
    ],
)
def test_a_working_directory_that_has_been_removed(text: str, sentence: str, here: Path) -> None:
    script = here / "train.py"
    (here / "gone").mkdir()
    os.chdir(here / "gone")
    (here / "gone").rmdir()
    with pytest.raises(SpecError) as refused:
        parse(text.split(), {})
    assert sentence in str(refused.value)
    assert parse([str(script)], {}).entrypoint.target == str(script)
    assert parse(["-m", "this"], {}).entrypoint.target == "this"
