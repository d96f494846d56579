"""Our parsers read the published command lines, unchanged but for paths, as the documents describe them.

A real shell expands each block, with a stand-in for the launcher that records its arguments. `tests/experiments/` runs
some of them as jobs.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.command_lines import count, fake_etcd3, isolate, watched
from support.places import place_of
from support.published_commands import (
    CHAOS_ARTICLE,
    CHAOS_BY_HAND,
    CHAOS_TUTORIAL,
    KUBEDL_ARGS,
    KUBEDL_FLAGS,
    KUBEDL_POD,
    TF_WORKER_POD,
    torch_pod,
    typed,
)

from dlrover_run.cli import parse
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.local_nodes.settings import LocalSettings
from dlrover_run.features.node_check.rules import CHECK_ONCE, NodeCheckRules
from dlrover_run.spec import JobSpec, SpecError
from tf_ps_runner import cli as tf_ps_run

CHAOS = Path(__file__).parents[2] / "scripts" / "start_chaos.sh"

DOCUMENTS = {"001": CHAOS_TUTORIAL, "002": CHAOS_ARTICLE}

BLOCKS = {f"{document}: {name}": text for document, blocks in DOCUMENTS.items() for name, text in blocks.items()}

every_block = pytest.mark.parametrize("text", BLOCKS.values(), ids=BLOCKS)

RULES = watched(
    JobRules(3, 4, max_restarts=3, pend_timeout=600, parts=(NodeCheckRules(check=CHECK_ONCE, exclude_stragglers=1),))
)
"""The rules that all blocks of both documents give."""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path, monkeypatch)


def words_of(text: str, directory: Path, **environ: str) -> dict[str, list[str]]:
    """The arguments with which a shell starts each of the two programs, for a block in this environment."""
    programs = directory / "programs"
    programs.mkdir()
    for program in ("dlrover-run", "start_chaos.sh"):
        (programs / program).write_text(f"printf '%s\\n' \"$@\" >{directory}/{program}.words\n")
        (programs / program).chmod(0o755)
    paths = {
        "examples/pytorch/mnist/start_chaos.sh": str(programs / "start_chaos.sh"),
        "examples/pytorch/mnist/cnn_train.py": "train.py",
        "/data/mnist_png": "digits",
    }
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", **environ}
    # A background process of the block has the pipe open too, so both programs have exited when this returns.
    subprocess.run(["/bin/bash", "-c", typed(text, paths)], env=environment, check=True, capture_output=True)
    return {file.stem: file.read_text().splitlines() for file in directory.glob("*.words")}


def job_of(text: str, directory: Path, **environ: str) -> JobSpec:
    """The job of a block in this environment, which must give no warning."""
    words = words_of(text, directory, **environ)["dlrover-run"]
    warnings: list[str] = []
    spec = parse(words, environ, count_workers=count, warn=warnings.append)
    assert warnings == []
    assert spec.entrypoint.target == "train.py"
    assert spec.entrypoint.args == (
        *("--num_epochs", "5", "--training_data", "digits/training/", "--validation_data", "digits/testing/"),
    )
    assert spec.workers_per_node == 2
    return spec


@every_block
def test_a_block_in_a_pod_is_a_job_of_three_to_four_nodes_at_the_master(text: str, tmp_path: Path) -> None:
    spec = job_of(text, tmp_path, **torch_pod(4, rank=1))
    assert (spec.rendezvous.backend, spec.rules) == ("master", RULES)
    assert place_of(spec).master is not None
    assert (place_of(spec).master.host, place_of(spec).master.port) == ("elasticjob-chaos-test-dlrover-master", 50001)
    # The replacement has its own number and prefers the rank of the node that it replaces.
    assert (spec.node_id, spec.node_rank, "local_nodes" in spec.settings) == ("4", 1, False)


@every_block
def test_a_block_with_local_nodes_is_the_same_job_on_this_machine(text: str, tmp_path: Path) -> None:
    spec = job_of(text, tmp_path, PET_LOCAL_NODES="4", WORKER_NUM="4")
    assert (spec.rendezvous.backend, spec.settings_of("local_nodes", LocalSettings)) == ("master", LocalSettings(4, 4))
    # On one machine nodes start at about the same time, and a node that is cut off can be replaced at once.
    defaults = {name: getattr(RULES, name) for name in ("last_call_timeout", "lost_after", "cut_off_timeout")}
    assert replace(spec.rules, **defaults) == RULES


@pytest.mark.parametrize(
    ("text", "verb"),
    [
        (CHAOS_TUTORIAL["straggler"], "cpu-overload"),
        (CHAOS_TUTORIAL["fault node"], "kill-process"),
        (CHAOS_ARTICLE["straggler"], "cpu-overload"),
        (CHAOS_ARTICLE["fault node"], "kill-process"),
        (CHAOS_ARTICLE["network, process"], "no-chaos"),
    ],
)
def test_a_block_starts_the_chaos_script_that_it_names(text: str, verb: str, tmp_path: Path) -> None:
    assert words_of(text, tmp_path, **torch_pod(1))["start_chaos.sh"] == [verb]


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_chaos_command_typed_by_hand_is_accepted(shell: str) -> None:
    """In a session without a job it has nothing to act on, and reports that. A wrong action or shell would be exit code
    2.
    """
    line = typed(CHAOS_BY_HAND, {"examples/pytorch/mnist/start_chaos.sh": str(CHAOS)}).replace("sh ", f"{shell} ", 1)
    environ = {"PATH": os.environ["PATH"], "CHAOS_WAIT": "0", **torch_pod(1)}
    done = subprocess.run(
        ["/bin/bash", "-c", f"{line}; exit"], env=environ, capture_output=True, text=True, start_new_session=True
    )
    assert (done.returncode, done.stderr) == (
        1,
        "start_chaos: nothing was done within CHAOS_WAIT=0 s: there is no dlrover-run\n",
    )


def test_the_node_range_alone_reports_what_it_needs(tmp_path: Path) -> None:
    """In a shell, without the environment of a pod."""
    with pytest.raises(SpecError, match=r"DLROVER_MASTER_ADDR.*--local-nodes=4"):
        job_of(CHAOS_TUTORIAL["preempted"], tmp_path, WORKER_NUM="4")


def test_kubedl_s_flags_and_the_arguments_of_its_container_are_a_job_in_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_etcd3(monkeypatch)
    warnings: list[str] = []
    words = [*KUBEDL_FLAGS, "train.py", *KUBEDL_ARGS[1:]]
    spec = parse(words, KUBEDL_POD, count_workers=count, warn=warnings.append)
    assert warnings == []
    assert (spec.rendezvous.backend, spec.run_id, spec.workers_per_node) == ("etcd", "resnet", 1)
    assert (spec.rules.min_nodes, spec.rules.max_nodes) == (1, 3)
    assert place_of(spec).etcd is not None
    assert place_of(spec).etcd.endpoints == (("etcd-service", 2379),)
    assert (spec.entrypoint.target, list(spec.entrypoint.args)) == ("train.py", KUBEDL_ARGS[1:])


def test_the_environment_of_a_workers_pod_has_no_effect_on_tf_ps_run() -> None:
    """Each pod of the document's job is a node; the `TF_CONFIG` from its master is for the script only."""
    flags = ["--role=worker", "--ps=1", "--workers=1", "train.py"]
    warnings: list[str] = []
    spec = tf_ps_run.parse(flags, TF_WORKER_POD, warn=warnings.append)
    assert warnings == []
    assert place_of(spec.job).master is not None
    assert f"{place_of(spec.job).master.host}:{place_of(spec.job).master.port}" == TF_WORKER_POD["DLROVER_MASTER_ADDR"]
