"""The features, one line each: a folder here with all that belongs to it, imported only by a job that has it.

Without its folder and its line, the rest works as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from dlrover_run.coordination.parts import applies, has_part

if TYPE_CHECKING:
    from dlrover_run.coordination.model import Assignment
    from dlrover_run.spec import JobSpec


def _by_rules(part: str) -> Callable[[JobSpec, Assignment], bool]:
    return lambda job, _: applies(job.rules.parts, part)


def _by_settings(name: str) -> Callable[[JobSpec, Assignment], bool]:
    return lambda job, _: name in job.settings


def _by_assignment(part: str) -> Callable[[JobSpec, Assignment], bool]:
    """A job has it by its rules, or by the rules of another node, which are those of the job."""

    def is_wanted(job: JobSpec, assignment: Assignment) -> bool:
        waiting = () if assignment.waiting is None else assignment.waiting.parts
        return applies(job.rules.parts, part) or has_part(assignment.parts, part) or has_part(waiting, part)

    return is_wanted


class Feature(NamedTuple):
    """`name` is the folder. `node` is the module in it with `NODE`, the class of `agent.node_feature.NodeFeature` that
    an agent begins once the job `has` the feature; empty for a feature without a part on the nodes. With `workers` it
    is one of `workers.feature.WorkersFeature`, for jobs with rounds of workers."""

    name: str
    node: str = ""
    has: Callable[[JobSpec, Assignment], bool] = lambda job, assignment: True
    workers: bool = True


FEATURES = (
    Feature("node_check", "node.node_checks", _by_assignment("health")),
    Feature("survivors", "feature", _by_rules("survivors")),
    Feature("autoscale", "autoscaler", _by_assignment("autoscale")),
    Feature("hangs", "node.feature", _by_settings("hangs")),
    Feature("checkpoints", "feature", _by_settings("checkpoints")),
    Feature("resources", "feature", workers=False),
    Feature("hooks", "node", _by_settings("hooks")),
)
"""In the order in which an agent calls them."""
