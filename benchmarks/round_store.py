"""The store of a round beside torch's: many clients exchange their addresses. See `benchmarks/README.md`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from core.cases import Benchmark, Case, Limits
from core.launchers import WORKERS
from core.meetings import start_server
from core.ratios import Measured
from core.run import Run, until_last
from core.series import draw_nothing
from core.trees import Tree

CLIENTS = (64, 128)

OF_SERVER = ", processor time of the server"


@dataclass(frozen=True)
class Store:
    """A server of `benchmarks/workers`."""

    name: str
    script: str
    tree: Tree | None = None

    def command(self) -> list[str]:
        """The command line of its process."""
        script = WORKERS / self.script
        return [self.tree.python, str(self.tree.script(script))] if self.tree else [sys.executable, str(script)]

    def of_tree(self, tree: Tree) -> Store | None:
        """That of another checkout; None if it is torch's."""
        return replace(self, name=f"{self.name}, {tree.name}", tree=tree) if self == OURS else None

    def absent(self) -> str | None:
        """It can always run."""
        return None


TORCH = Store("torch's TCPStore", "torch_store.py")
OURS = Store("the round's store", "our_store.py")


def exchange(clients: int) -> Callable[[Store, Run, Limits], Measured]:
    """All clients connected, to the last that has read the addresses of all."""

    def measure(store: Store, run: Run, limits: Limits) -> Measured:
        # The server does not end by itself.
        run.ends_by_itself = False
        server = start_server(run, store.command())
        host, port = server.address.rsplit(":", 1)
        used = server.cpu_seconds()
        run.start([sys.executable, str(WORKERS / "store_clients.py"), host, port, str(clients)])
        (began,) = run.wait("began", 1, limits.start)
        measured = until_last(began.at_ns, limits.recovery, lambda limit: run.wait("exchanged", clients, limit))
        values = {**(measured.values or {}), OF_SERVER: server.cpu_seconds() - used}
        return Measured(values, measured.note, measured.unended)

    return measure


CASES = tuple(
    Case(
        f"clients-{clients}",
        f"{clients} connected clients to the last that has written an address and read those of all others",
        "s",
        (OURS, TORCH),
        TORCH.name,
        exchange(clients),
    )
    for clients in CLIENTS
)

BENCHMARK = Benchmark(
    "The store of a round beside torch's TCPStore",
    "round_store",
    lambda options: CASES,
    repetitions=7,
    quick_repetitions=1,
    draw=draw_nothing,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
