"""What was asked of the node check: several flags turn it on, and others only have an effect with it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from dlrover_run.command_line import flags
from dlrover_run.command_line.flags import Given
from dlrover_run.command_line.meeting import Meeting
from dlrover_run.command_line.rendezvous_conf import RendezvousConf
from dlrover_run.command_line.settings import Settings
from dlrover_run.coordination.rules import CHECK_NEVER, CHECK_ONCE, Rules
from dlrover_run.spec import SpecError

CHECKED_FROM = 4
"""The fewest nodes of a job that `--auto-config` has checked (as DLRover)."""

SURE_THRESHOLD = 1.7
"""Below this a healthy node may count as a straggler: measurements of two nodes alike, each off by up to 20 %, may be
1.5 times apart, and three tries and a median only make that rare."""

_HOW_TO_MEET = "give --rdzv-backend=c10d and --rdzv-endpoint=HOST:PORT, where HOST is one of the nodes"


class NodeCheck(NamedTuple):
    """The fields of `Rules` that are about the check, and warnings about what was asked for."""

    mode: int
    straggler_threshold: float
    exclude_stragglers: bool
    measure_links: bool
    warnings: tuple[str, ...]

    def add_to(self, rules: Rules) -> Rules:
        """The rules with these in them. Without a check the others stay as they are by default, so that nodes which
        differ in nothing that counts are not told of a difference."""
        if self.mode == CHECK_NEVER:
            return rules
        return replace(
            rules,
            check=self.mode,
            straggler_threshold=self.straggler_threshold,
            exclude_stragglers=int(self.exclude_stragglers),
            measure_links=int(self.measure_links),
        )


def settle_check(settings: Settings, place: Meeting, conf: RendezvousConf) -> NodeCheck:
    """What the flags come to. Raises SpecError when nodes shall be checked that never meet."""
    threshold = flags.ratio(*settings.text("straggler_threshold"))
    level = int(settings.choice("precheck"))
    asked = settings.asked("network_check")
    mode = flags.check_mode(*asked) if asked else CHECK_NEVER
    measuring = level == 2 or settings.on("comm_perf_test")
    by = asked if mode else settings.asked("precheck") if level else settings.asked("comm_perf_test")
    if level or measuring:
        # Each of these asks for a check, and none takes back what another one asked for.
        mode = mode or CHECK_ONCE
    never_meet = place.backend == "static" and place.most > 1
    warnings: list[str] = []
    if mode and by and never_meet:
        raise SpecError(f"{by.place} is of no use with static, whose nodes never meet: {_HOW_TO_MEET}.")
    if not mode and asked is None and settings.on("auto_config") and place.least >= CHECKED_FROM:
        if never_meet:
            warnings.append(f"--auto-config checks no nodes of static, which never meet: {_HOW_TO_MEET}.")
        else:
            mode = CHECK_ONCE
    if mode == CHECK_NEVER:
        warnings += _without_effect(settings, conf)
    elif threshold < SURE_THRESHOLD:
        given = settings.asked("straggler_threshold")
        warnings.append(
            f"{given.place if given else '--straggler-threshold'} {threshold:g} may name healthy nodes: two alike may "
            f"measure 1.5 times apart, so give {SURE_THRESHOLD:g} or more."
        )
    return NodeCheck(mode, threshold, settings.on("exclude_straggler"), measuring, tuple(warnings))


def _without_effect(settings: Settings, conf: RendezvousConf) -> list[str]:
    said: list[Given | None] = [settings.asked("straggler_threshold")]
    if settings.on("exclude_straggler"):
        said.insert(0, settings.asked("exclude_straggler"))
    places = [given.place for given in said if given]
    if conf.says("check_timeout"):
        places.append("check_timeout of --rdzv-conf")
    return [f"{place} has no effect without --network-check." for place in places]
