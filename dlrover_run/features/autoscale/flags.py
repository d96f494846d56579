"""The flags of a job that scales itself, the rules that they make, and the settings of a node."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlrover_run.command_line import checks, values
from dlrover_run.command_line.feature import Draft, FeatureFlags
from dlrover_run.command_line.flag import SIZE, Flag
from dlrover_run.command_line.rdzv_conf import Key
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.spec import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlrover_run.command_line.sources import FlagValues
    from dlrover_run.features.autoscale.rules import AutoscaleRules
    from dlrover_run.features.autoscale.settings import AutoscaleSettings

SCALINGS = ("weak", "strong")

# fmt: off
FLAGS = (
    Flag("autoscale", SIZE,
        "Measure the throughput at different sizes within --nnodes=MIN:MAX, and keep the size whose nodes pay for "
        "themselves; [b]strong[/] if the script divides a fixed batch by the number of workers.",
        "weak|strong", const="weak", extension=True, choices=SCALINGS, after="node-unit"),
    Flag("scale-command", SIZE,
        "For --autoscale: a command that gives the job another number of nodes, as in [b]kubectl scale job/j "
        "--replicas={nodes}[/]. One node runs it, without a shell, when more nodes are wanted than are here, or fewer.",
        "COMMAND", "", extension=True, after="autoscale"),
)
# fmt: on

_time = partial(values.seconds, zero_allowed=True)
_time_above_zero = partial(values.seconds, zero_allowed=False)


def _share(source: str, text: str) -> float:
    share = _time(source, text)
    if share > 1:
        raise values.invalid(source, text, "is out of range", "give a number from 0 to 1")
    return share


def _tolerance(source: str, text: str) -> float:
    share = _time_above_zero(source, text)
    if share >= 0.2:
        raise values.invalid(source, text, "is out of range", "give a number above 0 and below 0.2")
    return share


def _share_or_more(source: str, text: str) -> float:
    factor = _time(source, text)
    if 0 < factor < 1:
        raise values.invalid(source, text, "is out of range", "give 1 or more, or 0 for no limit")
    return factor


KEYS = tuple(
    Key(
        f"autoscale_{field}",
        parse,
        f"For --autoscale: {help[0].lower()}{help[1:]}",
        scope="coordinated",
        alias=field,
        needs="scale-command" if field == "command_timeout" else "autoscale",
    )
    for field, parse, help in (
        (
            "efficiency",
            _share,
            "The share of a larger size that must become throughput: 1 for all of it, 0 for any gain",
        ),
        ("tolerance", _tolerance, "The share by which sizes may differ and count as equal; more is known sooner"),
        ("max_batch", _share_or_more, "How many times the batch of the smallest size the job's may be; 0 for no limit"),
        ("block", _time_above_zero, "Seconds of one block of a measurement, of which there are at least 6"),
        ("warm_up", _time, "Seconds at the begin of a round that are not measured"),
        ("node_timeout", _time, "Seconds for which the job waits for nodes that are not here"),
        ("retry", _time_above_zero, "Seconds until it waits for them again, and then twice as many"),
        ("command_timeout", _time_above_zero, "Seconds after which --scale-command is stopped"),
    )
)


def add_rules(flags: FlagValues, job: Draft, rules: JobRules) -> JobRules:
    """The rules with those of `--autoscale`, if it is given. Raises SpecError for a job that has one size only, or
    whose nodes do not communicate."""
    command = flags.explicit("scale_command")
    given = flags.explicit("autoscale")
    if given is None:
        if command is not None:
            raise SpecError(f"{command.source} is for a job that scales itself: give --autoscale too, or leave it out.")
        return rules
    kind = flags.choice("autoscale")
    if rules.min_size == rules.max_size:
        unit = f" with --node-unit {rules.node_unit}" if rules.node_unit > 1 else ""
        raise SpecError(
            f"{given.source} chooses between several numbers of nodes, and {job.nodes.source} {job.nodes.text}{unit} "
            "allows one only: give --nnodes=MIN:MAX."
        )
    if not job.rendezvous.coordinated:
        raise SpecError(
            f"{given.source} needs nodes that communicate: give --rdzv-backend=c10d or etcd with --rdzv-endpoint."
        )
    from dlrover_run.features.autoscale.rules import STRONG, WEAK, AutoscaleRules

    scaling = STRONG if kind == "strong" else WEAK
    part = replace(AutoscaleRules(), scaling=scaling, command=int(command is not None), **job.conf.of("autoscale"))
    if problem := part.problem():
        raise SpecError(f"{given.source} is not possible: {problem}.")
    return replace(rules, parts=with_part(rules.parts, part))


def settings(flags: FlagValues, environ: Mapping[str, str]) -> AutoscaleSettings | None:
    """What this node does: the words of `--scale-command`. Raises SpecError for one that cannot be run here."""
    given = flags.explicit("scale_command")
    if given is None:
        return None
    if local := flags.explicit("local_nodes"):
        raise SpecError(
            f"{given.source} starts nodes elsewhere, and {local.source} starts all nodes here: leave one out."
        )
    # Imported only here: other launches do not wait for it.
    from dlrover_run.features.autoscale.settings import AutoscaleSettings

    return AutoscaleSettings(checks.command_words(*given, environ, "'resize-job {nodes}'"))


def default_rules() -> AutoscaleRules:
    """The rules of a job that scales itself."""
    from dlrover_run.features.autoscale.rules import AutoscaleRules

    return AutoscaleRules()


FEATURE = FeatureFlags(FLAGS, add_rules, settings, keys=KEYS, default_rules=default_rules)
