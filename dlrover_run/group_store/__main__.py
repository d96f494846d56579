"""Runs the store at the port that is given, until it is killed.

The store is a process, because the launcher has no torch, and because it has to outlive every worker.
"""

from __future__ import annotations

import os
import sys
import threading

LISTENS = "the store listens"
"""What the process writes once it has begun to listen."""


def run(port: int) -> None:
    # Here the folder is the first entry of sys.path, which is for modules of the user's libraries only.
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != folder]
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not marked so.

    # It listens at all addresses. The name is the one for its own client.
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    print(LISTENS, flush=True)
    threading.Event().wait()
    del store


if __name__ == "__main__":
    run(int(sys.argv[1]))
