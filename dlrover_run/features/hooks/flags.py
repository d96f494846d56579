"""The flags of hooks, and the settings of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrover_run.command_line import checks, values
from dlrover_run.command_line.feature import FeatureFlags
from dlrover_run.command_line.flag import FAILURES, Flag

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlrover_run.command_line.sources import FlagValues
    from dlrover_run.features.hooks.settings import HookSettings

# fmt: off
FLAGS = (
    Flag("hook", FAILURES,
        "Run a command on this node, without a shell, [b]before-round[/] (a failure of it keeps this node out of the "
        "job), [b]after-failure[/] of a worker here, or [b]at-end[/] of the job; may be repeated.",
        "EVENT=COMMAND", extension=True),
    Flag("hook-timeout", FAILURES,
        "Seconds after which a command of --hook is stopped [dim](60)[/].",
        "SECONDS", extension=True, after="hook", needs="hook"),
)
# fmt: on


def settings(flags: FlagValues, environ: Mapping[str, str]) -> HookSettings | None:
    """The hooks of this node. Raises SpecError for an event that does not exist, and for a command that cannot be run
    here."""
    given = flags.all("hook")
    if not given:
        return None
    # Imported only here: other launches do not wait for it.
    from dlrover_run.features.hooks.settings import EVENTS, TIMEOUT, HookSettings

    commands: dict[str, tuple[tuple[str, ...], ...]] = {}
    for source, text in given:
        event, _, command = text.partition("=")
        if event not in EVENTS:
            raise values.invalid(
                source, text, "does not begin with an event", f"give one of {', '.join(EVENTS)}, as in at-end=COMMAND"
            )
        words = checks.command_words(f"{source} {event}", command, environ, f"{event}=/opt/site/check.sh")
        commands[event] = (*commands.get(event, ()), words)
    limit = flags.explicit("hook_timeout")
    return HookSettings(commands, TIMEOUT if limit is None else values.seconds(*limit, zero_allowed=False))


FEATURE = FeatureFlags(FLAGS, settings=settings)
