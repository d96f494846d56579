"""The text of each flag: from the command line, else from its variable, else its default."""

from __future__ import annotations

from collections.abc import Mapping

from dlrover_run.command_line import flags
from dlrover_run.command_line.argv import CommandLine
from dlrover_run.command_line.flags import Given
from dlrover_run.command_line.program import DLROVER_RUN, Program


class Settings:
    """What was said about each flag, by `Flag.dest`, with the place where it was said."""

    def __init__(self, line: CommandLine, environ: Mapping[str, str], program: Program = DLROVER_RUN) -> None:
        self._line = line
        self._environ = environ
        self._flags = program.by_dest

    def each(self, dest: str) -> list[Given]:
        """Every text given for a flag, in order."""
        flag = self._flags[dest]
        if dest in self._line.values:
            return [Given(flag.spellings[0], text) for text in self._line.values[dest]]
        if flag.variable is not None and flag.variable in self._environ:
            return [Given(flag.variable, self._environ[flag.variable])]
        return []

    def asked(self, dest: str) -> Given | None:
        """The text that counts, the last one; None when the flag was not given at all."""
        given = self.each(dest)
        return given[-1] if given else None

    def text(self, dest: str) -> Given:
        """The text that counts, the table's default included."""
        flag = self._flags[dest]
        return self.asked(dest) or Given(flag.spellings[0], flag.default or "")

    def on(self, dest: str) -> bool:
        """Whether a switch is on."""
        if dest in self._line.values:
            return True
        given = self.asked(dest)
        return given is not None and flags.switch(*given)

    def asked_number(self, dest: str, lowest: int, highest: int | None = None) -> int | None:
        """A whole number that somebody gave, else None."""
        given = self.asked(dest)
        return None if given is None else flags.whole_number(*given, lowest, highest)

    def number(self, dest: str, lowest: int, highest: int | None = None) -> int:
        """A whole number, the table's default included."""
        return flags.whole_number(*self.text(dest), lowest, highest)

    def choice(self, dest: str) -> str:
        """One of the words that the table allows."""
        return flags.choice(*self.text(dest), self._flags[dest].choices)
