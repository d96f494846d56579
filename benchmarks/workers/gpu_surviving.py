"""`gpu_steps.py` as a script whose survivors keep their processes and devices: see `gpu/kills.py`.

It needs `--survivors=keep`, and with NCCL a torch that can form its next group in place.
"""

import time

started = time.monotonic_ns()

from reporting import report  # noqa: E402 - the clock is read first

report("started", started)

import os  # noqa: E402 - a worker can be killed before it has imported torch

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from dlrover_run.training import Survivor  # noqa: E402

report("imported")

os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
PACE = 0.02
on_cuda = "BENCHMARK_CUDA" in os.environ
device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
if on_cuda:
    torch.cuda.set_device(device)
square = torch.randn(1024, 1024, device=device)
(square @ square).sum().item()
report("device")

model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
count = 0


def step() -> None:
    loss = model(torch.randn(64, 1024, device=device)).square().mean()
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    loss.item()


for round in Survivor("nccl" if on_cuda else "gloo").rounds():
    with round:
        count, state = round.newest(count, model.state_dict)
        if state is not None:
            model.load_state_dict(state)
        report("communicator", rank=round.rank)
        step()
        count += 1
        report("step", rank=round.rank)
        while True:
            time.sleep(PACE)
            step()
            count += 1
            round.check()
