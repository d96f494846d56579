"""One experiment: a supervisor with its nodes, the records of their workers, and the faults that a test injects.

No wait polls: records arrive through a FIFO, lines through a pipe. A test selects the moment of a fault by holding a
worker before a chosen step.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch
from support.cluster import is_master
from support.harness import OURS, WAIT, environment, only_long, start
from support.job import Processes, kill_at_once, of_local_node
from support.rendezvous_backends import RendezvousBackend

from experiments.history import Done, Held, Record, Round, Step, find_faults, read, rounds_of

SCRIPT = Path(__file__).with_name("recorded_mnist.py")
CHAOS = Path(__file__).parents[2] / "scripts" / "start_chaos.sh"

ALSO_ON_ETCD = pytest.mark.parametrize("experiment", ["master", *only_long("etcd")], indirect=True)
"""For experiments in which the backend matters most."""

EPOCHS, BATCH_SIZE, CHECKPOINT_STEPS, SEED = 2, 8, 3, 1

NEVER = 10_000
"""A timeout in seconds that no experiment may reach."""

PIPE_SIZE = 1 << 20
"""More bytes than all records of an experiment, so that no worker waits for the test to read them."""

Found = TypeVar("Found")


@dataclass(frozen=True)
class Digits:
    """Real handwritten digits on disk; `size` of them to train with."""

    training: Path
    validation: Path
    size: int

    def order(self, epoch: int) -> list[int]:
        """The samples of an epoch in the order of use by the ranks (torch's DistributedSampler shuffles them)."""
        return _permutation(self.size, epoch)


@cache
def _permutation(size: int, epoch: int) -> list[int]:
    generator = torch.Generator()
    generator.manual_seed(SEED + epoch)
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order


class Hold:
    """A step before which some ranks wait."""

    def __init__(self, file: Path, ranks: Collection[int]) -> None:
        self._file = file
        # It is locked before it gets its name, so that no worker passes it.
        unnamed = file.with_name(f".{file.name}")
        self._lock = unnamed.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._lock.write(" ".join(map(str, ranks)))
        self._lock.flush()
        unnamed.rename(file)

    def release(self) -> None:
        """Release the waiting ranks, and hold no further ones."""
        self._file.unlink(missing_ok=True)
        self._lock.close()


class Experiment:
    """Starts one supervisor. All processes below this one that did not exist before belong to it.

    Its nodes rendezvous at a master of the supervisor, or at a `place`.
    """

    def __init__(self, directory: Path, digits: Digits, place: RendezvousBackend | None = None) -> None:
        self.directory = directory
        self.place = place
        self.digits = digits
        self.records: list[Record] = []
        self.console = ""
        self._holds: list[Hold] = []
        self._half_record, self._read = b"", 0
        self._supervisor: subprocess.Popen[str] | None = None
        (directory / "holds").mkdir()
        os.mkfifo(directory / "records")
        # Opened for writing as well, so that there is always a writer and always a reader.
        self._fifo = os.open(directory / "records", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.fcntl(self._fifo, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        # Several processes write to the console: the command, and the chaos script.
        self._pipe = os.pipe()
        self._processes = Processes()

    def start(self, *flags: str, conf: dict[str, object] | None = None, env: dict[str, str] | None = None) -> None:
        """Run the command of an experiment. Its first world has all nodes that start at once, however slow one is.

        A node that comes later waits for no checkpoint unless `conf` says so: workers that are held save none.
        """
        meeting = [] if self.place is None else self.place.flags(self.place.ports)
        keys = {
            "last_call_timeout": NEVER,
            "scale_wait": 0,
            **({} if self.place is None else self.place.conf),
            **(conf or {}),
        }
        settings = ",".join(f"{key}={value}" for key, value in keys.items())
        self._supervisor = start(
            OURS,
            [
                *flags, *meeting, "--nproc-per-node=1", "--max-restarts=3", "--start-method=forkserver",
                f"--rdzv-conf={settings}", SCRIPT,
                "--no_cuda", f"--training_data={self.digits.training}", f"--validation_data={self.digits.validation}",
                f"--num_epochs={EPOCHS}", f"--batch_size={BATCH_SIZE}", f"--seed={SEED}",
                "--checkpoint_dir=checkpoints", f"--checkpoint_steps={CHECKPOINT_STEPS}",
            ],
            cwd=self.directory,
            env={
                "EXPERIMENT_RECORDS": str(self.directory / "records"),
                "EXPERIMENT_HOLDS": str(self.directory / "holds"),
                "OMP_NUM_THREADS": "1",
                **(env or {}),
            },
            stdout=self._pipe[1],
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._end = os.pidfd_open(self._supervisor.pid)

    def begin(self, *flags: str, held: int = 1, **options: Any) -> tuple[Hold, Round]:
        """Start four nodes, and wait until all wait for the held rank in step 5. Return the hold and the round."""
        middle = self.hold(5, held)
        self.start("--local-nodes=4", *flags, **options)
        before = self.until_held(5, held)
        assert before.nodes == {0: 0, 1: 1, 2: 2, 3: 3}
        return middle, before

    # Actions of a test.

    def hold(self, step: int, *ranks: int) -> Hold:
        """Hold these ranks before a step; the others then wait for them in the middle of it."""
        self._holds.append(Hold(self.directory / "holds" / str(step), ranks))
        return self._holds[-1]

    def print(self, words: str) -> None:
        """Print a line on the console of the command; a test can wait for it as for any other line."""
        os.write(self._pipe[1], f"{words}\n".encode())

    def signal_supervisor(self, number: signal.Signals) -> None:
        """Send a signal to the command alone."""
        self.supervisor.send_signal(number)

    def kill_nodes(self, *numbers: int) -> None:
        """Kill all of these nodes at once, as when machines lose power."""
        kill_at_once(process for number in numbers for process in self.processes_of(number))

    @contextlib.contextmanager
    def stopped(self, number: int) -> Iterator[None]:
        """Stop a node, as when a virtual machine is migrated. They continue at the end of the block."""
        processes = self.processes_of(number)
        _signal(processes, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(processes, signal.SIGCONT)

    @contextlib.contextmanager
    def chaos(self, verb: str, words: str, **settings: str) -> Iterator[None]:
        """Run `scripts/start_chaos.sh` against node 1, and enter the block when it has printed these words.

        It has the console of the command, as when both are started in one line. The end of the block reverts its fault.
        """
        process = subprocess.Popen(
            ["bash", CHAOS, verb],
            env=environment({"CHAOS_CLUSTER": str(self.supervisor.pid), **settings}),
            stdin=subprocess.DEVNULL,
            stdout=self._pipe[1],
            stderr=subprocess.STDOUT,
        )
        try:
            self.until_printed(f"start_chaos: {words}")
            yield
        finally:
            process.terminate()
            process.wait()

    def master(self) -> psutil.Process:
        """The master of the cluster."""
        (master,) = [process for process in self._processes.living() if is_master(process)]
        return master

    def processes_of(self, number: int) -> list[psutil.Process]:
        """The watchdog of a node, its agent and their descendants."""
        found = of_local_node(self._processes.living(), number)
        assert found, f"there is no node {number}{self.report()}"
        return found

    # Conditions that a test waits for.

    def until(self, find: Callable[[], Found | None], what: str, timeout: float = WAIT) -> Found:
        """Wait until something is found in the output so far, and return it."""
        deadline = time.monotonic() + timeout
        while (found := find()) is None:
            if not self._listen(deadline):
                raise AssertionError(f"waited in vain for {what}{self.report()}")
        return found

    def until_printed(self, words: str) -> None:
        """Wait for a line with these words after the last line that was waited for."""

        def look() -> re.Match[str] | None:
            return re.compile(f"{re.escape(words)}.*\n").search(self.console, self._read)

        self._read = self.until(look, repr(words)).end()

    def until_held(self, step: int, *ranks: int) -> Round:
        """Wait until these ranks of the newest round are held before a step, and all others wait in it."""

        def look() -> Round | None:
            newest = self.rounds[-1:]
            if not newest or not newest[0].is_whole:
                return None
            of_round = [record for record in self.records if record.round == newest[0].name]
            held = {record.rank for record in of_round if isinstance(record, Held) and record.step == step}
            inside = {record.rank for record in of_round if isinstance(record, Step) and record.step == step}
            return newest[0] if held.issuperset(ranks) and len(inside) == newest[0].world - len(ranks) else None

        return self.until(look, f"ranks {ranks} to stand before step {step}")

    def until_world(self, nodes: Collection[int], after: Round | None = None) -> Round:
        """Wait for a round of these nodes that begins after another; its process group must be complete."""

        def look() -> Round | None:
            found = [each for each in self.rounds if each.is_whole and set(each.nodes.values()) == set(nodes)]
            return found[-1] if found and (after is None or found[-1].began > after.began) else None

        return self.until(look, f"a world of the nodes {sorted(nodes)}")

    def finish(self) -> list[Round]:
        """Check that the command succeeds, that two whole epochs were trained, and that nothing is left. Return the
        rounds.
        """
        for hold in self._holds:
            hold.release()
        deadline = time.monotonic() + WAIT
        while self._listen(deadline):
            pass
        assert self.supervisor.wait(max(0.0, deadline - time.monotonic())) == 0, self.report()
        assert self._processes.wait() == [], self.report()
        self._read_records()
        faults = find_faults(self.records, self.digits.size, EPOCHS, self.digits.order)
        assert faults == [], "\n".join(faults) + self.report()
        assert self.place is None or self.place.left() == [], self.report()
        return self.rounds

    @property
    def rounds(self) -> list[Round]:
        """The rounds so far."""
        self._read_records()
        return rounds_of(self.records)

    @property
    def supervisor(self) -> subprocess.Popen[str]:
        assert self._supervisor is not None, "the experiment was not started"
        return self._supervisor

    def place_taken_by(self, number: int) -> int:
        """The number of the node that a node has replaced, as the supervisor prints it."""
        (place,) = re.findall(rf"node (\d+) .*; node {number} takes its place", self.console)
        return int(place)

    def report(self) -> str:
        """All records and output, for the message of a failed test."""
        self._read_records()
        records = [str(record) for record in self.records if not isinstance(record, Done)]
        return "\n".join(["", "--- console", self.console, "--- records", *records])

    def close(self) -> None:
        """Kill all processes that are left."""
        self._processes.end()
        if self._supervisor is not None:
            self._supervisor.wait()
            os.close(self._end)
        for hold in self._holds:
            hold.release()
        self._read_records()
        for fd in (self._fifo, *self._pipe):
            os.close(fd)

    def _listen(self, deadline: float) -> bool:
        """Receive the next data from workers or launchers. Whether any arrived before the deadline or the end."""
        wait = max(0.0, deadline - time.monotonic())
        ready = select.select([self._fifo, self._pipe[0], self._end], [], [], wait)[0]
        if self._fifo in ready:
            self._read_records()
        if self._pipe[0] in ready:
            self.console += os.read(self._pipe[0], 65536).decode(errors="replace")
        return bool(ready) and ready != [self._end]

    def _read_records(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fifo, PIPE_SIZE):
                *lines, self._half_record = (self._half_record + data).split(b"\n")
                self.records += map(read, lines)


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
