"""Separate networks for nodes on one machine: nodes reach each other, links can be cut, and all is removed with its
owner.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from support.harness import WAIT

from dlrover_run.features.local_nodes import network as networks
from dlrover_run.features.local_nodes.network import (
    ADDRESS_REQUESTS,
    Namespace,
    Network,
    NetworkError,
    node_address,
    why_not,
)

RTM_DELLINK = 17
RTMGRP_LINK = 1

IN_NAMESPACE = "import os; print(os.readlink('/proc/self/ns/net'))"

HOLDER = """\
import socket, sys
sys.path[:0] = sys.argv[2:]
from test_local_network import watching_devices
from dlrover_run.features.local_nodes.network import Network

network = Network()
watch = watching_devices(network.connect(0))
control = socket.socket(fileno=int(sys.argv[1]))
socket.send_fds(control, [b"held"], [watch.fileno()])
control.recv(1)
"""


def listening(namespace: Namespace, address: str) -> socket.socket:
    with namespace.entered():
        return socket.create_server((address, 0))


def datagrams(namespace: Namespace, address: str) -> socket.socket:
    """A socket to send and receive datagrams in that namespace."""
    with namespace.entered():
        there = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    there.settimeout(WAIT)
    there.bind((address, 0))
    return there


def connection(namespace: Namespace, server: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection from that namespace to a server."""
    with namespace.entered():
        near = socket.create_connection(server.getsockname(), WAIT)
    far, _ = server.accept()
    far.settimeout(WAIT)
    return near, far


def watching_devices(namespace: Namespace) -> socket.socket:
    """A socket that receives the removals of devices in that namespace, and belongs to it as a socket of a process
    would.
    """
    with namespace.entered():
        watch = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    watch.bind((0, RTMGRP_LINK))
    watch.settimeout(WAIT)
    return watch


def until_gone(watch: socket.socket, device: str) -> None:
    """Wait until that device has been removed."""
    while True:
        message = watch.recv(65_536)
        (kind,) = struct.unpack_from("=H", message, 4)
        if kind == RTM_DELLINK and f"{device}\0".encode() in message:
            return


def test_nodes_reach_each_other_and_the_master(network: Network) -> None:
    nodes = [network.connect(number) for number in (0, 4321)]
    for namespace, address in ((nodes[1], node_address(4321)), (network.switch, network.master_address)):
        with listening(namespace, address) as server:
            near, far = connection(nodes[0], server)
            with near, far:
                assert far.getpeername()[0] == node_address(0)
                near.sendall(b"word")
                assert far.recv(4) == b"word"


def test_a_node_has_its_own_loopback(network: Network) -> None:
    one, other = network.connect(0), network.connect(1)
    with listening(one, "127.0.0.1") as server:
        near, far = connection(one, server)
        near.close()
        far.close()
        with other.entered(), pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.getsockname(), WAIT)


def test_datagrams_between_cut_nodes_are_lost_without_an_error(network: Network) -> None:
    sockets = [datagrams(network.connect(number), node_address(number)) for number in range(3)]
    network.cut(0, 1)
    for near, far in ((0, 1), (1, 0)):
        sockets[near].sendto(b"lost", sockets[far].getsockname())
        # The datagram on the path that is not cut shows that none arrived on the cut one.
        sockets[2].sendto(b"heard", sockets[far].getsockname())
        assert sockets[far].recv(16) == b"heard"
    for there in sockets:
        there.close()


def test_a_link_that_is_restored_has_its_address_and_its_connections(network: Network) -> None:
    node, other = network.connect(0), network.connect(1)
    with listening(other, node_address(1)) as server:
        near, far = connection(node, server)
        with near, far:
            node.ip("link set eth0 down")
            with node.entered(), pytest.raises(OSError, match="unreachable"):
                socket.create_connection(server.getsockname(), WAIT)
            near.sendall(b"held up")
            node.ip("link set eth0 up")
            assert far.recv(16) == b"held up"
        for end in connection(node, server):
            assert node_address(0) in (end.getsockname()[0], end.getpeername()[0])
            end.close()


def test_the_master_keeps_its_hardware_address_when_a_node_leaves(network: Network) -> None:
    """Otherwise nodes with that address in their ARP cache could not reach it for seconds."""

    def of_the_switch() -> str:
        with network.switch.entered():
            words = subprocess.check_output(["ip", "-oneline", "link", "show", "switch"], text=True).split()
        return words[words.index("link/ether") + 1]

    before = of_the_switch()
    network.connect(0)
    network.connect(1)
    assert of_the_switch() == before
    watch = watching_devices(network.switch)
    network.disconnect(0)
    until_gone(watch, "node-0")
    watch.close()
    assert of_the_switch() == before


def test_a_closed_network_leaves_nothing(network: Network) -> None:
    there = Network()
    with watching_devices(there.connect(0)) as watch:
        there.close()
        until_gone(watch, "eth0")


@pytest.mark.usefixtures("network")
def test_an_owner_that_is_killed_leaves_nothing() -> None:
    ours, its = socket.socketpair()
    ours.settimeout(WAIT)
    command = [sys.executable, "-c", HOLDER, str(its.fileno()), *map(str, Path(__file__).parents[:2])]
    holder = subprocess.Popen(command, pass_fds=[its.fileno()])
    its.close()
    try:
        _, (fd,), _, _ = socket.recv_fds(ours, 16, 1)
    finally:
        holder.kill()
        holder.wait()
    ours.close()
    with socket.socket(fileno=fd) as watch:
        watch.settimeout(WAIT)
        until_gone(watch, "eth0")


def test_a_process_of_a_node_is_in_its_namespace_and_keeps_no_other_open(network: Network) -> None:
    node = network.connect(0)
    with node.entered():
        namespace = subprocess.check_output([sys.executable, "-c", IN_NAMESPACE], text=True).strip()
        held = subprocess.check_output(["ls", "-l", "/proc/self/fd"], close_fds=False, text=True)
    assert namespace == f"net:[{os.fstat(node.fd).st_ino}]"
    assert "net:[" not in held


def test_this_process_stays_in_its_namespace_and_has_no_more_threads(network: Network) -> None:
    def here() -> tuple[str, list[str]]:
        return os.readlink("/proc/thread-self/ns/net"), os.listdir("/proc/self/task")

    before = here()
    node = network.connect(0)
    assert here() == before
    with contextlib.suppress(LookupError), node.entered():
        assert here() != before
        raise LookupError
    assert here() == before


def test_a_busy_machine_has_time_to_find_the_hardware_address_of_a_node(network: Network) -> None:
    """With the kernel's 3 requests, a connection over a new cable failed with "No route to host"."""
    for namespace, device in ((network.connect(0), "eth0"), (network.switch, "switch")):
        with namespace.entered():
            shown = subprocess.run(
                ["ip", "ntable", "show", "name", "arp_cache", "dev", device], capture_output=True, text=True, check=True
            )
        (probes,) = re.findall(r"mcast_probes (\d+)", shown.stdout)
        assert int(probes) == ADDRESS_REQUESTS


def test_a_node_cannot_be_connected_twice(network: Network) -> None:
    network.connect(0)
    with pytest.raises(NetworkError, match=r"^`ip link add eth0 .*node-0.*` failed: .*File exists$"):
        network.connect(0)
    with listening(network.switch, network.master_address) as server:
        for end in connection(network.connect(1), server):
            end.close()


def test_every_node_has_its_own_address() -> None:
    everyone = [node_address(number) for number in range(networks.MAX_NODES)]
    assert everyone[7] == "10.77.1.107"
    assert everyone[250] == "10.77.3.150"
    assert len({*everyone, networks.MASTER_ADDRESS}) == networks.MAX_NODES + 1
    assert {address.rsplit(".", 1)[1] for address in everyone}.isdisjoint({"0", "255"})
    with pytest.raises(NetworkError, match="there is no address for node 25400"):
        node_address(networks.MAX_NODES)


@pytest.mark.usefixtures("network")
def test_without_the_program_ip_nodes_cannot_be_isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not() == "the program ip is missing: install iproute2"


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("echo 'no idea what -batch is' >&2; exit 1", "`ip -batch` failed: no idea what -batch is"),
        ("exit 3", "`ip -batch` failed: exit code 3"),
        ("exec sleep 90", "the program ip did not end within 0.1 s"),
    ],
    ids=["it knows no batch", "it says nothing", "it hangs"],
)
def test_an_error_of_ip_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, why: str) -> None:
    (tmp_path / "ip").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "ip").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(networks, "IP_TIMEOUT", 0.1 if "within" in why else WAIT)
    assert why_not() == why


def test_only_root_can_isolate_nodes() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            if os.geteuid() == 0:
                os.setuid(65_534)
            os.write(writing, (why_not() or "they can").encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as words:
        assert words.read() == "this needs root"
    os.waitpid(child, 0)
