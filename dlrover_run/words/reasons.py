"""Why a plan is as it is, and what a node waits for: codes with parameters, and the one place that renders them.

Decisions, the wire and the journal carry a chain of `Reason`s. A chain becomes a sentence only where a person reads it
(`render`). A feature adds its codes with an enum of its own and `register`.

A template takes Python's format fields, and `{number:#noun}` for a number of things, `{number:one|many}` for a text
that depends on the number, `{names:join}` for a list of names, and `{at:clock}` for a time in ISO 8601 with its zone,
which a person reads as that of this machine's clock. A text that continues the one before begins with its
separator, and a text that ends with a colon introduces the next one; every other text follows after a semicolon.
"""

from __future__ import annotations

import enum
import string
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.bounds import MAX_WHAT
from dlrover_run.words.text import counted, join_names

MAX_REASONS = 16
"""Reasons in one chain. A longer one keeps its first, which is the cause, and its last."""

MAX_PARAM = 2 * MAX_WHAT
"""Characters of one parameter."""

MAX_NAMES = 3
"""Entries of a list of names; the last one may stand for all others."""

_SEPARATORS = (",", ":", " ")

Param = (
    Annotated[str, Meta(max_length=MAX_PARAM)]
    | int
    | float
    | Annotated[tuple[Annotated[str, Meta(max_length=300)], ...], Meta(max_length=MAX_NAMES)]
)


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One reason: its code, and the parameters of its text."""

    code: Annotated[str, Meta(pattern=r"\A[a-z0-9_.]{1,64}\Z")]
    params: Annotated[dict[Annotated[str, Meta(max_length=64)], Param], Meta(max_length=8)] = {}

    def __hash__(self) -> int:
        return hash((self.code, tuple(sorted(self.params.items()))))

    def __str__(self) -> str:
        return render((self,))


Reasons = tuple[Reason, ...]
"""A chain: the first reason is the cause, and each later one continues it."""

BoundedReasons = Annotated[tuple[Reason, ...], Meta(max_length=MAX_REASONS)]


class ReasonCode(enum.Enum):
    """A set of codes: the value of each is the template of its text, and a call gives the reason."""

    @property
    def code(self) -> str:
        """The code on the wire and in the journal."""
        return f"{_PREFIXES.get(type(self), '')}{self.name.lower()}"

    def __call__(self, **params: Any) -> Reason:
        """The reason with these parameters, each within its bound."""
        return Reason(self.code, {name: _bounded(value) for name, value in params.items()})

    def within(self, reasons: Sequence[Reason]) -> bool:
        """Whether one of the reasons has this code."""
        return any(reason.code == self.code for reason in reasons)


def _bounded(value: Any) -> Param:
    if isinstance(value, list | tuple):
        return tuple(str(name)[:300] for name in value[:MAX_NAMES])
    return value if isinstance(value, int | float) else str(value)[:MAX_PARAM]


class Code(ReasonCode):
    """The reasons of the coordination core."""

    SENTENCE = "{text}"
    """A text that has no code."""

    # Before a round.
    NO_REPORT_YET = "no node has reported yet"
    EVERY_NODE_LEFT = "every node has left"
    NO_NODE_LEFT = ", and no node is here any more"
    NODES_HERE = "{number:the one node is|{number} nodes are} here"
    LAST_CALL_OVER = ", and no other node came for {seconds:g} s"
    NODES_LEFT = "{number:#node} {number:is|are} left"
    TOO_FEW_NODES = "after {seconds:g} s only {number} of at least {least:#node} {number:is|are} here ({names:join})"
    NO_NODE_CAME = "after {seconds:g} s none of at least {least:#node} is here"
    QUORUM = "{number} {number:is|are} needed, because the others may train with the master before this one"
    MISSING = "missing: {names:join}"
    RANK0_SILENT = "{node} should have led the next round, and did not answer for {seconds:g} s"
    RECOVERED = "the job was running when its coordinator began"

    # The end of a round.
    ALL_SUCCEEDED = "every worker succeeded"
    WORKER_FAILED = "rank {rank} on {node} {what}"
    RESTARTS_USED = "{most:the one restart|all {most} restarts} {most:was|were} used"
    RESTARTS_OF_WINDOW_USED = "{most:the one restart|all {most} restarts} of {window:g} s {most:was|were} used"
    EARLY_FAILURES = (
        "{number} rounds in succession failed before any worker had got through init_process_group or written a "
        "checkpoint, so the job stops early (--rdzv-conf early_failure_limit=0 goes on)"
    )
    STOPPED_ON_REQUEST = "{by} stopped the job"
    SCALED_UP = "{names:join} joined, so {after} nodes train instead of {before}"
    RESIZED = "{after:#node} {after:trains|train} instead of {before}"
    SCALED_DOWN = "{by} asked for fewer nodes, so {after:#node} {after:trains|train} instead of {before}"

    # Members that are gone.
    LOST = "{names:join} {number:was|were} lost"
    LEFT_AFTER_FAILURE = "{names:join} left: {what}"
    LEFT_ON_REQUEST = "{names:join} left, as {number:it was|they were} asked to"
    ENDED_BY_SIGNAL = "{names:join} {number:was|were} ended by {signal}"
    ASKED_TO_LEAVE = "{names:join} {number:was|were} asked to leave"

    # What a node without ranks waits for.
    NODES_OF = "{number:#node} of {wanted} {number:is|are} here"
    NAMED = ": {names:join}"
    TRAINING = "{number:#node} {number:trains|train}"
    JOINS_NEXT_ROUND = "this one takes part in the next round"
    JOINS_AT_CHECKPOINT = "this one takes part after the next checkpoint"
    NODES_PREPARE = "{number:#node} {number:imports|import} what {number:its|their} workers need, and then takes part"
    SPARE = "this one waits to step in, {number:#spare} in all"
    SPARE_OF = "this one waits to step in, {number:#spare} in all ({wanted} asked for)"
    NOT_REQUESTED = (
        ", and this node was not asked for (--spares is 0, --nnodes has all of its nodes): it waits in case one is lost"
    )


_PREFIXES: dict[type[ReasonCode], str] = {Code: ""}
_TEMPLATES: dict[str, str] = {}

TEXTS: dict[str, str] = {}
"""The module that registers the codes with the prefix of each feature; it is imported when a code of it is rendered."""


def register(codes: type[ReasonCode], prefix: str) -> None:
    """Add a feature's codes; on the wire each begins with the prefix."""
    _PREFIXES[codes] = prefix
    _TEMPLATES.update((code.code, code.value) for code in codes)


register(Code, "")


def sentence(text: str) -> Reasons:
    """The chain of a text that has no code."""
    return (Code.SENTENCE(text=text),)


def chain(before: Sequence[Reason], *further: Reason) -> Reasons:
    """The chain that goes on with further reasons, within its bound."""
    reasons = (*before, *further)
    return reasons if len(reasons) <= MAX_REASONS else (reasons[0], *reasons[1 - MAX_REASONS :])


def codes(reasons: Sequence[Reason]) -> tuple[str, ...]:
    return tuple(reason.code for reason in reasons)


def shown_names(names: Sequence[str], number: int | None = None) -> tuple[str, ...]:
    """The entries of a list of names that are rendered: at most three. `number` is how many names there are, where only
    the first are given."""
    number = len(names) if number is None else number
    return tuple(names) if number <= MAX_NAMES else (*names[: MAX_NAMES - 1], f"{number - MAX_NAMES + 1} others")


def render(reasons: Sequence[Reason]) -> str:
    """The text of a chain."""
    return "; ".join(map(_render_sentence, sentences(reasons)))


def sentences(reasons: Sequence[Reason]) -> list[Reasons]:
    """The parts of a chain that are rendered with a semicolon between them."""
    found: list[Reasons] = []
    for reason in reasons:
        if found and (_continues(reason) or _template(found[-1][-1].code).endswith(":")):
            found[-1] = (*found[-1], reason)
        else:
            found.append((reason,))
    return found


def new_reasons(before: Sequence[Reason], reasons: Reasons) -> Reasons:
    """What a reader of `before` has not read: the sentences that were added, or all of a chain that does not go on with
    further sentences."""
    known, found = sentences(before), sentences(reasons)
    new = found[len(known) :]
    return tuple(reason for part in new for reason in part) if new and found[: len(known)] == known else reasons


def _render_sentence(reasons: Sequence[Reason]) -> str:
    first, *further = reasons
    parts = (f"{'' if _continues(one) else ' '}{_rendered(one)}" for one in further)
    return _rendered(first).lstrip(",: ") + "".join(parts)


def _continues(reason: Reason) -> bool:
    return _template(reason.code).startswith(_SEPARATORS)


def _template(code: str) -> str:
    """The template of a code; empty for a code of another version."""
    feature, separator, _ = code.partition(".")
    if separator and code not in _TEMPLATES:
        # A reader of event logs has not imported any feature.
        import_module("dlrover_run.features.registry")
        if feature in TEXTS:
            import_module(TEXTS[feature])
    return _TEMPLATES.get(code, "")


def _rendered(reason: Reason) -> str:
    """The text of one reason. A reason of another version may have another code or other parameters."""
    if template := _template(reason.code):
        try:
            return _FORMATTER.format(template, **reason.params)
        except (LookupError, TypeError, ValueError, AttributeError):
            pass
    params = ", ".join(f"{name}={value}" for name, value in reason.params.items())
    return f"{reason.code} ({params})" if params else reason.code


class TextFormatter(string.Formatter):
    """Renders templates."""

    def format_field(self, value: Any, format_spec: str) -> str:
        number = len(value) if isinstance(value, list | tuple) else value
        if format_spec.startswith("#"):
            return counted(number, format_spec[1:])
        if "|" in format_spec:
            one, many = format_spec.split("|")
            return one if number == 1 else many
        if format_spec == "clock":
            from datetime import datetime

            return datetime.fromisoformat(value).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        return join_names(value) if format_spec == "join" else super().format_field(value, format_spec)


_FORMATTER = TextFormatter()
