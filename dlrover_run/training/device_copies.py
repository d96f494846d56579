"""The few calls by which storages of a device get into memory that this process has mapped."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, Protocol


class DeviceCopies(Protocol):
    """What a device can do; a test has one that needs no accelerator."""

    def is_remote(self, storage: Any) -> bool:
        """Whether a device has to copy this storage of torch."""

    def register(self, address: int, size: int, device: Any) -> str:
        """Pin this memory, so that the device copies to it by itself; why that failed, empty if it did not."""

    def unregister(self, address: int) -> None:
        """Undo `register`, before the memory is unmapped."""

    def copy_async(self, target: memoryview, storage: Any) -> None:
        """Begin to copy a storage to this part of the memory, of the same size."""

    def synchronize(self, storages: Sequence[Any]) -> None:
        """Return when each copy of these storages has arrived. Raises RuntimeError if one failed."""


_PORTABLE = 1
"""cudaHostRegisterPortable: the memory is pinned for each device that this process uses."""


class TorchCopies:
    """The devices of torch. Only CUDA (and ROCm, which torch names so) is given pinned memory and copies in the
    background; each other device copies one storage after the other."""

    def is_remote(self, storage: Any) -> bool:
        return bool(storage.device.type != "cpu")

    def register(self, address: int, size: int, device: Any) -> str:
        if device.type != "cuda":
            return ""
        problems: list[str] = []

        def register() -> None:
            import torch

            runtime = _runtime()
            with torch.cuda.device(device):
                code = int(runtime.cudaHostRegister(address, size, _PORTABLE))
            if code:
                problems.append(f"cudaHostRegister: error {code}")

        # CUDA keeps the last error of each thread, and the next kernel that this one starts would raise it.
        thread = threading.Thread(target=register, daemon=True)
        thread.start()
        thread.join()
        return problems[0] if problems else ""

    def unregister(self, address: int) -> None:
        _runtime().cudaHostUnregister(address)

    def copy_async(self, target: memoryview, storage: Any) -> None:
        if storage.device.type == "cpu":
            # A quarter of the processor time of torch's copy of bytes, and other threads run meanwhile.
            ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(target)), storage.data_ptr(), len(target))
            return
        import torch

        with torch.no_grad():
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            torch.frombuffer(target, dtype=torch.uint8).copy_(source, non_blocking=storage.device.type == "cuda")

    def synchronize(self, storages: Sequence[Any]) -> None:
        import torch

        for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
            # The copies are on the current stream, behind all that the script has enqueued there.
            torch.cuda.current_stream(device).synchronize()


TORCH_COPIES = TorchCopies()


def _runtime() -> Any:
    import torch

    cuda: Any = torch.cuda
    return cuda.cudart()
