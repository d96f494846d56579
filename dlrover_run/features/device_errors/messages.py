"""What the process that listens to the driver and the agent send each other, as JSON on a socket of packets."""

from __future__ import annotations

import msgspec

from dlrover_run.devices.count import DeviceId, PhysicalGpu
from dlrover_run.devices.gpu_state import GpuState

MAX_MESSAGE = 64 * 1024

ASK = b"{}"
"""The agent asks for the states of all GPUs."""


class WatchedGpu(msgspec.Struct, frozen=True):
    """A GPU of this machine by its NVML index. `mig` is as in `PhysicalGpu`. `problem` is NVML's error if the driver
    reports no errors of it to this process."""

    index: int
    uuid: str
    pci_bus_id: str
    mig: tuple[str, ...] | None = None
    problem: str = ""

    @property
    def physical(self) -> PhysicalGpu:
        return PhysicalGpu(DeviceId(self.uuid, self.pci_bus_id), self.mig)


class Watching(msgspec.Struct, frozen=True, tag="watching"):
    """The first message: the GPUs whose errors are reported from now on."""

    gpus: tuple[WatchedGpu, ...]


class XidSeen(msgspec.Struct, frozen=True, tag="xid"):
    """The driver has reported an error of a GPU at that Unix time, when these processes used it, as far as the driver
    names them: in a container with pids of its own it names none."""

    index: int
    number: int
    at: float
    pids: tuple[int, ...] = ()


class States(msgspec.Struct, frozen=True, tag="states"):
    """The states of all GPUs, the answer to ASK."""

    gpus: tuple[GpuState, ...]


Message = Watching | XidSeen | States


def encode(message: Message) -> bytes:
    return msgspec.json.encode(message)


_DECODER = msgspec.json.Decoder(Message)


def decode(data: bytes) -> Message:
    """The message of `encode`. Raises msgspec.DecodeError."""
    decoded: Message = _DECODER.decode(data)
    return decoded
