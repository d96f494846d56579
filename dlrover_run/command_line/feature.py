"""What a feature brings to the command line: its flags, and what they make of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dlrover_run.command_line.flag import Flag
from dlrover_run.command_line.rdzv_conf import Key, RdzvConf
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.spec import FlagValue, JobSpec

if TYPE_CHECKING:
    from dlrover_run.command_line.rendezvous import Rendezvous
    from dlrover_run.command_line.sources import FlagValues


OWN_MASTER = "has no effect with --local-nodes, which starts its own master."


class Draft(NamedTuple):
    """What is known of a job when its features add their rules: its rendezvous, the values of `--rdzv-conf`, and the
    number of nodes that was given. `warn` takes a sentence for the user."""

    nodes: FlagValue
    rendezvous: Rendezvous
    conf: RdzvConf
    warn: Callable[[str], None]


class FeatureFlags(NamedTuple):
    """One feature on the command line, as the module `flags` of its folder has it in `FEATURE`.

    `rules` returns the rules of the job with the part of this feature, which all nodes have in common. `settings`
    returns what this node alone does for the feature, a record that the agent reads by `JobSpec.settings_of`, or None.
    `check` looks at the job that the flags have come to, and returns warnings. They are called for each launch,
    `settings` first, import what they need only for a job that has the feature, and raise SpecError.
    `keys` are those that it brings to `--rdzv-conf`, and `default_rules` returns the record whose fields they set.
    `several` says that several flags can turn the feature on, so that its rules say whether it is. `nodes_here` is the
    flag, as `FlagValues` names it, that has this launcher start all nodes of a job, and says how many. `implied`
    returns the values that its flags give to others, where these are not given, by `Flag.dest`.
    """

    flags: tuple[Flag, ...]
    rules: Callable[[FlagValues, Draft, JobRules], JobRules] | None = None
    settings: Callable[[FlagValues, Mapping[str, str]], msgspec.Struct | None] | None = None
    check: Callable[[FlagValues, JobSpec, Mapping[str, str]], list[str]] | None = None
    several: bool = False
    nodes_here: str = ""
    keys: tuple[Key, ...] = ()
    default_rules: Callable[[], msgspec.Struct] | None = None
    implied: Callable[[FlagValues], Mapping[str, FlagValue]] | None = None
