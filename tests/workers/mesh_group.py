"""A process group without torch that can be formed in place: sockets of this machine, all to the first rank."""

import contextlib
import json
import os
import socket
import struct
import time

from dlrover_run.training.reconfigurable_group import ReconfigurableGroup
from dlrover_run.workers.tcp_store import parser


class MeshGroup(ReconfigurableGroup):
    able = os.environ.get("TEST_TORCH", "2.15.0") >= "2.14"
    version = os.environ.get("TEST_TORCH", "2.15.0")

    def __init__(self):
        super().__init__("mesh")
        self._listener = None
        self._peers = []
        self.rank = 0

    def open_as_in_any_script(self):
        self.rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        with self._wait_for("127.0.0.1", int(os.environ["MASTER_PORT"])) as store:
            # As torch's client.
            store.sendall(struct.pack("<BI", parser.VALIDATE, parser.MAGIC))
            key = struct.pack("<Q", 4) + b"mesh"
            if self.rank == 0:
                listener = socket.create_server(("127.0.0.1", 0))
                store.sendall(bytes([parser.SET]) + key + struct.pack("<QQ", 8, listener.getsockname()[1]))
                self._meet(listener, world, "plain")
            else:
                store.sendall(struct.pack("<BQ", parser.WAIT, 1) + key)
                if not store.recv(1):
                    raise RuntimeError("the store has ended")
                store.sendall(bytes([parser.GET]) + key)
                _, port = struct.unpack("<QQ", store.recv(16, socket.MSG_WAITALL))
                self._join(port, "plain")
        self.of_all("all are here")

    def handle(self, address, port, rank, world_size):
        # As torch, which reads and writes there.
        self._wait_for(address, port).close()
        self._close()
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        return f"mesh:{os.getpid()}:{self._listener.getsockname()[1]}"

    def form(self, uuid, handles, timeout):
        own = f"mesh:{os.getpid()}:{self._listener.getsockname()[1]}"
        self.rank = list(handles).index(own)
        try:
            if self.rank == 0:
                self._listener.settimeout(timeout)
                self._meet(self._listener, len(handles), uuid)
            else:
                self._join(int(handles[0].rpartition(":")[2]), uuid, timeout)
        except OSError as error:
            self._close()
            raise RuntimeError(f"Wait timeout ({error})") from None

    def abort(self):
        for peer in list(self._peers):
            # Not of one that has died.
            with contextlib.suppress(OSError):
                peer[0].shutdown(socket.SHUT_RDWR)

    def of_all(self, value):
        try:
            if self.rank:
                self._send(self._peers[0], value)
                return self._receive(self._peers[0])
            values = [value, *(self._receive(peer) for peer in self._peers)]
            for peer in self._peers:
                self._send(peer, values)
            return values
        except OSError as error:
            self._close()
            raise RuntimeError(f"Connection closed by peer ({error})") from None

    def of_rank(self, value, source):
        return self.of_all(value)[source]

    def _meet(self, listener, world, name):
        places = {}
        while len(places) < world - 1:
            accepted, _ = listener.accept()
            accepted.settimeout(None)
            peer = (accepted, accepted.makefile("rb"))
            theirs, rank = self._receive(peer)
            if theirs == name:
                places[rank] = peer
        self._peers = [places[rank] for rank in sorted(places)]

    def _join(self, port, name, timeout=60.0):
        connected = self._wait_for("127.0.0.1", port, timeout)
        self._peers = [(connected, connected.makefile("rb"))]
        self._send(self._peers[0], (name, self.rank))

    @staticmethod
    def _wait_for(address, port, timeout=60.0):
        deadline = time.monotonic() + timeout
        while True:
            try:
                connected = socket.create_connection((address, port), timeout)
                connected.settimeout(None)
                return connected
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    @staticmethod
    def _send(peer, value):
        peer[0].sendall(json.dumps(value).encode() + b"\n")

    @staticmethod
    def _receive(peer):
        line = peer[1].readline()
        if not line:
            raise ConnectionResetError("the end of the connection")
        return json.loads(line)

    def _close(self):
        for peer in self._peers:
            peer[1].close()
            peer[0].close()
        self._peers = []
        if self._listener is not None:
            self._listener.close()
            self._listener = None
