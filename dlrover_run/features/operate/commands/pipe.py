"""The end of a command that goes on writing when its output is not read any more, as with `dlrover-run top | head`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import sys
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from dlrover_run.background import beside

T = TypeVar("T")


async def while_read(work: Coroutine[Any, Any, T]) -> T:
    """The result of work that writes to standard output. Raises BrokenPipeError, and cancels the work, as soon as the
    reader has ended: a writer that waits for news would learn of it with its next line only."""
    with _unread() as unread:
        async with beside(unread.wait()) as closing, beside(work) as working:
            both: set[asyncio.Future[Any]] = {working, closing}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise BrokenPipeError
            return working.result()


def drop_output() -> None:
    """Have what is still in the buffer of standard output go nowhere: it would fail when the interpreter ends."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


@contextlib.contextmanager
def _unread() -> Iterator[asyncio.Event]:
    """An event that is set when the reader of a pipe at standard output has ended."""
    unread = asyncio.Event()
    loop = asyncio.get_running_loop()
    with select.epoll() as pipe:
        try:
            # No event is asked for: the kernel reports the end of the reader in any case.
            pipe.register(sys.stdout.fileno(), 0)
        except (OSError, ValueError):
            # A file has no reader, and a stream in memory no descriptor.
            yield unread
            return
        loop.add_reader(pipe.fileno(), unread.set)
        try:
            yield unread
        finally:
            loop.remove_reader(pipe.fileno())
