"""The messages of etcd's v3 API from the package etcd3, with each supported release of it and of protobuf."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import WAIT

from dlrover_run.rendezvous import kinds
from dlrover_run.spec import Entrypoint, JobSpec
from dlrover_run.store.etcd import codec
from dlrover_run.store.etcd.codec import PackageMissing
from dlrover_run.torchrun.node_thread import NodeThread

METHODS = [
    "KV.Txn",
    "Lease.LeaseGrant",
    "Lease.LeaseRevoke",
    "Lease.LeaseKeepAlive",
    "Watch.Watch",
    "Auth.Authenticate",
]


@pytest.fixture(autouse=True)
def _loaded_anew() -> Iterator[None]:
    load = codec.load
    load.cache_clear()
    yield
    load.cache_clear()


def run_program(body: str, path: Path | None = None) -> None:
    """Run a program in its own process, with the packages in `path` first in the search path."""
    env = {**os.environ, **({} if path is None else {"PYTHONPATH": str(path)})}
    command = [sys.executable, "-c", textwrap.dedent(body)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_its_path_and_its_request_and_response_types(name: str) -> None:
    method = codec.load().method(name)
    assert method.path == "/etcdserverpb." + name.replace(".", "/")
    assert method.request.DESCRIPTOR.full_name.endswith("Request")
    assert method.response.DESCRIPTOR.full_name.endswith("Response")
    assert method.response.FromString(method.response().SerializeToString()) == method.response()


def test_a_message_is_encoded_as_the_api_defines() -> None:
    put = codec.load().message("PutRequest")(key=b"a", value=b"bc", lease=5)
    assert put.SerializeToString() == b"\x0a\x01a\x12\x02bc\x18\x05"


def test_loading_leaves_no_module_variable_or_descriptor_that_others_could_find() -> None:
    run_program("""
        import os, sys
        before = dict(os.environ)
        from dlrover_run.store.etcd import codec
        codec.load().method("KV.Txn")
        from google.protobuf import descriptor_pool
        from google.protobuf.internal import api_implementation
        assert api_implementation.Type() == "upb"
        assert not [name for name in sys.modules if name.startswith("etcd3")]
        assert dict(os.environ) == before
        for name in ("kv.proto", "auth.proto", "rpc.proto"):
            try:
                descriptor_pool.Default().FindFileByName(name)
            except KeyError:
                continue
            raise AssertionError(name)
    """)


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_another_client_of_etcd_can_run_in_the_same_process(first: str) -> None:
    """Each client has files called `kv.proto` with messages of the same names and different fields."""
    run_program(f"""
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
        from dlrover_run.store.etcd import codec

        def theirs():
            file = descriptor_pb2.FileDescriptorProto(name="kv.proto", package="mvccpb")
            file.message_type.add(name="KeyValue").field.add(name="other", number=1, type=9, label=1)
            descriptor_pool.Default().Add(file)

        def ours():
            assert codec.load().message("PutRequest")(key=b"k").key == b"k"

        for load in (ours, theirs) if {first == "ours"} else (theirs, ours):
            load()
        found = descriptor_pool.Default().FindMessageTypeByName("mvccpb.KeyValue")
        assert message_factory.GetMessageClass(found)(other="x").other == "x"
    """)


def test_a_later_release_is_imported_as_an_ordinary_package(tmp_path: Path) -> None:
    """A release whose files can be imported, as a current compiler generates them; here from the same descriptors."""
    package = tmp_path / "etcd3" / "etcdrpc"
    package.mkdir(parents=True)
    (tmp_path / "etcd3" / "__init__.py").write_text("import etcd3.etcdrpc")
    (package / "__init__.py").write_text("from etcd3.etcdrpc import rpc_pb2")
    installed = importlib.util.find_spec("etcd3")
    assert installed is not None
    folder = Path((installed.submodule_search_locations or [])[0], "etcdrpc")
    body = ["from google.protobuf import descriptor_pool"]
    for name in ("kv", "auth", "rpc"):
        described = codec._read_literal([folder / f"{name}_pb2.py"])
        body.append(f"DESCRIPTOR = descriptor_pool.Default().AddSerializedFile({described!r})")
    (package / "rpc_pb2.py").write_text("\n".join(body))
    information = tmp_path / "etcd3-0.13.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: etcd3\nVersion: 0.13.0\n")
    run_program(
        """
        import sys
        from dlrover_run.store.etcd import codec
        api = codec.load()
        assert "etcd3.etcdrpc.rpc_pb2" in sys.modules
        assert api.method("KV.Txn").request(success=[]) == api.message("TxnRequest")()
        """,
        tmp_path,
    )


def test_a_later_release_that_rejects_the_installed_protobuf_is_reported_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str) -> None:
        raise TypeError("Descriptors cannot be created directly.")

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.13.0")
    monkeypatch.setattr(codec.importlib, "import_module", refuse)
    with pytest.raises(PackageMissing, match=r"Descriptors cannot be .* pip install etcd3==0\.12\.0"):
        codec.load()


def test_a_missing_package_is_reported_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nowhere)
    with pytest.raises(PackageMissing, match=r"etcd3.*pip install 'dlrover-run\[etcd\]'"):
        codec.load()


def test_a_missing_protobuf_is_reported_in_the_same_sentence() -> None:
    run_program("""
        import sys
        sys.modules["google.protobuf"] = None
        from dlrover_run.store.etcd import codec
        try:
            codec.load()
        except codec.PackageMissing as error:
            assert "pip install 'dlrover-run[etcd]'" in str(error), error
        else:
            raise AssertionError
    """)


def test_another_package_that_has_overwritten_etcd3_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etcd3" / "etcdrpc").mkdir(parents=True)
    (tmp_path / "etcd3" / "__init__.py").touch()
    (tmp_path / "etcd3" / "etcdrpc" / "kv_pb2.py").write_text("# nothing of what is looked for\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PackageMissing, match="pip uninstall etcd3-py"):
        codec.load()


@pytest.mark.parametrize(
    ("name", "module", "text", "words"),
    [
        ("google", "__init__.py", "", "No module named 'google.protobuf'): pip install 'dlrover-run[etcd]'"),
        ("etcd3/etcdrpc", "kv_pb2.py", "# as etcd3-py leaves it", "is damaged, perhaps by etcd3-py"),
    ],
    ids=["no protobuf", "etcd3-py"],
)
def test_a_launch_without_a_required_package_exits_with_2_and_one_line(
    tmp_path: Path, name: str, module: str, text: str, words: str
) -> None:
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name.partition("/")[0] / "__init__.py").touch()
    (tmp_path / name / module).write_text(text)
    (tmp_path / "train.py").write_text("print('begun')")
    command = [sys.executable, "-m", "dlrover_run", "--nnodes=2", "--rdzv-backend=etcd", "--rdzv-id=job"]
    done = subprocess.run(
        [*command, "--rdzv-endpoint=127.0.0.1:1", str(tmp_path / "train.py")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert words in done.stderr
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")


def test_torchrun_receives_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise PackageMissing("What a client of etcd needs is not installed.")

    monkeypatch.setattr(codec, "load", refuse)
    spec = JobSpec(
        entrypoint=Entrypoint("script", "train.py"), rendezvous=kinds.Store((("127.0.0.1", 1),)), run_id="job"
    )
    member = NodeThread(spec, print)
    member.join()
    assert member.wait(lambda view: view.problem is not None, WAIT)
    assert member.view.problem == "What a client of etcd needs is not installed."
    member.leave()
