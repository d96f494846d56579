"""A worker that trains at a pace of its own, with pauses that are drawn at random: see `benchmarks/stalls.py`.

BENCHMARK_FAULT has, as for `stalling.py`, the rank that says when the job began and is over, a number from which the
pace and the pauses are drawn, and the seconds to train. Nothing here is a hang.
"""

import math
import multiprocessing
import os
import random
import time
import zlib
from multiprocessing.connection import Connection

from reporting import report

report("started")
_, speaker, seed, seconds, _ = os.environ["BENCHMARK_FAULT"].split()
rank = int(os.environ["RANK"])

PACES = 0.1, 4.0
"""Seconds of the work of a step, of the fastest and of the slowest job."""

PAUSES = 0.5, 30.0
"""Seconds of a pause."""

BETWEEN_PAUSES = 90.0
"""Mean seconds of training between two pauses."""

REST = 0.05
"""Seconds to rest after each piece of work of a pause, so that ten jobs leave some of the machine to others."""


def load(requests: Connection) -> None:
    """Prepare a batch for as many seconds as each request says."""
    while True:
        over = time.monotonic() + requests.recv()
        while time.monotonic() < over:
            zlib.compress(os.urandom(1_000_000))
            time.sleep(REST)
        requests.send(None)


# Forked before torch has threads.
fork = multiprocessing.get_context("fork")
loader_end, data = fork.Pipe()
fork.Process(target=load, args=(loader_end,), daemon=True).start()

import torch  # noqa: E402 - after the fork
import torch.distributed as dist  # noqa: E402

from dlrover_run import training  # noqa: E402

on_device = "BENCHMARK_DEVICE" in os.environ
if on_device:
    import device
else:
    dist.init_process_group("gloo")
total = torch.ones(1000)

# What all ranks do at the same step, and what each does by itself.
together, alone = random.Random(seed), random.Random(f"{seed} {rank}")


def between(limits: tuple[float, float]) -> float:
    """A number of seconds, the short ones as often as the long ones."""
    low, high = map(math.log, limits)
    return math.exp(together.uniform(low, high))


pace = between(PACES)
counts_steps = together.random() < 0.5


def wait_for_data(pause: float) -> None:
    data.send(pause)
    data.recv()


def save(pause: float) -> None:
    over = time.monotonic() + pause
    with open(os.path.join(os.environ["BENCHMARK_RUN"], "checkpoint"), "wb") as file:
        while time.monotonic() < over:
            file.write(bytes(1 << 16))
            os.fsync(file.fileno())
            time.sleep(REST)


def evaluate(pause: float) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    over = time.monotonic() + pause
    with torch.no_grad():
        while time.monotonic() < over:
            for _ in range(100):
                model(torch.rand(64, 256)).argmax(1).sum().item()
            time.sleep(REST)


def step() -> None:
    time.sleep(pace * alone.uniform(0.7, 1.3))
    if on_device:
        device.collective(0, device.ALL_REDUCE, device.BYTES)
        device.synchronize()
    else:
        dist.all_reduce(total)
        total.fill_(1.0)
    if counts_steps:
        training.report(samples=64)


def train() -> None:
    step()
    report("step")
    if rank == int(speaker):
        report("fault")
    began = time.monotonic()
    while True:
        step()
        # The same on all ranks, whose clocks differ.
        if together.random() < pace / BETWEEN_PAUSES:
            kind, who, pause = together.randrange(4), together.randrange(int(os.environ["WORLD_SIZE"])), between(PAUSES)
            if kind == 3:
                # A step that is slower than the others, and shows nothing.
                time.sleep(pace * 1.5)
            elif rank == who:
                (wait_for_data, save, evaluate)[kind](pause)
        if rank == int(speaker) and time.monotonic() - began > float(seconds):
            report("over")


train()
