"""Where the value of a flag is from: the command line, else its variable, else its default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlrover_run.command_line import values
from dlrover_run.command_line.flag import Flag
from dlrover_run.spec import FlagValue


class FlagValues:
    """The value of each flag of a program, by `Flag.dest`: from the command line, else from its variable, else its
    default. `given` has the texts of the command line, and `flags` are those of the program, both by `Flag.dest`."""

    def __init__(
        self, given: Mapping[str, Sequence[str]], environ: Mapping[str, str], flags: Mapping[str, Flag]
    ) -> None:
        self._given = given
        self._environ = environ
        self.flags = flags

    def all(self, dest: str) -> list[FlagValue]:
        """Every text that was given for a flag, in order; none for one that no feature of the program brings."""
        flag = self.flags.get(dest)
        if flag is None:
            return []
        if dest in self._given:
            return [FlagValue(flag.spellings[0], text) for text in self._given[dest]]
        if flag.variable is not None and flag.variable in self._environ:
            return [FlagValue(flag.variable, self._environ[flag.variable])]
        return []

    def explicit(self, dest: str) -> FlagValue | None:
        """The last text that was given for a flag; None if the flag has only its default."""
        given = self.all(dest)
        return given[-1] if given else None

    def get(self, dest: str) -> FlagValue:
        """The last text that was given for a flag, else its default."""
        flag = self.flags[dest]
        return self.explicit(dest) or FlagValue(flag.spellings[0], flag.default or "")

    def is_on(self, dest: str) -> bool:
        if dest in self._given:
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
        return values.choice(*self.get(dest), self.flags[dest].choices)
