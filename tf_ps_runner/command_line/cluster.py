"""The tasks of a node in a cluster that started tf-ps-run on each node: which ones follows from its rank."""

from __future__ import annotations

from dlrover_run.environment.records import Detected
from dlrover_run.spec import FlagValue, SpecError
from dlrover_run.words.text import join_words
from tf_ps_runner.cluster.model import Capacity, Role
from tf_ps_runner.cluster.rules import ROLES, ClusterRules


def tasks_of_node(found: Detected, cluster: ClusterRules) -> tuple[Capacity, ...]:
    """The tasks of this node: of the chief first, then of each other role, assigned to the nodes in turn.

    Without a number of nodes each of them hosts one task. Raises SpecError when a node would have none.
    """
    order = sorted(ROLES, key=lambda role: role is not Role.CHIEF)
    roles = [role for role in order for _ in range(cluster.replicas(role)[1])]
    nodes = len(roles) if found.size is None else found.size
    if found.node_rank is None:
        raise SpecError(f"{found.title} does not say which node this is: give --role.")
    rank = int(found.node_rank.text)
    if nodes > len(roles) or rank >= len(roles):
        source = found.nodes or FlagValue(found.node_rank.source, f"at least {rank + 1}")
        raise SpecError(
            f"{found.title} has {source.text} nodes ({source.source}), and the job has {len(roles)} tasks: raise "
            f"--workers or --ps, or request {len(roles)} nodes."
        )
    own = roles[rank::nodes]
    return tuple(Capacity(role, own.count(role)) for role in dict.fromkeys(own))


def describe_tasks(capacity: tuple[Capacity, ...]) -> str:
    tasks = [f"{part.slots} {part.role.value}" if part.slots > 1 else part.role.value for part in capacity]
    return f"{join_words(tasks)} on this node (--ps, --workers)"
