"""The pipes and files of torch's flight recorder: who answers, who does not, and whose files are read."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from pathlib import Path

import pytest

from dlrover_run.features.hangs.collectives.recorder_files import RecorderFiles

PIPE, FILE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"


class Recorder:
    """As a process of torch: it makes a pipe, and writes a file for each byte."""

    def __init__(self, variables: dict[str, str], rank: int) -> None:
        self.path = Path(f"{variables[FILE]}{rank}")
        self.number = 0
        pipe = f"{variables[PIPE]}{rank}.pipe"
        os.mkfifo(pipe)
        self._reader = os.open(pipe, os.O_RDWR)
        self._thread = threading.Thread(target=self._answer)

    def write(self) -> None:
        self.number += 1
        self.path.write_bytes(pickle.dumps({"entries": [], "number": self.number}, protocol=2))

    def _answer(self) -> None:
        while os.read(self._reader, 1) != b"e":
            self.write()

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        os.write(self._reader, b"e")
        self._thread.join()
        os.close(self._reader)


def _numbers(files: RecorderFiles, *ranks: int, timeout: float = 30.0) -> dict[int, int]:
    found = asyncio.run(files.read(ranks, timeout))
    return {rank: dump["number"] for rank, dump in found.items()}


def test_each_process_that_has_a_pipe_writes_a_new_dump(tmp_path: Path) -> None:
    files = RecorderFiles({}, str(tmp_path))
    variables = files.variables
    assert set(variables) == {PIPE, FILE}
    assert files.variables == variables
    with Recorder(variables, 0), Recorder(variables, 3):
        # Rank 1 does not use NCCL.
        assert _numbers(files, 0, 1, 3) == {0: 1, 3: 1}
        assert _numbers(files, 0, 3) == {0: 2, 3: 2}


def test_a_dump_of_an_earlier_incident_is_none_of_this_one(tmp_path: Path) -> None:
    files = RecorderFiles({}, str(tmp_path))
    variables = files.variables
    Path(f"{variables[FILE]}0").write_bytes(pickle.dumps({"entries": [], "number": 7}))
    pipe = f"{variables[PIPE]}0.pipe"
    os.mkfifo(pipe)
    # A process that is stopped has its pipe open and answers nothing.
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert _numbers(files, 0, timeout=0.3) == {}
    os.close(reader)
    assert _numbers(files, 0) == {}


@pytest.mark.parametrize("pipe", [PIPE, "TORCH_FR_DUMP_PIPE_FILE"])
@pytest.mark.parametrize("file", [FILE, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_names_of_the_user_are_used(tmp_path: Path, pipe: str, file: str) -> None:
    given = {pipe: str(tmp_path / "own-"), file: str(tmp_path / "trace-")}
    files = RecorderFiles(given, str(tmp_path))
    assert files.variables == {}
    with Recorder({PIPE: given[pipe], FILE: given[file]}, 0):
        assert _numbers(files, 0) == {0: 1}


def test_a_file_in_place_of_a_pipe_is_left_alone(tmp_path: Path) -> None:
    files = RecorderFiles({}, str(tmp_path))
    plain = Path(f"{files.variables[PIPE]}0.pipe")
    plain.write_text("kept")
    assert _numbers(files, 0) == {}
    assert plain.read_text() == "kept"


def test_without_a_folder_there_are_no_variables(tmp_path: Path) -> None:
    (tmp_path / "flight-recorder").write_text("a file")
    files = RecorderFiles({}, str(tmp_path))
    assert files.variables == {}
    assert _numbers(files, 0) == {}
