"""The policies, one line each. A policy is imported only by jobs that have it.

The order is that in which a decision asks them.

A package has `rules.RECORDS`, its classes of `coordination.parts`, each with the feature's name as the tag; in
`policy` either `OBSERVER`, its class of `coordination.observer.Observer`, or `POLICY`, its class of
`coordination.policy.Policy`; and `text`, which registers its codes, with that name as the prefix.
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
    from dlrover_run.coordination.job import Job
    from dlrover_run.coordination.observer import Observer
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
def job_of(rules: JobRules) -> Job:
    """The job with these rules, and with the features that they ask for, in the order of `POLICIES`."""
    # Imported by what decides; a node of a job only reads the records.
    from dlrover_run.coordination.combined_policy import CombinedPolicy
    from dlrover_run.coordination.job import Job
    from dlrover_run.coordination.policy import Policy

    applied = {part.feature for part in rules.parts if part.applies and (rules.has_rounds or not part.needs_rounds)}
    observers: dict[str, Observer] = {}
    policies: dict[str, Policy] = {}
    for name, package in POLICIES.items():
        if name in applied:
            module = import_module(f"{package}.policy")
            if hasattr(module, "OBSERVER"):
                observers[name] = module.OBSERVER(rules)
            else:
                policies[name] = module.POLICY(rules)
    if len(policies) > 1:
        return Job(rules, observers, CombinedPolicy(rules, policies))
    return Job(rules, observers, next(iter(policies.values()), None) or Policy(rules))


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
