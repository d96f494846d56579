"""Faults of etcd, and of the elected agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.faults import Fault, Faults
from simulation.nodes import Node

if TYPE_CHECKING:
    from simulation.etcd_scenario import EtcdScenario


class EtcdFaults(Faults):
    """The same faults of nodes and of the network as with a master, and those of etcd. In a gentle run etcd does not
    change its leader, because that prolongs the leases of nodes that have ended."""

    def __init__(self, scenario: EtcdScenario) -> None:
        self._etcd = scenario.cluster
        self._etcd_scenario = scenario
        super().__init__(scenario)

    def _gentle(self) -> list[Fault]:
        return [self._kill_node, self._ask_to_go, self._join, self._break_stream, self._compact]

    def _place(self) -> list[Fault]:
        faults = [
            self._go_away, self._lag, self._compact, self._etcd.change_leader, self.lose_coordinator, self._stop_leader,
            self._light_fuse, self._light_fuse, self._deny, self._return,
        ]  # fmt: skip
        return faults if self._etcd_scenario.durable else [*faults, self._lose_everything, self._lose_everything]

    def _leader(self) -> Node | None:
        leader = self._etcd_scenario.leader
        return leader if leader is not None and leader.alive and not leader.left else None

    def _go_away(self) -> None:
        if self._etcd.away:
            return
        self._etcd.note("is away")
        self._etcd.away = True
        if self._random.random() < 0.5:
            self._break_all_streams()
        self._later(self._random.choice((1.0, 10.0, 40.0)), self._etcd.come_back)

    def _lag(self) -> None:
        weather = self._scenario.place.weather
        # A job that waits 20 s for its nodes cannot be notified of them that late.
        most = self._scenario.rules.pend_timeout / 4
        before, weather.lag = weather.lag, min(most, self._random.choice((1.0, 5.0, 20.0)))
        self._etcd.note(f"tells of changes up to {weather.lag:g} s late")

        def catch_up() -> None:
            weather.lag = before

        self._later(20.0, catch_up)

    def _compact(self) -> None:
        self._etcd.compact()
        if self._random.random() < 0.5:
            self._break_all_streams()

    def _lose_everything(self) -> None:
        self._etcd.lose_everything()
        self._break_all_streams()

    def _deny(self) -> None:
        """An administrator revokes the rights of a node, and grants them again."""
        if (node := self._node()) is None:
            return
        node.note("is denied by etcd")
        client = self._etcd_scenario.clients[node]
        client.denied = True

        def allow() -> None:
            client.denied = False

        self._later(self._random.choice((1.0, 10.0, 30.0)), allow)

    def lose_coordinator(self) -> None:
        if (leader := self._leader()) is not None:
            leader.kill(silent=True)

    def _stop_leader(self) -> None:
        if (leader := self._leader()) is not None:
            leader.stop()
            self._later(self._random.choice((1.0, 10.0, 30.0)), leader.resume)

    def _light_fuse(self) -> None:
        """The elected agent is killed, or stopped for a while, in the middle of a step."""
        if (leader := self._leader()) is None:
            return
        leader.fuse = self._random.randint(0, 12)
        if self._random.random() < 0.5:
            leader.on_fuse = leader.kill
            return

        def stop() -> None:
            leader.stop()
            self._later(self._random.choice((1.0, 10.0, 30.0)), leader.resume)

        leader.on_fuse = stop
