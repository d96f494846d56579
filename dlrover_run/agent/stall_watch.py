"""Watches the workers of one round on this node: takes samples, asks the detector, and reports a stall with its stacks.

One timer for all workers, and none while no round runs. It lives with its round: a report about an earlier round could
only be wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from dlrover_run.console.text import format_ranks
from dlrover_run.coordination.reasons import render as render_reasons
from dlrover_run.evidence.records import Evidence
from dlrover_run.stall.detector import AskStacks, Decision, Detector, Resumed, StallCode, Stalled
from dlrover_run.stall.guilt import Finding, GuiltCode, Suspect, find_guilty
from dlrover_run.stall.stacks import Stack, fold, render

TRAINING_INTERVAL = 1.0
"""Seconds between two samples while the workers exchange data. One takes some 2 ms for 8 workers."""

QUIET_INTERVAL = 0.5
"""Seconds between two samples while they do not."""

STACKS_TIMEOUT = 1.0
"""Seconds that the workers have to write their stacks. It takes milliseconds; a stopped worker writes none."""

STACKS_INTERVAL = 0.01
"""Seconds between two looks at what the workers have written: the kernel does not report writes to a memory file."""

CERTAIN = frozenset({GuiltCode.STOPPED, GuiltCode.BLOCKED_IN_KERNEL, GuiltCode.LATE})
"""Findings that need no worker that waits in a collective: the state of a process is proof enough."""


class Sampling(Protocol):
    """What takes samples: `evidence.sample.Sampler`."""

    def sample(self, full: bool, dumped: Mapping[int, int] | None = None) -> list[Evidence]: ...

    def close(self) -> None: ...


class Stacks(Protocol):
    """What asks for stacks, by rank: `stall.ask.StackFiles`, with the pids of the workers."""

    def request(self, rank: int) -> bool: ...

    def answer(self, rank: int) -> Stack | None: ...

    def dumped(self, rank: int) -> int: ...


@dataclass(frozen=True)
class StallReport:
    """A stall, the workers that the others wait for, and the stacks."""

    stalled: Stalled
    finding: Finding
    seconds: float
    stacks: Mapping[int, Stack]

    @property
    def guilty(self) -> tuple[int, ...]:
        """The ranks that the others wait for; empty if the evidence names none."""
        return self.finding.ranks

    @property
    def line(self) -> str:
        """The line for the console."""
        named = f"{format_ranks(self.guilty)} " if self.guilty else ""
        return f"no progress for {self.seconds:.0f} s: {named}{render_reasons(self.finding.reasons)}"

    @property
    def text(self) -> str:
        """The stacks, equal ones folded."""
        return render(fold(self.stacks))


class StallWatch:
    """The watch of one round. `steps` reads the steps that workers have reported, by rank; `on_stall` and `on_resume`
    are called from the event loop."""

    def __init__(
        self,
        detector: Detector,
        sampling: Sampling,
        stacks: Stacks,
        on_stall: Callable[[StallReport], None],
        on_resume: Callable[[float], None],
        steps: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        self._detector = detector
        self._sampling = sampling
        self._stacks = stacks
        self._on_stall = on_stall
        self._on_resume = on_resume
        self._steps = steps
        self._ranks: tuple[int, ...] = ()
        self._quiet: dict[int, list[Evidence]] = defaultdict(list)

    async def run(self) -> None:
        """Watch until it is cancelled, or until the kernel gives no evidence: too many connections, no sock_diag."""
        try:
            with contextlib.suppress(OSError):
                await self._watch()
        finally:
            self._sampling.close()

    async def _watch(self) -> None:
        while True:
            await self.step()
            await asyncio.sleep(QUIET_INTERVAL if self._detector.needs_figures else TRAINING_INTERVAL)

    async def step(self) -> None:
        """Take one sample, and carry out what the detector decides."""
        full = self._detector.needs_figures
        samples = self._sampling.sample(full, {rank: self._stacks.dumped(rank) for rank in self._ranks})
        self._ranks = tuple(one.rank for one in samples)
        if not full:
            self._quiet.clear()
        for one in samples:
            if one.figures is not None:
                # The first sample and the last are enough for the share of a processor.
                self._quiet[one.rank][1:] = [one]
        decision: Decision = self._detector.observe(samples, self._steps())
        if isinstance(decision, AskStacks):
            found = await self._ask(decision.ranks)
            # A worker without a stack cannot be told from one that works: it counts as one that stays in its place.
            self._detector.note_stacks(
                {rank: [tuple(map(str, found[rank].main)) if rank in found else ("",)] for rank in decision.ranks}
            )
        elif isinstance(decision, Stalled):
            stacks = await self._ask(self._ranks)
            suspects = [Suspect(one.rank, one, stacks.get(one.rank), self._share(one.rank)) for one in samples]
            finding = self._finding(decision, suspects)
            if not self._is_certain(finding, stacks):
                self._detector.withdraw()
                return
            self._on_stall(StallReport(decision, finding, samples[0].at - decision.since, stacks))
        elif isinstance(decision, Resumed):
            self._on_resume(decision.seconds)

    def _finding(self, stalled: Stalled, suspects: list[Suspect]) -> Finding:
        if stalled.code is not StallCode.START:
            return find_guilty(suspects)
        late = [one for one in suspects if one.rank in stalled.ranks]
        line = next((one.stack.user_line for one in late if one.stack is not None), None)
        return Finding(GuiltCode.LATE, stalled.ranks, line)

    def _is_certain(self, finding: Finding, stacks: Mapping[int, Stack]) -> bool:
        """Whether a person should read of it: a wrong report is worse than none. Workers that wait for requests, or for
        the time, make no progress either, so one of them must wait for another one, or must have counted steps."""
        if any(stack.in_debugger for stack in stacks.values()):
            return False
        waits = any(stack.in_collective for stack in stacks.values())
        return waits or finding.code in CERTAIN or bool(self._steps()) or self._detector.timeout is not None

    def _share(self, rank: int) -> float:
        samples = self._quiet[rank]
        if len(samples) < 2:
            return 0.0
        first, last = samples
        assert first.figures is not None
        assert last.figures is not None
        return (last.figures.own.cpu - first.figures.own.cpu) / (last.at - first.at)

    async def _ask(self, ranks: tuple[int, ...]) -> dict[int, Stack]:
        asked = [rank for rank in ranks if self._stacks.request(rank)]
        found: dict[int, Stack] = {}
        loop = asyncio.get_running_loop()
        end = loop.time() + STACKS_TIMEOUT
        while len(found) < len(asked) and loop.time() < end:
            await asyncio.sleep(STACKS_INTERVAL)
            for rank in asked:
                if rank not in found and (stack := self._stacks.answer(rank)) is not None:
                    found[rank] = stack
        return found
