"""The policies, one line each. A policy is imported only by jobs that have it.

The order is that in which the core asks the policies of a job that has several.

A package has `rules.RECORDS`, its classes of `coordination.parts`, each with the policy's name as the tag;
`policy.POLICY`, its class of `coordination.policy.Policy`; and `text`, which registers its codes, with that name as the
prefix.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from dlrover_run.coordination.parts import Part
from dlrover_run.coordination.rules import JobRules
from dlrover_run.words import reasons

if TYPE_CHECKING:
    from dlrover_run.coordination.policy import Policy

POLICIES = {
    "health": "dlrover_run.features.node_check.decision",
    "parameter_servers": "tf_ps_runner.cluster",
    "stall": "dlrover_run.features.hangs.stalls",
    "straggler": "dlrover_run.features.hangs.stragglers",
    "survivors": "dlrover_run.features.survivors",
    "autoscale": "dlrover_run.features.autoscale",
}

reasons.TEXTS.update((name, f"{package}.text") for name, package in POLICIES.items())


@lru_cache(maxsize=64)
def policy_of(rules: JobRules) -> Policy:
    """The policy of a job with these rules: its only one, or all of its policies as one, in the order of `POLICIES`."""
    # Imported by what decides; a node of a job only reads the records.
    from dlrover_run.coordination.combined_policy import CombinedPolicy
    from dlrover_run.coordination.policy import Policy

    applied = {part.feature for part in rules.parts if part.applies and (rules.has_rounds or not part.needs_rounds)}
    kinds: dict[str, type[Policy]] = {
        name: import_module(f"{package}.policy").POLICY for name, package in POLICIES.items() if name in applied
    }
    if len(kinds) > 1:
        return CombinedPolicy(rules, {name: kind(rules) for name, kind in kinds.items()})
    return next(iter(kinds.values()), Policy)(rules)


def decode_part(kind: type[Any], value: Any) -> Any:
    """Decode a part of a record; the `dec_hook` of every decoder of a record that has parts. Raises ValueError if no
    feature has that part."""
    assert issubclass(kind, Part), "only a part of a feature needs this hook"
    name = value.get("type") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise ValueError("a part of a record names no feature")
    records = import_module(f"{POLICIES[name]}.rules").RECORDS if name in POLICIES else ()
    record: type[Part] | None = next((record for record in records if issubclass(record, kind)), None)
    if record is None:
        raise ValueError(f"no feature {name[:100]!r} with a {kind.__name__}")
    return msgspec.convert(value, record)
