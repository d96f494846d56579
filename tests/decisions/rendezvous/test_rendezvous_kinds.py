"""The four kinds of rendezvous: what follows from each, and that no text shows a secret."""

from __future__ import annotations

import pytest

from dlrover_run.launch_request import decode, encode
from dlrover_run.rendezvous import backends, kinds
from dlrover_run.spec import Entrypoint, JobSpec

ALL = (
    kinds.Alone(),
    kinds.Static(("node0", 29500)),
    kinds.Master("::1", 29400, token="hush", tls=kinds.TlsSpec(ca="/ca.pem")),
    kinds.Store((("a", 2379), ("b", 1)), user="me", password="hush"),
)


def job(kind: kinds.Rendezvous) -> JobSpec:
    return JobSpec(Entrypoint("script", "train.py"), "job", rendezvous=kind)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.backend)
def test_a_kind_has_a_row_and_reaches_a_launcher_process_unchanged(kind: kinds.Rendezvous) -> None:
    assert isinstance(kind, backends.of(kind).kind)
    assert decode(encode(job(kind)), JobSpec).rendezvous == kind


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.backend)
def test_no_text_of_a_job_shows_a_secret(kind: kinds.Rendezvous) -> None:
    for text in (repr(kind), str(kind), repr(job(kind)), f"{job(kind)}"):
        assert "hush" not in text


def test_one_property_follows_from_each_kind() -> None:
    found = [(kind.alone, kind.ranked, kind.hosted, kind.leased, kind.coordinated) for kind in ALL]
    assert found == [
        (True, False, False, False, False),
        (False, True, False, False, False),
        (False, False, True, False, True),
        (False, False, False, True, True),
    ]
    assert [kind.endpoint for kind in ALL] == ["", "", "[::1]:29400", ""]
    assert [kind.secret for kind in ALL] == ["", "", "hush", ""]
