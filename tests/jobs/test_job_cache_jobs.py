"""Compiled code outlives a restart and, with `--job-cache`, the job; many processes may use one cache."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from support.harness import Mailbox, finish, launch

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_FX_GRAPH_CACHE")

ONE_THREAD = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Else each worker starts processes that compile."""

TELL = f"""
import os
post(**{{name: os.environ.get(name) for name in {NAMES}}})
"""

COMPILE = """
import os, signal
import torch
from torch._dynamo.utils import counters

def step(x):
    return (x.sin() * 2 + x.cos()).sum(dim=0).relu()

torch.compile(step)(torch.ones(8, 16))
found = counters["inductor"]
post(hits=found["fxgraph_cache_hit"], misses=found["fxgraph_cache_miss"])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ.get("TEST_STAYS"):
    signal.pause()
"""


def variables(mailbox: Mailbox, *flags: str, **env: str) -> list[dict[str, Any]]:
    clean: dict[str, str | None] = dict.fromkeys(NAMES)
    job = launch(mailbox, *flags, "--nproc-per-node=2", mailbox.script("train.py", TELL), env={**clean, **env})
    found = mailbox.gather(2)
    assert finish(job).code == 0
    return [{name: message[name] for name in NAMES} for message in found]


def test_workers_find_the_caches_below_the_directory_of_the_flag(mailbox: Mailbox) -> None:
    first, second = variables(mailbox, "--job-cache=cache", TRITON_CACHE_DIR="/own")
    cache = mailbox.directory / "cache"
    assert first == second
    assert first["TRITON_CACHE_DIR"] == "/own"
    assert first["TORCHINDUCTOR_CACHE_DIR"] == str(cache / "inductor")
    assert first["CUDA_CACHE_PATH"] == str(cache / "cuda")
    assert cache.is_dir()


def test_without_the_flag_and_a_device_nothing_is_set(mailbox: Mailbox) -> None:
    assert variables(mailbox) == [dict.fromkeys(NAMES)] * 2


@pytest.mark.long
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_restart_and_a_later_job_compile_nothing(mailbox: Mailbox, method: str) -> None:
    flags = ("--job-cache=cache", f"--start-method={method}", "--max-restarts=1")
    script = mailbox.script("train.py", COMPILE)
    clean: dict[str, str | None] = {**dict.fromkeys(NAMES), **ONE_THREAD}
    job = launch(mailbox, *flags, script, env={**clean, "TEST_STAYS": "1"})
    cold = mailbox.receive()
    assert (cold["hits"], cold["misses"]) == (0, 1)
    os.kill(cold["pid"], signal.SIGKILL)
    warm = mailbox.receive()
    assert (warm["restart"], warm["hits"], warm["misses"]) == (1, 1, 0)
    assert finish(job).code == 0
    later = launch(mailbox, *flags, script, env=clean)
    message = mailbox.receive()
    assert (message["hits"], message["misses"]) == (1, 0)
    assert finish(later).code == 0
