"""The texts that are shown for gRPC's messages of failed connections to a master and to etcd."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from dlrover_run.rendezvous import kinds
from dlrover_run.store.etcd.errors import error_for_status
from dlrover_run.transport import auth, connection
from dlrover_run.transport.grpc_errors import ConnectionProblem

FIRST = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.1:2379: "


def of_master(details: str, *, encrypted: bool = False) -> str:
    return connection.describe_failure(SimpleNamespace(details=lambda: details), encrypted)


def of_etcd(details: str) -> str:
    return str(error_for_status("UNAVAILABLE", details, kinds.Store((("10.0.0.1", 2379),))))


@pytest.mark.parametrize(
    ("words", "master", "etcd"),
    [
        ("connect: Connection refused (111)", ConnectionProblem.REFUSED.value, ConnectionProblem.REFUSED.value),
        (
            "Failed parsing HTTP/2",
            "another program listens there, which is not a master: give --rdzv-endpoint another port",
            "another program listens there, which is not etcd",
        ),
        (
            "connection attempt timed out before receiving SETTINGS frame",
            "the program that listens there does not answer: another program, or a master that is stopped",
            "the program that listens there does not answer: another program, or a member that is stopped",
        ),
        (
            "Socket closed",
            "it closed the connection, as a master with TLS does to a node without tls_ca",
            "it closed the connection, as etcd with TLS does to a node without protocol=https",
        ),
        (
            "recvmsg: Connection reset by peer",
            "it closed the connection, as a master with TLS does to a node without tls_ca",
            "it closed the connection, as etcd with TLS does to a node without protocol=https",
        ),
        ("odd\n  words", "UNAVAILABLE: ipv4:10.0.0.1:2379: odd words", "UNAVAILABLE: ipv4:10.0.0.1:2379: odd words"),
    ],
)
def test_the_same_message_has_the_same_text_for_a_master_and_for_etcd(words: str, master: str, etcd: str) -> None:
    assert (of_master(FIRST + words), of_etcd(FIRST + words)) == (master, etcd)


@pytest.mark.parametrize(
    ("words", "clause"),
    [
        ("security handshaker failed: CERTIFICATE_VERIFY_FAILED", "its certificate is not signed by tls_ca"),
        ("security handshaker failed: Hostname Verification Check failed", "its certificate is for another name"),
        ("security handshaker failed: WRONG_VERSION_NUMBER", "it does not use TLS"),
        ("security handshaker creation failed", "tls_cert and tls_key do not belong together"),
        ("recvmsg: Connection reset by peer", "as a master does if it does not use TLS, does not trust tls_cert"),
    ],
)
def test_what_a_master_with_tls_does_is_reported(words: str, clause: str) -> None:
    assert clause in of_master(FIRST + words, encrypted=True)


def test_the_files_of_tls_are_read_in_the_order_of_grpc(tmp_path: Path) -> None:
    for name in ("ca", "key", "cert"):
        (tmp_path / name).write_text(name)
    tls = kinds.TlsSpec(ca=f"{tmp_path}/ca", cert=f"{tmp_path}/cert", key=f"{tmp_path}/key")
    assert auth.read_tls_files(tls) == (b"ca", b"key", b"cert")


def test_a_file_of_tls_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(auth.TlsFileError, match=r"a TLS file cannot be read \(No such file.*\): .*/gone"):
        auth.read_tls_files(kinds.TlsSpec(ca=f"{tmp_path}/gone"))
