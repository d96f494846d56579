"""What a check process makes of its environment: the device and the threads that it computes with, and the store that
it hosts."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from test_check_tasks import Crew, crew  # noqa: F401 - the fixture that ends the processes

from dlrover_run.agent.environment import check_environments
from dlrover_run.node_check.accelerators import find_accelerator
from dlrover_run.spec import Entrypoint, JobSpec


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has torch believe in so many GPUs."""
    import torch

    def show(count: int) -> None:
        answers = {
            "is_available": count > 0,
            "device_count": count,
            "set_device": None,
            "get_device_name": "NVIDIA H200",
            "is_bf16_supported": True,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)

    return show


Gpus = Callable[[int], None]


@pytest.mark.parametrize(
    ("present", "workers", "backend"), [(8, 8, "nccl"), (8, 2, "nccl"), (1, 4, "gloo"), (1, 1, "nccl")]
)
def test_ranks_that_share_the_one_gpu_of_a_machine_talk_through_its_memory(
    gpus: Gpus, present: int, workers: int, backend: str
) -> None:
    gpus(present)
    found = find_accelerator(workers - 1, workers)
    assert (found.device.index, found.backend) == ((workers - 1) % present, backend)


def test_a_rank_for_which_none_of_several_gpus_is_left_is_reported(gpus: Gpus) -> None:
    gpus(7)
    assert find_accelerator(6, 8).device.index == 6
    with pytest.raises(RuntimeError, match="local rank 7 has no GPU: 7 are visible"):
        find_accelerator(7, 8)


@pytest.mark.long
@pytest.mark.parametrize("own", [False, True])
def test_a_rank_that_sees_its_own_device_alone_is_the_only_one_of_it(crew: Crew, own: bool) -> None:  # noqa: F811
    entrypoint = Entrypoint("program", "/bin/true")
    spec = JobSpec(entrypoint, "job", 2, virtual_local_rank=own)
    environment = check_environments(spec, {"CUDA_VISIBLE_DEVICES": "4,5"})[1]
    assert environment["CUDA_VISIBLE_DEVICES"] == ("5" if own else "4,5")
    process = crew.start_faulty("place", **environment)
    process.order(do="compute", seconds=0.1)
    assert process.answer()["device"] == ("abacus 0 of 1" if own else "abacus 1 of 2")


def test_a_wrong_result_of_one_of_several_threads_is_reported(crew: Crew) -> None:  # noqa: F811
    process = crew.start_faulty("wrong", OMP_NUM_THREADS="3")
    process.order(do="compute", seconds=1)
    answer = process.answer()
    assert answer["wrong"] is True
    assert "multiplied matrices wrongly" in answer["problem"]


@pytest.mark.long
def test_several_threads_compute_and_the_process_takes_further_orders(crew: Crew) -> None:  # noqa: F811
    process = crew.start(OMP_NUM_THREADS="3")
    for _ in range(2):
        process.order(do="compute", seconds=0.2)
        assert 0.0001 < process.answer()["tflops"] < 100
    assert process.end() == (0, "", "")


@pytest.mark.long
def test_the_store_of_links_listens_before_a_link_is_ordered(crew: Crew) -> None:  # noqa: F811
    process = crew.start(DLROVER_RUN_CHECK_STORE_PORT=str(crew.port.number))
    process.order(do="compute", seconds=0.1)
    process.answer()
    socket.create_connection(("127.0.0.1", crew.port.number)).close()


def test_a_port_that_is_taken_leaves_the_process_of_use(crew: Crew) -> None:  # noqa: F811
    with socket.create_server(("", 0)) as taken:
        process = crew.start(DLROVER_RUN_CHECK_STORE_PORT=str(taken.getsockname()[1]))
        process.order(do="compute", seconds=0.1)
        assert process.answer()["tflops"] > 0
