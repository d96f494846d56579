"""A worker that shares a GPU with another rank and reports each phase of its start: see `gpu/kills.py`. Without a GPU
it does the same with gloo on the processor.

It has DDP and an optimizer, as a script has that is trained for more than a benchmark.
"""

import time

started = time.monotonic_ns()

from reporting import report  # noqa: E402 - the clock is read first

report("started", started)

import os  # noqa: E402 - a worker can be killed before it has imported torch

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

on_cuda = "BENCHMARK_CUDA" in os.environ
if on_cuda:
    # A process that was forked has imported torch; what is loaded for the first device counts to the device.
    assert torch.cuda.is_available()
report("imported")

# NCCL refuses two ranks on one GPU, unless it believes that each has a host of its own. Above an import this would keep
# the script from warm workers.
os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")

WIDTH, BATCH = 1024, 64
PACE = 0.02
"""Seconds that a step sleeps; without them the ranks would use all processors."""

device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
if on_cuda:
    torch.cuda.set_device(device)
square = torch.randn(WIDTH, WIDTH, device=device)
(square @ square).sum().item()
report("device")

dist.init_process_group("nccl" if on_cuda else "gloo")
one = torch.ones(1, device=device)
dist.all_reduce(one)
assert one.item() == dist.get_world_size()
report("communicator")

layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(*layers).to(device), device_ids=[0] if on_cuda else None
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def step() -> None:
    loss = model(torch.randn(BATCH, WIDTH, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss.item()


step()
report("step")
while True:
    time.sleep(PACE)
    step()
