"""Where an agent listens for `tf-ps-run scale`, when others of this machine listen at the same name."""

from __future__ import annotations

import asyncio
import os
import re

import pytest

from tf_ps_runner.agent.scale_server import ScaleServer


@pytest.mark.parametrize(
    ("alone", "said"),
    [(False, ""), (True, "another job on this machine is named .* `tf-ps-run scale` reaches only that one")],
)
def test_the_first_node_of_a_machine_listens_for_all_of_its_job(alone: bool, said: str) -> None:
    async def run() -> str | None:
        first, second = (ScaleServer(f"desk-{os.getpid()}", lambda wish: 1) for _ in range(2))
        assert await first.open(alone) is None
        problem = await second.open(alone)
        await second.close()
        await first.close()
        return problem

    problem = asyncio.run(run())
    assert re.fullmatch(said, problem or "")
