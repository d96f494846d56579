"""Why a launcher ends, and the exit code for it in each scheme of `--exit-codes`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Literal

from dlrover_run import exit_codes


class ExitReason(enum.StrEnum):
    """Why a launcher ends. A script may exit with any number, so the exit code alone does not show it."""

    SUCCESS = "success"
    WORKER_FAILED = "worker failed"
    PEER_FAILED = "peer failed"
    STOPPED = "stopped"
    """A signal ended the launcher, or one of its processes was killed."""
    BAD_COMMAND_LINE = "bad command line"
    INTERNAL_ERROR = "internal error"
    CANNOT_START = "cannot start"
    CANNOT_JOIN = "cannot join"
    FAULTY_NODE = "faulty node"
    STRAGGLER = "straggler"
    TOO_FEW_NODES = "too few nodes"
    CUT_OFF = "cut off"
    STOPPED_ON_REQUEST = "stopped on request"
    """An operator has stopped the job on all nodes."""


ExitScheme = Literal["precise", "torchrun", "kubernetes"]
"""What `--exit-codes` selects: a code for each reason, torchrun's codes, or those by which an operator decides whether
to start a pod again."""

RETRIED = frozenset({130, 137, 138, 143})
"""The exit codes that KubeDL and Kubeflow's `restartPolicy: ExitCode` both retry. KubeDL takes every other code for
permanent, Kubeflow each one below 128."""

RETRY = 138
"""SIGUSR1: reserved there for a program that asks for another attempt."""

PREEMPTED = 143
"""SIGTERM, with which Kubernetes ends a pod."""

_KUBERNETES: Mapping[ExitReason, int] = {
    ExitReason.CANNOT_START: RETRY,
    ExitReason.CANNOT_JOIN: RETRY,
    ExitReason.FAULTY_NODE: RETRY,
    ExitReason.STRAGGLER: RETRY,
    ExitReason.TOO_FEW_NODES: RETRY,
    ExitReason.CUT_OFF: RETRY,
    ExitReason.STOPPED_ON_REQUEST: exit_codes.COMPAT_FAILURE,
}
"""The reasons for which another attempt, often on another machine, may go well; and the stop of the whole job, which an
operator of the cluster must not undo."""


def in_scheme(reason: ExitReason, code: int, scheme: ExitScheme, peer_status: int = 0) -> int:
    """The exit code of a launch that ends for `reason`, whose precise exit code is `code`.

    `peer_status` is the exit status of the worker of another node that ended the job, 0 if it is not known.
    """
    if scheme == "precise" or reason in (ExitReason.SUCCESS, ExitReason.BAD_COMMAND_LINE):
        return code
    if scheme == "torchrun":
        return exit_codes.COMPAT_FAILURE
    if reason is ExitReason.STOPPED:
        return code if code in RETRIED else PREEMPTED
    # All nodes of a job are started again, or none.
    if reason is ExitReason.PEER_FAILED and peer_status in RETRIED:
        return peer_status
    # A worker's own code stays: the operator would have seen it without a launcher too.
    return _KUBERNETES.get(reason, code)


_WITHOUT_RESULT: Mapping[int, ExitReason] = {
    exit_codes.SUCCESS: ExitReason.SUCCESS,
    exit_codes.BAD_COMMAND_LINE: ExitReason.BAD_COMMAND_LINE,
    exit_codes.CANNOT_START: ExitReason.CANNOT_START,
}


def reason_without_result(code: int) -> ExitReason:
    """The reason for the precise exit code of a launcher that has left no result, so that no script ended with it."""
    if code > exit_codes.of_signal(0):
        return ExitReason.STOPPED
    return _WITHOUT_RESULT.get(code, ExitReason.INTERNAL_ERROR)
