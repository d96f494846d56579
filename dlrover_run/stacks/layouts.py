"""Where CPython keeps its threads, frames and code objects, for each version.

From 3.13 on an interpreter describes itself, by a table at the beginning of `_PyRuntime`. The figures of older ones are
those of their headers, on 64 bits; they are the same in all releases of a version. An interpreter that was built for
debugging has others: then nothing that is read fits, and it has no stacks.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, replace

from dlrover_run.stacks.memory import ProcessMemory, Unreadable

COOKIE = b"xdebugpy"


class Lines(enum.Enum):
    """How a code object says which line an instruction belongs to."""

    LOCATIONS = enum.auto()
    """3.11 and newer."""
    RANGES = enum.auto()
    """3.10."""
    STEPS = enum.auto()
    """3.9."""


@dataclass(frozen=True)
class Layout:
    """Positions in bytes. `frame` are those that lead from a thread to its innermost frame, each but the first in what
    the one before points to. `native_id` and `owner` are 0 where there is none; `thread_code` is the position of the
    copies of a code object that single threads use, and `copy` that of the number of one in a frame, both 0 where there
    are none. `foreign` is the first kind of a frame that belongs to no code of Python.

    `lock` leads from `_PyRuntime`, or with `lock_of_interpreter` from the interpreter, to the thread that has last held
    the lock of the interpreter, as `frame` does; `locked` is the position of whether it is held, after that one. It is
    empty where that is not known. `variables` is the position of the variables of a call in its frame, 0 if unknown."""

    interpreters: int
    next_interpreter: int
    threads: int
    next_thread: int
    interpreter: int
    frame: tuple[int, ...]
    code: int
    previous: int
    instruction: int
    file: int
    name: int
    lines: int
    first_line: int
    instructions: int
    native_id: int = 0
    owner: int = 0
    foreign: int = 3
    thread_code: int = 0
    copy: int = 0
    header: int = 16
    ascii_text: int = 40
    text: int = 56
    kind: Lines = Lines.LOCATIONS
    state_shifts: tuple[int, ...] = (2,)
    lock: tuple[int, ...] = ()
    lock_of_interpreter: bool = False
    locked: int = 8
    variables: int = 0


_BEFORE_311 = Layout(
    interpreters=32,
    next_interpreter=0,
    threads=8,
    next_thread=8,
    interpreter=16,
    frame=(24,),
    code=32,
    previous=24,
    instruction=104,
    file=104,
    name=112,
    lines=120,
    first_line=40,
    instructions=0,
    kind=Lines.STEPS,
    ascii_text=48,
    text=72,
)

_SINCE_311 = Layout(
    interpreters=40,
    next_interpreter=0,
    threads=16,
    next_thread=8,
    interpreter=16,
    frame=(56, 8),
    code=32,
    previous=48,
    instruction=56,
    file=112,
    name=120,
    lines=136,
    first_line=72,
    instructions=184,
    native_id=160,
    owner=69,
    ascii_text=48,
    text=72,
    lock=(368,),
    variables=72,
)

LAYOUTS = {
    (3, 9): _BEFORE_311,
    (3, 10): replace(_BEFORE_311, instruction=96, kind=Lines.RANGES, lock=(360,)),
    (3, 11): _SINCE_311,
    (3, 12): replace(
        _SINCE_311,
        threads=72,
        frame=(56, 0),
        code=0,
        previous=8,
        first_line=68,
        instructions=192,
        native_id=144,
        owner=70,
        ascii_text=40,
        text=56,
        lock=(384, 8),
        lock_of_interpreter=True,
        variables=72,
    ),
}

_DESCRIBED = ((3, 13), (3, 14))

_WORDS = (
    "runtime.size runtime.finalizing runtime.interpreters"
    " interpreter.size interpreter.id interpreter.next interpreter.threads +main gc modules sysdict builtins gil"
    " gil_state enabled locked holder +code_generation +copies_generation"
    " thread.size thread.previous thread.next thread.interpreter thread.frame thread.id thread.native_id chunk status"
    " frame.size frame.previous frame.code frame.instruction locals frame.owner +stack_pointer +frame.copy"
    " code.size code.file code.name qualname code.lines code.first_line argcount names kinds code.instructions"
    " +code.copies"
)
"""The words of the table that an interpreter has, after its name, version, and whether it has no lock. Those with a +
were added in 3.14."""

_PREFIX = struct.Struct("=8sQQ")
_LOCKLESS_HEADER = 32


def version_of(hexadecimal: int) -> tuple[int, int]:
    """The first two numbers of a version of Python, of `Py_Version`."""
    return hexadecimal >> 24 & 0xFF, hexadecimal >> 16 & 0xFF


def read_layout(memory: ProcessMemory, runtime: int) -> Layout | None:
    """The layout of the interpreter whose `_PyRuntime` is here, as it describes itself; None if it does not, or is of a
    version that is not known. Raises Unreadable."""
    cookie, hexadecimal, is_lockless = _PREFIX.unpack(memory.read(runtime, _PREFIX.size))
    version = version_of(hexadecimal)
    if cookie != COOKIE or version not in _DESCRIBED:
        return None
    keys = [word.removeprefix("+") for word in _WORDS.split() if version >= (3, 14) or not word.startswith("+")]
    words = struct.unpack(f"={len(keys)}Q", memory.read(runtime + _PREFIX.size, 8 * len(keys)))
    table = dict(zip(keys, words, strict=True))
    if max(words) > 1 << 24:
        raise Unreadable
    grown = _LOCKLESS_HEADER - 16 if is_lockless else 0
    return Layout(
        interpreters=table["runtime.interpreters"],
        next_interpreter=table["interpreter.next"],
        threads=table["interpreter.threads"],
        next_thread=table["thread.next"],
        interpreter=table["thread.interpreter"],
        frame=(table["thread.frame"],),
        code=table["frame.code"],
        previous=table["frame.previous"],
        instruction=table["frame.instruction"],
        file=table["code.file"],
        name=table["code.name"],
        lines=table["code.lines"],
        first_line=table["code.first_line"],
        instructions=table["code.instructions"],
        native_id=table["thread.native_id"],
        owner=table["frame.owner"],
        thread_code=table.get("code.copies", 0) if is_lockless else 0,
        copy=table.get("frame.copy", 0) if is_lockless else 0,
        header=16 + grown,
        ascii_text=40 + grown,
        text=56 + grown,
        state_shifts=(2, 8, 16),
        lock=() if is_lockless else (table["holder"],),
        lock_of_interpreter=True,
        locked=table["locked"] - table["holder"],
        variables=table["locals"],
    )
