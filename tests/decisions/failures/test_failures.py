"""The evidence after the death of a worker: its error file, the kernel's counters, its last output, and which worker
failed first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from dlrover_run.failures.causes import (
    describe_exit,
    failed_before,
    lost_peer,
    may_be_oom_kill,
    root_cause,
    summarize_error,
)
from dlrover_run.failures.error_file import MAX_BYTES, copy_root_cause, read_error_file
from dlrover_run.failures.oom_kills import OomKillCounters
from dlrover_run.failures.tracebacks import exception_lines, last_failure, last_link, plain_lines
from dlrover_run.failures.worker_exit import RecordedError, WorkerExit
from dlrover_run.words.text import format_bytes
from dlrover_run.workers.exits import build_worker_exit

NOON = 1_700_000_000

TRACE = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    step()
ValueError: bad label 11
"""
PEER_TRACE = """[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 9, in <module>
[rank1]:     dist.all_reduce(x)
[rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:36863
"""


def end(rank: int = 0, code: int = 1, after: float = 0.0, **more: object) -> WorkerExit:
    made = WorkerExit(rank=rank, local_rank=rank, pid=4000 + rank, code=code, unix_time=NOON + after)
    return replace(made, **more)  # type: ignore[arg-type]


def recorded(message: str, after: float) -> RecordedError:
    return RecordedError(message, "", NOON + after)


# --- the error file


def write_record(path: Path, content: object, modified: float = NOON + 0.25) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    os.utime(path, (modified, modified))
    return path


def torch_record(stamp: object = str(NOON)) -> dict[str, object]:
    extra = {"py_callstack": TRACE, "timestamp": stamp}
    return {"message": {"message": "ValueError: bad label 11", "extraInfo": extra}}


def test_torchs_record_is_read_with_the_time_of_the_file(tmp_path: Path) -> None:
    path = write_record(tmp_path / "error.json", torch_record())
    assert read_error_file(path) == RecordedError("ValueError: bad label 11", TRACE, NOON + 0.25)


@pytest.mark.parametrize("modified", [NOON - 5.0, NOON + 60.0])
def test_a_file_touched_at_another_time_keeps_its_own_stamp(modified: float, tmp_path: Path) -> None:
    error = read_error_file(write_record(tmp_path / "error.json", torch_record(), modified))
    assert error is not None
    assert error.unix_time == NOON


def test_the_flat_form_of_a_record_is_read_too(tmp_path: Path) -> None:
    path = write_record(tmp_path / "error.json", {"message": "no space left", "timestamp": NOON - 100})
    assert read_error_file(path) == RecordedError("no space left", "", NOON - 100)


@pytest.mark.parametrize("stamp", [None, "yesterday", "nan", [1], "inf"])
def test_a_strange_stamp_gives_the_time_of_the_file(stamp: object, tmp_path: Path) -> None:
    error = read_error_file(write_record(tmp_path / "error.json", torch_record(stamp)))
    assert error is not None
    assert error.unix_time == NOON + 0.25


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", "null", '{"message": 3}', '{"other": "x"}', "[" * 100_000, "\x00\x01"],
)
def test_a_damaged_file_is_no_record(content: str, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(content)
    assert read_error_file(path) is None


def test_missing_parts_of_a_record_are_empty(tmp_path: Path) -> None:
    path = write_record(tmp_path / "error.json", {"message": {"message": None, "extraInfo": "x"}})
    assert read_error_file(path) == RecordedError("", "", NOON + 0.25)


def test_half_a_character_in_a_record_does_no_harm(tmp_path: Path) -> None:
    error = read_error_file(write_record(tmp_path / "error.json", '{"message": "a\\ud800b"}'))
    assert error is not None
    assert error.message == "a?b"


def test_what_is_no_ordinary_file_of_a_sane_size_is_not_read(tmp_path: Path) -> None:
    huge = write_record(tmp_path / "huge.json", {"message": "x" * MAX_BYTES})
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert [read_error_file(path) for path in (huge, pipe, tmp_path, tmp_path / "none")] == [None] * 4


@pytest.mark.torchrun
def test_a_record_that_torch_writes_is_read(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise KeyError('weights')\nmain()\n"
    )
    path = tmp_path / "error.json"
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}
    subprocess.run([sys.executable, "-c", program], env=environment, stderr=subprocess.DEVNULL, timeout=120)
    error = read_error_file(path)
    assert error is not None
    assert error.message == "KeyError: 'weights'"
    assert error.traceback.startswith("Traceback (most recent call last):")
    assert error.unix_time == path.stat().st_mtime


def test_the_root_cause_is_passed_on_with_its_code(tmp_path: Path) -> None:
    source = write_record(tmp_path / "error.json", {**torch_record(), "own": "kept"})
    dest = tmp_path / "mine.json"
    dest.write_text("older")
    assert copy_root_cause(end(code=-11, error_file=str(source)), dest) is None
    written = json.loads(dest.read_text())
    assert written["message"]["errorCode"] == -11
    assert written["message"]["extraInfo"]["py_callstack"] == TRACE
    assert written["own"] == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["error.json", "mine.json"]


def test_a_flat_record_is_passed_on_as_it_is(tmp_path: Path) -> None:
    source = write_record(tmp_path / "error.json", {"message": "text", "timestamp": 1})
    assert copy_root_cause(end(code=3, error_file=str(source)), tmp_path / "mine.json") is None
    assert json.loads((tmp_path / "mine.json").read_text()) == {"message": "text", "timestamp": 1}


def test_what_cannot_be_passed_on_is_reported(tmp_path: Path) -> None:
    source = write_record(tmp_path / "error.json", torch_record())
    damaged = write_record(tmp_path / "damaged.json", "{")
    dest = tmp_path / "mine.json"
    answers = [
        copy_root_cause(end(2, error_file=None), dest),
        copy_root_cause(end(2, error_file=str(damaged)), dest),
        copy_root_cause(end(2, error_file=str(source)), tmp_path / "none" / "mine.json"),
    ]
    words = ["Rank 2 recorded no error", "of rank 2 cannot be read", "could not be copied to"]
    assert all(word in (answer or "") for word, answer in zip(words, answers, strict=True))
    assert not dest.exists()


# --- kills for memory


class Kernel:
    """A simulated /proc with the cgroup trees that its mountinfo names."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.tree = root / "cgroup"
        (self.proc / "self" / "ns").mkdir(parents=True)
        (self.proc / "self" / "ns" / "cgroup").symlink_to("cgroup:[4026531835]")
        self.vmstat(0)

    def in_a_container(self) -> None:
        (self.proc / "self" / "ns" / "cgroup").unlink()
        (self.proc / "self" / "ns" / "cgroup").symlink_to("cgroup:[4026532999]")

    def vmstat(self, kills: int) -> None:
        (self.proc / "vmstat").write_text(f"pgfault 12\noom_kill {kills}\n")

    def mounted(self, version: int, top: str, own: str) -> None:
        kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,memory")
        lines = [
            "22 1 0:20 / /proc rw - proc proc rw",
            f"31 23 0:28 {top} {self.tree} rw,relatime shared:9 - {kind} cgroup {options}",
        ]
        (self.proc / "self" / "mountinfo").write_text("\n".join(lines) + "\n")
        line = f"0::{own}" if version == 2 else f"3:cpu,cpuacct:/x\n4:memory:{own}\n0::/elsewhere"
        (self.proc / "self" / "cgroup").write_text(line + "\n")

    def v2(self, path: str, limit: str, oom: int, kills: int) -> None:
        group = self.tree / path
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(limit + "\n")
        (group / "memory.events").write_text(f"low 0\nhigh 0\nmax 7\noom {oom}\noom_kill {kills}\n")

    def v1(self, path: str, limit: int, hits: int, kills: int) -> None:
        group = self.tree / path
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (group / "memory.failcnt").write_text(f"{hits}\n")
        (group / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


MIB = 1 << 20
UNLIMITED = 9223372036854771712


def test_v2_names_the_nearest_limit_that_was_hit(kernel: Kernel) -> None:
    kernel.mounted(2, "/", "/job/agent")
    kernel.v2("job", str(512 * MIB), oom=1, kills=1)
    kernel.v2("job/agent", str(2048 * MIB), oom=0, kills=1)
    watch = OomKillCounters(kernel.proc)
    assert watch.explain() is None
    kernel.v2("job", str(512 * MIB), oom=2, kills=2)
    kernel.v2("job/agent", str(2048 * MIB), oom=0, kills=2)
    assert watch.explain() == "the kernel's memory limit was hit (cgroup limit 512 MiB)"
    assert OomKillCounters(kernel.proc).explain() is None


def test_v2_a_kill_without_a_limit_is_the_machines(kernel: Kernel) -> None:
    kernel.mounted(2, "/", "/job")
    kernel.v2("job", "max", oom=0, kills=0)
    watch = OomKillCounters(kernel.proc)
    kernel.v2("job", "max", oom=0, kills=1)
    assert watch.explain() == "the kernel killed a process because the machine had run out of memory"


def test_v2_a_kill_in_a_sibling_group_is_not_ours(kernel: Kernel) -> None:
    kernel.mounted(2, "/", "/job/agent")
    kernel.v2("job", str(512 * MIB), oom=0, kills=0)
    kernel.v2("job/agent", "max", oom=0, kills=0)
    watch = OomKillCounters(kernel.proc)
    kernel.v2("job", str(512 * MIB), oom=1, kills=1)
    kernel.vmstat(1)
    assert watch.explain() is None


def test_v2_in_a_container_that_shares_the_hosts_namespace(kernel: Kernel) -> None:
    kernel.mounted(2, "/docker/abc", "/docker/abc/job")
    kernel.v2("", str(1536 * MIB), oom=0, kills=0)
    kernel.v2("job", "max", oom=0, kills=0)
    watch = OomKillCounters(kernel.proc)
    kernel.v2("", str(1536 * MIB), oom=1, kills=1)
    kernel.v2("job", "max", oom=1, kills=1)
    assert watch.explain() == "the kernel's memory limit was hit (cgroup limit 1.5 GiB)"


def test_v1_counts_the_kill_in_the_group_and_the_hit_where_the_limit_is(kernel: Kernel) -> None:
    kernel.mounted(1, "/", "/job/agent")
    kernel.v1("job", 512 * MIB, hits=3, kills=0)
    kernel.v1("job/agent", UNLIMITED, hits=0, kills=0)
    watch = OomKillCounters(kernel.proc)
    kernel.v1("job", 512 * MIB, hits=9, kills=0)
    assert watch.explain() is None
    kernel.v1("job/agent", UNLIMITED, hits=0, kills=1)
    assert watch.explain() == "the kernel's memory limit was hit (cgroup limit 512 MiB)"


def test_v1_has_a_limit_of_memory_with_swap_that_is_asked_first(kernel: Kernel) -> None:
    kernel.mounted(1, "/", "/job/agent")
    kernel.v1("job", UNLIMITED, hits=0, kills=0)
    kernel.v1("job/agent", 512 * MIB, hits=0, kills=0)
    group = kernel.tree / "job/agent"
    (group / "memory.memsw.limit_in_bytes").write_text(f"{512 * MIB}\n")
    (group / "memory.memsw.failcnt").write_text("0\n")
    watch = OomKillCounters(kernel.proc)
    kernel.v1("job/agent", 512 * MIB, hits=0, kills=1)
    (group / "memory.memsw.failcnt").write_text("7\n")
    assert watch.explain() == "the kernel's memory limit was hit (cgroup limit 512 MiB)"


def test_v1_names_a_limit_whose_count_of_hits_stays_0(kernel: Kernel) -> None:
    """Where memory and memory with swap have one limit, as in a container."""
    kernel.mounted(1, "/", "/job")
    kernel.v1("job", 150 * MIB, hits=0, kills=0)
    (kernel.tree / "job" / "memory.max_usage_in_bytes").write_text(f"{150 * MIB - 4096}\n")
    watch = OomKillCounters(kernel.proc)
    kernel.v1("job", 150 * MIB, hits=0, kills=1)
    assert watch.explain() == "the kernel's memory limit was reached (cgroup limit 150 MiB)"
    (kernel.tree / "job" / "memory.max_usage_in_bytes").write_text(f"{90 * MIB}\n")
    kernel.v1("job", 150 * MIB, hits=0, kills=2)
    assert watch.explain() == "the kernel killed a process because the machine had run out of memory"


def test_in_a_container_nothing_is_asserted_of_the_machine(kernel: Kernel) -> None:
    kernel.mounted(2, "/", "/")
    kernel.in_a_container()
    kernel.v2("", "max", oom=0, kills=0)
    watch = OomKillCounters(kernel.proc)
    kernel.v2("", "max", oom=0, kills=1)
    assert watch.explain() == (
        "the kernel killed a process for lack of memory, because of a limit above this container or because the "
        "machine had run out"
    )


class TestOneKillExplainsOneEnd:
    @pytest.fixture(autouse=True)
    def counters(self, kernel: Kernel) -> None:
        kernel.mounted(2, "/", "/job")
        self.kernel = kernel
        self.at = 100.0
        self.kills = 0
        self.killed(0)
        self.watch = OomKillCounters(kernel.proc, lambda: self.at)

    def killed(self, count: int) -> None:
        self.kills += count
        self.kernel.v2("job", str(512 * MIB), oom=self.kills, kills=self.kills)

    def passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self.at += 1.0
            self.watch.note()

    def test_a_kill_of_long_ago_explains_nothing(self) -> None:
        self.killed(1)
        self.passes(3)
        assert self.watch.explain(7) is None

    def test_a_kill_of_a_moment_ago_explains_an_end_also_when_it_is_looked_at_late(self) -> None:
        self.passes(10)
        self.killed(1)
        self.passes(1)
        self.at += 60.0  # A console that stands still.
        assert self.watch.explain(7) is not None

    def test_each_kill_explains_one_end(self) -> None:
        self.killed(2)
        assert [self.watch.explain(pid) is not None for pid in (7, 8, 9)] == [True, True, False]
        # Asked again, and of the same process.
        assert [self.watch.explain(pid) is not None for pid in (7, 8, 9)] == [True, True, False]
        self.killed(1)
        assert self.watch.explain(10) is not None

    def test_a_process_with_much_memory_takes_time_to_end(self) -> None:
        self.kernel.v2("job", str(80 << 30), oom=0, kills=0)
        self.watch = OomKillCounters(self.kernel.proc, lambda: self.at)
        self.kernel.v2("job", str(80 << 30), oom=1, kills=1)
        self.passes(10)
        assert self.watch.explain(7) is not None
        assert self.watch.explain(8) is None


def test_without_cgroups_the_machines_count_is_weaker_evidence(kernel: Kernel) -> None:
    watch = OomKillCounters(kernel.proc)
    kernel.vmstat(1)
    assert (
        watch.explain()
        == "the kernel killed a process of this machine for lack of memory at that time, most likely this one"
    )


def test_without_any_counter_nothing_is_reported(tmp_path: Path) -> None:
    assert OomKillCounters(tmp_path).explain() is None


def test_bytes_for_people() -> None:
    assert [format_bytes(n) for n in (100, 512 * MIB, 3 << 29, 3 << 40)] == ["100 bytes", "512 MiB", "1.5 GiB", "3 TiB"]


LIMIT = 48 * MIB
LIMITED_TIMEOUT = 60.0


@pytest.fixture(params=["memory", "with swap"])
def limited_group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A real control group with a small memory limit, below the one that this process is in; in version 1 also one
    whose limit of memory with swap is the same, as in a container."""
    watch_lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = {line.split(":")[1]: line.split(":", 2)[2] for line in watch_lines}
    if "memory" in own:
        group, limit = Path("/sys/fs/cgroup/memory") / own["memory"].strip("/"), "memory.limit_in_bytes"
    else:
        group, limit = Path("/sys/fs/cgroup") / own.get("", "/").strip("/"), "memory.max"
    group = group / f"dlrover-run-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as problem:
        pytest.skip(f"no control group can be made here: {problem}")
    try:
        (group / limit).write_text(str(LIMIT))
        # Where there is swap, the process must not escape into it.
        if (group / "memory.swap.max").exists():
            (group / "memory.swap.max").write_text("0")
        elif request.param == "with swap" and (group / "memory.memsw.limit_in_bytes").exists():
            (group / "memory.memsw.limit_in_bytes").write_text(str(LIMIT))
    except OSError as problem:
        group.rmdir()
        pytest.skip(f"no memory limit can be set here: {problem}")
    yield group
    group.rmdir()


def test_a_real_kill_for_memory_is_distinguished_from_another_sigkill(limited_group: Path) -> None:
    # The watcher moves into the group before it starts its own children, as an agent in a limited container does.
    program = f"""
import os, subprocess, sys
open({str(limited_group / "cgroup.procs")!r}, "w").write(str(os.getpid()))
from dlrover_run.failures.oom_kills import OomKillCounters
watch = OomKillCounters()
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
child.kill()
print(child.wait(), watch.explain())
greedy = "data = bytearray({3 * LIMIT})\\nfor i in range(0, len(data), 4096): data[i] = 1"
print(subprocess.run([sys.executable, "-c", greedy]).returncode, watch.explain())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=LIMITED_TIMEOUT, check=True
    )
    assert done.stdout.splitlines()[0] == "-9 None"
    # In version 1 with one limit the kernel counts no hits; its use of memory is at the limit all the same.
    hit = "was reached" if "was reached" in done.stdout and (limited_group / "memory.failcnt").exists() else "was hit"
    assert done.stdout.splitlines()[1:] == [f"-9 the kernel's memory limit {hit} (cgroup limit 48 MiB)"]


def test_what_looks_like_a_kill_for_memory() -> None:
    loader = "RuntimeError: DataLoader worker (pid 99) is killed by signal: Killed."
    assert may_be_oom_kill(-9, "")
    assert may_be_oom_kill(137, "")
    assert may_be_oom_kill(1, loader)
    assert not may_be_oom_kill(-11, "")
    assert not may_be_oom_kill(1, TRACE)


# --- tracebacks


def test_the_last_traceback_is_cut_out_of_other_output() -> None:
    text = f"epoch 1\n{TRACE}retrying\n{TRACE.replace('11', '12')}[W1120 14:11:24.07 Module.cpp:9] destroyed\n\n"
    assert last_failure(text) == TRACE.replace("11", "12").splitlines()


def test_a_chain_of_exceptions_is_kept_together() -> None:
    link = "\nThe above exception was the direct cause of the following exception:\n\n"
    chain = TRACE + link + TRACE.replace("ValueError: bad label 11", "OSError: y")
    assert last_failure("noise\n" + chain)[0] == TRACE.splitlines()[0]
    assert len(last_failure(chain)) == len(chain.splitlines())
    assert last_link(last_failure(chain))[-1] == "OSError: y"
    assert exception_lines(chain) == ["OSError: y"]


def test_torchs_rank_prefix_colours_and_progress_bars_go() -> None:
    assert plain_lines("[rank3]: \x1b[31mred\x1b[0m\n 10%\r 20%\r\n[default0]:x\a") == ["red", " 20%", "x"]
    assert exception_lines(PEER_TRACE)[0].startswith("RuntimeError: [gloo/")


def test_an_exception_may_have_a_message_of_several_lines_or_none() -> None:
    assert exception_lines(TRACE + "  expected 0..9\n") == ["ValueError: bad label 11", "  expected 0..9"]
    assert exception_lines(TRACE.replace(": bad label 11", "")) == ["ValueError"]
    assert exception_lines("Traceback (most recent call last):\n  File") == []
    assert exception_lines("all is well") == []


def test_a_dump_of_faulthandler_is_a_failure_without_an_exception() -> None:
    dump = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x01 (most recent call first):\n  File x, line 1\n"
    assert last_failure("step 1\n" + dump) == dump.splitlines()
    assert exception_lines(dump) == []


# --- in words


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (end(code=0), "exited with code 0"),
        (end(code=3), "exited with code 3"),
        (end(code=1), "exited with code 1"),
        (end(code=-9, oom_kill="the limit was hit"), "was killed by SIGKILL: the limit was hit"),
        (end(code=-9), "was killed by SIGKILL, not by the launcher"),
        (end(code=-11), "was killed by SIGSEGV (segmentation fault)"),
        (end(code=-40), "was killed by signal 40"),
        (end(code=137), "exited with code 137, a shell's code for a command that was killed by SIGKILL"),
        (end(code=255), "exited with code 255"),
        (end(code=-15, stopped_with=signal.SIGTERM), "was stopped by the launcher with SIGTERM"),
        (end(code=0, stopped_with=signal.SIGTERM), "was stopped by the launcher with SIGTERM"),
        (end(error=recorded("ValueError: x\nmore", 0)), "raised ValueError: x"),
        (end(error=recorded("no space left", 0)), "failed: no space left"),
        (end(code=-6, error=recorded("KeyError: x", 0)), "was killed by SIGABRT (abort), after it raised KeyError: x"),
        (end(stderr_tail=TRACE), "raised ValueError: bad label 11"),
        (end(code=3, stderr_tail=TRACE), "exited with code 3"),
    ],
)
def test_an_end_as_text(one: WorkerExit, words: str) -> None:
    assert describe_exit(one) == words


def test_text_is_bounded_and_safe_to_print() -> None:
    words = summarize_error(end(error=recorded("ValueError: \x1b[31m" + "x" * 5000, 0)))
    assert words is not None
    assert len(words) <= 200
    assert "\x1b" not in words


# --- who was first


ROOTS: dict[str, list[WorkerExit]] = {
    "the first death, whatever the order of the list": [end(3, 5, after=1.0), end(1, 6, after=1.0001)],
    "an exception before a slow end": [
        end(1, 1, after=4.0, error=recorded("ValueError: x", 0.5)), end(0, 3, after=1.0),
    ],
    "an observed death, for an error file has whole seconds": [
        end(0, -9, after=0.3), end(1, 1, after=0.9, error=recorded("KeyError: 'x'", 0.0)),
    ],
    "an error file that is older by more than its second": [
        end(1, 1, after=5.0, error=recorded("KeyError: 'x'", -2.0)), end(0, -9, after=0.3),
    ],
}  # fmt: skip
"""The first one of each is the root cause."""


@pytest.mark.parametrize("ends", ROOTS.values(), ids=ROOTS)
def test_the_root_cause(ends: list[WorkerExit]) -> None:
    assert root_cause(ends) is root_cause(ends[::-1]) is ends[0]


def test_victims_and_successes_are_never_the_root() -> None:
    victim = end(0, -15, after=0.0, stopped_with=signal.SIGTERM)
    assert root_cause([victim, end(1, 0, after=0.1), end(2, 3, after=9.0)]) == end(2, 3, after=9.0)
    assert root_cause([victim, end(1, 0)]) is None
    assert root_cause([]) is None


def test_a_failing_worker_that_was_stopped_is_the_root_cause_if_all_others_lost_a_peer() -> None:
    culprit = end(0, -15, after=1.0, stopped_with=signal.SIGTERM, failed_first=True, error=recorded("OSError: x", 0.25))
    lost = end(1, -6, after=0.4, error=recorded("RuntimeError: Connection closed by peer", 0.3))
    assert root_cause([lost, culprit]) is culprit
    assert describe_exit(culprit) == "raised OSError: x"
    assert culprit.exit_status == 1
    # A record may be old, of an error that was handled, so a failure without an earlier stop comes first.
    assert root_cause([culprit, end(2, 3, after=0.5)]) == end(2, 3, after=0.5)
    # If a user stopped the whole job, no worker is to blame.
    assert root_cause([culprit, end(1, -15, stopped_with=signal.SIGTERM)]) is None


def test_an_error_counts_as_earlier_than_a_stop_only_when_it_is_for_certain() -> None:
    assert failed_before(recorded("x", 0.25), NOON + 0.5)
    assert not failed_before(recorded("x", 0.495), NOON + 0.5)  # Timestamps of files have the resolution of a tick.
    assert not failed_before(recorded("x", 0.0), NOON + 0.5)  # Any moment of that second.
    assert not failed_before(recorded("x", 0.25), None)
    assert not failed_before(None, NOON)


@pytest.mark.parametrize(
    "peer",
    [{"stderr_tail": PEER_TRACE}, {"error": recorded("RuntimeError: Socket Timeout", -1.5)}],
    ids=["tail", "file"],
)
def test_a_peer_that_lost_its_connection_is_not_the_root_though_seen_first(peer: dict[str, object]) -> None:
    lost = end(1, 1, after=0.0, **peer)
    assert lost_peer(lost)
    killed = end(0, -9, after=0.002)
    assert root_cause([lost, killed]) is killed
    # If all workers report that, the first of them is the best guess.
    assert root_cause([replace(lost, rank=2, unix_time=NOON + 3), lost]) is lost


def test_an_aborted_watchdog_counts_as_a_lost_peer_and_a_plain_log_line_does_not() -> None:
    tail = "[rank1]:[E1120 ProcessGroupNCCL.cpp:629] Watchdog caught collective operation timeout: WorkNCCL(...)"
    assert lost_peer(end(code=-6, stderr_tail=tail))
    assert not lost_peer(end(code=1, stderr_tail="warning: connection closed by peer, retrying\n" + TRACE))


@pytest.mark.parametrize(
    ("code", "stopped_with", "found"),
    [(-9, None, "the limit was hit"), (-9, signal.SIGKILL, None), (-11, None, None), (1, None, None)],
)
def test_a_kill_for_memory_is_looked_for_where_this_launcher_did_not_kill(
    code: int, stopped_with: signal.Signals | None, found: str | None
) -> None:
    """Through the function that the agent calls for each worker that has ended."""
    spec = SimpleNamespace(name="rank 3", rank=3, local_rank=1)
    worker = SimpleNamespace(
        code=code, stopped_with=stopped_with, stopped_at=None, pid=7, ended_at=1.0, forwarded=set(), spec=spec
    )
    nowhere = SimpleNamespace(path=None)
    placed = SimpleNamespace(stdout=nowhere, stderr=nowhere, error_file=None)
    memory = SimpleNamespace(explain=lambda _: "the limit was hit")
    end = build_worker_exit(cast(Any, worker), cast(Any, placed), "", cast(Any, memory))
    assert (end.rank, end.code, end.oom_kill) == (3, code, found)
