"""Runs the folder as a program, whose modules are imported under a private name: processes requests until their end."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

PACKAGE = "_dlrover_node_check"

EXIT_INVALID_REQUEST = 2
"""The exit code after an invalid request."""

_IGNORED_SIGNALS = (
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGXCPU,
    signal.SIGIO,
    signal.SIGPWR,
    signal.SIGSTKFLT,
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)
# The launcher's list, without those that end the check; this folder runs alone and cannot import it.


def run() -> None:
    global __package__
    if not __package__:
        # Here the folder is the first entry of sys.path, where its modules would shadow a library's of the same name.
        folder = os.path.dirname(os.path.abspath(__file__))
        sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != folder]
        package = type(sys)(PACKAGE)
        package.__path__ = [folder]
        sys.modules[PACKAGE] = package
        __package__ = PACKAGE
    for number in _IGNORED_SIGNALS:
        # A scheduler that signals every process of a job step does not address the check.
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        # The default action ends the process at once. A handler in Python would run after the end of a collective.
        signal.signal(number, signal.SIG_DFL)
    code = _serve()
    # The interpreter's own exit waits for threads that libraries may have left hanging in a link that failed.
    os._exit(code)


def _serve() -> int:
    """Process all requests and return the exit code."""
    from . import protocol

    replies = protocol.Replies()
    tasks: Any = None
    problem = ""
    try:
        from .tasks import Tasks

        tasks = Tasks(replies)
    except Exception as error:
        problem = f"torch cannot be imported: {protocol.first_line(error)}"
    with open(0, "rb", closefd=False) as requests:
        while line := requests.readline(protocol.MAX_REQUEST):
            try:
                request = protocol.read_request(line)
            except protocol.InvalidRequest as error:
                sys.stderr.write(f"the node check received an invalid request: {error}: {line[:200]!r}\n")
                return EXIT_INVALID_REQUEST
            replies.expect()
            try:
                if tasks is None:
                    replies.send(protocol.failed(request, problem))
                else:
                    tasks.run(request)
            except BrokenPipeError:
                # The agent has ended, so there are no more requests either.
                return 0
    return 0


run()
