"""The MNIST example on real digits: it learns, and kills and changes of the world size do not change the result."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
if not importlib.util.find_spec("sklearn"):
    pytest.skip("scikit-learn, which brings the digits, is not installed", allow_module_level=True)

import torch
from support.harness import OURS, Launcher, environment

from dlrover_run.training import CheckpointDirectory, ElasticDistributedSampler

EXAMPLE = Path(__file__).parents[2] / "examples" / "mnist"


def load_script(path: Path) -> Any:
    """Import the script as a module; the examples are no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module there.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


cnn_train = load_script(EXAMPLE / "cnn_train.py")
RUN_TIMEOUT = 480.0
"""Seconds after which a run counts as hung and is killed; a run takes about 7 on two idle cores."""

STARTED = re.compile(r"rank (\d+) of \d+ is initialized: .* pid = (\d+)")
LOSS = re.compile(r"loss = (\S+), step = (\d+)")
TRAINING_SAMPLES = 1433
WORKERS = 2
BATCH_SIZE = 32
STEPS_PER_EPOCH = -(-TRAINING_SAMPLES // (WORKERS * BATCH_SIZE))


@dataclass
class Run:
    """The output of one run of the example, so far while it is running."""

    lines: list[str] = field(default_factory=list)
    pids: dict[int, int] = field(default_factory=dict)
    exit_code: int | None = None

    def found(self, pattern: str) -> list[tuple[str, ...]]:
        return [match.groups() for line in self.lines if (match := re.search(pattern, line))]

    @property
    def losses(self) -> dict[int, set[float]]:
        """The losses by step; more than one loss where a repeated step gave a different one."""
        losses: dict[int, set[float]] = {}
        for loss, step in self.found(LOSS.pattern):
            losses.setdefault(int(step), set()).add(float(loss))
        return losses

    @property
    def final_accuracy(self) -> float:
        ((accuracy,),) = self.found(r"^final accuracy = (\S+)$")
        return float(accuracy)


def run_example(
    launcher: Launcher,
    workers: int,
    directory: Path,
    *args: str,
    on_line: Callable[[Run, str], None] = lambda run, line: None,
) -> Run:
    """Run the example to its end in `directory`; `on_line` is called with each line as soon as it is printed."""
    command = [
        *launcher.command, "--standalone", f"--nproc_per_node={workers}", "--max_restarts=3",
        str(EXAMPLE / "cnn_train.py"), "--no_cuda", *args,
    ]  # fmt: skip
    env = environment({"TMPDIR": str(directory), "OMP_NUM_THREADS": "1"})
    run = Run()
    process = subprocess.Popen(
        command, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    alarm = threading.Timer(RUN_TIMEOUT, stop, [process, run])
    alarm.start()
    try:
        for line in process.stdout:
            run.lines.append(line.rstrip("\n"))
            if match := STARTED.search(line):
                run.pids[int(match[1])] = int(match[2])
            on_line(run, line)
        run.exit_code = process.wait()
    finally:
        alarm.cancel()
        if run.exit_code is None:
            stop(process, run)
        process.stdout.close()
        process.wait()
    assert run.exit_code == 0, "\n".join(run.lines)
    return run


def stop(process: subprocess.Popen[str], run: Run) -> None:
    """Kill the launcher and then its last workers, which keep the output open."""
    process.kill()
    for pid in run.pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def newest_state(directory: Path) -> Any:
    checkpoint = CheckpointDirectory(directory).load_latest()
    assert checkpoint is not None
    return checkpoint.state


def tensors_of(state: Any) -> Iterator[torch.Tensor]:
    """Every number of a state as a tensor, in a fixed order."""
    if isinstance(state, dict):
        for key in sorted(state):
            yield from tensors_of(state[key])
    elif isinstance(state, list):
        for item in state:
            yield from tensors_of(item)
    elif state is not None:
        yield torch.as_tensor(state)


def bytes_of(state: Any) -> list[bytes]:
    return [tensor.contiguous().numpy().tobytes() for tensor in tensors_of(state)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A run without faults, and its directory."""
    directory = tmp_path_factory.mktemp("undisturbed")
    return directory, run_example(OURS, WORKERS, directory, "--checkpoint_dir", "checkpoints")


def data_args(undisturbed_directory: Path) -> list[str]:
    digits = undisturbed_directory / "mnist_digits"
    return ["--training_data", f"{digits}/training/", "--validation_data", f"{digits}/testing/"]


@pytest.mark.long
def test_learns_the_digits(undisturbed: tuple[Path, Run]) -> None:
    _, run = undisturbed
    assert run.final_accuracy >= 0.95
    assert [int(epoch) for epoch, _ in run.found(r"^epoch = (\d+), accuracy = (0\.\d+)$")] == list(range(5))
    assert sorted(run.losses) == list(range(0, 5 * STEPS_PER_EPOCH, 20))
    assert 2.2 < run.losses[0].pop() < 2.5  # Untrained: about the logarithm of 10.


def test_writes_the_digits_as_directories_of_images(tmp_path: Path) -> None:
    def write() -> Path:
        subprocess.run([sys.executable, EXAMPLE / "write_digits.py", tmp_path / "digits"], check=True)
        assert os.listdir(tmp_path) == ["digits"]
        return tmp_path / "digits"

    # Files that a killed writer has left have no effect.
    left_over = tmp_path / ".digits.unfinished" / "training" / "0"
    left_over.mkdir(parents=True)
    (left_over / "9999.png").write_bytes(b"half an ima")
    digits = write()
    assert sorted(os.listdir(digits)) == ["testing", "training"]
    for part, count in {"training": TRAINING_SAMPLES, "testing": 1797 - TRAINING_SAMPLES}.items():
        assert sorted(os.listdir(digits / part)) == list("0123456789")
        assert len(list((digits / part).glob("*/*.png"))) == count
    # Another writer creates the same files, byte for byte.
    before = contents(digits)
    assert contents(write()) == before


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*.png")}


@pytest.mark.long
def test_two_kills_change_nothing(launcher: Launcher, undisturbed: tuple[Path, Run], tmp_path: Path) -> None:
    # The step at which to kill, and which rank: one that only computes, then the one that saves.
    kills = [(20, 1), (60, 0)]
    pids_killed: list[int] = []

    def kill_at_its_step(run: Run, line: str) -> None:
        match = LOSS.search(line)
        if match and len(pids_killed) < len(kills) and int(match[2]) == kills[len(pids_killed)][0]:
            pids_killed.append(run.pids[kills[len(pids_killed)][1]])
            os.kill(pids_killed[-1], signal.SIGKILL)

    directory, baseline = undisturbed
    run = run_example(
        launcher, WORKERS, tmp_path, *data_args(directory), "--checkpoint_dir", "checkpoints", on_line=kill_at_its_step
    )
    resumed_at = [int(step) for (step,) in run.found(r"^resume at step = (\d+)$")]
    assert len(set(pids_killed)) == len(kills) == len(resumed_at)
    # A checkpoint is written before its step is printed, so no step before the kill is repeated.
    assert all(step >= kill for step, (kill, _) in zip(resumed_at, kills, strict=True))
    positions = run.found(r"^Load epoch = (\d+), completed num = (\d+), num_samples = (\d+)$")
    assert [position_after(step) for step in resumed_at] == [tuple(map(int, each)) for each in positions]

    assert run.losses == baseline.losses
    assert run.final_accuracy == baseline.final_accuracy
    assert bytes_of(newest_state(tmp_path / "checkpoints")) == bytes_of(newest_state(directory / "checkpoints"))


def position_after(step: int) -> tuple[int, int, int]:
    """Epoch, samples completed and samples left for a rank, as a checkpoint after `step` steps must contain them."""
    # The checkpoint at the end of an epoch is written before the next epoch begins.
    epoch = (step - 1) // STEPS_PER_EPOCH
    completed = min((step - epoch * STEPS_PER_EPOCH) * WORKERS * BATCH_SIZE, TRAINING_SAMPLES)
    return epoch, completed, -(-(TRAINING_SAMPLES - completed) // WORKERS)


@pytest.mark.long
def test_another_number_of_workers_continues_with_the_same_samples(
    undisturbed: tuple[Path, Run], tmp_path: Path
) -> None:
    """One worker with the whole global batch continues in the middle of an epoch, and computes the same weights."""
    directory, baseline = undisturbed
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    shutil.copy(directory / "checkpoints" / "step-000000000100.pt", checkpoints)
    run = run_example(
        OURS, 1, tmp_path, *data_args(directory), "--checkpoint_dir", "checkpoints",
        "--batch_size", str(WORKERS * BATCH_SIZE),
    )  # fmt: skip
    # Step 100 is the eighth of the fifth epoch.
    assert f"Load epoch = 4, completed num = 512, num_samples = {TRAINING_SAMPLES - 512}" in run.lines
    ours, theirs = newest_state(checkpoints), newest_state(directory / "checkpoints")
    assert ours["sampler"] == theirs["sampler"] == {"epoch": 4, "completed_num": TRAINING_SAMPLES}
    # Not bit for bit: one worker adds the gradients in another order than two do.
    assert_close(ours["model"], theirs["model"])
    assert abs(run.final_accuracy - baseline.final_accuracy) < 0.01


@pytest.mark.long
def test_a_rank_without_samples_in_the_last_step_takes_part(undisturbed: tuple[Path, Run], tmp_path: Path) -> None:
    """33 images are a global batch of 32 and one of a single image: two workers must compute what a plain loop does."""
    training = tmp_path / "training"
    digits = undisturbed[0] / "mnist_digits"
    for image in sorted((digits / "training").glob("*/*.png"))[:: TRAINING_SAMPLES // 33][:33]:
        folder = training / image.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, folder)
    run_example(
        OURS, 2, tmp_path, "--training_data", str(training), "--validation_data", f"{digits}/testing",
        "--batch_size", "16", "--num_epochs", "1", "--checkpoint_dir", "checkpoints",
        "--learning_rate", "0.01", "--seed", "3",
    )  # fmt: skip

    torch.manual_seed(3)
    net = cnn_train.Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    data = cnn_train.DigitFolder(training)
    order = list(ElasticDistributedSampler(data, 1, 0, seed=3))
    for done, batch in ((0, order[:32]), (32, order[32:])):
        images, labels = cnn_train.collate([data[index] for index in batch])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - done / 33)
        optimizer.step()
    state = newest_state(tmp_path / "checkpoints")
    assert state["sampler"] == {"epoch": 0, "completed_num": 33}
    assert_close(state["model"], net.state_dict())


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--training_data", "somewhere"], "give both --training_data and --validation_data, or neither"),
        (["--num_epochs", "0"], "--num_epochs must be at least 1, not 0"),
    ],
)
def test_refuses_invalid_arguments(args: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cnn_train.parse_arguments(args)
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.long
def test_the_demo_kills_a_worker_and_continues(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE / "demo.py", "--directory", tmp_path / "demo"],
        cwd=tmp_path, timeout=RUN_TIMEOUT, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    step = re.search(
        r"^demo: after the kill the workers continued from the checkpoint of step (\d+)$", done.stdout, re.M
    )
    assert step is not None
    assert int(step[1]) >= 60
    assert "was killed by SIGKILL, not by the launcher; restart 1 of 3" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"demo"}, "nothing is left next to the directory"
