"""The last step of a worker that is about to end is saved."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

from dlrover_run.observe import page
from dlrover_run.training import peers
from dlrover_run.training.stop_agreement import StopAgreement

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""What the launcher sends before it kills a worker after `--shutdown-timeout`."""


class LastStep:
    """A block in which a signal does not end the worker at once, but after its step; see
    `CheckpointDirectory.save_at_stop`.

    - After a signal, `check` leaves the block, or else the end of the block does: the last step is saved, and
      SystemExit with code 128 + n ends the worker, as the signal n would have done. The launcher kills it after
      `--shutdown-timeout` seconds.
    - When another rank has died, or has left its block, the collectives of this rank fail. Their error leaves the
      block, the last step is saved, and the error goes on. A signal of the launcher that came meanwhile takes effect
      after the save: the launcher waits for the end of this process, and an interpreter that has imported torch takes
      0.2 s and more to end by itself.
    - Any other error leaves the block without a save: nothing is known about the state then.
    - Where a device finishes the collectives (NCCL), the ranks agree after the signal on the step after which all of
      them stop (see StopAgreement), and a rank that has lost another one saves nothing.

    No collective may come between the first change of the state and the change of the number of steps: its error would
    save half a step. A rank that gloo does not tell of the death itself waits until one that it knows of has saved and
    ended: gloo closes connections only with the process, also after `destroy_process_group`.
    """

    def __init__(
        self,
        save: Callable[[int, object], bool],
        state: Callable[[], tuple[int, object]],
        signals: Sequence[int] = STOP_SIGNALS,
    ) -> None:
        self._save = save
        self._state = state
        self._signals = signals
        self._received: int | None = None
        self._before: dict[int, Any] = {}
        self._steps = 0
        self._agreement: StopAgreement | None = None
        self._agreed = False

    @property
    def requested(self) -> bool:
        """Whether this worker has been asked to end."""
        return self._received is not None

    def check(self) -> None:
        """Leave the block if this worker has been asked to end. Call it after each step."""
        self._steps += 1
        if self._received is None:
            return
        if self._agreement is not None:
            if not self._agreement.stops_after(self._steps):
                return
            self._agreed = True
        raise SystemExit(128 + self._received)

    def __enter__(self) -> LastStep:
        waits = peers.waits_for_device()
        self._agreement = StopAgreement(peers.StoreRanks()) if waits else None
        page.note_stop(page.Stop.WAITS_FOR_DEVICE if waits else page.Stop.ANSWERS)
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost_peer = error is not None and peers.is_lost_peer(error)
        try:
            ends = self._received is not None and (error is None or isinstance(error, SystemExit))
            if self._may_save(ends, lost_peer, error is None):
                page.note_stop(page.Stop.ANSWERS)
                self._save_now()
            if error is None and self._received is not None:
                raise SystemExit(128 + self._received)
        finally:
            page.note_stop(page.Stop.NO_BLOCK)
            for number, before in self._before.items():
                signal.signal(number, before)
        if lost_peer and self._received is not None:
            signal.raise_signal(self._received)

    def _may_save(self, ends: bool, lost_peer: bool, at_end: bool) -> bool:
        """Whether the state is that after the last step that was completed."""
        if self._agreement is None:
            return ends or lost_peer
        if ends and at_end and not self._agreed:
            self._agreed = self._agreement.stops_at_end()
        if ends and not self._agreed:
            logger.warning("The last step is not saved: the other workers have not come to its end")
        return ends and self._agreed

    def _save_now(self) -> None:
        step, state = self._state()
        try:
            if self._save(step, state):
                logger.info("Saved the last step, %d, before the end of this worker", step)
        except (OSError, RuntimeError) as error:
            # What ends the worker is the cause that the user has to see.
            logger.warning("The last step, %d, could not be saved: %s", step, error)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = number
