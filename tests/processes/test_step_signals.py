"""Signals from a scheduler to every process of a job step, and signals that are forwarded to the workers.

The test is the parent of the launcher, as `slurmstepd` is, and walks the process tree below itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from support.cluster import Cluster, is_master
from support.harness import WAIT, WORKERS, Mailbox, finish, launch, only_long
from support.rendezvous_backends import MasterBackend

from dlrover_run.agent.shutdown import (
    SAME_SIGNAL_SECONDS,
    WITNESS_SECONDS,
    AcceptedSignal,
    ShutdownRequest,
    SignalDeduplicator,
)
from dlrover_run.cli import parse
from dlrover_run.processes import event_loop, signals, watchdog
from dlrover_run.processes.watchdog import ReceivedSignal
from dlrover_run.spec import SpecError

ON_SIGNAL = str(WORKERS / "on_signal.py")

ONE_NODE: tuple[str, ...] = ("--nproc-per-node=2",)
THREE_NODES = ("--local-nodes=3", "--nnodes=3", "--nproc-per-node=1")
PLACES = [
    pytest.param(ONE_NODE, id="one node"),
    pytest.param(THREE_NODES, id="three nodes", marks=pytest.mark.long),
]
METHODS = ["spawn", *only_long("forkserver")]


def step_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """Every process of the step, the launcher first."""
    return [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]


def signal_step(launcher: subprocess.Popen[str], number: int) -> None:
    """Signal every process of the step, as `slurmstepd` does with proctrack/linuxproc."""
    for process in step_of(launcher):
        with contextlib.suppress(psutil.NoSuchProcess):
            os.kill(process.pid, number)


def workers_of(place: Sequence[str]) -> int:
    return 3 if place == THREE_NODES else 2


LINES = """
import os, signal
rank, half = os.environ['RANK'], {half}
came = []
signal.signal(signal.SIGUSR1, lambda number, frame: came.append('SIGUSR1'))
signal.signal(signal.SIGUSR2, lambda number, frame: came.append('SIGUSR2'))
for line in range(half):
    print(f'rank {{rank}} line {{line}}', file=sys.stderr if line % 2 else sys.stdout, flush=True)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
post()
while len(came) < 2:
    signal.sigwaitinfo([signal.SIGUSR1, signal.SIGUSR2]); came.append('')
for line in range(half, 2 * half):
    print(f'rank {{rank}} line {{line}}', file=sys.stderr if line % 2 else sys.stdout, flush=True)
"""


def check_lines(
    mailbox: Mailbox, disturb: Callable[[subprocess.Popen[str]], str | None], count: int, *flags: str
) -> str:
    """Run workers that print 240 lines, half of them after a fault and after both signals. Return the output, which
    must have all lines once. `disturb` returns what it has read of the output, if it has.
    """
    each = 240 // count
    script = mailbox.script("lines.py", LINES.format(half=each // 2))
    launcher = launch(mailbox, *flags, "--forward-signals=USR1,USR2", script, stderr=subprocess.STDOUT)
    mailbox.gather(count)
    before = disturb(launcher)
    ended = finish(launcher)
    out = (before or "") + ended.out
    assert ended.code == 0, out
    shown = [line[line.rindex("rank ") :] for line in out.splitlines() if " line " in line]
    assert sorted(shown) == sorted(f"rank {rank} line {line}" for rank in range(count) for line in range(each))
    return out


def read_lines(launcher: subprocess.Popen[str], count: int) -> str:
    """Read the output until it has so many of the workers' lines. It is read without a buffer, which `communicate`
    would not look into.
    """
    assert launcher.stdout is not None
    shown = b""
    while shown.count(b" line ") < count or not shown.endswith(b"\n"):
        assert select.select([launcher.stdout], [], [], WAIT)[0], shown.decode()
        read = os.read(launcher.stdout.fileno(), 65536)
        assert read, shown.decode()
        shown += read
    return shown.decode()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("method", METHODS)
def test_no_line_is_lost_when_every_process_of_the_step_is_signaled(
    mailbox: Mailbox, method: str, place: Sequence[str]
) -> None:
    """Of 240 lines 4 arrived when the signal killed the relay."""

    def disturb(launcher: subprocess.Popen[str]) -> None:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal_step(launcher, number)
        # The processes of the launcher without the workers: none of those has a handler for a real-time signal.
        for process in step_of(launcher):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if not any("lines.py" in word for word in process.cmdline()) or process.pid == launcher.pid:
                    os.kill(process.pid, signal.SIGRTMIN + 3)

    out = check_lines(mailbox, disturb, workers_of(place), *place, f"--start-method={method}")
    assert "the output relay was killed" not in out


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("flags", [("--tee=3",), *only_long(((),))], ids=["teed", "console"])
def test_no_line_is_lost_when_an_idle_relay_is_killed(
    mailbox: Mailbox, place: Sequence[str], flags: Sequence[str]
) -> None:
    """A relay that has shown all that was written. What a busy one has read and not yet shown is lost with it."""
    killed = []

    def disturb(launcher: subprocess.Popen[str]) -> str:
        shown = read_lines(launcher, 120)
        for process in step_of(launcher):
            if process.name().startswith("dlrover-relay"):
                killed.append(process)
                process.kill()
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            launcher.send_signal(number)
        return shown

    out = check_lines(mailbox, disturb, workers_of(place), *place, *flags)
    assert out.count("the output relay was killed by SIGKILL") == len(killed) > 0


LOADING = """
import os, signal, time
from pathlib import Path
import torch

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor(index)

stop = []
if __name__ == '__main__':
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    batches = iter(torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2))
    seen = [next(batches)]
    post(children=[worker.pid for worker in batches._workers])
    while not stop:
        time.sleep(0.1)
    seen += batches
    torch.save(torch.cat(seen), f'saved-{os.environ["RANK"]}.pt')
    post(saved=len(torch.cat(seen)), signals=len(stop))
"""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("whole_step", [False, *only_long(True)], ids=["the launcher", "the step without children"])
def test_data_loaders_live_until_their_worker_has_saved(
    mailbox: Mailbox, method: str, place: Sequence[str], whole_step: bool
) -> None:
    """SIGTERM to the process group ended the data loaders, and the emergency checkpoint failed with
    `DataLoader worker (pid ...) is killed by signal: Terminated`."""
    pytest.importorskip("torch")
    count = workers_of(place)
    script = mailbox.script("loading.py", LOADING)
    launcher = launch(mailbox, *place, f"--start-method={method}", script)
    children = {child for message in mailbox.gather(count) for child in message["children"]}
    if whole_step:
        # A kernel that signals data loaders too ends them, whatever a launcher does.
        for process in step_of(launcher):
            if process.pid not in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
    else:
        launcher.terminate()
    messages = mailbox.gather(count)
    ended = finish(launcher)
    assert ended.code == 128 + signal.SIGTERM
    assert [(message["saved"], message["signals"]) for message in messages] == [(64, 1)] * count, ended.err
    assert len(list(Path(mailbox.directory).glob("saved-*.pt"))) == count
    assert not any(psutil.pid_exists(child) for child in children)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("method", METHODS)
def test_a_worker_gets_one_stop_signal_though_the_whole_step_gets_it(
    mailbox: Mailbox, method: str, place: Sequence[str]
) -> None:
    count = workers_of(place)
    launcher = launch(
        mailbox, *place, f"--start-method={method}", "--shutdown-timeout=3", ON_SIGNAL, "stay", stderr=subprocess.STDOUT
    )
    mailbox.gather(count)
    signal_step(launcher, signal.SIGTERM)
    ended = finish(launcher)
    assert ended.code == 128 + signal.SIGTERM
    # Each lived until the end of its grace period, so a second signal would have been reported.
    assert [message["signal"] for message in mailbox.pending()] == ["SIGTERM"] * count, ended.out
    assert "lost the master" not in ended.out
    assert "the master has ended" not in ended.out


def test_a_master_outlives_the_nodes_of_its_step(mailbox: Mailbox) -> None:
    """Three launchers that rendezvous at a master, which the SIGTERM of the step used to kill."""
    cluster = Cluster(mailbox, MasterBackend())
    nodes = [cluster.node(name, "3", args=["stay"]) for name in "abc"]
    members = cluster.world(3)
    processes = {process.pid for node in nodes for process in step_of(node.process)}
    assert any(is_master(psutil.Process(pid)) for pid in processes)
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert [message["told"] for message in mailbox.gather(3)] == ["SIGTERM"] * 3
    for member in members:
        os.kill(member["pid"], signal.SIGKILL)
    for node in nodes:
        assert node.finish() == 128 + signal.SIGTERM
        assert "the master" not in node.output, node.output
    cluster.close()
    cluster.check_place()


@pytest.mark.parametrize("whole_step", [False, True], ids=["the launcher", "the step"])
@pytest.mark.parametrize("place", PLACES)
def test_forwarded_signals_reach_each_worker_once_and_training_continues(
    mailbox: Mailbox, place: Sequence[str], whole_step: bool
) -> None:
    count = workers_of(place)
    launcher = launch(mailbox, *place, "--forward-signals=USR1,SIGUSR2", ON_SIGNAL, "stay")
    members = mailbox.gather(count)
    for name in ("SIGUSR1", "SIGUSR2"):
        number = getattr(signal, name)
        signal_step(launcher, number) if whole_step else launcher.send_signal(number)
        assert [message["signal"] for message in mailbox.gather(count)] == [name] * count
    launcher.terminate()
    assert [message["signal"] for message in mailbox.gather(count)] == ["SIGTERM"] * count
    for member in members:
        os.kill(member["pid"], signal.SIGKILL)
    assert finish(launcher).code == 128 + signal.SIGTERM


def test_a_worker_that_a_forwarded_signal_kills_is_reported(mailbox: Mailbox) -> None:
    launcher = launch(mailbox, "--forward-signals=ALRM", ON_SIGNAL)
    mailbox.receive()
    launcher.send_signal(signal.SIGALRM)
    ended = finish(launcher)
    assert ended.code == 128 + signal.SIGALRM
    assert "rank 0 was killed by SIGALRM, which --forward-signals passed on" in ended.err


def test_a_launcher_that_an_unlisted_signal_ends_reports_it_and_lets_workers_save(mailbox: Mailbox) -> None:
    launcher = launch(mailbox, "--nproc-per-node=2", ON_SIGNAL)
    mailbox.gather(2)
    launcher.send_signal(signal.SIGUSR1)
    ended = finish(launcher)
    assert [message["signal"] for message in mailbox.gather(2, timeout=0)] == ["SIGTERM"] * 2
    assert ended.code == 128 + signal.SIGUSR1
    assert "SIGUSR1 received, which ends this launcher (--forward-signals=SIGUSR1 would pass it on)" in ended.err


STATE = """
import json, os
fields = [line.split() for line in open('/proc/self/status') if line.startswith(('SigBlk', 'SigIgn', 'SigCgt'))]
masks = {name[:-1]: int(mask, 16) for name, mask in fields}
open(os.environ['STATE'] + os.environ.get('RANK', ''), 'w').write(json.dumps(masks))
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("ignored", [(signal.SIGHUP, signal.SIGUSR2), *only_long(((),))], ids=["two", "none"])
@pytest.mark.parametrize("action", ["report", "off"])
def test_workers_inherit_the_signal_state_of_a_program_without_a_launcher(
    mailbox: Mailbox, method: str, ignored: Sequence[signal.Signals], action: str
) -> None:
    (mailbox.directory / "state.py").write_text(STATE)
    state = str(mailbox.directory / "state")

    def ignore() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    subprocess.run(
        [sys.executable, "state.py"],
        cwd=mailbox.directory,
        env={**os.environ, "STATE": state},
        preexec_fn=ignore,
        check=True,
    )
    flags = (f"--start-method={method}", f"--stall-action={action}")
    launcher = launch(mailbox, *flags, "state.py", env={"STATE": state}, preexec_fn=ignore)
    assert finish(launcher).code == 0
    plain, ours = json.loads(Path(state).read_text()), json.loads(Path(f"{state}0").read_text())
    # Stacks are read from outside, so a worker handles no signal for them.
    assert ours == plain


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--forward-signals=TERM"], "contains SIGTERM, "),
        (["--forward-signals=USR3"], "contains 'USR3', "),
        (["--forward-signals=KILL"], "contains SIGKILL, "),
        (["--forward-signals=CONT"], "contains SIGCONT, "),
        (["--forward-signals=USR1", "--signals-to-handle=SIGUSR1"], "contains SIGUSR1, "),
    ],
)
def test_signals_that_cannot_be_forwarded_are_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        parse([*flags, __file__], {})


def test_forwarded_signals_can_be_given_by_a_variable() -> None:
    assert parse([__file__], {"PET_FORWARD_SIGNALS": "USR1, SIGUSR2"}).forward_signals == (
        signal.SIGUSR1,
        signal.SIGUSR2,
    )
    assert parse([__file__], {}).forward_signals == ()


TERM = signal.SIGTERM
STEPD, SUPERVISOR, PERSON = 100, 200, 300
LATER = 5.0 + SAME_SIGNAL_SECONDS

Delivery = Callable[[SignalDeduplicator], list[AcceptedSignal]]
"""Something that the deduplicator learns."""


def sent(sender: int, at: float, above: bool = True) -> ReceivedSignal:
    """SIGTERM to the launcher."""
    return ReceivedSignal(TERM, above, sender, at)


def launcher_gets(sender: int, at: float, now: float | None = None) -> Delivery:
    return lambda deduplicator: deduplicator.to_launcher(sent(sender, at), at if now is None else now)


def agent_gets(at: float, now: float | None = None) -> Delivery:
    return lambda deduplicator: deduplicator.to_agent(TERM, at, at if now is None else now)


def person_sends(at: float) -> Delivery:
    return lambda deduplicator: deduplicator.to_launcher(sent(PERSON, at, above=False), at)


def time_passes(now: float) -> Delivery:
    return lambda deduplicator: deduplicator.look(now)


@pytest.mark.parametrize(
    "deliveries",
    [
        pytest.param([(person_sends(5.0), [None])], id="what a person sends is passed on at once"),
        pytest.param([(agent_gets(5.0), []), (launcher_gets(STEPD, 5.1), [5.0])], id="one sender, launcher and agent"),
        pytest.param([(launcher_gets(STEPD, 5.0), []), (agent_gets(5.1), [5.0])], id="one sender, launcher first"),
        pytest.param(
            [(agent_gets(5.0, now=9.0), []), (launcher_gets(STEPD, 5.1, now=9.0), [5.0])], id="a loop that reads late"
        ),
        pytest.param(
            [(launcher_gets(STEPD, 5.0, now=9.0), []), (agent_gets(5.0, now=9.0), [5.0])],
            id="a loop that reads late, launcher first",
        ),
        pytest.param(
            [
                (launcher_gets(STEPD, 1.0, now=9.0), []),
                (launcher_gets(SUPERVISOR, 8.0, now=9.0), []),
                (agent_gets(8.0, now=9.0), [8.0]),
                (time_passes(9.0 + WITNESS_SECONDS), [None]),
            ],
            id="signals that came long apart and are read together are two",
        ),
        pytest.param(
            # The search for the agent's own copy starts when the loop reads, however old the signal is.
            [
                (launcher_gets(STEPD, 5.0, now=9.0), []),
                (time_passes(9.0 + WITNESS_SECONDS - 0.01), []),
                (time_passes(9.0 + WITNESS_SECONDS), [None]),
            ],
            id="a sender that signals the launcher alone",
        ),
        pytest.param(
            [
                (agent_gets(5.0), []),
                (launcher_gets(STEPD, 5.0), [5.0]),
                (launcher_gets(STEPD, 5.5), []),
                (time_passes(6.0), [None]),
            ],
            id="one copy proves one signal",
        ),
        pytest.param(
            [
                (agent_gets(5.0), []),
                (launcher_gets(STEPD, 5.0), [5.0]),
                (launcher_gets(SUPERVISOR, 5.2), []),
                (time_passes(LATER), []),
                (launcher_gets(SUPERVISOR, LATER), []),
                (time_passes(LATER + WITNESS_SECONDS), [None]),
            ],
            id="a supervisor that passes on what all have got repeats nothing",
        ),
    ],
)
def test_which_signals_are_delivered_to_the_workers_and_which_they_have_received(
    deliveries: list[tuple[Delivery, list[float | None]]],
) -> None:
    """Each delivery with the signals that the launcher accepts for it, by the time at which the workers received them:
    None for not yet.
    """
    deduplicator = SignalDeduplicator()
    for act, accepted in deliveries:
        assert act(deduplicator) == [AcceptedSignal(TERM, delivered_at) for delivered_at in accepted]
    assert deduplicator.due is None


@pytest.mark.parametrize(
    ("deliveries", "end"),
    [
        pytest.param([], None, id="no signal"),
        pytest.param([person_sends(5.0)], None, id="a signal that is passed on at once"),
        pytest.param([launcher_gets(STEPD, 5.0)], 5.0 + WITNESS_SECONDS, id="the launcher's copy alone"),
        pytest.param([agent_gets(5.0)], 5.0 + WITNESS_SECONDS, id="the agent's copy alone"),
        pytest.param([agent_gets(1.0, now=5.0)], None, id="a copy of the agent that no other followed"),
        pytest.param([agent_gets(5.0), launcher_gets(STEPD, 5.0)], None, id="both copies"),
    ],
)
def test_until_when_a_stop_for_another_reason_waits_for_a_signal(deliveries: list[Delivery], end: float | None) -> None:
    deduplicator = SignalDeduplicator()
    for act in deliveries:
        act(deduplicator)
    assert deduplicator.undecided_until(5.0) == end


@pytest.fixture
def signals_of_its_own() -> Iterator[None]:
    """Restore the signal handlers of the test process."""
    handlers = {number: signal.getsignal(number) for number in signals.TERMINATION_SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.mark.usefixtures("signals_of_its_own")
@pytest.mark.parametrize("launcher_first", [True, False])
def test_workers_that_a_busy_agent_starts_after_a_signal_have_not_received_it(launcher_first: bool) -> None:
    came: list[float | None] = []
    parent_pipe, watchdog_end = os.pipe()

    async def start_workers() -> float:
        departure = ShutdownRequest(
            parse([__file__], {}),
            lambda number, for_workers, delivered_at: came.append(delivered_at),
            lambda *_: None,
            lambda: None,
        )
        departure.listen([parent_pipe])
        to_launcher = [lambda: watchdog.send(watchdog_end, sent(STEPD, time.monotonic()))]
        to_agent = [lambda: os.kill(os.getpid(), TERM)]
        for send in to_launcher + to_agent if launcher_first else to_agent + to_launcher:
            send()
        # The loop has run nothing since the signal.
        started = time.monotonic()
        while not came:
            await asyncio.sleep(0)
        return started

    started = event_loop.run(start_workers())
    os.close(parent_pipe)
    os.close(watchdog_end)
    (delivered_at,) = came
    assert delivered_at is not None
    assert delivered_at < started


@pytest.mark.usefixtures("signals_of_its_own")
def test_a_round_that_ends_meanwhile_waits_until_a_signal_is_decided() -> None:
    """A node that leaves first ends the round of the others, which have got half of the same signal."""
    parent_pipe, watchdog_end = os.pipe()

    async def decide() -> tuple[signal.Signals | None, float | None]:
        departure = ShutdownRequest(parse([__file__], {}), lambda *_: None, lambda *_: None, lambda: None)
        departure.listen([parent_pipe])
        await departure.until_decided()
        assert departure.signal is None
        watchdog.send(watchdog_end, sent(STEPD, time.monotonic()))
        for _ in range(3):  # The loop reads the pipe.
            await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), TERM)
        await departure.until_decided()
        return departure.signal, departure.delivered_at

    number, delivered_at = event_loop.run(decide())
    os.close(parent_pipe)
    os.close(watchdog_end)
    assert number is TERM
    assert delivered_at is not None
