"""The MNIST example, unchanged, which tells what it trains and can be made to stand still before a step.

    dlrover-run ... recorded_mnist.py [arguments of cnn_train.py]

`EXPERIMENT_RECORDS` is a file or a FIFO that takes the records (see `history.py`), each in one write. Where a file in
`EXPERIMENT_HOLDS` has the number of a step for its name, the ranks that it lists wait before that step until nobody has
a lock on it. `EXPERIMENT_PATIENCE` is the time-out of the process group in seconds, for a script that has one.
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

# What the example imports, and what torch imports when it trains, so that `--start-method=forkserver` finds it here.
import PIL.PngImagePlugin  # noqa: F401
import torch._dynamo
import torch.distributed as dist
import torch.distributed.elastic.multiprocessing.errors
import torch.nn.parallel
import torch.utils.data  # noqa: F401

import dlrover_run.training  # noqa: F401

EXAMPLE = Path(__file__).parents[2] / "examples" / "mnist" / "cnn_train.py"


class Recorder:
    """Tells what this worker does."""

    def __init__(self) -> None:
        # Appended in one write each, which neither a file nor a FIFO mixes with the writes of others.
        self._file = os.open(os.environ["EXPERIMENT_RECORDS"], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._holds = Path(os.environ["EXPERIMENT_HOLDS"])
        self._round = ""
        self.dataset: object = None
        self.samples: list[int] = []

    def tell(self, what: str, **about: object) -> None:
        record = {"type": what, "at": time.monotonic(), "round": self._round, "rank": dist.get_rank(), **about}
        os.write(self._file, json.dumps(record).encode() + b"\n")

    def begin(self) -> None:
        """Agree with the others on the name of the round."""
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            store.set("round of the experiment", os.urandom(6).hex())
        self._round = store.get("round of the experiment").decode()
        node = int(os.environ.get("DLROVER_LOCAL_NODE", "0"))
        self.tell("began", world=dist.get_world_size(), pid=os.getpid(), node=node)

    def wait(self, step: int) -> None:
        """Stand still before a step, if the test wants it."""
        try:
            hold = (self._holds / str(step)).open()
        except FileNotFoundError:
            return
        with hold:
            if dist.get_rank() in map(int, hold.read().split()):
                self.tell("held", step=step)
                fcntl.flock(hold, fcntl.LOCK_SH)


def load_example() -> ModuleType:
    """The example as a module, which does not run by itself then."""
    spec = importlib.util.spec_from_file_location("cnn_train", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up there.
    sys.modules["cnn_train"] = module
    spec.loader.exec_module(module)
    return module


def record(example: Any, recorder: Recorder) -> None:
    """Have the example tell what it does."""
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
    def resume_and_tell(training: Any) -> None:
        resume(training)
        sampler = training.sampler
        recorder.tell("resumed", step=training.step, epoch=sampler.epoch, completed=sampler.completed_num)

    @wraps(take_step)
    def tell_and_take_step(training: Any, *args: Any) -> None:
        step = training.step
        recorder.wait(step)
        samples, recorder.samples = recorder.samples, []
        epoch, world = training.sampler.epoch, training.sampler.num_replicas
        recorder.tell("step", step=step, epoch=epoch, world=world, samples=samples)
        take_step(training, *args)
        recorder.tell("done", step=step)

    @wraps(save)
    def tell_and_save(directory: Any, step: int, state: object) -> Path:
        recorder.tell("saving", step=step)
        path: Path = save(directory, step, state)
        recorder.tell("saved", step=step)
        return path

    example.train_model, example.train = begin_and_train_model, train_and_know_the_data
    example.Training.take_step, example.Training.resume = tell_and_take_step, resume_and_tell
    example.CheckpointDirectory.save, example.DigitFolder.__getitem__ = tell_and_save, read_and_note


if __name__ == "__main__":
    if patience := os.environ.get("EXPERIMENT_PATIENCE"):
        dist.init_process_group = partial(dist.init_process_group, timeout=timedelta(seconds=float(patience)))
    the_example = load_example()
    record(the_example, Recorder())
    the_example.main()
