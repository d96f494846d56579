"""The policies, one line each. A policy is imported only by jobs that have it.

The order is that in which the core asks the policies of a job that has several.

A package has `rules.RECORDS`, its classes of `coordination.policy_records`, each with the policy's name as the tag;
`policy.POLICY`, its class of `coordination.policy.Policy`; and `text`, which registers its codes, with that name as the
prefix.
"""

from __future__ import annotations

from functools import lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from dlrover_run.coordination import combined_records
from dlrover_run.coordination.policy_records import PolicyRecord
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

    parts = () if rules.policy is None else rules.policy.each()
    has_rounds = all(part.has_rounds for part in parts)
    applied = {part.policy_name for part in parts if part.applies and (has_rounds or not part.needs_rounds)}
    kinds: dict[str, type[Policy]] = {
        name: import_module(f"{package}.policy").POLICY for name, package in POLICIES.items() if name in applied
    }
    if len(kinds) > 1:
        return CombinedPolicy(rules, {name: kind(rules) for name, kind in kinds.items()})
    return next(iter(kinds.values()), Policy)(rules)


def decode_part(kind: type[Any], value: Any, may_be_combined: bool = True) -> Any:
    """Decode a part of a policy, or a combination of parts; the `dec_hook` of every decoder of a record that has one.
    Raises ValueError if no policy has that part."""
    assert issubclass(kind, PolicyRecord), "only a part of a policy needs this hook"
    name = value.get("type") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise ValueError("a part of a policy names none")
    records = import_module(f"{POLICIES[name]}.rules").RECORDS if name in POLICIES else ()
    if may_be_combined and name == combined_records.TAG:
        records = combined_records.RECORDS
    record: type[PolicyRecord] | None = next((record for record in records if issubclass(record, kind)), None)
    if record is None:
        raise ValueError(f"no policy {name[:100]!r} with a {kind.__name__}")
    # A combination in a combination is refused before it is decoded, however deep it is.
    return msgspec.convert(value, record, dec_hook=partial(decode_part, may_be_combined=False))
