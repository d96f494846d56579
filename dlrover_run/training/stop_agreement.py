"""At which step all ranks stop, where a rank does not come back from a collective that another one has left.

A collective of NCCL is only enqueued. A rank that stops one step before another leaves that one to wait for its
device, where no Python runs. So a rank that has the signal goes on, and each of its checks waits for the device: then
no rank is more than one step ahead of another. Once all ranks have the signal, the first that sees it names the next
step, which no rank can have passed. A rank that has lost another one never gets there, so it saves nothing: what its
device has enqueued behind the dead collective may have changed half of the state.
"""

from __future__ import annotations

from typing import Protocol

CONFIRM_TIMEOUT = 5.0
"""Seconds that a rank waits at its last step until all others have come there."""

_KNOWN, _AT, _PASSED, _ALL = "stop/known", "stop/at", "stop/passed", "stop/all"


class Ranks(Protocol):
    """What the ranks of a round share, and this rank's device."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    def synchronize(self) -> None:
        """Return when the device has finished what was enqueued. Raises RuntimeError if that failed."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number that all ranks share; the sum."""

    def first(self, key: str, proposal: str) -> str:
        """What the first rank has proposed under this key."""

    def publish(self, key: str, value: str) -> None:
        """Show a value to the other ranks."""

    def await_value(self, key: str, timeout: float) -> bool:
        """Whether a rank publishes a value under this key within `timeout` seconds."""


class StopAgreement:
    """One rank's part in it, from the signal on. Raises RuntimeError where the store or the device has failed."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._is_known = False

    def stops_after(self, step: int) -> bool:
        """Whether all ranks stop after this step, which is finished on all of them then. Call it after each step."""
        self._ranks.synchronize()
        if not self._is_known:
            self._ranks.add(_KNOWN, 1)
            self._is_known = True
        if self._ranks.add(_KNOWN, 0) < self._ranks.world_size:
            return False
        at = int(self._ranks.first(_AT, str(step + 1)))
        return step >= at and self._confirm(f"{at} {step}")

    def stops_at_end(self) -> bool:
        """Whether all ranks have come to the end of the block."""
        self._ranks.synchronize()
        return self._confirm("end")

    def _confirm(self, where: str) -> bool:
        """Whether all ranks have come here: each has seen its device finish, so no collective before was broken off."""
        if self._ranks.add(f"{_PASSED}/{where}", 1) == self._ranks.world_size:
            self._ranks.publish(f"{_ALL}/{where}", "1")
            return True
        return self._ranks.await_value(f"{_ALL}/{where}", CONFIRM_TIMEOUT)
