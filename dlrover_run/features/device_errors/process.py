"""The process that listens to the driver for one agent. It ends with the agent, also if that is killed: its socket
ends, and the kernel kills it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import threading
import time
from typing import Any

from dlrover_run.devices.count import Nvml, NvmlUnavailable, open_nvml, read_gpu
from dlrover_run.devices.gpu_state import read_state
from dlrover_run.features.device_errors.messages import (
    MAX_MESSAGE,
    Message,
    States,
    WatchedGpu,
    Watching,
    XidSeen,
    encode,
)
from dlrover_run.workers.template import process_title

XID_CRITICAL_ERROR, DOUBLE_BIT_ECC_ERROR = 0x8, 0x2
"""NVML's types of events."""

XID_OF_MEMORY_ERROR = 48
"""The Xid of a double-bit memory error, for the event that has no number."""

MAX_WAIT_MS = 3_600_000
"""Milliseconds of one wait for an event; NVML knows no wait without an end."""

ERROR_PAUSE = 5.0
"""Seconds after a wait that has failed, as it does while a GPU is lost: the errors of the others are still reported."""

TIMEOUT, NOT_SUPPORTED = 10, 3
"""NVML's errors for a wait that is over, and for what a GPU does not have."""


class Line:
    """The socket to the agent. What it is too slow to read is dropped."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: Message) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(encode(message), socket.MSG_DONTWAIT)

    def has_request(self) -> bool:
        """Wait for a request; False when the agent has ended."""
        with contextlib.suppress(OSError):
            return bool(self._connection.recv(MAX_MESSAGE))
        return False


class Driver:
    """The events of all GPUs. NVML must be initialised; its functions may be called by several threads."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._events = nvml.nvmlEventSetCreate()
        self._indices: dict[int | None, int] = {}

    def begin(self) -> tuple[WatchedGpu, ...]:
        """Have the errors of each GPU reported from now on."""
        found = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            # A GPU that is lost already has no name.
            with contextlib.suppress(self._nvml.NVMLError):
                gpu = read_gpu(self._nvml, index)
                problem = self._register(index)
                found.append(WatchedGpu(index, gpu.device.uuid, gpu.device.pci_bus_id, gpu.mig, problem))
        return tuple(found)

    def wait(self) -> XidSeen | None:
        """The next error; None after MAX_WAIT_MS. Raises NVMLError."""
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, MAX_WAIT_MS)
        except nvml.NVMLError as error:
            if getattr(error, "value", None) == TIMEOUT:
                return None
            raise
        at = time.time()
        number = int(event.eventData) if event.eventType == XID_CRITICAL_ERROR else XID_OF_MEMORY_ERROR
        index = self._indices.get(_address(event.device))
        if index is None:
            index = int(nvml.nvmlDeviceGetIndex(event.device))
        pids: tuple[int, ...] = ()
        with contextlib.suppress(nvml.NVMLError):
            pids = tuple(int(one.pid) for one in nvml.nvmlDeviceGetComputeRunningProcesses(event.device))
        return XidSeen(index, number, at, pids)

    def states(self) -> States:
        """The states of all GPUs now."""
        return States(tuple(read_state(self._nvml, index) for index in range(self._nvml.nvmlDeviceGetCount())))

    def _register(self, index: int) -> str:
        """What keeps the errors of a GPU from being reported; empty for nothing, and for one that cannot report any."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            self._indices[_address(handle)] = index
            kinds = nvml.nvmlDeviceGetSupportedEventTypes(handle) & (XID_CRITICAL_ERROR | DOUBLE_BIT_ECC_ERROR)
            if kinds:
                nvml.nvmlDeviceRegisterEvents(handle, kinds, self._events)
        except nvml.NVMLError as error:
            return "" if getattr(error, "value", None) == NOT_SUPPORTED else str(error)
        return ""


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


class Listener:
    """Reports the errors of GPUs, once NVML has answered, and answers requests for their states."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._driver: Driver | None = None
        self._nvml: Nvml = None

    def listen(self) -> None:
        """Report errors until this process ends. Without a driver, or without pynvml, it ends at once."""
        with contextlib.suppress(NvmlUnavailable, ImportError), open_nvml(None) as nvml:
            self._nvml = nvml
            driver = self._driver = Driver(nvml)
            # The agent asks for states from now on.
            self._line.send(Watching(driver.begin()))
            while True:
                try:
                    error = driver.wait()
                except nvml.NVMLError:
                    time.sleep(ERROR_PAUSE)
                    continue
                if error is not None:
                    self._line.send(error)
        os._exit(0)

    def answer(self) -> None:
        """Send the states of the GPUs; none if the driver does not know them."""
        states = States(())
        if self._driver is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                states = self._driver.states()
        self._line.send(states)


def run() -> int:
    """Listen to the driver. The first argument is the descriptor of the socket to the agent."""
    process_title.name_process("dlrover-devices")
    line = Line(socket.socket(fileno=int(sys.argv[1])))
    listener = Listener(line)
    # A driver that is stuck keeps that thread for ever; this one sees the end of the agent nevertheless.
    threading.Thread(target=listener.listen, name="events", daemon=True).start()
    while line.has_request():
        listener.answer()
    os._exit(0)
