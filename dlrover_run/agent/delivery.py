"""Whether the workers have got a signal already that has come to the launcher, so that nobody sends it to them again.

`slurmstepd` (with proctrack/linuxproc) and `systemctl stop` signal every process of a job, the workers among them;
`slurmstepd` with proctrack/cgroup signals the launcher alone, and so does a person. No variable tells which. What tells
is the agent: like a worker it is in a session of its own, so no process group and no session holds it together with
the launcher. A sender that has signalled both, and is an ancestor of the launcher, signals the whole tree. An ancestor,
because `pkill dlrover` would find launcher and agent by their names, and no worker.

Pure: the caller gives the times, in seconds of one monotonic clock. There are two for each signal: `at`, when the
process got it, which is compared, and `now`, when the agent's loop reads it, from which the agent waits. The loop may
be busy for seconds between the two: while it starts workers, for example.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlrover_run.process_tree.watchdog import ReceivedSignal

WITNESS_SECONDS = 0.25
"""How long the agent waits for its own copy of a signal that an ancestor has sent to the launcher. A scheduler signals
all processes in one loop, which takes milliseconds."""

SAME_SIGNAL_SECONDS = 2.0
"""Two ancestors that send the same signal within this time mean one signal: a scheduler signals the supervisor of a
local cluster and its nodes, and the supervisor passes the signal on to the nodes."""


@dataclass(frozen=True)
class Delivery:
    """A signal that the launcher acts on now. `told_at` is when whoever sent it began to signal the workers as well;
    None: they have not got it."""

    number: int
    told_at: float | None


@dataclass(frozen=True)
class _Waiting:
    received: ReceivedSignal
    read_at: float


class Deliveries:
    """Takes what comes to the launcher and to the agent, and returns what to act on. `due` is the time at which `look`
    has something to return, None while nothing waits."""

    def __init__(self) -> None:
        self._own: dict[int, float] = {}
        self._last: dict[int, ReceivedSignal] = {}
        self._waiting: list[_Waiting] = []

    @property
    def due(self) -> float | None:
        return min((each.read_at + WITNESS_SECONDS for each in self._waiting), default=None)

    def to_agent(self, number: int, at: float, now: float) -> list[Delivery]:
        """The agent itself got a signal `at` that time."""
        self._own[number] = at
        return self.look(now)

    def to_launcher(self, received: ReceivedSignal, now: float) -> list[Delivery]:
        """The launcher has got a signal."""
        if not received.above:
            return [Delivery(received.number, None)]
        last = self._last.get(received.number)
        if last is not None and last.sender != received.sender and received.at - last.at < SAME_SIGNAL_SECONDS:
            return []
        self._last[received.number] = received
        self._waiting.append(_Waiting(received, now))
        return self.look(now)

    def look(self, now: float) -> list[Delivery]:
        """What is decided by now, in the order in which it came."""
        decided: list[Delivery] = []
        for each in list(self._waiting):
            number, at = each.received.number, each.received.at
            own = self._own.get(number)
            if own is not None and abs(own - at) < SAME_SIGNAL_SECONDS:
                # One copy proves one signal.
                del self._own[number]
                decided.append(Delivery(number, min(own, at)))
            elif now >= each.read_at + WITNESS_SECONDS:
                decided.append(Delivery(number, None))
            else:
                continue
            self._waiting.remove(each)
        return decided
