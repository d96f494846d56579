"""The policies, one line each. A policy is imported only by jobs that have it.

A package has `rules.RECORDS`, its classes of `coordination.policy_records`, each with the policy's name as the tag;
`policy.POLICY`, its class of `coordination.policy.Policy`; and `text`, which registers its codes, with that name as the
prefix.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

import msgspec

from dlrover_run.coordination import reasons
from dlrover_run.coordination.policy import Policy
from dlrover_run.coordination.policy_records import PolicyRecord
from dlrover_run.coordination.rules import JobRules

POLICIES = {
    "health": "dlrover_run.policies.health",
    "parameter_servers": "dlrover_run.policies.parameter_servers",
}

reasons.TEXTS.update((name, f"{package}.text") for name, package in POLICIES.items())


@lru_cache(maxsize=64)
def policy_of(rules: JobRules) -> Policy:
    """The policy of a job with these rules."""
    if rules.policy is None or not rules.policy.applies:
        return Policy(rules)
    policy: type[Policy] = import_module(f"{POLICIES[name_of(rules.policy)]}.policy").POLICY
    return policy(rules)


def name_of(part: PolicyRecord) -> str:
    """The name of the policy that a part belongs to."""
    assert isinstance(part, msgspec.Struct), "each part is a struct"
    return str(part.__struct_config__.tag)


def record_of(name: str, kind: type[PolicyRecord]) -> type[PolicyRecord]:
    """The class of a policy's part in one kind of record. Raises ValueError if there is none."""
    records = import_module(f"{POLICIES[name]}.rules").RECORDS if name in POLICIES else ()
    found: type[PolicyRecord] | None = next((record for record in records if issubclass(record, kind)), None)
    if found is None:
        raise ValueError(f"no policy {name[:100]!r} with a {kind.__name__}")
    return found


def decode_part(kind: type[Any], value: Any) -> Any:
    """Decode a part of a policy; the `dec_hook` of every decoder of a record that has one."""
    if not (isinstance(kind, type) and issubclass(kind, PolicyRecord)):
        raise NotImplementedError(f"{kind} has no decoder")
    name = value.get("type") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise ValueError("a part of a policy names none")
    return msgspec.convert(value, record_of(name, kind))
