"""A stand-in for NVML, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

FOUR = ["GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"]


class FakeNvmlError(Exception):
    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


@dataclass
class FakeNvml:
    """NVML with GPUs named by their UUIDs; `mig` maps a GPU to its slots, None for an empty one."""

    uuids: list[str] = field(default_factory=list)
    mig: dict[str, list[str | None]] = field(default_factory=dict)
    init_error: FakeNvmlError | None = None
    lost: str | None = None
    shutdowns: int = 0
    NVMLError: type[Exception] = FakeNvmlError

    def nvmlInit(self) -> None:
        if self.init_error:
            raise self.init_error

    def nvmlShutdown(self) -> None:
        self.shutdowns += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        if self.uuids[index] == self.lost:
            raise FakeNvmlError(15, "GPU is lost")
        return self.uuids[index]

    def nvmlDeviceGetUUID(self, handle: Any) -> str | bytes:
        return str(handle)

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        return SimpleNamespace(busId=f"00000000:{0x1A + self.uuids.index(handle):02X}:00.0")

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        if not self.mig:
            raise FakeNvmlError(3, "Not Supported")
        return [1 if handle in self.mig else 0, 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return len(self.mig[handle])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:
        uuid = self.mig[handle][index]
        if uuid is None:
            raise FakeNvmlError(6, "Not Found")
        return uuid
