"""Worker side of the tests' mailbox."""

import json
import os
import socket
import time


def post(**message):
    """Send one message to the test, with the identity of the sender."""
    message.setdefault("rank", int(os.environ.get("RANK", -1)))
    message.setdefault("restart", int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))
    message.setdefault("pid", os.getpid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mail:
        mail.sendto(json.dumps(message).encode(), "\0" + os.environ["TEST_MAILBOX"])


def wait_for_signals():
    """Wait until the handler of a signal ends this process.

    `signal.pause` would miss a signal that arrives between Python's last check for one and the system call.
    """
    while True:
        time.sleep(0.1)
