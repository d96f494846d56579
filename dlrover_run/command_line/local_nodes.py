"""Nodes on this machine: how many start at once and later, what that means for the job, and what excludes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dlrover_run.command_line import flags, lookup
from dlrover_run.command_line.flags import Given
from dlrover_run.command_line.meeting import MEETING_IN_ETCD
from dlrover_run.command_line.rendezvous_conf import RendezvousConf
from dlrover_run.command_line.settings import Settings
from dlrover_run.coordination.rules import Rules
from dlrover_run.coordination.words import counted
from dlrover_run.spec import Entrypoint, LocalSpec, MasterSpec, SpecError

MOST = 1000
"""More nodes than one machine can bear: each is several processes."""

LAST_CALL_TIMEOUT = 3.0
"""Seconds without a newcomer after which the first round starts with fewer than the most nodes, where `--rdzv-conf`
does not say. All nodes are started in the same second, so that nobody else is on the way: who joins later is meant to
join a job that trains."""

OWN_MASTER = MasterSpec(host="127.0.0.1", port=0, is_host=False)
"""The master of nodes on this machine, whose address and token are known once it has been started."""

_FOR_NODES_ELSEWHERE = {
    "standalone": "is for one node that meets nobody",
    "node_rank": "is for a node that is started by hand",
    "master_addr": "is for nodes that are started by hand",
    "master_port": "is for nodes that are started by hand",
}


class LocalNodes(NamedTuple):
    """What `--local-nodes` and its like come to, with the text of `--local-nodes` and where it was written, and
    sentences about what will have no effect."""

    given: Given
    spec: LocalSpec
    warnings: tuple[str, ...]


def find_local_nodes(settings: Settings) -> LocalNodes | None:
    """The nodes that shall start on this machine; None where they start elsewhere, each by a command of its own.

    Raises SpecError for a flag that only has a meaning for such a command.
    """
    restarts = settings.number("node_restarts", 0)
    join_after = flags.seconds(*settings.text("node_join_after"), zero_allowed=True)
    isolated = settings.on("isolate_nodes")
    given = settings.asked("local_nodes")
    if given is None:
        return None
    _refuse_flags(settings, isolated=isolated)
    least, most = flags.node_range(*given)
    if most > MOST:
        raise flags.wrong(*given, "is out of range", f"give at most {MOST}")
    unused = settings.asked("node_join_after") if least == most else None
    late = f"{given.place} {given.text} has no node that joins later"
    return LocalNodes(
        given,
        LocalSpec(least, most, restarts, isolated, join_after),
        (f"{unused.place} has no effect, since {late}.",) if unused else (),
    )


def without_local_nodes(settings: Settings) -> list[str]:
    """Sentences about flags that have no effect on a job whose nodes start elsewhere."""
    given = [settings.asked(name) for name in ("node_restarts", "node_join_after")]
    if settings.on("isolate_nodes"):
        given.insert(1, settings.asked("isolate_nodes"))
    return [f"{one.place} has no effect without --local-nodes." for one in given if one]


def _refuse_flags(settings: Settings, *, isolated: bool) -> None:
    for name, purpose in _FOR_NODES_ELSEWHERE.items():
        given = settings.asked(name)
        if given and (name != "standalone" or settings.on(name)):
            raise SpecError(f"{given.place} {purpose}, and --local-nodes starts its nodes itself: leave one out.")
    if not isolated:
        return
    if address := settings.asked("local_addr"):
        raise SpecError(
            f"{address.place} names one address, and --isolate-nodes gives each node its own: leave one out."
        )
    backend = settings.asked("rdzv_backend")
    if backend and backend.text in MEETING_IN_ETCD:
        raise SpecError(f"{backend.place} {backend.text} is out of reach for nodes of --isolate-nodes: leave one out.")


def fit_rules(
    here: LocalNodes, rules: Rules, conf: RendezvousConf, nodes: Given, *, spares_given: bool
) -> tuple[Rules, Sequence[str]]:
    """The rules of a job of these nodes, and sentences about them.

    `nodes` is what says how many the job has. Raises SpecError when fewer start than it needs to begin.
    """
    least, most = here.spec.least, here.spec.most
    if least < rules.fewest:
        asked = f"{nodes.place} {nodes.text}" + (f" with --node-unit {rules.unit}" if rules.unit > 1 else "")
        problem = f"starts {counted(least, 'node')} at first, and {asked} begins with no fewer than {rules.fewest}"
        raise flags.wrong(*here.given, problem, f"give at least {rules.fewest}")
    if not conf.says("last_call_timeout"):
        rules = replace(rules, last_call_timeout=LAST_CALL_TIMEOUT)
    if not spares_given:
        return replace(rules, spares=max(0, most - rules.most)), ()
    surplus = most - rules.most - rules.spares
    if surplus <= 0:
        return rules, ()
    asked_for = f"--nnodes and --spares ask for {rules.most + rules.spares} of the nodes of {here.given.place}"
    wait = "waits as a spare" if surplus == 1 else "wait as spares"
    return rules, (f"{asked_for}, and {surplus} more {wait} too.",)


def refuse_what_no_node_has(local: LocalSpec, entrypoint: Entrypoint) -> None:
    """Refuse a job that wants what its nodes on this machine cannot have: a network each, or a program typed in."""
    if entrypoint.kind in ("script", "run_path") and entrypoint.target == lookup.STANDARD_INPUT:
        raise SpecError("The script '-' comes from standard input, which no node of --local-nodes has: name a file.")
    if not local.isolated:
        return
    from dlrover_run.local_cluster.network import why_not

    if problem := why_not():
        raise SpecError(f"--isolate-nodes cannot be had here, since {problem}.")
