"""Where the value of a flag is from: the command line, else its variable, else its default."""

from __future__ import annotations

from collections.abc import Mapping

from dlrover_run.command_line import values
from dlrover_run.command_line.parse import CommandLine
from dlrover_run.command_line.program import DLROVER_RUN, Program
from dlrover_run.spec import FlagValue


class FlagValues:
    """The value of each flag of a program, by `Flag.dest`: from the command line, else from its variable, else its
    default."""

    def __init__(self, line: CommandLine, environ: Mapping[str, str], program: Program = DLROVER_RUN) -> None:
        self._line = line
        self._environ = environ
        self.program = program
        self._flags = program.by_dest

    def all(self, dest: str) -> list[FlagValue]:
        """Every text that was given for a flag, in order."""
        flag = self._flags[dest]
        if dest in self._line.values:
            return [FlagValue(flag.spellings[0], text) for text in self._line.values[dest]]
        if flag.variable is not None and flag.variable in self._environ:
            return [FlagValue(flag.variable, self._environ[flag.variable])]
        return []

    def explicit(self, dest: str) -> FlagValue | None:
        """The last text that was given for a flag; None if the flag has only its default."""
        given = self.all(dest)
        return given[-1] if given else None

    def get(self, dest: str) -> FlagValue:
        """The last text that was given for a flag, else its default."""
        flag = self._flags[dest]
        return self.explicit(dest) or FlagValue(flag.spellings[0], flag.default or "")

    def is_on(self, dest: str) -> bool:
        if dest in self._line.values:
            return True
        given = self.explicit(dest)
        return given is not None and values.switch(*given)

    def explicit_integer(self, dest: str, lowest: int, highest: int | None = None) -> int | None:
        """An integer that was given for a flag; None if the flag has only its default."""
        given = self.explicit(dest)
        return None if given is None else values.integer(*given, lowest, highest)

    def integer(self, dest: str, lowest: int, highest: int | None = None) -> int:
        """An integer, the default included."""
        return values.integer(*self.get(dest), lowest, highest)

    def choice(self, dest: str) -> str:
        """One of the words that the flag's `choices` allow, the default included."""
        return values.choice(*self.get(dest), self._flags[dest].choices)
