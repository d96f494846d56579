"""Where the master of a job is, and with what this node proves to it that it belongs to the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dlrover_run.command_line import credentials, lookup
from dlrover_run.command_line.local_nodes import OWN_MASTER
from dlrover_run.command_line.meeting import Meeting
from dlrover_run.command_line.rendezvous_conf import RendezvousConf
from dlrover_run.coordination.rules import Rules
from dlrover_run.spec import MasterSpec


def find_master(place: Meeting, conf: RendezvousConf, environ: Mapping[str, str]) -> MasterSpec | None:
    """The master; None for a job that meets at none. Raises SpecError when a file of its settings cannot be used."""
    if place.own_master:
        return OWN_MASTER
    endpoint = place.endpoint
    if endpoint is None:
        return None
    token = credentials.find_token(conf, environ)
    tls = credentials.find_tls(conf)
    credentials.require(conf, token, tls)
    if conf.state_dir is not None:
        lookup.find_directory(*conf.state_dir)
    return MasterSpec(
        host=endpoint.host,
        port=endpoint.port,
        is_host=False if conf.is_host is None and endpoint.elsewhere else conf.is_host,
        bind=conf.bind,
        state_dir=lookup.absolute(conf.state_dir.text) if conf.state_dir else None,
        token=token,
        auth_required=conf.auth == "required",
        tls=tls,
    )


def fit_to_place(rules: Rules, place: Meeting, conf: RendezvousConf) -> Rules:
    """The rules with the patience for a node that is not heard of which the place where they meet calls for."""
    if not place.has_place:
        # Nothing is heard of other nodes, so there is none whose loss could explain a failure.
        return replace(rules, lost_after=0.0)
    if place.backend == "etcd" and not conf.says("lost_after"):
        # The lease has bridged what a broken connection needs a moment for.
        return replace(rules, lost_after=0.0)
    return rules
