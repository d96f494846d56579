"""The policies, one line each: when a job has it, and its class."""

from __future__ import annotations

from collections.abc import Callable

from dlrover_run.coordination.policy import Policy
from dlrover_run.coordination.rules import CHECK_NEVER, JobRules
from dlrover_run.policies.health.policy import HealthPolicy
from dlrover_run.policies.parameter_servers.policy import ParameterServerPolicy

POLICIES: tuple[tuple[Callable[[JobRules], bool], type[Policy]], ...] = (
    (lambda rules: rules.cluster is not None, ParameterServerPolicy),
    (lambda rules: rules.check != CHECK_NEVER, HealthPolicy),
)


def policy_of(rules: JobRules) -> Policy:
    """The policy of a job with these rules: the first that applies."""
    return next((policy for applies, policy in POLICIES if applies(rules)), Policy)(rules)
