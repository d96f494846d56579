"""Which warm workers are needed, what they know, and which may be used; and what they do with a device."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dlrover_run.cli import parse
from dlrover_run.coordination.records.round import RankAssignment, RoundKey
from dlrover_run.features.warm_workers.choice import (
    STEP_DELAY,
    STORE_DELAY,
    Changes,
    Use,
    Warm,
    changes,
    lasting,
    prepares_at,
    use_of,
)
from dlrover_run.spec import SpecError
from dlrover_run.workers.environment import environments_before_ranks, worker_environment
from dlrover_run.workers.template import ahead


@pytest.mark.parametrize(
    ("running", "done", "warm", "workers", "expected"),
    [
        ({0, 1}, (), (), 2, Changes(frozenset(), (0, 1))),
        ({0, 1}, (), {1}, 2, Changes(frozenset(), (0,))),
        ({0, 1}, (), {0, 1}, 2, Changes(frozenset(), ())),
        # One has failed, or waits for the next round: what is ready stays.
        ({1}, (), {0, 1}, 2, Changes(frozenset(), ())),
        ({1}, {0}, {0, 1}, 2, Changes(frozenset({0}), ())),
        ((), (), {0, 1, 2}, 1, Changes(frozenset({1, 2}), ())),
    ],
)
def test_each_worker_that_runs_has_one_and_none_is_left_over(
    running: set[int], done: set[int], warm: set[int], workers: int, expected: Changes
) -> None:
    assert changes(running, done, warm, workers) == expected


@pytest.mark.parametrize(
    ("warm", "environment", "use"),
    [
        (None, {}, "none"),
        (Warm({"A": "1"}, waits=False), {"A": "1"}, "prepares"),
        (Warm({"A": "1"}, waits=True), {"A": "1", "RANK": "3"}, "ready"),
        (Warm({"A": "1"}, waits=True), {"A": "2"}, "environment"),
        (Warm({"A": "1"}, waits=True), {}, "environment"),
    ],
)
def test_one_that_has_read_another_environment_is_not_used(
    warm: Warm | None, environment: dict[str, str], use: Use
) -> None:
    assert use_of(warm, environment) == use


def test_nothing_of_a_round_is_in_its_environment() -> None:
    parent = {"PATH": "/bin", "DLROVER_OF_THE_USER": "1", "NODE_NUM": "7"}
    spec = parse(["--nproc-per-node=2", "-m", "json"], parent)
    numbers = {"node_rank": 4, "nodes": 7, "first_rank": 8, "world_size": 14, "role_first_rank": 8}
    ranks = RankAssignment(
        key=RoundKey(), workers=2, store_address="host", store_port=99, role_world_size=14, restart_count=5, **numbers
    )
    given = {"TRITON_CACHE_DIR": "/cache/1", "DLROVER_PROGRESS": "/proc/1/fd/9", "DLROVER_SURVIVOR_LINE": "3"}
    environment = {**worker_environment(spec, ranks, 1, parent, "/errors/1"), **given}
    left = lasting(environment, environments_before_ranks(spec, parent)[1::2], parent)
    assert not left.keys() & {
        *("RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR"),
        *("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE", "NODE_RANK", "WORKER_RANK"),
        *("DLROVER_PROGRESS", "DLROVER_SURVIVOR_LINE", "WORKER_NUM"),
    }
    kept = {
        **parent,
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": "/cache/1",
    }
    assert kept.items() <= left.items()


@pytest.mark.parametrize(
    ("stepped", "met", "at"),
    [(None, None, None), (None, 5.0, 5.0 + STORE_DELAY), (7.0, 5.0, 7.0 + STEP_DELAY), (7.0, None, 7.0 + STEP_DELAY)],
)
def test_they_are_prepared_once_the_workers_train(stepped: float | None, met: float | None, at: float | None) -> None:
    assert prepares_at(stepped, met) == at


@pytest.mark.parametrize("flag", ["--warm-workers", "PET_WARM_WORKERS"])
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ([], "needs --start-method=forkserver"),
        (["--start-method=spawn"], "needs --start-method=forkserver"),
        (["--start-method=forkserver", "--no-python"], "cannot be used with --no-python"),
    ],
)
def test_it_is_refused_where_no_worker_is_forked(flag: str, flags: list[str], why: str) -> None:
    arguments, environ = ([flag], {}) if flag.startswith("--") else ([], {flag: "1"})
    with pytest.raises(SpecError, match=f"{flag}.* {why}, because"):
        parse([*arguments, *flags, "/bin/true"], environ)


class FakeTorch(ModuleType):
    """Records what is called, and fails for what draws a number or sets a seed."""

    def __init__(self, devices: int) -> None:
        super().__init__("torch")
        self.calls: list[str] = []
        self.held = 0
        self.distributed = SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: True)
        self.backends = SimpleNamespace(cudnn=SimpleNamespace(is_available=lambda: True))
        self.nn = SimpleNamespace(functional=SimpleNamespace(conv2d=self._uses("conv2d")))
        self.matmul = self._uses("matmul")
        self._C = SimpleNamespace(_cuda_clearCublasWorkspaces=self._frees("workspaces"))
        self.cuda = SimpleNamespace(
            is_available=lambda: devices > 0,
            device_count=lambda: devices,
            device=self._enters,
            synchronize=lambda: self.calls.append("synchronize"),
            empty_cache=self._frees("cache"),
            reset_peak_memory_stats=lambda: self.calls.append("peaks"),
            reset_accumulated_memory_stats=lambda: self.calls.append("sums"),
            nccl=SimpleNamespace(version=lambda: self.calls.append("nccl")),
        )

    def ones(self, *shape: int, device: str) -> object:
        self.calls.append(f"ones on {device}")
        self.held += 1
        return object()

    def no_grad(self) -> Any:
        return nullcontext()

    def _enters(self, index: int) -> Any:
        self.calls.append(f"device {index}")
        return nullcontext()

    def _uses(self, name: str) -> Any:
        def use(*operands: object) -> None:
            self.held += 1
            self.calls.append(name)

        return use

    def _frees(self, name: str) -> Any:
        def free() -> None:
            self.held = 0
            self.calls.append(name)

        return free


@pytest.mark.parametrize(("devices", "local_rank", "index"), [(2, 1, 1), (1, 1, 0)])
def test_a_device_is_opened_and_nothing_of_it_is_kept(
    monkeypatch: pytest.MonkeyPatch, devices: int, local_rank: int, index: int
) -> None:
    """What is not in the fake, as a random generator, raises an error."""
    torch = FakeTorch(devices)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert ahead.open_device(local_rank) == f"cuda:{index}"
    assert torch.calls == [
        *(f"device {index}", f"ones on cuda:{index}", "matmul", "conv2d", "nccl", "synchronize"),
        *("workspaces", "cache", "peaks", "sums"),
    ]
    assert torch.held == 0


def test_without_a_device_or_with_one_that_fails_the_worker_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch(0)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert ahead.open_device(0) == ""
    broken = FakeTorch(1)
    monkeypatch.setattr(broken, "ones", None)
    monkeypatch.setitem(sys.modules, "torch", broken)
    assert ahead.open_device(0).startswith("TypeError: ")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert ahead.open_device(0) == ""
