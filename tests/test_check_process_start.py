"""What a check process makes of its environment: the threads that it computes with, and the store that it hosts."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("torch")

from test_check_tasks import Crew, crew  # noqa: F401 - the fixture that ends the processes


def test_a_wrong_result_of_one_of_several_threads_is_told(crew: Crew) -> None:  # noqa: F811
    process = crew.start_faulty("wrong", OMP_NUM_THREADS="3")
    process.order(do="compute", seconds=1)
    answer = process.answer()
    assert answer["wrong"] is True
    assert "multiplied matrices wrongly" in answer["problem"]


def test_several_threads_compute_and_the_process_takes_further_orders(crew: Crew) -> None:  # noqa: F811
    process = crew.start(OMP_NUM_THREADS="3")
    for _ in range(2):
        process.order(do="compute", seconds=0.2)
        assert 0.0001 < process.answer()["tflops"] < 100
    assert process.end() == (0, "", "")


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
