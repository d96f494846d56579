"""Do one order with torch: find the device of this local rank, compute or link, and say what came of it."""

from __future__ import annotations

import contextlib
import os

import torch

from .accelerators import Accelerator, find_accelerator
from .answers import Answers, failed, first_line
from .compute import WrongResult, measure_compute
from .link import LinkProblem, Stores, measure_link
from .orders import Compute, Link, Order

STORE_PORT = "DLROVER_RUN_CHECK_STORE_PORT"
"""The variable with the port at which this process hosts a store, before it is asked to, so that it is there when the
others of a link come. One who comes too early is refused, and torch lets him try again only after up to a second."""

OWN_DEVICE = "DLROVER_RUN_CHECK_OWN_DEVICE"
"""The variable that is 1 when this process sees one device alone, which is none of the other local ranks'."""

HOST_TIMEOUT = 10.0
"""Seconds for that store to listen; the link, which tries it again, tells why it could not."""


class Tasks:
    """What a check process keeps from one order to the next: its device, and the stores that it hosts."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._accelerator: Accelerator | None = None
        self._stores = Stores()
        port = os.environ.get(STORE_PORT, "")
        if port.isdecimal():
            with contextlib.suppress(LinkProblem):
                self._stores.host(int(port), HOST_TIMEOUT)
        # A process that was forked has a library that read the template's environment, not its own.
        threads = os.environ.get("OMP_NUM_THREADS", "")
        self._threads = int(threads) if threads.isdecimal() and int(threads) > 0 else torch.get_num_threads()
        # Those that torch would use together wait for each other, which on a busy machine takes most of the time.
        torch.set_num_threads(1)

    def do(self, order: Order) -> None:
        """Do the order and answer it. After some failures the process ends itself with the answer."""
        if self._accelerator is None:
            try:
                self._accelerator = find_accelerator(*_place_among_devices())
            except Exception as error:
                self._answers.give(failed(order, f"no device could be used: {first_line(error)}"))
                return
        if isinstance(order, Compute):
            self._compute(order, self._accelerator)
        else:
            self._link(order, self._accelerator)

    def _compute(self, order: Compute, accelerator: Accelerator) -> None:
        try:
            tflops = measure_compute(accelerator, order.seconds, self._threads)
        except WrongResult as error:
            self._answers.give(failed(order, str(error), wrong=True))
        except torch.cuda.OutOfMemoryError as error:
            self._answers.give(failed(order, f"{accelerator.name} has too little free memory: {first_line(error)}"))
        except Exception as error:
            answer = failed(order, f"{accelerator.name} could not multiply matrices: {first_line(error)}")
            if accelerator.device.type == "cpu":
                self._answers.give(answer)
            else:
                # A driver's error stays with the process: whatever it does next fails too.
                self._answers.give_last(answer)
        else:
            self._answers.give({"done": "compute", "device": accelerator.name, "tflops": tflops})

    def _link(self, order: Link, accelerator: Accelerator) -> None:
        def give_up(problem: str) -> None:
            self._answers.give_last(failed(order, problem))

        try:
            gigabytes = measure_link(accelerator, order, self._stores, give_up)
        except LinkProblem as error:
            self._answers.give(failed(order, str(error)))
        except Exception as error:
            self._answers.give(failed(order, first_line(error)))
        else:
            self._answers.give({"done": "link", "name": order.name, "gigabytes": gigabytes})


def _place_among_devices() -> tuple[int, int]:
    """This process's place among the local ranks that see the same devices, and how many these are."""
    if os.environ.get(OWN_DEVICE) == "1":
        return 0, 1
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
