"""An emulated terminal: the text on its screen after some output, for the control sequences that the launcher uses."""

from __future__ import annotations

import re

_PIECE = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|[^\x1b]", re.DOTALL)


class Screen:
    """A terminal of `rows` by `columns`, which scrolls."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows = rows
        self.columns = columns
        self.gone: list[str] = []
        self._lines = [""]
        self._row = self._column = 0

    @property
    def lines(self) -> list[str]:
        """All lines that were ever written, without text that was erased or overwritten."""
        return [line.rstrip() for line in [*self.gone, *self._lines]]

    def feed(self, text: str) -> None:
        """Process the output of a program, after the kernel has replaced `\\n` by `\\r\\n`."""
        for piece in _PIECE.finditer(text.replace("\r\n", "\n").replace("\n", "\r\n")):
            number, command = piece.groups()
            if command is None:
                self._write(piece.group())
            elif command == "A":
                self._row = max(0, self._row - int(number or 1))
            elif command in "KJ":
                assert not number, "only from the cursor on"
                self._lines[self._row] = self._lines[self._row][: self._column]
                if command == "J":
                    del self._lines[self._row + 1 :]
            else:
                assert command == "m", f"an unknown command {piece.group()!r}"

    def _write(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._down()
        else:
            if self._column == self.columns:
                self._column = 0
                self._down()
            line = self._lines[self._row].ljust(self._column)
            self._lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append("")
        if self._row == self.rows:
            self.gone.append(self._lines.pop(0))
            self._row -= 1
