"""The MNIST example, unchanged, which notes the samples of each step (`core/indices.py`).

dlrover-run ... mnist_indices.py [arguments of cnn_train.py]
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "mnist" / "cnn_train.py"


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


def note_samples(example: Any) -> None:
    """Make the example note what it trains on."""
    path = Path(os.environ["BENCHMARK_RUN"], f"indices-{os.getpid()}")
    about = {"port": int(os.environ["MASTER_PORT"]), "rank": int(os.environ["RANK"])}
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    take_step, resume, train = example.Training.take_step, example.Training.resume, example.train
    read = example.DigitFolder.__getitem__
    samples: list[int] = []
    data: list[object] = []

    def note(what: str, **more: object) -> None:
        os.write(file, json.dumps({"what": what, "at": time.monotonic(), **about, **more}).encode() + b"\n")

    @wraps(train)
    def train_and_know_the_data(training: Any, loader: Any, *args: Any) -> None:
        data.append(loader.dataset)
        train(training, loader, *args)

    @wraps(read)
    def read_and_note(dataset: Any, index: int) -> Any:
        if data and dataset is data[0]:
            samples.append(index)
        return read(dataset, index)

    @wraps(resume)
    def note_resume(training: Any) -> None:
        resume(training)
        note("resumed", step=training.step)

    @wraps(take_step)
    def note_step(training: Any, *args: Any) -> None:
        # Before the step: one that is complete on some rank has begun on all.
        note("step", step=training.step, epoch=training.sampler.epoch, samples=samples)
        samples.clear()
        take_step(training, *args)

    example.Training.take_step, example.Training.resume = note_step, note_resume
    example.train, example.DigitFolder.__getitem__ = train_and_know_the_data, read_and_note


if __name__ == "__main__":
    the_example = load_example()
    note_samples(the_example)
    the_example.main()
