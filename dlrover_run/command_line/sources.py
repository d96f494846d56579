"""Where the value of a flag is from: the command line, else its variable, else the cluster that started the launcher,
else another flag that implies it, else its default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dlrover_run.command_line import values
from dlrover_run.command_line.flag import Flag
from dlrover_run.spec import FlagValue


class FlagValues:
    """The value of each flag of a program, by `Flag.dest`: the first of its sources that has one.

    `given` has the texts of the command line, `detected` what the cluster says, `implied` what other flags imply, and
    `flags` are those of the program, all by `Flag.dest`. A value names its source.
    """

    def __init__(
        self,
        given: Mapping[str, Sequence[str]],
        environ: Mapping[str, str],
        flags: Mapping[str, Flag],
        detected: Mapping[str, FlagValue] = MappingProxyType({}),
        implied: Mapping[str, FlagValue] = MappingProxyType({}),
    ) -> None:
        self._given = given
        self._environ = environ
        self._detected = detected
        self._implied = implied
        self.flags = flags

    def with_cluster(self, detected: Mapping[str, FlagValue]) -> FlagValues:
        """The values with those of the cluster, by `Flag.dest`, below flags and variables and above the defaults.
        Called by both launchers for a detected job."""
        return FlagValues(self._given, self._environ, self.flags, detected, self._implied)

    def with_implied(self, implied: Mapping[str, FlagValue]) -> FlagValues:
        """The values with those that other flags imply, by `Flag.dest`, above the defaults only."""
        return FlagValues(self._given, self._environ, self.flags, self._detected, implied)

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
        """The last text that was given for a flag, on the command line or by its variable; None without one."""
        given = self.all(dest)
        return given[-1] if given else None

    def known(self, dest: str) -> FlagValue | None:
        """The same, or what the cluster says; None if the flag has only its default."""
        return self.explicit(dest) or self._detected.get(dest)

    def get(self, dest: str) -> FlagValue:
        """The value of a flag, its default included."""
        flag = self.flags[dest]
        return self.known(dest) or self._implied.get(dest) or FlagValue(flag.spellings[0], flag.default or "")

    def source_of(self, value: FlagValue, dest: str) -> str:
        """Where a value of that flag is from, for people: a flag that is not given gives its default only."""
        is_default = self.known(dest) is None and value.source == self.flags[dest].spellings[0]
        return f"default of {value.source}" if is_default else value.source

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
