"""The loop of a check process: read an order, do it, answer it, until the orders end."""

from __future__ import annotations

import os
import signal
import sys

from .answers import Answers, failed, first_line
from .orders import LONGEST, Order, OrderError, read_order

EXIT_NO_ORDER = 2
"""The exit code after a line that is no order."""

_OF_THE_STEP = (
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
# The launcher's own list, without those that end the check; this folder runs alone and cannot import it.


def serve() -> None:
    """Take orders from standard input until its end, and end the process."""
    for number in _OF_THE_STEP:
        # A scheduler that signals every process of a job step does not mean the check.
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        # The default ends the process wherever it is. A handler in Python would wait for a collective to end.
        signal.signal(number, signal.SIG_DFL)
    answers = Answers.take_stdout()
    code = _follow(answers)
    # The interpreter's own end waits for threads that libraries may have left hanging in a link that failed.
    os._exit(code)


def _follow(answers: Answers) -> int:
    """Do all orders; the exit code."""
    try:
        from .tasks import Tasks
    except Exception as error:
        return _refuse(answers, f"torch cannot be imported: {first_line(error)}")
    tasks = Tasks(answers)
    with open(0, "rb", closefd=False) as orders:
        while line := orders.readline(LONGEST):
            order = _read(line)
            if order is None:
                return EXIT_NO_ORDER
            answers.expect()
            try:
                tasks.do(order)
            except BrokenPipeError:
                # Nobody reads answers any more, so nobody gives orders either.
                return 0
    return 0


def _refuse(answers: Answers, problem: str) -> int:
    """Answer all orders with the same problem."""
    with open(0, "rb", closefd=False) as orders:
        while line := orders.readline(LONGEST):
            order = _read(line)
            if order is None:
                return EXIT_NO_ORDER
            answers.expect()
            answers.give(failed(order, problem))
    return 0


def _read(line: bytes) -> Order | None:
    try:
        return read_order(line)
    except OrderError as error:
        sys.stderr.write(f"the node check was given a line that is no order: {error}: {line[:200]!r}\n")
        return None
