"""What a person is told while the job goes on: whom the node waits for, each round, and why there is another one."""

from __future__ import annotations

import os

from dlrover_run import failures
from dlrover_run.agent.round import Round
from dlrover_run.console.voice import Voice
from dlrover_run.coordination.records import OVER, Assignment, Seat, Waiting
from dlrover_run.spec import JobSpec

_VERBOSE = frozenset({"INFO", "DEBUG"})


class Narration:
    """Tells of one node's part in a job, through `voice`."""

    def __init__(self, spec: JobSpec, voice: Voice) -> None:
        self._spec = spec
        self._voice = voice
        self._waiting: Waiting | None = None
        alone = spec.backend == "memory" or (spec.backend == "static" and spec.rules.most == 1)
        self._shows_rounds = not alone or os.environ.get("LOGLEVEL", "").upper() in _VERBOSE

    def follow(self, wanted: Assignment) -> None:
        """Show what the node waits for while it has no place in a round, and for how long still."""
        waiting = wanted.waiting if wanted.seat is None and wanted.phase not in OVER else None
        if waiting == self._waiting:
            return
        self._waiting = waiting
        if waiting is None:
            self._voice.wait_no_more()
        else:
            self._voice.wait_for(waiting.text, waiting.seconds)

    def begin_round(self, seat: Seat) -> None:
        """A round begins in which this node has that seat."""
        if self._shows_rounds:
            from dlrover_run.console.rounds import render_rendezvous

            self._voice.say(render_rendezvous(seat, self._spec.event_log))

    def end_round(self, ended: Round, wanted: Assignment, seat: Seat) -> None:
        """A round is over, and `seat` is this node's place in the next one."""
        from dlrover_run.console.rounds import render_regrouping, render_restart

        # A master that has forgotten what was before counts anew.
        if seat.restart_count <= ended.seat.restart_count:
            self._voice.say(render_regrouping(wanted.reason, seat, ended.lasted))
            return
        reason, failure = wanted.reason, wanted.failure
        if failure is None or ended.seat.has(failure.rank):
            # All the evidence is here now, and on one node nobody needs to be told which it was.
            root = failures.root_cause(ended.ends)
            reason = f"rank {root.rank} {failures.describe_end(root)}" if root else reason
        rules = self._spec.rules
        line = render_restart(reason, seat.restart_count, rules.max_restarts, ended.lasted, rules.restart_window)
        self._voice.say(line)

    def end(self) -> None:
        """The job is over for this node."""
        self._voice.wait_no_more()
