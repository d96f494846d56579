"""A held port is reserved for the worker that will bind it."""

from __future__ import annotations

import errno
import socket

import pytest

from dlrover_run.processes.ports import HeldPort


@pytest.mark.torchrun
def test_a_store_can_be_hosted_on_a_held_port() -> None:
    from datetime import timedelta

    from torch.distributed import TCPStore

    port = HeldPort()
    for use_libuv in (True, False):
        store = TCPStore("127.0.0.1", port.number, 1, True, timedelta(seconds=20), use_libuv=use_libuv)
        store.set("key", "value")
        assert store.get("key") == b"value"
        del store
    port.release()


def test_a_request_for_a_free_port_never_returns_a_held_one() -> None:
    port = HeldPort()
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as other, pytest.raises(OSError, match="in use") as refused:
            other.bind((address, port.number))
        assert refused.value.errno == errno.EADDRINUSE
    port.release()


def test_an_early_connection_is_refused_so_that_the_client_retries() -> None:
    port = HeldPort()
    with socket.socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect(("127.0.0.1", port.number))
    port.release()


def test_a_port_with_a_listener_cannot_be_held() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(OSError, match="in use"):
            HeldPort(listener.getsockname()[1])


def test_a_released_port_can_be_held_again() -> None:
    port = HeldPort()
    port.release()
    port.release()
    HeldPort(port.number).release()
