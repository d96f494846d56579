"""One flag: its name, value, environment variable and help text, and the panels of the help.

The tables of flags (`flags.py` for torchrun's and the core's, `flags.py` of each feature for its own) are made of this
record.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

SIZE = "Job size"
RENDEZVOUS = "Rendezvous"
WORKERS = "Workers"
FAILURES = "Failures and restarts"
OUTPUT = "Output"
PROGRESS = "Progress"
DEVICES = "Devices"
OTHER = "Other"

FIRST_TORCHRUN = "2.13"
"""The oldest torchrun version whose flags are all here."""

STATIC_ADDRESS = "127.0.0.1"
"""Address of node 0 for static rendezvous when no flag gives one, as in torchrun."""


class Flag(NamedTuple):
    """One flag.

    `value` is the name of its value in the help, empty for a switch. `const` is the value of a flag that is given
    without one: such a flag takes a value only after `=`, because the next word may be the script; a request takes the
    next word. `has_variable` gives the flag a default from the environment variable `variable_prefix` + DEST.
    `extension` marks a flag that torchrun does not have: it never makes an abbreviation of torchrun's ambiguous. A
    `request` prints something and starts no job. `files` makes the shell complete file names. `since` is the torchrun
    version that introduced the flag: a flag that is newer than `FIRST_TORCHRUN` never makes an abbreviation ambiguous
    that the first version accepts. `after` is the flag of its panel behind which a flag of a feature stands in the
    help, empty for the end of the panel. `needs` is the flag without which it has no effect: its name (or
    `name|other`), `name=VALUE` for one of its values (or `name=VALUE|OTHER`), or `name!=VALUE` for any other value.
    `common` puts a flag of a feature into the short help.
    """

    name: str
    panel: str
    help: str
    value: str = ""
    default: str | None = None
    short: str | None = None
    has_variable: bool = True
    extension: bool = False
    request: bool = False
    choices: tuple[str, ...] = ()
    files: Literal["", "directory"] = ""
    const: str = ""
    variable_prefix: str = "PET_"
    since: str = FIRST_TORCHRUN
    after: str = ""
    needs: str = ""
    common: bool = False

    @property
    def dest(self) -> str:
        """The name with underscores: the key of its value and the end of its variable's name."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str | None:
        """The environment variable that gives the default; None for a flag without one."""
        return f"{self.variable_prefix}{self.dest.upper()}" if self.has_variable and not self.request else None

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every unabbreviated spelling; messages use the first."""
        long = dict.fromkeys((f"--{self.name}", f"--{self.dest}"))
        return (*long, self.short) if self.short else tuple(long)
