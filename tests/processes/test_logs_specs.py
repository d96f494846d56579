"""`--logs-specs`: a plugin from the entry points `torchrun.logs_specs`, really installed, compared with torchrun."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from support.harness import (
    OURS,
    WAIT,
    WORKERS,
    Launcher,
    Mailbox,
    finish,
    kill_leftovers,
    launch,
    only_long,
    run,
    still_alive,
    watched,
)

from dlrover_run.output.destinations import LogFile, Nowhere, RankStreams, Relayed, Tee
from dlrover_run.spec import LogSpec
from dlrover_run.torchrun.logs_specs import LogsDestinations, LogsSpecsClient, plan_from_destinations

pytestmark = pytest.mark.torchrun

PLUGIN = f"""
import os, sys
from pathlib import Path
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std
sys.path.append({str(WORKERS)!r})

class Tiny(LogsSpecs):
    rounds = 0

    @property
    def root_log_dir(self):
        return self._root_log_dir

    def reify(self, envs):
        self.rounds += 1
        print("the plugin speaks")
        (Path(self._root_log_dir) / f"asked-{{self.rounds}}").write_text(
            repr((sorted(envs), envs[1]["RANK"], self._redirects, self._tee, self._local_ranks_filter)))
        dest = LogsDest(filtered_stdout=Path(self._root_log_dir) / "picked")
        for rank, env in envs.items():
            folder = Path(self._root_log_dir) / f"round-{{self.rounds}}" / env["RANK"]
            folder.mkdir(parents=True)
            env["FROM_PLUGIN"] = f"round {{self.rounds}}"
            env["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
            dest.error_files[rank] = folder / "error.json"
            dest.stdouts[rank] = folder / "out"
            dest.stderrs[rank] = "" if rank else os.devnull
            if rank == 0:
                dest.tee_stdouts[rank] = folder / "out"
        return dest

class Same(Tiny):
    def reify(self, envs):
        files = {{rank: f"{{self._root_log_dir}}/{{rank}}.log" for rank in envs}}
        errors = {{rank: f"{{self._root_log_dir}}/error.json" for rank in envs}}
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = errors[rank]
        return LogsDest(files, {{rank: "" for rank in envs}}, files, {{}}, errors)

class Raises(Tiny):
    def reify(self, envs):
        raise LookupError("no room")

class Forgets(Tiny):
    def reify(self, envs):
        return LogsDest(stdouts={{0: "", 1: ""}}, stderrs={{0: ""}})

class Dies(Tiny):
    def reify(self, envs):
        os._exit(7)

class Refuses(Tiny):
    def __init__(self, **given):
        raise TypeError("I take nothing")

class Posts(Tiny):
    def reify(self, envs):
        from post import post
        post(plugin=os.getpid())
        return LogsDest({{rank: "" for rank in envs}}, {{rank: "" for rank in envs}})

class Hangs(Posts):
    def reify(self, envs):
        super().reify(envs)
        import signal
        signal.pause()
"""


@pytest.fixture
def plugin(tmp_path: Path) -> dict[str, str | None]:
    """The environment in which the distribution of the plugins is installed."""
    site = tmp_path / "site"
    info = site / "tiny_logs-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "tiny_logs.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-logs\nVersion: 1.0\n")
    names = ["Tiny", "Same", "Raises", "Forgets", "Dies", "Refuses", "Posts", "Hangs"]
    lines = [f"{name.lower()} = tiny_logs:{name}\n" for name in names]
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\n" + "".join(lines))
    (tmp_path / "logs").mkdir()
    (tmp_path / "tmp").mkdir()
    return {"PYTHONPATH": str(site), "TMPDIR": str(tmp_path / "tmp")}


def write(path: Path, code: str) -> Path:
    path.write_text(code)
    return path


def test_a_plugin_places_the_output_of_every_round(
    launcher: Launcher, tmp_path: Path, plugin: dict[str, str | None]
) -> None:
    script = write(
        tmp_path / "script.py",
        "import os, sys\n"
        "print('out', os.environ['RANK'], os.environ['FROM_PLUGIN'], 'needle' * int(os.environ['RANK'] == '0'))\n"
        "print('err', os.environ['RANK'], file=sys.stderr)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    os.open('turn', os.O_RDONLY if os.environ['RANK'] == '0' else os.O_WRONLY)\n"
        "    if os.environ['RANK'] == '0': __import__('signal').pause()\n"
        "    open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{\"message\": \"why\"}')\n"
        "    sys.exit(3)\n",
    )
    os.mkfifo(tmp_path / "turn")
    logs = tmp_path / "logs"
    flags = ["--logs-specs=tiny", f"--log-dir={logs}", "-r", "0:3,1:1", "-t", "0:1", "--local-ranks-filter=0,1"]
    more = ["--nproc-per-node=2", "--max-restarts=1", "--role=tiny", "--duplicate-stdout-filters=needle"]
    ended = run(launcher, [*flags, *more, script], cwd=tmp_path, env=plugin)
    assert ended.code == 0, ended.err
    for attempt in (1, 2):
        asked = (logs / f"asked-{attempt}").read_text()
        assert asked == "([0, 1], '1', {0: <Std.ALL: 3>, 1: <Std.OUT: 1>}, {0: <Std.OUT: 1>}, {0, 1})"
        for rank, needle in (("0", "needle"), ("1", "")):
            text = (logs / f"round-{attempt}" / rank / "out").read_text()
            assert text == f"out {rank} round {attempt} {needle}\n"
    recorded = [str(path.relative_to(logs)) for path in logs.rglob("error.json")]
    assert recorded == ["round-1/1/error.json"]
    assert "[tiny0]:out 0 round 1 needle\n" in ended.out
    assert "[tiny0]:out 0 round 2 needle\n" in ended.out
    assert "out 1" not in ended.out
    assert "err 1" in ended.err
    assert "err 0" not in ended.err
    picked = (logs / "picked").read_text()
    # Ours differs: the selection of an earlier round is kept.
    rounds = (1, 2) if launcher.is_ours else (2,)
    assert picked == "".join(f"[tiny0]:out 0 round {attempt} needle\n" for attempt in rounds)
    assert "the plugin speaks" in (ended.err if launcher.is_ours else ended.out)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.long
def test_a_plugin_that_names_one_file_for_all_rounds_loses_nothing(
    tmp_path: Path, plugin: dict[str, str | None]
) -> None:
    """Ours differs: torchrun empties the file; and an error that an earlier round recorded is not this round's."""
    script = write(
        tmp_path / "script.py",
        "import os\n"
        "round = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('line of round', round)\n"
        "if round == '0':\n"
        "    open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{\"message\": \"an old error\"}')\n"
        "raise SystemExit(5)\n",
    )
    flags = ["--logs-specs=same", f"--log-dir={tmp_path / 'logs'}", "--max-restarts=1"]
    ended = run(OURS, [*flags, script], cwd=tmp_path, env=plugin)
    assert ended.code == 5, ended.err
    both = "line of round 0\nline of round 1\n"
    assert (tmp_path / "logs" / "0.log").read_text() == both
    assert ended.out == both.replace("line", "[default0]:line")
    restart, _, report = ended.err.partition("FAILED")
    assert "an old error" in restart
    assert "an old error" not in report
    assert str(tmp_path / "logs" / "0.log") in report


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("raises", "--logs-specs 'raises': LookupError: no room"),
        *only_long(
            ("refuses", "--logs-specs 'refuses': TypeError: I take nothing"),
            ("forgets", "--logs-specs 'forgets': the plugin gives local rank 1 no stdout or no stderr"),
        ),
        ("dies", "--logs-specs 'dies': the plugin's process ended with code 7"),
    ],
)
def test_a_failing_plugin_is_reported_in_a_sentence_and_nothing_starts(
    tmp_path: Path, plugin: dict[str, str | None], name: str, sentence: str
) -> None:
    script = write(tmp_path / "script.py", "open('started', 'w')")
    ended = run(OURS, [f"--logs-specs={name}", "--nproc-per-node=2", script], cwd=tmp_path, env=plugin)
    assert ended.code == 2
    assert f"dlrover-run: {sentence}" in ended.err
    assert not (tmp_path / "started").exists()


def test_the_plugins_process_lives_as_long_as_the_job(mailbox: Mailbox, plugin: dict[str, str | None]) -> None:
    os.mkfifo(mailbox.directory / "turn")
    flags = ["--logs-specs=posts", "--nproc-per-node=2", "--max-restarts=1"]
    job = launch(mailbox, *flags, WORKERS / "fail_once_hold.py", env=plugin)
    first = mailbox.receive()["plugin"]
    with watched(first) as pidfds:
        try:
            messages = [mailbox.receive() for _ in range(5)]
            assert [m["plugin"] for m in messages if "plugin" in m] == [first]
            for number in (signal.SIGQUIT, signal.SIGXCPU, signal.SIGRTMIN):
                os.kill(first, number)  # As a scheduler that signals every process of the job step.
            # Longer than the grace period of the processes that dead workers leave: it is not killed as an orphan.
            assert still_alive(pidfds, 1.0) == 1
            job.terminate()
            assert finish(job).code == 128 + signal.SIGTERM
            assert still_alive(pidfds, 0) == 0
        finally:
            kill_leftovers(pidfds)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_a_plugin_that_does_not_answer(
    mailbox: Mailbox, plugin: dict[str, str | None], number: signal.Signals
) -> None:
    job = launch(mailbox, "--logs-specs=hangs", WORKERS / "hold.py", env=plugin)
    with watched(mailbox.receive()["plugin"]) as pidfds:
        try:
            job.send_signal(number)
            assert finish(job).code == (-number if number is signal.SIGKILL else 128 + number)
            assert still_alive(pidfds, WAIT) == 0
        finally:
            kill_leftovers(pidfds)
    assert mailbox.pending() == []


def test_a_plugin_that_is_abandoned_while_it_starts_is_closed_without_an_error() -> None:
    async def run() -> None:
        plugin = LogsSpecsClient(LogSpec(plugin="tiny"))
        asked = asyncio.ensure_future(plugin.ask({}))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        assert asked.cancelled()
        await plugin.close()
        assert plugin.pids == set()

    asyncio.run(run())


def test_destinations_become_streams() -> None:
    answer = LogsDestinations(
        environments={0: {}, 1: {}},
        stdouts={0: "/logs/0", 1: "/dev/null"},
        stderrs={0: "", 1: "/dev/null"},
        tee_stdouts={0: "/logs/0", 1: "/dev/null"},
        error_files={0: "/logs/error", 1: "/dev/null"},
        filtered_stdout="/logs/picked",
    )
    plan = plan_from_destinations(answer, LogSpec(stdout_filters=("x",)))
    assert plan.directory is None
    assert plan.ranks == (
        RankStreams(0, LogFile("/logs/0"), Relayed(shown=True), "/logs/error"),
        RankStreams(1, Nowhere(), Relayed(shown=False), None),
    )
    assert plan.tees == (Tee(0, 1, "/logs/0", ("x",), "/logs/picked"),)
