"""Keeps what NCCL and torch have said of a hang, in a folder of its own for each incident of each round."""

from __future__ import annotations

import os

import msgspec

from dlrover_run.features.hangs.collectives.evidence import Evidence
from dlrover_run.output.run_directory import RunDir

FOLDER = "hangs"
"""The folder in the directory of the run."""

MAX_INCIDENTS = 1000
"""Incidents of one round that are kept."""


def keep_evidence(evidence: Evidence, round_number: int, run_dir: RunDir) -> str | None:
    """Write the evidence to `hangs/round-1-incident-1` and so on, which is returned; nothing is overwritten. None
    without any, or without a directory that stays. Raises OSError."""
    if not (evidence.ras_report or evidence.dumps) or not run_dir.keep or run_dir.path is None:
        return None
    folder = _new_folder(os.path.join(run_dir.path, FOLDER), round_number)
    if evidence.ras_report:
        suffix = "json" if evidence.ras_report.lstrip().startswith("{") else "txt"
        with open(os.path.join(folder, f"nccl-ras.{suffix}"), "w") as file:
            file.write(evidence.ras_report)
    for rank, dump in evidence.dumps.items():
        with open(os.path.join(folder, f"flight-recorder-rank-{rank}.json"), "wb") as file:
            file.write(msgspec.json.encode(dump))
    return folder


def _new_folder(above: str, round_number: int) -> str:
    os.makedirs(above, exist_ok=True)
    for number in range(1, MAX_INCIDENTS + 1):
        folder = os.path.join(above, f"round-{round_number}-incident-{number}")
        try:
            os.mkdir(folder)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{above} has {MAX_INCIDENTS} incidents of round {round_number}")
