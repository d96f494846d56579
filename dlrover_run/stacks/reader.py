"""The Python stacks of a process, read while it runs.

What is read may change meanwhile: a thread returns from a call while its frames are followed. Each frame must point to
a code object, and a chain must end, otherwise the thread is read again. So a stack of a thread that computes is one of
its last moments, perhaps of two of them; that of a thread that waits is exact.
"""

from __future__ import annotations

import os
import struct
import zlib

from dlrover_run.stacks.layouts import LAYOUTS, Layout, Lines, read_layout, version_of
from dlrover_run.stacks.lines import line_of
from dlrover_run.stacks.memory import ProcessMemory, Unreadable, mapped_files
from dlrover_run.stacks.stack import MAX_FRAMES, Frame, Stack, Thread
from dlrover_run.stacks.symbols import Module

MAX_THREADS = 100
"""Threads of a process that are read, the main thread among them."""

MAX_FOLLOWED = 10_000
"""Threads, or calls, that are followed at most: a chain that changes may be a circle."""

ATTEMPTS = 10
"""How often a thread is read that changes meanwhile."""

MAX_TEXT = 4096
"""Characters of a name of a file or a function."""

MAX_TABLE = 256 * 1024
"""Bytes of the table of lines of a code object."""

MAX_LINE = 1_000_000
"""The greatest number of a line; a greater one was read while it changed."""

VARIABLES = 48
"""Variables of a call that are looked at; those of an inner call, or of none, follow them in memory."""

DIGESTED_CALLS = 20
"""Innermost calls whose variables are looked at."""

_CHANGING = ("PyLong_Type", "PyFloat_Type", "PyRangeIter_Type", "PyEnum_Type", "PyListIter_Type")
"""Types whose values count steps. Objects of others may be changed by another thread."""

_VALUE_BYTES = 24
"""Bytes of such an object, after its type, that have its value."""

_INT = struct.Struct("=i")
_WIDTHS = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}


class NoPython(Exception):
    """The process runs no Python whose stacks can be read."""


class StackReader:
    """Reads the stacks of one process. Raises NoPython, and OSError: PermissionError without the right to trace the
    process, otherwise it has ended. `close` it."""

    def __init__(self, pid: int) -> None:
        self._memory = ProcessMemory(pid)
        self._main = 0
        try:
            self._find_interpreter()
        except (Unreadable, NoPython) as error:
            self._memory.close()
            raise NoPython(f"process {pid} runs no Python that is known") from error
        except BaseException:
            self._memory.close()
            raise

    def read(self, *, main: bool = False) -> Stack:
        """The stacks of all threads, the main thread last, or of the main thread alone. Empty while the interpreter
        begins and after it has ended."""
        names: dict[int, str] = {}
        try:
            if main and self._main and self._memory.word(self._main + self._layout.native_id) == self._memory.pid:
                # To follow hundreds of threads takes longer than all else.
                thread = Thread(self._name(self._main), self._frames(self._main, names))
                return Stack((thread,), self._holds_lock(self._main))
            *others, last = self._threads() or [0]
            self._main = last if self._layout.native_id else 0
        except Unreadable:
            return Stack(())
        if not last:
            return Stack(())
        chosen = [last] if main else [*others[: MAX_THREADS - 1], last]
        threads = tuple(Thread(self._name(one), self._frames(one, names)) for one in chosen)
        return Stack(threads, self._holds_lock(last), 0 if main else self._variables(last))

    def close(self) -> None:
        """Free the descriptor."""
        self._memory.close()

    def _find_interpreter(self) -> None:
        program = os.readlink(f"/proc/{self._memory.pid}/exe")
        for start, path in mapped_files(self._memory.pid):
            if path != program and "python" not in os.path.basename(path).lower():
                continue
            try:
                module = Module(self._memory, start)
                self._runtime = module.find("_PyRuntime")
                self._code_type = module.find("PyCode_Type")
                if not self._runtime or not self._code_type:
                    continue
                layout = read_layout(self._memory, self._runtime) or self._older(module, path)
            except Unreadable:
                continue
            if layout is not None:
                self._layout: Layout = layout
                self._types = frozenset(map(module.find, _CHANGING)) - {0}
                return
        raise NoPython

    def _older(self, module: Module, path: str) -> Layout | None:
        version = module.find("Py_Version")
        if version:
            return LAYOUTS.get(version_of(self._memory.word(version)))
        # Before 3.11 only its name says so.
        name = os.path.basename(path).removesuffix(" (deleted)")
        return next((LAYOUTS[old] for old in ((3, 9), (3, 10)) if f"python{old[0]}.{old[1]}" in name), None)

    def _threads(self) -> list[int]:
        """The threads of all interpreters of the process, the main thread last."""
        layout, word = self._layout, self._memory.word
        found: list[int] = []
        interpreter = word(self._runtime + layout.interpreters)
        while interpreter and len(found) < MAX_FOLLOWED:
            thread = word(interpreter + layout.threads)
            while thread and len(found) < MAX_FOLLOWED:
                if word(thread + layout.interpreter) != interpreter:
                    raise Unreadable
                found.append(thread)
                thread = word(thread + layout.next_thread)
            interpreter = word(interpreter + layout.next_interpreter)
        # Threads are added at the beginning, so the oldest is the last; before 3.11 nothing else tells the main thread.
        if layout.native_id:
            found.sort(key=lambda thread: word(thread + layout.native_id) == self._memory.pid)
        return found

    def _name(self, thread: int) -> str:
        """The name of a thread that is known outside of Python: its number."""
        if not self._layout.native_id:
            return hex(thread)
        try:
            return str(self._memory.word(thread + self._layout.native_id))
        except Unreadable:
            return hex(thread)

    def _frames(self, thread: int, names: dict[int, str]) -> tuple[Frame, ...]:
        best: list[Frame] = []
        for _ in range(ATTEMPTS):
            found: list[Frame] = []
            try:
                if self._follow(thread, found, names):
                    return tuple(found)
            except Unreadable:
                names.clear()
            best = max(best, found, key=len)
        return tuple(best)

    def _holds_lock(self, thread: int) -> bool | None:
        """Whether a thread holds the lock of its interpreter; None if that is not known."""
        layout, word = self._layout, self._memory.word
        if not layout.lock:
            return None
        *way, last = layout.lock
        try:
            at = word(thread + layout.interpreter) if layout.lock_of_interpreter else self._runtime
            for position in way:
                at = word(at + position)
            held = _INT.unpack(self._memory.read(at + last + layout.locked, _INT.size))[0]
            return None if held not in (-1, 0, 1) else held == 1 and word(at + last) == thread
        except Unreadable:
            return None

    def _variables(self, thread: int) -> int:
        """A digest of the variables in the innermost calls of a thread; 0 if they cannot be read."""
        layout, memory = self._layout, self._memory
        if not layout.variables:
            return 0
        found: list[bytes] = []
        try:
            frame = thread
            for position in layout.frame:
                frame = memory.word(frame + position)
            for _ in range(DIGESTED_CALLS):
                if not frame:
                    break
                data = memory.read(frame + layout.variables, 8 * VARIABLES)
                found.append(memory.read(frame + layout.instruction, 8) + data)
                found += filter(None, map(self._value, struct.unpack(f"={VARIABLES}Q", data)))
                frame = memory.word(frame + layout.previous)
        except Unreadable:
            return 0
        return zlib.crc32(b"".join(found)) or 1

    def _value(self, reference: int) -> bytes | None:
        """The value of a variable, if its type counts."""
        header = self._layout.header
        address = reference & ~3
        try:
            if address % 8 or self._memory.word(address + header - 8) not in self._types:
                return None
            return self._memory.read(address + header, _VALUE_BYTES)
        except Unreadable:
            return None

    def _follow(self, thread: int, found: list[Frame], names: dict[int, str]) -> bool:
        """Add the calls of a thread, the innermost first. Whether they are those of one chain."""
        layout, word = self._layout, self._memory.word
        frame = thread
        for position in layout.frame:
            frame = word(frame + position)
        size = max(layout.code, layout.previous, layout.instruction, layout.owner, layout.copy) + 8
        innermost = frame
        for _ in range(MAX_FOLLOWED):
            if not frame or len(found) >= MAX_FRAMES:
                break
            data = self._memory.read(frame, size)
            if not layout.owner or data[layout.owner] < layout.foreign:
                found.append(self._frame(data, names))
            frame = _word(data, layout.previous)
        else:
            return False
        # Whatever has returned meanwhile, the calls below the innermost one are those of its moment.
        return not innermost or bool(found)

    def _frame(self, data: bytes, names: dict[int, str]) -> Frame:
        layout, memory = self._layout, self._memory
        # The lowest bits of a reference from a frame say how it is counted.
        code = _word(data, layout.code) & ~3
        size = max(layout.file, layout.name, layout.lines, layout.first_line, layout.thread_code, layout.header) + 8
        fields = memory.read(code, size)
        if _word(fields, layout.header - 8) != self._code_type:
            raise Unreadable
        table_at = _word(fields, layout.lines)
        if layout.kind is Lines.LOCATIONS:
            instructions = code + layout.instructions
            if layout.thread_code and (number := _INT.unpack_from(data, layout.copy)[0]):
                copies = _word(fields, layout.thread_code)
                if not 0 < number < memory.word(copies):
                    raise Unreadable
                instructions = memory.word(copies + 8 * (1 + number))
            position = _word(data, layout.instruction) - instructions
        else:
            units = 2 if layout.kind is Lines.RANGES else 1
            position = _INT.unpack_from(data, layout.instruction)[0] * units
        length = memory.word(table_at + layout.header)
        if not 0 <= length <= MAX_TABLE:
            raise Unreadable
        table = memory.read(table_at + layout.header + 16, length)
        first: int = _INT.unpack_from(fields, layout.first_line)[0]
        # Before its first instruction a call is at its definition.
        line = line_of(layout.kind, table, first, position) if position >= 0 else first
        file, name = (self._text(_word(fields, each), names) for each in (layout.file, layout.name))
        return Frame(file, line if 0 <= line <= MAX_LINE else 0, name)

    def _text(self, address: int, names: dict[int, str]) -> str:
        if address not in names:
            names[address] = self._read_text(address)
        return names[address]

    def _read_text(self, address: int) -> str:
        layout = self._layout
        # After its header: length, hash, state.
        head = self._memory.read(address, layout.header + 20)
        length, state = _word(head, layout.header), _INT.unpack_from(head, layout.header + 16)[0]
        for shift in layout.state_shifts:
            bits = state >> shift
            width, is_compact, is_ascii = bits & 7, bits >> 3 & 1, bits >> 4 & 1
            if width in _WIDTHS and is_compact:
                start = address + (layout.ascii_text if is_ascii else layout.text)
                if length > MAX_TEXT:
                    raise Unreadable
                return self._memory.read(start, length * width).decode(_WIDTHS[width], errors="replace")
        raise Unreadable


def _word(data: bytes, position: int) -> int:
    return int.from_bytes(data[position : position + 8], "little")
