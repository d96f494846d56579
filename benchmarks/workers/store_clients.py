"""Clients of a store that exchange their addresses: `store_clients.py HOST PORT CLIENTS`.

Each is a process with torch's client, forked once torch is imported. All of them are connected before the clock is
started. Then each writes its address and reads those of all others, as the ranks of a group do that connect to each
other. They are processes and not threads, because threads of one process would wait for its interpreter.
"""

import os
import sys
from datetime import timedelta

from reporting import report
from torch.distributed import TCPStore

TIMEOUT = timedelta(seconds=120)

ADDRESS = b"a" * 200
"""About as long as the address of a rank of gloo."""

host, port, clients = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def exchange(rank: int, connected: int, begin: int) -> None:
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    os.write(connected, b".")
    os.read(begin, 1)
    store.set(f"address-{rank}", ADDRESS)
    for other in range(clients):
        assert store.get(f"address-{other}") == ADDRESS
    report("exchanged", rank=rank, attempt=0)


def main() -> None:
    connected, to_parent = os.pipe()
    begin, to_clients = os.pipe()
    for rank in range(clients):
        if os.fork() == 0:
            os.close(to_clients)
            try:
                exchange(rank, to_parent, begin)
            except BaseException as error:
                print(f"client {rank}: {error}", file=sys.stderr, flush=True)
                report("failed", rank=rank, attempt=0)
            os._exit(0)
    ready = 0
    while ready < clients:
        ready += len(os.read(connected, clients))
    report("began", rank=0, attempt=0)
    # The end of file wakes all of them.
    os.close(to_clients)
    for _ in range(clients):
        os.wait()


main()
