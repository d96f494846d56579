"""What `stop --wait` says and returns when the job has ended, and when it only does not answer."""

from __future__ import annotations

import asyncio

import pytest
from support.virtual_torch import TorchJob, rules

from dlrover_run import exit_codes
from dlrover_run.command_line import help as pages
from dlrover_run.command_line.program import DLROVER_RUN
from dlrover_run.coordination.records.requests import OperatorRequest
from dlrover_run.features.operate.commands import asker
from dlrover_run.job_status.status import JobStatus
from dlrover_run.rendezvous.client import AskFailed


class StoppingJob:
    """A job that takes the request to stop, and then has ended, or does not answer."""

    name = "resnet"

    def __init__(self, ends: bool) -> None:
        self._ends = ends

    async def ask(self, request: OperatorRequest | None = None) -> JobStatus:
        if request is not None:
            job = TorchJob(rules(1, 1))
            job.come("a")
            return job.coordinator.status(self.name, job.now)
        if not self._ends:
            await asyncio.Event().wait()
        raise AskFailed("the agents of the job have ended", no_job=True)


@pytest.mark.parametrize("ends", [True, False])
def test_a_job_that_does_not_answer_has_not_ended(
    ends: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def find(*_: object) -> StoppingJob:
        return StoppingJob(ends)

    monkeypatch.setattr(asker, "find_job", find)
    code = pages.run(DLROVER_RUN, ["stop", "--wait", "--timeout=0.01", "resnet"])
    printed = capsys.readouterr()
    assert printed.out.startswith("dlrover-run stop: the job 'resnet' stops\n")
    assert ("has ended" in printed.out) == ends
    if ends:
        assert (code, printed.err) == (exit_codes.SUCCESS, "")
    else:
        assert code == asker.NO_JOB
        assert "the job 'resnet' has not answered within 0.01 s (--timeout)" in printed.err
