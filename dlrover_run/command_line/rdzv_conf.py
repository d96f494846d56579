"""What `--rdzv-conf` has: a key of its table, what the texts of values mean, and the record of the values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.spec import FlagValue

Scope = Literal["any", "coordinated", "hosted", "leased"]


class RdzvConf(NamedTuple):
    """The values of `--rdzv-conf`. `rules` are the defaults with the given values, and `features` what was given for
    each feature, by its name and the field of its rules; a file name keeps its source.

    `tls_ca` to `tls_key` are for a master, `cacert` to `key` for etcd. `keys` are the known keys that were given,
    `unknown` the names of the others.
    """

    rules: JobRules
    is_host: bool | None = None
    bind: str | None = None
    state_dir: FlagValue | None = None
    web: str | None = None
    token_file: FlagValue | None = None
    tls_ca: FlagValue | None = None
    tls_cert: FlagValue | None = None
    tls_key: FlagValue | None = None
    auth: str = "auto"
    protocol: str | None = None
    cacert: FlagValue | None = None
    cert: FlagValue | None = None
    key: FlagValue | None = None
    prefix: str | None = None
    user: FlagValue | None = None
    password_file: FlagValue | None = None
    features: Mapping[str, Mapping[str, float]] = {}
    keys: tuple[Key, ...] = ()
    unknown: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        return any(key.name == name for key in self.keys)

    def of(self, feature: str) -> Mapping[str, float]:
        """What was given for a feature, by the field of its rules."""
        return self.features.get(feature, {})


class Key(NamedTuple):
    """One key.

    `parse` turns the text into a value or raises SpecError. `help` is empty for an alias and for a key of torchrun that
    has no effect here. A key of the core sets the field of `JobRules` or `RdzvConf` with its name or its `alias`; one
    that a feature brings, that field of the feature's rules. `scope` is where a key has an effect: in any job, in a job
    whose nodes communicate, or only with a master or etcd; a key that torchrun has too is "any", so that it is never
    warned about. `needs` is a flag without which it has no effect, as in `Flag.needs`. `instead_in_store` is what to do
    instead of a key that has no effect in a store, which is `{store}` there.
    """

    name: str
    parse: Callable[[str, str], Any]
    help: str = ""
    scope: Scope = "any"
    alias: str = ""
    instead_in_store: str = ""
    needs: str = ""

    @property
    def field(self) -> str:
        """The name of the field that the key sets, if there is one."""
        return self.alias or self.name
