"""Reports each signal that it gets, and exits with code 0 on it without the argument `stay`."""

import os
import signal
import sys

from post import post, wait_for_signals


def take(number, frame):
    post(signal=signal.Signals(number).name)
    if "stay" not in sys.argv:
        os._exit(0)


for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), take)
post(signal=None)
wait_for_signals()
