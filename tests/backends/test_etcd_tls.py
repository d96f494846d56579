"""The etcd client with real servers that use TLS, and wrong TLS options of the user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_conversation import (
    files,
    hold,
    known,
    read,
    talk,
)
from support.etcd_server import Etcd, Tls, serving

from dlrover_run.rendezvous import kinds
from dlrover_run.store.operations import StoreMisconfigured


@pytest.fixture(scope="module")
def etcd_tls(tmp_path_factory: pytest.TempPathFactory, etcd_certificates: Path) -> Iterator[Etcd]:
    """A server that requires client certificates."""
    with serving(tmp_path_factory.mktemp("etcd-tls"), tls=Tls(etcd_certificates)) as server:
        yield server


def test_a_node_with_a_certificate_of_the_right_authority_can_connect(tmp_path: Path, etcd_certificates: Path) -> None:
    with serving(tmp_path / "e", tls=Tls(etcd_certificates)) as server:
        server.demand_users()
        talk(known(server, tls=files(etcd_certificates)), hold)


def test_a_server_may_require_no_certificates(tmp_path: Path, etcd_certificates: Path) -> None:
    with serving(tmp_path / "e", tls=Tls(etcd_certificates, authority=None)) as server:
        talk(kinds.Store(server.places, tls=files(etcd_certificates, name=None)), hold)
        with pytest.raises(StoreMisconfigured, match="it uses TLS, and this node does not: protocol=https is missing"):
            talk(kinds.Store(server.places), read)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": None}, "demands a certificate of this node: cert is missing"),
        ({"name": "stranger"}, "demands a certificate of this node: cert is missing, or not accepted"),
        ({"ca": "other-ca"}, "is not signed by cacert"),
        ({"ca": None}, "is not signed by cacert"),
        ({"key": "server"}, "client.pem, and key, .*server.key, do not belong together"),
        ({"ca": "nowhere"}, r"cacert, .*nowhere.pem, cannot be used \(No such file or directory\)"),
        ({"ca": "empty"}, "cacert, .*empty.pem, cannot be used"),
        ({"name": "nowhere"}, r"nowhere.pem, or key, .*, cannot be used \(No such file or directory\)"),
        ({"name": "empty"}, "empty.pem, or key, .*empty.key, cannot be used"),
        ({"name": "client", "key": "locked"}, "a key without a password"),
    ],
)
def test_each_wrong_tls_file_is_reported_in_one_sentence(
    etcd_tls: Etcd, etcd_certificates: Path, given: dict[str, str | None], words: str
) -> None:
    with pytest.raises(StoreMisconfigured, match=words) as caught:
        talk(kinds.Store(etcd_tls.places, tls=files(etcd_certificates, **given)), read)
    assert "\n" not in str(caught.value)


def test_a_certificate_for_another_name_is_reported_in_one_sentence(tmp_path: Path, etcd_certificates: Path) -> None:
    with (
        serving(tmp_path / "e", tls=Tls(etcd_certificates, "elsewhere", None)) as server,
        pytest.raises(StoreMisconfigured, match="is for another name than the endpoint"),
    ):
        talk(kinds.Store(server.places, tls=files(etcd_certificates)), read)


def test_a_node_without_tls_reports_that_the_server_uses_it(etcd_tls: Etcd) -> None:
    with pytest.raises(StoreMisconfigured, match="it uses TLS, and this node does not: protocol=https is missing"):
        talk(kinds.Store(etcd_tls.places), read)


def test_a_node_with_tls_reports_that_the_server_does_not_use_it(shared_etcd: Etcd, etcd_certificates: Path) -> None:
    with pytest.raises(StoreMisconfigured, match="it does not use TLS, and this node does"):
        talk(kinds.Store(shared_etcd.places, tls=files(etcd_certificates)), read)


@pytest.mark.parametrize("order", [1, -1])
def test_a_wrong_endpoint_has_no_effect_while_another_one_works(shared_etcd: Etcd, etcd_tls: Etcd, order: int) -> None:
    talk(kinds.Store((*shared_etcd.places, *etcd_tls.places)[::order]), hold)
