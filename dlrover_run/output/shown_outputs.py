"""The outputs that the relay shows, as the agent holds them: a pipe or a log file each, and the end of a pipe's output.

The agent keeps all of it open until the relay has shown it, so that another relay can go on. Where no relay can live,
it reads the pipes itself, and keeps their ends.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec

from dlrover_run.output import ring
from dlrover_run.output.channels import PIPE_BYTES
from dlrover_run.output.messages import OWN_MESSAGES
from dlrover_run.output.ring import RingWriter, tail_text

DISCARD_BYTES = 64 * 1024
"""Bytes of one read of output that no relay can show, so that the agent's loop has other work done in between."""


class ShownOutput(msgspec.Struct):
    """An output that the relay shows; its `message` is sent again to a replacement. `fd` is the pipe or the log file,
    and `ring` keeps the end of a pipe's output. With a `discarding` the agent reads it, since no relay can."""

    key: str
    message: dict[str, Any]
    fd: int
    ring: int = -1
    ended: bool = False
    discarding: RingWriter | None = None

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.fd,) if self.ring < 0 else (self.fd, self.ring)

    def discard_from_now(self) -> None:
        """Read output that no relay can show, so that its worker does not wait for a full pipe for ever. The end of it
        is kept: it may have the reason why the worker died."""
        self.discarding = RingWriter(os.dup(self.ring))
        asyncio.get_running_loop().add_reader(self.fd, self._discard)

    def discard_what_is_there(self) -> None:
        """Read all that the pipe holds now, if the agent reads it."""
        left = 2 * PIPE_BYTES  # More than a pipe holds, so only a live writer can have more.
        while self.discarding is not None and left > 0 and (count := self._discard()):
            left -= count

    def _discard(self) -> int:
        try:
            data = os.read(self.fd, DISCARD_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""  # EIO: the last writer has closed the pseudo-terminal.
        if not data:
            asyncio.get_running_loop().remove_reader(self.fd)
        elif self.discarding is not None:
            self.discarding.write(data)
        return len(data)

    def close(self) -> None:
        """Close the pipe or the log file; not the ring."""
        if self.discarding is not None:
            asyncio.get_running_loop().remove_reader(self.fd)
            self.discarding.close()
        os.close(self.fd)


class ShownOutputs:
    """The outputs by number. A number is never used again: the relay may speak of one that has ended."""

    def __init__(self) -> None:
        self._numbers = itertools.count(OWN_MESSAGES + 1)
        self._outputs: dict[int, ShownOutput] = {}
        self._ended_rings: dict[str, int] = {}

    def __iter__(self) -> Iterator[ShownOutput]:
        return iter(list(self._outputs.values()))

    def add(self, key: str, message: dict[str, Any], fd: int, ring: int) -> ShownOutput:
        """A new output, whose descriptors belong to this object now."""
        number = next(self._numbers)
        output = self._outputs[number] = ShownOutput(key, {**message, "source": number}, fd, ring)
        return output

    def live(self, keys: Collection[str] | None = None) -> list[int]:
        """The numbers of the outputs with these keys (None: of all) that have not ended."""
        found = self._outputs.items()
        return [number for number, each in found if not each.ended and (keys is None or each.key in keys)]

    def ended(self) -> list[int]:
        """The numbers of the outputs that have ended and are not shown in full yet."""
        return [number for number, each in self._outputs.items() if each.ended]

    def mark_ended(self, numbers: Collection[int]) -> None:
        """These are closed when they are shown. Until then another relay would have to show the rest."""
        for number in numbers:
            if number in self._outputs:
                self._outputs[number].ended = True

    def drop(self, number: int) -> None:
        """Close an output; the end of a pipe's output is kept until the next of that key ends."""
        output = self._outputs.pop(number, None)
        if output is None:
            return
        output.close()
        if output.ring >= 0:
            if (before := self._ended_rings.pop(output.key, -1)) >= 0:
                os.close(before)
            self._ended_rings[output.key] = output.ring

    def discard(self, numbers: Iterable[int]) -> None:
        """Read what the pipes of these hold, where the agent reads them."""
        for number in numbers:
            if number in self._outputs:
                self._outputs[number].discard_what_is_there()

    def tails(self, numbers: Iterable[int]) -> dict[str, str]:
        """The ends of these outputs, by key."""
        found = (self._outputs.get(number) for number in numbers)
        known = [each for each in found if each is not None and each.ring >= 0]
        return {each.key: tail_text(*ring.tail(each.ring)) for each in known}

    def rings(self, key: str) -> list[int]:
        """The rings of the outputs with this key, the latest last, which stay open until the next await: what is shown
        now, and before it the end of an output of that key that has ended."""
        live = [each.ring for each in self._outputs.values() if each.key == key and each.ring >= 0]
        return [*([self._ended_rings[key]] if key in self._ended_rings else []), *live]

    def close(self) -> None:
        for number in list(self._outputs):
            self.drop(number)
        for fd in self._ended_rings.values():
            os.close(fd)
        self._ended_rings.clear()
