"""A worker that trains until the fault of its run: see `benchmarks/stalls.py`.

BENCHMARK_FAULT has the fault, the rank that it is for (-1: each, at the same step), the seconds after the first step,
how long an innocent one takes, and a folder or address that it needs. BENCHMARK_GUILTY is the rank that does something
else than the others in a fault of all. The function of the fault is where its rank is found then.

With BENCHMARK_DEVICE the worker has the shape of one with NCCL (`device.py`): its collectives are only enqueued, and
its main thread waits for its device in C, on a line of this script. With BENCHMARK_CUDA it has a GPU and NCCL
(`cuda_device.py`). With BENCHMARK_OPTIMIZER each step is one of an optimizer of torch too.
"""

import ctypes
import itertools
import multiprocessing
import os
import pdb
import signal
import socket
import struct
import threading
import time
from collections import deque

from reporting import report

report("started")
name, guilty, delay, seconds, place = os.environ["BENCHMARK_FAULT"].split()
rank = int(os.environ["RANK"])
EVERY_RANK = -1
is_for_me = int(guilty) in (rank, EVERY_RANK)
is_guilty = int(os.environ["BENCHMARK_GUILTY"]) == rank
on_cuda = "BENCHMARK_CUDA" in os.environ
on_device = on_cuda or "BENCHMARK_DEVICE" in os.environ

PACE = 0.05
"""Seconds between two steps."""

KERNEL = 0.02
"""Seconds of the device in a step."""

EPOCH = 6.0
"""Seconds of an epoch whose data loader starts its workers anew, and of their start."""

LOADERS, LOADER_START, LOADED_STEPS = 2, 3.0, 5

STORM_THREADS = 300
"""More than the 100 whose stacks Python writes."""


def produce() -> None:
    while True:
        batches.put(0)


if name == "lost-loader" and is_for_me:
    # Forked before torch has threads.
    fork = multiprocessing.get_context("fork")
    batches: "multiprocessing.Queue[int]" = fork.Queue(2)
    loader = fork.Process(target=produce, daemon=True)
    loader.start()

import torch  # noqa: E402 - after the fork
import torch.distributed as dist  # noqa: E402

if on_cuda:
    import cuda_device as device
elif on_device:
    import device
else:
    dist.init_process_group("gloo")
total = torch.ones(1000)
parameter = torch.nn.Parameter(torch.ones(1, device="cuda" if on_cuda else "cpu"))
optimizer = torch.optim.SGD([parameter]) if "BENCHMARK_OPTIMIZER" in os.environ else None


def step() -> None:
    if optimizer is not None:
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    if not on_device:
        dist.all_reduce(total)
        total.fill_(1.0)
        return
    device.kernel(KERNEL)
    device.collective(0, device.ALL_REDUCE, device.BYTES)
    device.synchronize()


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(10_000)


def spin() -> None:
    while True:
        pass


def spin_in_c() -> None:
    deque(itertools.repeat(0), maxlen=0)


def lost_loader() -> None:
    assert loader.pid is not None
    os.kill(loader.pid, signal.SIGKILL)
    while True:
        batches.get()
        step()


def lock() -> None:
    held = threading.Lock()
    held.acquire()
    held.acquire()


def mismatch() -> None:
    if on_device:
        device.collective(0, device.ALL_GATHER, device.BYTES)
        device.synchronize()
        return
    dist.all_gather([torch.empty(1000) for _ in range(dist.get_world_size())], total)


def left() -> None:
    if on_device:
        # As torch makes a barrier: all ranks add up one number.
        device.collective(0, device.ALL_REDUCE, 4)
        device.synchronize()
        return
    dist.barrier()


def endless_kernel() -> None:
    device.kernel(-1.0)
    step()


def cut() -> None:
    """Drop what arrives on the connections of this worker, acknowledgements included."""
    reject = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(reject))
    for number in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(number))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER
        except OSError:
            continue
    while True:
        step()


def full_disk() -> None:
    with open(os.path.join(place, "checkpoint"), "wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                time.sleep(0.1)


def storm() -> None:
    begin = threading.Event()

    def work() -> None:
        begin.wait()
        spin()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(STORM_THREADS)]
    for thread in threads:
        thread.start()
    begin.set()
    threads[0].join()


def until_over() -> "itertools.takewhile[int]":
    over = time.monotonic() + float(seconds)
    return itertools.takewhile(lambda _: time.monotonic() < over, itertools.count())


def checkpoint() -> None:
    with open(os.path.join(os.environ["BENCHMARK_RUN"], "large"), "wb") as file:
        for _ in until_over():
            file.write(bytes(1 << 16))
            os.fsync(file.fileno())
            time.sleep(0.1)
            file.seek(0)


def evaluate() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    with torch.no_grad():
        for _ in until_over():
            model(torch.rand(64, 256)).argmax(1).sum().item()


def compile_model() -> None:
    with torch.device("cuda" if on_cuda else "cpu"):
        for size in until_over():
            layers = [torch.nn.Linear(16 + size, 16 + size), torch.nn.GELU(), torch.nn.Linear(16 + size, 4)]
            torch.compile(torch.nn.Sequential(*layers))(torch.rand(8, 16 + size)).sum().backward()


def download() -> None:
    host, _, port = place.partition(":")
    with socket.create_connection((host, int(port))) as connection:
        for _ in until_over():
            connection.recv(65536)


def debug() -> None:
    with open(place) as commands, open(os.devnull, "w") as shown:
        pdb.Pdb(stdin=commands, stdout=shown, nosigint=True).set_trace()
        report("continued")


def long_kernel() -> None:
    device.kernel(float(seconds))
    device.synchronize()


def optimize_on_host() -> None:
    """What an optimizer does whose state is in the host's memory: long operations on large tensors, in place."""
    parameter = torch.nn.Parameter(torch.ones(4_000_000))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], foreach=False)
    for _ in until_over():
        optimizer.step()


def checkpoint_before_barrier() -> None:
    if is_guilty:
        checkpoint()
    left()


def prepare(ready: "multiprocessing.Queue[int]") -> None:
    """What a worker of a data loader does first: it imports, and opens its files."""
    time.sleep(LOADER_START)
    for batch in range(LOADED_STEPS):
        ready.put(batch)


def epochs() -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(max(1, int(float(seconds) / EPOCH))):
        ready: multiprocessing.Queue[int] = context.Queue()
        loaders = [context.Process(target=prepare, args=(ready,), daemon=True) for _ in range(LOADERS)]
        for one in loaders:
            one.start()
        for _ in range(LOADED_STEPS):
            ready.get()
            step()
        for one in loaders:
            one.kill()
            one.join()


def train() -> None:
    step()
    report("step")
    due = time.monotonic() + float(delay) if is_for_me else float("inf")
    # At one time all ranks can do something only at one step.
    due_step = 1 + int(float(delay) / PACE) if int(guilty) == EVERY_RANK else None
    for number in itertools.count(1):
        if (time.monotonic() >= due) if due_step is None else (number == due_step):
            due = float("inf")
            report("fault")
            FAULTS.get(name, report_nothing)()
            report("over")
        if name == "blocked-disk" and is_for_me:
            write()
        step()
        time.sleep(PACE)


def report_nothing() -> None:
    """The benchmark does it from outside."""


def write() -> None:
    with open(os.path.join(place, "progress"), "w") as file:
        file.write("another step\n")


FAULTS = {
    "stopped": stopped,
    "sleep": sleep,
    "spin": spin,
    "spin-in-c": spin_in_c,
    "lost-loader": lost_loader,
    "lock": lock,
    "mismatch": mismatch,
    "left": left,
    "cut": cut,
    "full-disk": full_disk,
    "storm": storm,
    "endless-kernel": endless_kernel,
    "checkpoint": checkpoint,
    "evaluation": evaluate,
    "warm-up": compile_model,
    "compilation": compile_model,
    "download": download,
    "debugger": debug,
    "kernel": long_kernel,
    "host-optimizer": optimize_on_host,
    "checkpoint-barrier": checkpoint_before_barrier,
    "loaders": epochs,
    "one-rank": long_kernel,
    "shared-device": long_kernel,
}

train()
