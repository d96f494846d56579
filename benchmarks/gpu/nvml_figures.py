"""Prints what NVML says of each device and of the processes that compute on it, as JSON. A program of its own, because
the library is the one that LD_LIBRARY_PATH names."""

import json
import time
from collections.abc import Callable
from typing import Any

import pynvml

SAMPLES, INTERVAL = 3, 0.5


def figures(index: int) -> dict[str, Any]:
    """The figures of a device now; a function that does not answer has its error in place of a figure."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    since = int((time.time() - 1) * 1e6)
    questions: dict[str, Callable[[], Any]] = {
        "name": lambda: pynvml.nvmlDeviceGetName(handle),
        "utilization": lambda: _fields(pynvml.nvmlDeviceGetUtilizationRates(handle), "gpu", "memory"),
        "power_mw": lambda: pynvml.nvmlDeviceGetPowerUsage(handle),
        "memory": lambda: _fields(pynvml.nvmlDeviceGetMemoryInfo(handle), "total", "used"),
        "processes": lambda: [
            _fields(one, "pid", "usedGpuMemory") for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        ],
        "process_utilization": lambda: [
            _fields(one, "pid", "timeStamp", "smUtil", "memUtil")
            for one in pynvml.nvmlDeviceGetProcessUtilization(handle, since)
        ],
    }
    found: dict[str, Any] = {}
    for name, ask in questions.items():
        try:
            found[name] = ask()
        except pynvml.NVMLError as error:
            found[name] = f"error: {error}"
    return found


def _fields(value: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name, None) for name in names}


if __name__ == "__main__":
    pynvml.nvmlInit()
    samples = []
    for _ in range(SAMPLES):
        samples.append([figures(index) for index in range(pynvml.nvmlDeviceGetCount())])
        time.sleep(INTERVAL)
    print(json.dumps(samples, indent=1))
