"""The command line compared with torchrun's own parser: what both accept must have the same meaning, and both must
refuse the same.

Where ours differs on purpose, a test here names the difference.
"""

from __future__ import annotations

import contextlib
import io
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.places import place_of
from support.torchrun_tables import VERSIONS, takes_a_value, torchrun

from dlrover_run.cli import parse
from dlrover_run.command_line.flags import BY_DEST, TABLE
from dlrover_run.command_line.parse import CommandLine, parse_argv
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.spec import JobSpec, SpecError, Std, StreamMap, UsageError

torch = pytest.importorskip("torch")
torch_run = pytest.importorskip("torch.distributed.run")
torch_meeting = pytest.importorskip("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
torch_texts = pytest.importorskip("torch.distributed.elastic.rendezvous.utils")
pytestmark = pytest.mark.torchrun


@pytest.fixture(autouse=True)
def _scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory in which the scripts that the command lines name exist."""
    for name in ("train.py", "-5", "a script.py"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)


def theirs(argv: list[str], environ: dict[str, str] | None = None) -> Namespace | None:
    """The result of torchrun's parser; None if it refuses."""
    with mock.patch.dict("os.environ", environ or {}), contextlib.redirect_stderr(io.StringIO()):
        try:
            parser: ArgumentParser = torch_run.get_args_parser()
            return parser.parse_args(argv)
        except SystemExit:
            return None


def ours(argv: list[str]) -> CommandLine | None:
    """The parts of our command line that correspond to torchrun's: None if it would refuse."""
    try:
        line = parse_argv(argv)
    except UsageError:
        return None
    return line if line.script is not None else None


def streams(text: str, ranks: int) -> dict[int, Std]:
    """The value that torchrun reads from `--redirects`, by rank."""
    from torch.distributed.elastic.multiprocessing.api import Std as TorchStd
    from torch.distributed.elastic.multiprocessing.api import to_map

    return {rank: Std(int(chosen)) for rank, chosen in to_map(TorchStd.from_str(text), ranks).items()}


def agree(spec: JobSpec, args: Namespace) -> None:
    """Check that every field of the job has the value of torchrun's namespace."""
    workers = torch_run.determine_local_world_size(args.nproc_per_node)
    least, most = torch_run.parse_min_max_nnodes(args.nnodes)
    assert (spec.rules.min_nodes, spec.rules.max_nodes) == (least, most)
    assert spec.workers_per_node == workers
    assert spec.rules.max_restarts == args.max_restarts
    assert spec.role == args.role
    assert spec.local_addr == args.local_addr
    assert (spec.start_method == "spawn") == (args.start_method == "spawn")
    assert spec.event_log == args.event_log_handler
    assert spec.virtual_local_rank == args.virtual_local_rank
    assert spec.numa_binding == args.numa_binding
    assert [number.name for number in spec.signals] == args.signals_to_handle.split(",")
    assert spec.shutdown_timeout == (30 if args.shutdown_timeout is None else args.shutdown_timeout)
    assert spec.logs.log_dir == args.log_dir
    assert (spec.logs.prefix_template or "") == getattr(args, "log_line_prefix_template", "")
    assert list(spec.logs.stdout_filters) == args.duplicate_stdout_filters
    assert list(spec.logs.stderr_filters) == args.duplicate_stderr_filters
    ranks = {int(rank) for rank in args.local_ranks_filter.split(",")} if args.local_ranks_filter else None
    assert spec.logs.shown_ranks == ranks
    for mine, text in ((spec.logs.redirects, args.redirects), (spec.logs.tee, args.tee)):
        assert {rank: mine.of(rank) for rank in range(workers)} == streams(text, workers)
    silent = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None and most == 1
    if args.standalone or silent or (args.rdzv_backend != "static" and most == 1):
        assert (spec.rendezvous.backend, place_of(spec).master, place_of(spec).store, spec.node_rank) == (
            "memory",
            None,
            None,
            None,
        )
    elif args.rdzv_backend in ("etcd", "etcd-v2"):
        assert place_of(spec).etcd is not None
        assert (spec.rendezvous.backend, place_of(spec).master, place_of(spec).store, spec.node_rank) == (
            "etcd",
            None,
            None,
            None,
        )
        assert place_of(spec).etcd.endpoints == (torch_texts.parse_rendezvous_endpoint(args.rdzv_endpoint, 2379),)
        waits(spec, args)
    elif args.rdzv_backend == "c10d":
        assert place_of(spec).master is not None
        assert (spec.rendezvous.backend, place_of(spec).store) == ("master", None)
        assert (place_of(spec).master.host, place_of(spec).master.port) == torch_texts.parse_rendezvous_endpoint(
            args.rdzv_endpoint, 29400
        )
        waits(spec, args)
    else:
        port = 29500 if args.master_port is None else args.master_port
        meeting = torch_texts.parse_rendezvous_endpoint(args.rdzv_endpoint or f"{args.master_addr}:{port}", 29500)
        assert (spec.rendezvous.backend, place_of(spec).store, spec.node_rank) == ("static", meeting, args.node_rank)
    # A job without a name gets a new one on both sides, so only its length can be compared.
    assert len(spec.run_id) == 36 if args.standalone or silent else spec.run_id == args.rdzv_id
    assert spec.entrypoint.target == args.training_script
    kinds = {"run_path": args.run_path, "program": args.no_python, "module": args.module, "script": True}
    assert spec.entrypoint.kind == next(kind for kind, chosen in kinds.items() if chosen)


def waits(spec: JobSpec, args: Namespace) -> None:
    """Check that the timeouts which torchrun's c10d reads from `--rdzv-conf` are those of the job, with the same
    defaults.
    """
    config = torch_texts._parse_rendezvous_config(args.rdzv_conf)
    params = torch_meeting.RendezvousParameters(
        "c10d", args.rdzv_endpoint, args.rdzv_id, spec.rules.min_nodes, spec.rules.max_nodes, **config
    )
    limits = torch_meeting.RendezvousTimeout(
        torch_meeting._get_timeout(params, "join"), torch_meeting._get_timeout(params, "last_call")
    )
    assert spec.rules.join_timeout == limits.join.total_seconds()
    assert spec.rules.last_call_timeout == limits.last_call.total_seconds()
    ours = JobRules()
    assert spec.rules.keep_alive_interval == params.get_as_int("keep_alive_interval", ours.keep_alive_interval)
    assert spec.rules.keep_alive_attempts == params.get_as_int("keep_alive_max_attempt", ours.keep_alive_attempts)
    if place_of(spec).master is not None:
        assert place_of(spec).master.is_host == params.get_as_bool("is_host")


# The random command lines below cover the meaning of single flags.
COMMAND_LINES = """
train.py
train.py --nnodes 3 --standalone --nproc_per_node=2
train.py -h
train.py --help
train.py a -- b
train.py -r 3 -t3 -m
-- train.py x
--nnodes 1 -- train.py -- x
--nnodes=1:1 train.py
--nnodes 2 --node-rank 1 train.py
--nnodes=2 --node_rank=0 --master_addr=10.0.0.1 --master_port=1234 train.py
--nnodes 2 --rdzv-endpoint node0:4000 train.py
--nnodes 2 --rdzv-endpoint [::1]:4000 train.py
--nnodes 2 --rdzv-endpoint [fe80::1]:1 --master-port 5 train.py
--nnodes 2 --master-addr ::1 train.py
--nnodes 4 --node-rank 3 --rdzv-id job7 train.py
--nproc-per-node=1 --nproc_per_node=3 train.py
--standalone --rdzv-id mine train.py
--standalone --rdzv-endpoint nonsense:x train.py
--stand train.py
--rdzv-backend c10d train.py
--rdzv-backend c10d --rdzv-id job7 --rdzv-endpoint h:29400 train.py
--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0 train.py
--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:1 --rdzv-id job7 train.py
--nnodes 1:3 --rdzv-backend c10d --rdzv-endpoint [::1]:4000 --max-restarts=3 train.py
--nnodes=2:2 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:29400 --nproc_per_node=2 train.py
--nnodes=1:1 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 train.py
--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=a --rdzv-conf=join_timeout=5,last_call_timeout=1,timeout=9 train.py
--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=a --rdzv-conf=is_host=F,read_timeout=9 train.py
--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=a --rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=9 train.py
--rdzv-backend etcd --rdzv-endpoint etcd-service train.py
--nnodes=1:3 --rdzv_backend=etcd --rdzv_endpoint=etcd-service:2379 --rdzv_id=job7 --max_restarts=10 train.py
--nnodes=2 --rdzv-backend=etcd-v2 --rdzv-endpoint=[::1] --rdzv-conf=protocol=http,join_timeout=5,timeout=9 train.py
--nnodes=2 --rdzv-backend=etcd --rdzv-endpoint=etcd --rdzv-conf=etcd_prefix=custom,last_call_timeout=1 train.py
--rdzv-endpoint 127.0.0.1:1234 train.py
--rdzv-conf timeout=5,is_host=1 train.py
--max-r 3 train.py
--max-restarts 1 --max_restarts 2 train.py
--role= train.py
--role -5 train.py
--module json.tool x
-m json.tool x
-mr3 json.tool x
--no-python ls -l
--run-path --no-python --module train.py
-r=3 train.py
--redirects 1 -t 2 train.py
--nproc-per-node 2 --redirects 0:3,7:1 --tee 9:3 train.py
--redirect=3 --nproc-per-node 2 train.py
-t 0:3,1:2 --nproc-per-node=2 train.py
--tee 0:3 -t 0:1 train.py
--log-line-prefix-template ${hostname}:${rank}:$x train.py
--log_line_prefix_template= train.py
--local-ranks-filter 0,1 --nproc-per-node=2 train.py
--duplicate_stdout_filters a,,b,c train.py
--duplicate-stderr-filters ,,,x train.py
--duplicate-stderr-filters ,,,, train.py
--shutdown-timeout 0 train.py
""".strip().splitlines()


@pytest.mark.parametrize("text", COMMAND_LINES)
def test_a_command_line_has_the_same_meaning_for_torchrun(text: str) -> None:
    argv = text.split()
    if "template" in text and "log_line_prefix_template" not in KNOWN:
        pytest.skip("a flag of later torchruns")
    args = theirs(argv)
    assert args is not None
    spec = parse(argv, {})
    agree(spec, args)
    assert list(spec.entrypoint.args) == args.training_script_args


@pytest.mark.parametrize(
    "words",
    [["-5", "x"], ["a script.py", "", "b c"], ["--role", "-a b", "train.py"], ["--role", "", "train.py"]],
)
def test_unusual_arguments_have_the_same_meaning_for_torchrun(words: list[str]) -> None:
    args = theirs(words)
    assert args is not None
    spec = parse(words, {})
    agree(spec, args)
    assert list(spec.entrypoint.args) == args.training_script_args


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--nnodes",
        "--nnodes 1",
        "--nnodes --standalone train.py",
        "--role -- train.py",
        "--role -m train.py",
        "--role --nope train.py",
        "--standalone=1 train.py",
        "-mfoo train.py",
        "-m=1 train.py",
        "-x train.py",
        "-nproc 2 train.py",
        "--nope train.py",
        "--nproc-per_node 2 train.py",
        "--nproc 2 train.py",
        "--max 2 train.py",
        "--r 2 train.py",
        "--max-restarts x train.py",
        "--monitor-interval x train.py",
        "--start-method thread train.py",
        "--numa-binding core train.py",
        "--master-port x train.py",
        "--shutdown-timeout x train.py",
        "--node-rank x train.py",
    ],
)
def test_both_refuse_a_bad_command_line(text: str) -> None:
    assert theirs(text.split()) is None
    with pytest.raises(SpecError):
        parse(text.split(), {})


def test_the_parser_is_the_recorded_one() -> None:
    """Ours is compared with this record for the torchruns that are not installed: see test_torchrun_tables.py."""
    version = torch.__version__.partition("+")[0]
    if version not in VERSIONS:
        pytest.skip(f"torchrun {version} is not recorded")
    recorded = torchrun(version).flags
    actions = {action.dest: action for action in torch_run.get_args_parser()._actions if action.option_strings}
    assert list(actions) == list(recorded)
    for dest, action in actions.items():
        row = recorded[dest]
        assert list(action.option_strings) == row["spellings"]
        assert (action.nargs != 0) == takes_a_value(row)
        # Neither a switch nor the help has a default that could be given.
        assert not takes_a_value(row) or action.default == row.get("default")
        assert list(action.choices or ()) == row.get("choices", [])
        assert getattr(action.type, "__name__", None) == row.get("type")


KNOWN = {action.dest for action in torch_run.get_args_parser()._actions}
"""The flags of the torchrun that is installed."""


def prefixes() -> Iterator[str]:
    """Every prefix of every spelling of the flags of this torchrun, the complete spelling included."""
    for flag in TABLE:
        for spelling in flag.spellings if flag.dest in KNOWN else ():
            for end in range(3, len(spelling) + 1):
                yield spelling[:end]


@pytest.mark.parametrize("prefix", sorted(set(prefixes())))
def test_a_prefix_is_accepted_exactly_where_torchrun_accepts_it(prefix: str) -> None:
    parser = torch_run.get_args_parser()
    taken = [spelling for spelling in parser._option_string_actions if spelling.startswith(prefix)]
    dest = (
        parser._option_string_actions[prefix].dest
        if prefix in parser._option_string_actions
        else parser._option_string_actions[taken[0]].dest
        if len(taken) == 1
        else None
    )
    if dest is not None and BY_DEST[dest].request:
        assert parse_argv([f"{prefix}=zsh" if dest == "print_completion" else prefix]).request is not None
        return
    if dest is None and prefix in FORMERLY_CLEAR:
        return
    for argv in ([prefix, "1", "train.py"], [f"{prefix}=1", "train.py"], [prefix, "train.py"]):
        line = ours(argv)
        if dest is None:
            assert theirs(argv) is None
            assert line is None
            continue
        refused = theirs(argv) is None
        # torchrun's parser checks some values at once; ours does so later, when it knows that they are used.
        if refused and line is not None:
            with pytest.raises(SpecError):
                parse(argv, {})
        elif line is not None:
            assert dest in line.values
        else:
            assert refused


FORMERLY_CLEAR = {"--log-", "--log_"}
"""Prefixes of a flag of the first torchrun that a later one has made ambiguous."""


@pytest.mark.parametrize("prefix", sorted(FORMERLY_CLEAR))
def test_a_prefix_that_the_first_torchrun_accepted_is_accepted_on_purpose(prefix: str) -> None:
    assert parse([prefix, "logs", "train.py"], {}).logs.log_dir == "logs"


@st.composite
def node_ranges(draw: Any) -> str:
    """Texts for `--nnodes` in both forms."""
    least = draw(st.integers(1, 9))
    return f"{least}:{least + draw(st.integers(0, 9))}" if draw(st.booleans()) else str(least)


@st.composite
def meetings(draw: Any) -> list[str]:
    """Flags of a job whose nodes rendezvous at an endpoint."""
    host = draw(st.sampled_from(["node-0.cluster", "10.0.0.1", "[::1]", "localhost"]))
    port = draw(st.one_of(st.just(""), st.integers(1, 65535).map(":{}".format)))
    settings = ["join_timeout", "last_call_timeout", "keep_alive_interval", "keep_alive_max_attempt", "timeout"]
    numbers = st.dictionaries(st.sampled_from(settings), st.integers(1, 10**6).map(str))
    words = st.dictionaries(st.just("is_host"), st.sampled_from(["1", "True", "yes", "Y", "0", "F", "no", "n"]))
    conf = {**draw(numbers), **draw(words)}
    given = {
        "nnodes": draw(node_ranges()),
        "rdzv-backend": "c10d",
        "rdzv-endpoint": f"{host}{port}",
        "rdzv-conf": ",".join(f"{key}={value}" for key, value in conf.items()),
    }
    return [f"--{name}={value}" for name, value in given.items() if value]


VALUES: dict[str, st.SearchStrategy[str]] = {
    "nproc_per_node": st.integers(1, 64).map(str),
    "rdzv_id": st.from_regex(r"[a-z0-9_-]{1,8}", fullmatch=True).filter(lambda text: not text.startswith("-")),
    "rdzv_conf": st.sampled_from(["", "timeout=5", "is_host=1,read_timeout=7"]),
    "max_restarts": st.integers(0, 99).map(str),
    "monitor_interval": st.floats(0.001, 100).map(str),
    "start_method": st.sampled_from(["spawn", "fork", "forkserver"]),
    "log_dir": st.just("logs"),
    "event_log_handler": st.sampled_from(["null", "console"]),
    "role": st.text("abc -_$", max_size=6).filter(lambda text: not text.startswith("-")),
    "redirects": st.sampled_from(["0", "1", "2", "3", "0:1", "0:3,0:2"]),
    "tee": st.sampled_from(["0", "1", "2", "3", "0:1", "0:0"]),
    "local_ranks_filter": st.lists(st.integers(0, 9), max_size=4).map(lambda ranks: ",".join(map(str, ranks))),
    "duplicate_stdout_filters": st.text(",ab ", max_size=8),
    "duplicate_stderr_filters": st.text(",ab ", max_size=8),
    **({"log_line_prefix_template": st.text("${}rank: ", max_size=9)} if "log_line_prefix_template" in KNOWN else {}),
    "master_addr": st.sampled_from(["127.0.0.1", "node-0.cluster", "::1"]),
    "master_port": st.integers(1, 65535).map(str),
    "local_addr": st.sampled_from(["10.0.0.7", "me"]),
    "numa_binding": st.sampled_from(["node", "socket", "exclusive", "core-complex"]),
    "signals_to_handle": st.lists(st.sampled_from(["SIGTERM", "SIGINT", "SIGUSR1"]), min_size=1, unique=True).map(
        ",".join
    ),
    "shutdown_timeout": st.integers(0, 999).map(str),
}
SWITCHES = ["standalone", "run_path", "virtual_local_rank"]


@st.composite
def flags_and_variables(draw: Any) -> tuple[list[str], dict[str, str]]:
    """A valid command line, and `PET_*` variables that it may override."""
    argv: list[str] = []
    environ: dict[str, str] = {}
    for dest in draw(st.lists(st.sampled_from([*VALUES, *SWITCHES]), max_size=8)):
        flag = BY_DEST[dest]
        value = draw(VALUES[dest]) if dest in VALUES else draw(st.sampled_from("01"))
        if flag.variable and draw(st.booleans()):
            environ[flag.variable] = value
            continue
        spelling = draw(st.sampled_from(flag.spellings))
        if dest in SWITCHES:
            argv.append(spelling)
        elif spelling.startswith("--"):
            argv.extend([f"{spelling}={value}"] if draw(st.booleans()) else [spelling, value])
        else:
            argv.extend([spelling + value] if draw(st.booleans()) else [spelling, value])
    arguments = st.one_of(
        st.sampled_from(["", "-h", "--nnodes=7", "--standalone", "-r", "--help"]), st.text(max_size=5)
    )
    tail = draw(st.lists(arguments, max_size=4))
    if "--standalone" not in argv and "PET_STANDALONE" not in environ and draw(st.booleans()):
        argv += draw(meetings())
    return [*argv, *draw(st.sampled_from([[], ["--"]])), "train.py", *tail], environ


@settings(
    max_examples=250,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(flags_and_variables())
def test_random_command_lines_have_the_same_meaning_for_torchrun(job: tuple[list[str], dict[str, str]]) -> None:
    argv, environ = job
    args = theirs(argv, environ)
    spec = parse(argv, environ)
    tail = argv[argv.index("train.py") + 1 :]
    assert list(spec.entrypoint.args) == tail
    if args is None:
        # argparse looks for flags after the script too, and rejects an ambiguous one there.
        assert theirs(argv[: len(argv) - len(tail)], environ) is not None
        return
    agree(spec, args)
    if "--" not in tail:
        assert args.training_script_args == tail


def test_arguments_after_the_script_are_those_of_the_script_on_purpose() -> None:
    """argparse up to Python 3.11 removes a `--` there, and refuses `--max`, which is ambiguous among its own flags."""
    for words in (("--", "a"), ("--max", "3")):
        assert parse(["train.py", *words], {}).entrypoint.args == words


def test_words_for_on_and_off_are_accepted_in_variables_on_purpose() -> None:
    """torchrun ends with a traceback there."""
    with pytest.raises(ValueError, match="invalid literal"):
        theirs(["train.py"], {"PET_RUN_PATH": "true"})
    assert parse(["train.py"], {"PET_RUN_PATH": "true"}).entrypoint.kind == "run_path"


def test_choices_are_checked_in_variables_too_on_purpose() -> None:
    args = theirs(["train.py"], {"PET_START_METHOD": "zzz"})
    assert args is not None
    assert args.start_method == "zzz"
    with pytest.raises(SpecError, match="PET_START_METHOD 'zzz'"):
        parse(["train.py"], {"PET_START_METHOD": "zzz"})


def test_a_map_may_name_local_rank_ten_on_purpose() -> None:
    with pytest.raises(ValueError, match="does not match"):
        streams("10:3", 11)
    spec = parse(["--nproc-per-node=11", "-r", "10:3", "train.py"], {})
    assert spec.logs.redirects == StreamMap(by_rank={10: Std.ALL})


def test_the_shutdown_timeout_may_be_a_fraction_on_purpose() -> None:
    assert theirs(["--shutdown-timeout", "0.5", "train.py"]) is None
    assert parse(["--shutdown-timeout", "0.5", "train.py"], {}).shutdown_timeout == 0.5


def test_a_static_endpoint_needs_no_port_on_purpose() -> None:
    assert place_of(parse(["--nnodes=2", "--rdzv-endpoint=node0", "train.py"], {})).store == ("node0", 29500)


def meet(*flags: str, **environ: str) -> JobSpec:
    """The job of two nodes that meet at node0."""
    return parse(["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node0", *flags, "train.py"], environ)


@pytest.mark.parametrize("nodes", ["0", "2:1", "0:2", "1:2:3", "a", "1:", ":2", "-1", "1.5", "1:a"])
def test_both_refuse_an_invalid_range(nodes: str) -> None:
    argv = [f"--nnodes={nodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=a:1", "train.py"]
    args = theirs(argv)
    assert args is not None
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        torch_run.config_from_args(args)
    with pytest.raises(SpecError, match="--nnodes"):
        parse(argv, {})


@pytest.mark.parametrize("endpoint", ["node0:x", "node0:65536", "a/b", "[::1", ":4000"])
def test_both_refuse_an_invalid_endpoint(endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        torch_texts.parse_rendezvous_endpoint(endpoint, 29400)
    with pytest.raises(SpecError, match="--rdzv-endpoint"):
        parse(["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "train.py"], {})


def test_a_range_needs_an_elastic_backend_on_purpose() -> None:
    """torchrun's static backend waits for MAX nodes whatever MIN is."""
    args = theirs(["--nnodes=1:2", "train.py"])
    assert args is not None
    assert torch_run.config_from_args(args)[0].rdzv_backend == "static"
    with pytest.raises(SpecError, match="give --rdzv-backend=c10d"):
        parse(["--nnodes=1:2", "train.py"], {})


def test_several_nodes_need_an_endpoint_on_purpose() -> None:
    """Without an endpoint each of torchrun's nodes hosts a store of its own, and waits for the others."""
    assert torch_texts.parse_rendezvous_endpoint("", 29400) == ("localhost", 29400)
    with pytest.raises(SpecError, match="needs an endpoint"):
        parse(["--nnodes=2", "--rdzv-backend=c10d", "train.py"], {})


def test_several_nodes_need_a_fixed_port_on_purpose() -> None:
    assert torch_texts.parse_rendezvous_endpoint("node0:0", 29400) == ("node0", 0)
    with pytest.raises(SpecError, match="has port 0"):
        meet("--rdzv-endpoint=node0:0")


def test_a_node_without_heartbeats_is_detected_sooner_on_purpose() -> None:
    """torchrun waits for 15 s without a heartbeat, and then does not use the result."""
    assert meet().rules.heartbeat_timeout == 9


def test_timeouts_may_be_fractions_on_purpose() -> None:
    with pytest.raises(ValueError, match="does not represent a valid integer"):
        torch_meeting.RendezvousParameters("c10d", "a", "b", 1, 1, join_timeout="0.5").get_as_int("join_timeout")
    assert meet("--rdzv-conf=join_timeout=0.5").rules.join_timeout == 0.5


def test_the_other_name_of_c10d_is_master_on_purpose() -> None:
    assert meet("--rdzv-backend=master") == meet("--rdzv-backend=c10d")
