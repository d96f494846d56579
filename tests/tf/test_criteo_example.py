"""The Criteo example learns the pattern in its generated data, in both ways to train, and loses no block of it."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from interpreters import each_tensorflow, tensorflow_215
from support.cluster import quiet_port
from support.harness import WAIT

pytest.importorskip("numpy")

EXAMPLE = Path(__file__).parents[2] / "examples" / "criteo_deeprec"
STEPS = 300
LEARNED = 0.70
"""An AUC that no model reaches without having learned the categories: without them 0.603 is the maximum."""


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generated click log."""
    return generated(tmp_path_factory.mktemp("criteo") / "data")


def generated(directory: Path, *args: str) -> Path:
    subprocess.run([sys.executable, EXAMPLE / "generate.py", directory, *args], check=True, stdout=subprocess.DEVNULL)
    return directory


def environment(task: Mapping[str, object] | None = None) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TF_")}
    clean |= {"TF_CPP_MIN_LOG_LEVEL": "2"}
    return clean if task is None else {**clean, "TF_CONFIG": json.dumps(task)}


def train_alone(python: Path, script: str, data: Path, directory: Path) -> dict[str, float]:
    """Train in one process, and return the result."""
    command = [python, EXAMPLE / script, "--data", data, "--checkpoints", directory, f"--steps={STEPS}"]
    subprocess.run(command, check=True, timeout=WAIT, env=environment(), stdout=subprocess.DEVNULL)
    return evaluate(python, data, directory)


def evaluate(python: Path, data: Path, directory: Path) -> dict[str, float]:
    command = [python, EXAMPLE / "evaluate.py", "--data", data, "--checkpoints", directory]
    out = subprocess.run(command, check=True, timeout=WAIT, env=environment(), stdout=subprocess.PIPE).stdout
    result: dict[str, float] = json.loads(out)
    return result


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is killed at the end if it still runs: a server never exits by itself."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def train_in_cluster(python: Path, script: str, data: Path, directory: Path) -> dict[str, float]:
    """Train with a chief, a worker and two servers that are not restarted, and return the result."""
    places = {role: [f"127.0.0.1:{quiet_port()}" for _ in range(count)] for role, count in COUNTS.items()}
    command = [python, EXAMPLE / script, "--data", data, "--checkpoints", directory, f"--steps={STEPS}"]

    def start(role: str, index: int, **options: object) -> subprocess.Popen[str]:
        task = {"cluster": places, "task": {"type": role, "index": index}}
        return subprocess.Popen(command, env=environment(task), text=True, **options)  # type: ignore[call-overload]

    with ExitStack() as stack:
        for role in ("ps", "worker"):
            for index in range(COUNTS[role]):
                stack.enter_context(ended(start(role, index, stdout=subprocess.DEVNULL)))
        chief = stack.enter_context(ended(start("chief", 0)))
        assert chief.wait(WAIT) == 0
    return evaluate(python, data, directory)


COUNTS = {"chief": 1, "worker": 1, "ps": 2}


def test_the_generator_writes_the_format_of_the_criteo_set(data: Path) -> None:
    assert (data / "train.tsv").read_bytes().count(b"\n") == 200_000
    columns = list(zip(*(line.split("\t") for line in (data / "evaluation.tsv").read_text().splitlines()), strict=True))
    assert (len(columns), len(columns[0])) == (40, 20_000)
    assert set(columns[0]) == {"0", "1"}
    for column in columns[1:14]:
        assert all(re.fullmatch(r"\d*", count) for count in column)
    for column in columns[14:]:
        assert all(re.fullmatch(r"[0-9a-f]{8}|", category) for category in column)
    assert any("" in column for column in columns[1:14])
    assert any("" in column for column in columns[14:])


def test_the_generator_reports_the_best_possible_auc(data: Path) -> None:
    truth = json.loads((data / "truth.json").read_text())
    assert truth["best"] == pytest.approx(0.806, abs=0.001)
    assert truth["clicked"] == pytest.approx(0.256, abs=0.005)
    assert truth["counts"] < 0.62 < 0.75 < truth["linear"] < truth["best"]
    assert truth["permuted"] == pytest.approx(0.5, abs=0.015)


@pytest.mark.long
def test_the_same_seed_gives_the_same_rows_whatever_a_killed_writer_has_left(data: Path, tmp_path: Path) -> None:
    left_over = tmp_path / ".again.unfinished"
    left_over.mkdir()
    (left_over / "train.tsv").write_text("half a ro")
    again = generated(tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again"]
    other = generated(tmp_path / "other", "--seed", "2")
    for name in ("train.tsv", "evaluation.tsv"):
        assert (again / name).read_bytes() == (data / name).read_bytes() != (other / name).read_bytes()


def test_the_demo_kills_no_server_before_the_first_checkpoint(tmp_path: Path) -> None:
    demo = runpy.run_path(str(EXAMPLE / "demo.py"))
    saved_step, may_kill = demo["saved_step"], demo["may_kill"]
    assert saved_step(tmp_path) == 0
    for name, step in (("model.ckpt-0", 0), ("/far/model.ckpt-51", 51)):
        (tmp_path / "checkpoint").write_text(
            f'model_checkpoint_path: "{name}"\nall_model_checkpoint_paths: "model.ckpt-7"\n'
        )
        assert saved_step(tmp_path) == step
        assert may_kill(demo["KILL_AT"], saved_step(tmp_path)) == (step > 0)
    assert not may_kill(demo["KILL_AT"] - 1, 51)


@pytest.mark.long
@pytest.mark.tensorflow
def test_the_demo_loses_no_block_when_it_kills_a_server(tensorflow: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(data)
    demo = [sys.executable, EXAMPLE / "demo.py", "--python", tensorflow, "--directory", tmp_path]
    done = subprocess.run(demo, timeout=WAIT, env=environment(), text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "demo: killing the second server" in done.stdout
    # The launcher prints to standard error; a checkpoint of the beginning would lose all blocks.
    restored = re.findall(r"has restored \S+-(\d+), and goes on", done.stderr)
    assert [int(step) > 0 for step in restored] == [True], done.stderr
    assert f"{STEPS} of {STEPS} blocks used" in done.stdout.splitlines()[-1]


@pytest.mark.long
@pytest.mark.tensorflow
@each_tensorflow
@pytest.mark.parametrize("script", ["deepfm_graph.py", "deepfm_strategy.py"])
def test_both_ways_learn_with_a_plain_cluster(tensorflow: Path, script: str, data: Path, tmp_path: Path) -> None:
    found = train_in_cluster(tensorflow, script, data, tmp_path)
    assert found["step"] >= STEPS
    assert found["auc"] > LEARNED
    if script == "deepfm_strategy.py":
        # All steps are from one process, which reads all blocks before it reads any of them again.
        assert found == {"step": STEPS, "auc": found["auc"], "blocks_seen": STEPS, "blocks_seen_more_than_once": 0}


@pytest.mark.long
@pytest.mark.tensorflow
@tensorflow_215
def test_graph_mode_learns_in_one_process(tensorflow: Path, data: Path, tmp_path: Path) -> None:
    found = train_alone(tensorflow, "deepfm_graph.py", data, tmp_path)
    assert found["auc"] > LEARNED
    assert found == {"step": STEPS, "auc": found["auc"], "blocks_seen": STEPS, "blocks_seen_more_than_once": 0}


@pytest.mark.tensorflow
@pytest.mark.long
def test_no_model_learns_from_permuted_labels(tensorflow: Path, tmp_path: Path) -> None:
    data = generated(tmp_path / "data", "--permute")
    found = train_alone(tensorflow, "deepfm_graph.py", data, tmp_path / "checkpoints")
    assert found["step"] == STEPS
    # The few categories that most rows have allow this much by chance.
    assert found["auc"] == pytest.approx(0.5, abs=0.06)
