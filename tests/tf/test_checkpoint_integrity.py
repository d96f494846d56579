"""Complete and incomplete checkpoints, made from one of TensorFlow 2.21: two variables, one data file of 64 bytes."""

from __future__ import annotations

import base64
import errno
import math
import os
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from support.harness import WAIT

from tf_ps_runner.worker import checkpoint_integrity, files
from tf_ps_runner.worker.checkpoint_index import UNPARTITIONED, DamagedIndex, crc32c, masked, read_index
from tf_ps_runner.worker.checkpoint_integrity import find_newest

INDEX = base64.b64decode(
    "AAAGCAEaAggBAAUTYWxwaGEIARIIEgIIAxICCAIoGDVrPjqoAAQRYmV0YQgJEgQSAggFIBgoKDWXnT0SAAAAAAEAAAAAS7D4UQAAAAABAAAAAMDyobAAAQJj"
    "AEQAAAAAAQAAAABJdsGGSQhWDgAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAFf7gIskdUfb"
)
LENGTH = 64


def checkpoint(folder: Path, step: int, written: int) -> str:
    """Write a complete checkpoint with this modification time."""
    path = folder / f"model.ckpt-{step}"
    path.with_name(path.name + ".data-00000-of-00001").write_bytes(bytes(LENGTH))
    index = path.with_name(path.name + ".index")
    index.write_bytes(INDEX)
    os.utime(index, (written, written))
    return str(path)


def note(folder: Path, written: int, newest: str, *kept: str) -> None:
    """TensorFlow's state file."""
    lines = [f'model_checkpoint_path: "{newest}"', *(f'all_model_checkpoint_paths: "{path}"' for path in kept)]
    (folder / "checkpoint").write_text("\n".join(lines) + "\n")
    os.utime(folder / "checkpoint", (written, written))


def newest_complete(folder: Path, damaged: Collection[str] = ()) -> tuple[str | None, list[str]]:
    """The name of the newest complete checkpoint, and a sentence for each one that was skipped."""
    found, skipped = find_newest(str(folder), damaged)
    return found and Path(found).name, [sentence.replace(f"{folder}/", "") for _, sentence in skipped]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with checkpoints of the steps 50, 100 and 150."""
    for step in (50, 100, 150):
        checkpoint(tmp_path, step, step)
    note(tmp_path, 151, "model.ckpt-150", "model.ckpt-50", "model.ckpt-100", "model.ckpt-150")
    return tmp_path


def test_an_index_gives_the_length_of_the_data_and_the_variables_in_one_piece() -> None:
    index = read_index(INDEX)
    assert index.lengths == [LENGTH]
    assert index.parts == {"alpha": UNPARTITIONED, "beta": UNPARTITIONED}


def test_the_checksums_are_those_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert masked(0) == 0xA282EAD8


def test_an_index_that_is_cut_off_is_detected() -> None:
    for length in range(len(INDEX)):
        with pytest.raises(DamagedIndex):
            read_index(INDEX[:length])


def test_each_byte_of_an_index_is_checked() -> None:
    # After the entries there is an empty block that is not read, and at the end the footer with its padding.
    for at in [*range(73), *range(86, len(INDEX) - 48)]:
        with pytest.raises(DamagedIndex):
            read_index(INDEX[:at] + bytes([INDEX[at] ^ 4]) + INDEX[at + 1 :])


def data(folder: Path) -> Path:
    return folder / "model.ckpt-150.data-00000-of-00001"


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        pytest.param(lambda f: (f / "model.ckpt-150.index").unlink(), "its index is missing", id="no index"),
        pytest.param(lambda f: (f / "model.ckpt-150.index").write_bytes(INDEX[:100]), "its index is cut off", id="cut"),
        pytest.param(lambda f: (f / "model.ckpt-150.index").write_bytes(b""), "its index is cut off", id="empty"),
        pytest.param(lambda f: data(f).unlink(), "model.ckpt-150.data-00000-of-00001 is missing", id="no data"),
        pytest.param(
            lambda f: data(f).write_bytes(bytes(40)), "model.ckpt-150.data-00000-of-00001 has 40 of 64 bytes", id="half"
        ),
    ],
)
def test_an_incomplete_checkpoint_is_skipped_reported_and_kept(
    folder: Path, damage: Callable[[Path], object], why: str
) -> None:
    damage(folder)
    left = sorted(os.listdir(folder))
    assert newest_complete(folder) == ("model.ckpt-100", [f"model.ckpt-150 is not complete ({why})"])
    assert sorted(os.listdir(folder)) == left


UNUSED = "checkpoint is missing, so 3 checkpoints are not used"
NO_NAME = "checkpoint names no checkpoint; the newest one there is used"


@pytest.mark.parametrize(
    ("change", "newest", "skipped"),
    [
        pytest.param(lambda f: None, "model.ckpt-150", [], id="recorded"),
        pytest.param(lambda f: checkpoint(f, 200, written=200), "model.ckpt-200", [], id="not recorded any more"),
        pytest.param(lambda f: checkpoint(f, 900, written=20), "model.ckpt-150", [], id="older with a higher number"),
        pytest.param(lambda f: (f / "checkpoint").write_bytes(b""), "model.ckpt-150", [NO_NAME], id="empty state file"),
        # As TensorFlow does, which is silent.
        pytest.param(lambda f: (f / "checkpoint").unlink(), None, [UNUSED], id="no state file"),
        pytest.param(lambda f: [path.unlink() for path in f.iterdir()], None, [], id="an empty directory"),
    ],
)
def test_which_checkpoint_is_the_newest(
    folder: Path,
    change: Callable[[Path], object],
    newest: str | None,
    skipped: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint_integrity, "STATE_TIMEOUT", 0.0)
    change(folder)
    assert newest_complete(folder) == (newest, skipped)


class FailingFiles:
    """The state file of a file system that is away for `times` attempts to read it."""

    def __init__(self, error: OSError, times: float, listed: bool = True) -> None:
        self._error, self._times, self._listed = error, times, listed

    def read(self, path: str, most: int = -1) -> bytes:
        if path.endswith("/checkpoint") and self._times > 0:
            self._times -= 1
            raise self._error
        return files.read(path, most)

    def list_names(self, directory: str) -> list[str]:
        return files.list_names(directory) if self._listed else []

    def __getattr__(self, name: str) -> object:
        return getattr(files, name)


MISSING = FileNotFoundError(errno.ENOENT, "No such file or directory")
AWAY = OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("error", [MISSING, AWAY, OSError(errno.ESTALE, "Stale file handle")], ids=str)
def test_a_state_file_that_is_away_for_a_moment_begins_no_fresh_model(
    folder: Path, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_integrity, "files", FailingFiles(error, times=2))
    monkeypatch.setattr(checkpoint_integrity, "STATE_INTERVAL", 0.0)
    monkeypatch.setattr(checkpoint_integrity, "STATE_TIMEOUT", WAIT)
    assert newest_complete(folder) == ("model.ckpt-150", [])


def test_a_state_file_that_cannot_be_read_is_reported_and_the_newest_checkpoint_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_integrity, "files", FailingFiles(AWAY, times=math.inf))
    monkeypatch.setattr(checkpoint_integrity, "STATE_TIMEOUT", 0.0)
    newest, (sentence,) = newest_complete(folder)
    assert newest == "model.ckpt-150"
    assert "checkpoint cannot be read" in sentence


def test_a_directory_of_which_nothing_can_be_read_is_not_taken_for_an_empty_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_integrity, "files", FailingFiles(AWAY, times=math.inf, listed=False))
    monkeypatch.setattr(checkpoint_integrity, "STATE_TIMEOUT", 0.0)
    with pytest.raises(OSError, match="Input/output error"):
        find_newest(str(folder))


def test_a_checkpoint_of_another_name_is_not_used(folder: Path) -> None:
    for step in (50, 100, 150):
        (folder / f"model.ckpt-{step}.index").rename(folder / f"bert.ckpt-{step}.index")
    found, skipped = newest_complete(folder)
    assert (found, len(skipped)) == (None, 3)


def test_a_checkpoint_that_failed_to_be_restored_is_skipped(folder: Path) -> None:
    assert newest_complete(folder, [str(folder / "model.ckpt-150")])[0] == "model.ckpt-100"


def test_names_with_quotes_and_letters_of_other_languages_are_read(tmp_path: Path) -> None:
    folder = tmp_path / 'mod"el é'
    folder.mkdir()
    checkpoint(folder, 5, written=5)
    escaped = str(folder / "model.ckpt-5").replace('"', '\\"').replace("é", "\\303\\251")
    note(folder, 6, escaped)
    assert newest_complete(folder) == ("model.ckpt-5", [])
