"""What a cluster's environment variables say about the job of a launcher, each value with the variable that has it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from dlrover_run.spec import FlagValue, SpecError

FIRST_PORT, PORTS = 15000, 17000
"""The range of the ports that are derived from the id of a job. It ends below the ephemeral ports of Linux (32768), of
which other programs hold some at any time."""

BY_FLAGS = "give --cluster=none with --rdzv-endpoint and the other flags of the rendezvous"
"""The remedy that always works."""

_MAX_DIGITS = 18
"""Digits of the longest number: the ids of Slurm's federated jobs have 10."""


class Context(NamedTuple):
    """What is known of a launcher: its variables, `environ`, and its machine.

    `read` returns the text of a file, None if there is none. `interactive` means that a person types at a terminal: the
    launcher is then started by that person and not by the cluster. `is_own_address` is whether a host is an IP address
    of this machine. `command` is the command line for messages. `named` means that `--cluster` names the cluster, which
    counts in a shell too. `hosts` are those of --hostfile.
    """

    hostname: str
    read: Callable[[str], str | None]
    interactive: bool = False
    command: str = "dlrover-run ..."
    is_own_address: Callable[[str], bool] = lambda host: False
    named: bool = False
    hosts: tuple[FlagValue, ...] = ()
    environ: Mapping[str, str] = MappingProxyType({})

    def given(self, *names: str) -> FlagValue | None:
        """The first of these variables that is not empty. Characters that would spoil a message are replaced."""
        for name in names:
            if text := self.environ.get(name, "").strip():
                return FlagValue(name, text if text.isprintable() else re.sub(r"[^ -~]", "?", text))
        return None

    def number(self, *names: str, lowest: int = 0) -> FlagValue | None:
        """The same for a variable that must hold an integer of at least `lowest`. Raises Contradiction."""
        value = self.given(*names)
        if value is not None:
            read_number(value, lowest)
        return value

    def positive(self, *names: str) -> FlagValue | None:
        """The same for a variable that holds 0 where there is nothing to say: None for it. Raises Contradiction."""
        value = self.number(*names)
        return value if value and int(value.text) else None

    def visible_gpus(self, *counts: str) -> FlagValue | None:
        """The number of GPUs that the cluster has given to this launcher: those that it may see, else a count."""
        for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
            devices = [each for each in self.environ.get(name, "").split(",") if each.strip()]
            if devices and devices[0].strip() not in ("all", "void", "none", "-1", "NoDevFiles"):
                return FlagValue(name, str(len(devices)))
        return self.positive(*counts)


@dataclass(frozen=True)
class Detected:
    """A launcher that the cluster has started, one on each node of a job.

    `title` names the job in messages. `nodes` is None if the cluster does not say how many there are, `node_rank` if it
    does not say which of them this node is. `host` is the first node, on which the job's nodes meet at `port`, and
    `first` whether this node is it; None if it is not known. `workers` is the number of accelerators of this node.
    `hosts` are the nodes in the order of their ranks, empty if not known. `least` is the lowest possible number of
    nodes where `nodes` is None. `no_host` is the remedy for a missing `host`.
    """

    cluster: str
    title: str
    nodes: FlagValue | None
    node_rank: FlagValue | None = None
    host: FlagValue | None = None
    port: int = 0
    run_id: FlagValue | None = None
    workers: FlagValue | None = None
    first: bool | None = None
    hosts: tuple[str, ...] = ()
    least: int = 1
    no_host: str = "give --rdzv-endpoint=HOST:PORT, where HOST is one of the nodes"

    @property
    def size(self) -> int | None:
        """The number of nodes, None if not known."""
        return int(self.nodes.text) if self.nodes else None


@dataclass(frozen=True)
class Unstarted:
    """An allocation of several nodes in which the cluster started no launcher on each node, as in a batch script.

    Its values are not used. A job whose size is not given is refused with `problem` and `remedy`; with `hint_only`, for
    an interactive shell, they are only printed.
    """

    problem: str
    remedy: str
    hint_only: bool = False


Detection = Detected | Unstarted | None


class Contradiction(SpecError):
    """Variables that contradict each other, or that show a job which cannot work.

    `launchers` is the number of launchers of a job with several of them on a node, 0 otherwise.
    """

    def __init__(self, problem: str, remedy: str, launchers: int = 0) -> None:
        super().__init__(f"{problem}: {remedy}.")
        self.launchers = launchers


def read_number(value: FlagValue, lowest: int = 0) -> int:
    """The integer that a variable holds. Raises Contradiction."""
    if not is_count(value.text) or int(value.text) < lowest:
        raise Contradiction(
            f"{value.source} {value.text[:100]!r} is not an integer of {lowest} or more",
            f"unset {value.source}, or give --cluster=none",
        )
    return int(value.text)


def is_count(text: str) -> bool:
    """Whether a text is an integer of 0 or more, of a length that Python converts."""
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


def port_of(job: str) -> int:
    """The port on which the nodes of a job meet: the same on every node, and most often another for another job."""
    return FIRST_PORT + zlib.crc32(job.encode(errors="replace")) % PORTS


def several_launchers(problem: str, launchers: int, launch: str, context: Context) -> Contradiction:
    """The error for several launchers on a node of one job, with the command that starts one."""
    why = "one launcher starts all processes of a node"
    remedy = f"{why}, so start it with `{launch} {context.command}`, or give --cluster=none for separate jobs"
    return Contradiction(problem, remedy, launchers)
