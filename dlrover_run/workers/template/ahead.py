"""A process that is forked ahead of the round in which it will be a worker: it imports what its worker will need, opens
the device, and waits for its rank.

Until then it knows nothing of a round: its environment has what every worker of its local rank has. It draws no random
numbers, and keeps no memory of the device but that of the context and of the libraries. It ends when the agent closes
the socket.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from .worker import EXIT_ABANDONED

TITLE = "dlrover-warm-worker"
"""What `ps` shows of it until it is a worker."""

MAX_DESCRIPTORS = 4
"""The command, and the three streams of the worker."""


class AgentLine:
    """The socket of such a process: the agent lets it begin, sends the command that makes it a worker, and lets that
    begin. It is also how the end of the agent, or of its interest, is known."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)

    def wait(self) -> None:
        """Return when the agent lets this process go on."""
        if self._socket.recv(1) != b"g":
            os._exit(EXIT_ABANDONED)

    def send(self, packet: bytes) -> None:
        """Answer with JSON of at most `serve.MAX_ANSWER` bytes."""
        self._socket.send(packet)

    def command(self) -> tuple[dict[str, Any], list[int]]:
        """Wait for the command of the worker, which has gone on when this returns, and its descriptors."""
        packet, fds, _, _ = socket.recv_fds(self._socket, 1, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not packet:
            os._exit(0)
        self.send(b"{}")
        self.wait()
        return read_request(fds[0]), fds

    def detach(self) -> int:
        return self._socket.detach()


def read_request(fd: int) -> dict[str, Any]:
    """The JSON in a memory file."""
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        request: dict[str, Any] = json.loads(file.read())
    return request


def close_streams() -> None:
    """Read from and print to nowhere: what imports print has been printed by the workers before."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    os.close(quiet)


def open_device(local_rank: int) -> str:
    """Create the context of torch's device for this local rank, with what loads at the first use of it: the kernels of
    torch, cuBLAS, cuDNN and NCCL. Returns the device, or why there is none.

    The current device stays the first one, as in a new interpreter. The workspaces are given back.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ""
    cuda = torch.cuda
    index = local_rank % cuda.device_count()
    try:
        with cuda.device(index), torch.no_grad():
            _use(torch, f"cuda:{index}")
            cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
            cuda.empty_cache()
            cuda.reset_peak_memory_stats()
            cuda.reset_accumulated_memory_stats()
    except Exception as error:  # The worker meets it too, where it is printed.
        return f"{type(error).__name__}: {str(error)[:200]}"
    return f"cuda:{index}"


def _use(torch: Any, device: str) -> None:
    square = torch.ones(1, 1, 8, 8, device=device)
    torch.matmul(square, square)
    if torch.backends.cudnn.is_available():
        torch.nn.functional.conv2d(square, square)
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        torch.cuda.nccl.version()
