"""Carries out requests with torch: finds the device of this local rank, computes or tests a link, and replies."""

from __future__ import annotations

import contextlib
import os

import torch

from .accelerators import Accelerator, select_accelerator
from .compute import WrongResult, measure_compute
from .link import LinkProblem, Stores, measure_link
from .protocol import Compute, Link, Replies, Request, failed, first_line
from .turns import turn

STORE_PORT = "DLROVER_RUN_CHECK_STORE_PORT"
"""The variable with the port at which this process hosts a store, before a request for that, so that it listens when
the others of a link connect. A connection that is refused is retried by torch only after up to a second."""

OWN_DEVICE = "DLROVER_RUN_CHECK_OWN_DEVICE"
"""The variable that is 1 if this process sees only one device, which no other local rank sees."""

HOST_TIMEOUT = 10.0
"""Seconds for that store to listen. A failure is reported by the link, which tries again."""


class Tasks:
    """The state of a check process between requests: its device, and the stores that it hosts."""

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._accelerator: Accelerator | None = None
        self._stores = Stores()
        port = os.environ.get(STORE_PORT, "")
        if port.isdecimal():
            with contextlib.suppress(LinkProblem):
                self._stores.host(int(port), HOST_TIMEOUT)
        # In a forked process the library has read the template's environment, not this one's.
        threads = os.environ.get("OMP_NUM_THREADS", "")
        self._threads = int(threads) if threads.isdecimal() and int(threads) > 0 else torch.get_num_threads()
        # Threads that torch uses for one operation wait for each other: on a busy machine for most of the time.
        torch.set_num_threads(1)

    def run(self, request: Request) -> None:
        """Carry out a request and reply. After some failures the process ends itself with the reply."""
        if self._accelerator is None:
            try:
                alone = os.environ.get(OWN_DEVICE) == "1"
                local_rank, workers = (0, 1) if alone else (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"])
                self._accelerator = select_accelerator(int(local_rank), int(workers))
            except Exception as error:
                self._replies.send(failed(request, f"no device could be used: {first_line(error)}"))
                return
        if isinstance(request, Compute):
            self._compute(request, self._accelerator)
        else:
            self._link(request, self._accelerator)

    def _compute(self, request: Compute, accelerator: Accelerator) -> None:
        try:
            with turn(getattr(accelerator, "uuid", "")):
                tflops = measure_compute(accelerator, request.seconds, self._threads)
        except WrongResult as error:
            self._replies.send(failed(request, str(error), wrong=True))
        except torch.cuda.OutOfMemoryError as error:
            self._replies.send(failed(request, f"{accelerator.name} has too little free memory: {first_line(error)}"))
        except Exception as error:
            # After an error of a driver everything in the process fails.
            send = self._replies.send if accelerator.device.type == "cpu" else self._replies.send_last
            send(failed(request, f"{accelerator.name} could not multiply matrices: {first_line(error)}"))
        else:
            self._replies.send({"done": "compute", "device": accelerator.name, "tflops": tflops})

    def _link(self, request: Link, accelerator: Accelerator) -> None:
        def give_up(problem: str) -> None:
            self._replies.send_last(failed(request, problem))

        try:
            gigabytes, shared = measure_link(accelerator, request, self._stores, give_up)
        except Exception as error:
            self._replies.send(failed(request, str(error) if isinstance(error, LinkProblem) else first_line(error)))
        else:
            told = {"shared": accelerator.name} if shared else {}
            self._replies.send({"done": "link", "name": request.name, "gigabytes": gigabytes, **told})
