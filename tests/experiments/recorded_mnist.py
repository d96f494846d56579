"""The MNIST example, unchanged, which records what it trains and can be held before a step.

    dlrover-run ... recorded_mnist.py [arguments of cnn_train.py]

`EXPERIMENT_RECORDS` is a file or a FIFO that takes the records (see `history.py`), each in one write. Where a file in
`EXPERIMENT_HOLDS` has the number of a step for its name, the ranks that it lists wait before that step until no
process has a lock on it. `EXPERIMENT_PATIENCE` is the timeout of the process group in seconds, if the script has one.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import sys
import time
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

# The imports of the example and those of torch during training, so that `--start-method=forkserver` finds them here.
import PIL.PngImagePlugin  # noqa: F401
import torch._dynamo
import torch.distributed as dist
import torch.distributed.elastic.multiprocessing.errors
import torch.nn.parallel
import torch.utils.data  # noqa: F401

import dlrover_run.training  # noqa: F401

EXAMPLE = Path(__file__).parents[2] / "examples" / "mnist" / "cnn_train.py"


class Recorder:
    """Records what this worker does."""

    def __init__(self) -> None:
        # Each record is appended in one write, so neither a file nor a FIFO mixes it with those of others.
        self._file = os.open(os.environ["EXPERIMENT_RECORDS"], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._holds = Path(os.environ["EXPERIMENT_HOLDS"])
        self._round = ""
        self.dataset: object = None
        self.samples: list[int] = []

    def record(self, what: str, **about: object) -> None:
        record = {"type": what, "at": time.monotonic(), "round": self._round, "rank": dist.get_rank(), **about}
        os.write(self._file, json.dumps(record).encode() + b"\n")

    def begin(self) -> None:
        """Agree with the other workers on the name of the round."""
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            store.set("round of the experiment", os.urandom(6).hex())
        self._round = store.get("round of the experiment").decode()
        node = int(os.environ.get("DLROVER_LOCAL_NODE", "0"))
        self.record("began", world=dist.get_world_size(), pid=os.getpid(), node=node)

    def wait(self, step: int) -> None:
        """Wait before a step if the test holds this rank."""
        try:
            hold = (self._holds / str(step)).open()
        except FileNotFoundError:
            return
        with hold:
            if dist.get_rank() in map(int, hold.read().split()):
                self.record("held", step=step)
                fcntl.flock(hold, fcntl.LOCK_SH)


def load_example() -> ModuleType:
    """The example as a module, whose main function does not run."""
    spec = importlib.util.spec_from_file_location("cnn_train", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module there.
    sys.modules["cnn_train"] = module
    spec.loader.exec_module(module)
    return module


def record(example: Any, recorder: Recorder) -> None:
    """Make the example record what it does."""
    train_model, train = example.train_model, example.train
    take_step, resume = example.Training.take_step, example.Training.resume
    save, read = example.CheckpointDirectory.save, example.DigitFolder.__getitem__

    @wraps(train_model)
    def begin_and_train_model(*args: Any) -> None:
        recorder.begin()
        train_model(*args)

    @wraps(train)
    def train_and_know_the_data(training: Any, loader: Any, *args: Any) -> None:
        recorder.dataset = loader.dataset
        train(training, loader, *args)

    @wraps(read)
    def read_and_note(dataset: Any, index: int) -> Any:
        if dataset is recorder.dataset:
            recorder.samples.append(index)
        return read(dataset, index)

    @wraps(resume)
    def record_resume(training: Any) -> None:
        resume(training)
        sampler = training.sampler
        recorder.record("resumed", step=training.step, epoch=sampler.epoch, completed=sampler.completed_num)

    @wraps(take_step)
    def record_step(training: Any, *args: Any) -> None:
        step = training.step
        recorder.wait(step)
        samples, recorder.samples = recorder.samples, []
        epoch, world = training.sampler.epoch, training.sampler.num_replicas
        recorder.record("step", step=step, epoch=epoch, world=world, samples=samples)
        take_step(training, *args)
        recorder.record("done", step=step)

    @wraps(save)
    def record_save(directory: Any, step: int, state: object) -> Path:
        recorder.record("saving", step=step)
        path: Path = save(directory, step, state)
        recorder.record("saved", step=step)
        return path

    example.train_model, example.train = begin_and_train_model, train_and_know_the_data
    example.Training.take_step, example.Training.resume = record_step, record_resume
    example.CheckpointDirectory.save, example.DigitFolder.__getitem__ = record_save, read_and_note


if __name__ == "__main__":
    if patience := os.environ.get("EXPERIMENT_PATIENCE"):
        dist.init_process_group = partial(dist.init_process_group, timeout=timedelta(seconds=float(patience)))
    the_example = load_example()
    record(the_example, Recorder())
    the_example.main()
