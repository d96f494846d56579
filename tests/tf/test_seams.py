"""Every attribute of TensorFlow that is patched or used is resolved before anything is patched.

Each supported TensorFlow has all of them.

`make test-tensorflow TENSORFLOW=2.18.1` runs this file with one more version, which TF_PYTHON names.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from interpreters import newest_tensorflow_first
from scripted_cluster import BOOT, SCRIPTS, ScriptedCluster, run_booted
from test_strategy import Training, finish

from tf_ps_runner.worker import patching, strategy
from tf_ps_runner.worker.patching import Patch, after_import, require_attr, require_instance_attrs, wrap


class Incomplete:
    """The queue of a coordinator without the one attribute that a chief needs to leave."""

    inflight_closure_count = 0

    def __init__(self) -> None:
        self._queue_lock = self._queue = self._queue_free_slot_condition = self._stop_waiting_condition = None


class Complete(Incomplete):
    def __init__(self) -> None:
        super().__init__()
        self._queue_lock = self._queue = self._queue_free_slot_condition = self._stop_waiting_condition = None
        self._no_inflight_closure_condition = None


def fill(module: ModuleType, queue: type) -> None:
    """Add the attributes that a patch of TensorFlow's coordinator looks up."""

    class Cluster:
        def __init__(self) -> None:
            self.closure_queue = queue()

    class Closure:
        def execute_on(self) -> None: ...

        def mark_cancelled(self) -> None: ...

    class ClusterCoordinator:
        def schedule(self) -> None: ...

        def join(self) -> None: ...

        def done(self) -> None: ...

        def fetch(self) -> None: ...

    errors = SimpleNamespace(CancelledError=OSError, UnavailableError=OSError, AbortedError=OSError)
    vars(module).update(
        Cluster=Cluster,
        Closure=Closure,
        ResourceClosure=Closure,
        ClusterCoordinator=ClusterCoordinator,
        _CoordinatedClosureQueue=queue,
        errors=errors,
    )


def classes(module: ModuleType) -> list[dict[str, Any]]:
    """The current content of its classes."""
    return [dict(vars(one)) for one in vars(module).values() if isinstance(one, type)]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of TensorFlow that is already imported."""
    module = ModuleType("pretended_tensorflow")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    patching.missing_patches()
    yield module
    patching.missing_patches()


@pytest.mark.parametrize(
    ("queue", "absent", "named"),
    [
        pytest.param(Incomplete, None, "_no_inflight_closure_condition", id="field that a leaving chief needs"),
        pytest.param(Complete, "fetch", "ClusterCoordinator.fetch", id="method"),
    ],
)
def test_one_missing_attribute_leaves_all_others_unpatched(
    loaded: ModuleType, queue: type, absent: str | None, named: str
) -> None:
    fill(loaded, queue)
    if absent is not None:
        delattr(loaded.ClusterCoordinator, absent)
    before = classes(loaded)
    after_import(loaded.__name__, "a planned change loses steps", strategy.change_coordinator)
    (sentence,) = patching.missing_patches()
    assert named in sentence
    assert classes(loaded) == before


def test_a_module_with_all_attributes_is_patched(loaded: ModuleType) -> None:
    fill(loaded, Complete)
    schedule = loaded.ClusterCoordinator.schedule
    after_import(loaded.__name__, "a planned change loses steps", strategy.change_coordinator)
    assert patching.missing_patches() == []
    assert loaded.ClusterCoordinator.schedule is not schedule


def test_a_patch_that_cannot_be_applied_reverts_those_before_it(loaded: ModuleType) -> None:
    class Slotted:
        __slots__ = ()
        length = 3

    vars(loaded).update(one=1, slotted=Slotted())

    def change(module: Any) -> Sequence[Patch]:
        return [Patch(module, "one", 2), Patch(module.slotted, "length", 4)]

    after_import(loaded.__name__, "nothing", change)
    assert loaded.one == 1
    assert len(patching.missing_patches()) == 1


def test_attributes_are_those_that_a_constructor_sets_whatever_wraps_it() -> None:
    class Owner:
        def __init__(self) -> None:
            self.kept = self.__class__.__name__

    patch = wrap(Owner, "__init__", lambda original, self: original(self))
    setattr(*patch)
    require_instance_attrs(Owner.__init__, "kept")
    with pytest.raises(patching.MissingAttribute, match="attribute __class__ set by"):
        require_instance_attrs(Owner.__init__, "__class__")
    with pytest.raises(patching.MissingAttribute, match=r"Owner\.other"):
        require_attr(Owner, "other")


def check_seams(python: Path) -> str:
    """Fail unless this TensorFlow has all attributes that are patched or used; return its version."""
    done = run_booted(python, SCRIPTS / "seams.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["changed"]) >= 14
    assert found["missing"] == [], found
    print(f"TensorFlow {found['version']}: {len(found['changed'])} modules are changed, nothing is missing")
    return str(found["version"])


@pytest.mark.tensorflow
@pytest.mark.parametrize(("tensorflow", "version"), [("2.21", "2.21."), ("2.15", "2.15.")], indirect=["tensorflow"])
def test_a_supported_tensorflow_has_all_patched_attributes(tensorflow: Path, version: str) -> None:
    assert check_seams(tensorflow).startswith(version)


@pytest.mark.skipif("TF_PYTHON" not in os.environ, reason="make test-tensorflow names the interpreter in TF_PYTHON")
def test_the_tensorflow_of_tf_python_has_all_patched_attributes() -> None:
    version = check_seams(Path(os.environ["TF_PYTHON"]))
    assert version.startswith(os.environ.get("TF_VERSION", version))


@pytest.mark.tensorflow
@pytest.mark.long
@pytest.mark.parametrize("renamed", ["_stop_waiting_condition", "_no_inflight_closure_condition"])
def test_a_script_runs_to_its_end_without_a_patch_that_this_tensorflow_does_not_allow(
    renamed: str, tensorflow: Path, tmp_path: Path
) -> None:
    with ScriptedCluster(tensorflow, "other_tensorflow.py", tmp_path, RENAMED=renamed, STEPS="20") as cluster:
        training = Training(cluster)
        training.cluster.new_version(1)
        cluster.start("worker")
        chief = cluster.start("chief")
        finish(chief, 20)
        assert any(renamed in message["text"] for message in chief.messages("note")), chief.output
        assert "schedule is as TensorFlow has it" in chief.output


GENERATING = """
import os, signal
import tensorflow as tf

@tf.function
def double(x):
    if x > 0:
        x = x * 2
    return x

print("doubled", int(double(tf.constant(21))), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.tensorflow
@newest_tensorflow_first
def test_generated_code_is_written_to_the_directory_of_the_job(tensorflow: Path, tmp_path: Path) -> None:
    """The files that TensorFlow writes for converted functions are removed with the job, however one of its processes
    exits.
    """
    (tmp_path / "script.py").write_text(GENERATING)
    scratch, usual = tmp_path / "scratch", tmp_path / "usual"
    scratch.mkdir()
    usual.mkdir()
    variables = {"TF_PS_SCRATCH": str(scratch), "TMPDIR": str(usual)}
    done = run_booted(tensorflow, BOOT, tmp_path / "script.py", **variables)
    assert "doubled 42" in done.stdout, done.stderr
    assert list(usual.glob("__autograph*")) == []
    assert list(scratch.glob("__autograph_generated_file*.py"))
