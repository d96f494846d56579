"""Complete and incomplete checkpoints, made from one of TensorFlow 2.21: two variables, one data file of 64 bytes."""

from __future__ import annotations

import base64
import os
from collections.abc import Collection
from pathlib import Path

import pytest

from tf_ps_runner.worker.checkpoint_index import UNPARTITIONED, DamagedIndex, crc32c, masked, read_index
from tf_ps_runner.worker.checkpoint_integrity import find_newest

INDEX = base64.b64decode(
    "AAAGCAEaAggBAAUTYWxwaGEIARIIEgIIAxICCAIoGDVrPjqoAAQRYmV0YQgJEgQSAggFIBgoKDWXnT0SAAAAAAEAAAAAS7D4UQAAAAABAAAAAMDyobAAAQJj"
    "AEQAAAAAAQAAAABJdsGGSQhWDgAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAFf7gIskdUfb"
)
LENGTH = 64


def checkpoint(folder: Path, step: int, written: int) -> str:
    """A complete checkpoint, written at a time."""
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


def newest_complete(folder: str, damaged: Collection[str] = ()) -> tuple[str | None, list[str]]:
    """The newest complete checkpoint, and a sentence for each one that was skipped."""
    found, skipped = find_newest(folder, damaged)
    return found, [sentence for _, sentence in skipped]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with checkpoints of the steps 50, 100 and 150."""
    for step in (50, 100, 150):
        checkpoint(tmp_path, step, step)
    note(tmp_path, 151, "model.ckpt-150", "model.ckpt-50", "model.ckpt-100", "model.ckpt-150")
    return tmp_path


def test_an_index_gives_the_length_of_the_data() -> None:
    assert read_index(INDEX).lengths == [LENGTH]


def test_an_index_gives_also_the_variables_in_one_piece() -> None:
    assert read_index(INDEX).parts == {"alpha": UNPARTITIONED, "beta": UNPARTITIONED}


def test_the_checksums_are_those_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert masked(0) == 0xA282EAD8


def test_an_index_that_is_cut_off_is_detected() -> None:
    for length in range(len(INDEX)):
        with pytest.raises(DamagedIndex):
            read_index(INDEX[:length])


def test_each_byte_of_an_index_counts() -> None:
    # After the entries comes an empty block that is not read, and at the end the footer with its padding.
    for at in [*range(73), *range(86, len(INDEX) - 48)]:
        with pytest.raises(DamagedIndex):
            read_index(INDEX[:at] + bytes([INDEX[at] ^ 4]) + INDEX[at + 1 :])


def test_the_newest_is_what_tensorflow_records(folder: Path) -> None:
    assert newest_complete(str(folder)) == (str(folder / "model.ckpt-150"), [])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda f: (f / "model.ckpt-150.index").unlink(), "its index is missing"),
        (lambda f: (f / "model.ckpt-150.index").write_bytes(INDEX[:100]), "its index is cut off"),
        (lambda f: (f / "model.ckpt-150.index").write_bytes(b""), "its index is cut off"),
        (
            lambda f: (f / "model.ckpt-150.data-00000-of-00001").unlink(),
            "model.ckpt-150.data-00000-of-00001 is missing",
        ),
        (
            lambda f: (f / "model.ckpt-150.data-00000-of-00001").write_bytes(bytes(40)),
            "model.ckpt-150.data-00000-of-00001 has 40 of 64 bytes",
        ),
    ],
    ids=["no index", "half an index", "an empty index", "no data", "half the data"],
)
def test_an_incomplete_checkpoint_is_skipped_reported_and_kept(folder: Path, damage: object, why: str) -> None:
    assert callable(damage)
    damage(folder)
    left = sorted(os.listdir(folder))
    assert newest_complete(str(folder)) == (
        str(folder / "model.ckpt-100"),
        [f"{folder / 'model.ckpt-150'} is not complete ({why})"],
    )
    assert sorted(os.listdir(folder)) == left


def test_a_checkpoint_that_could_not_be_recorded_any_more_is_the_newest(folder: Path) -> None:
    newest = checkpoint(folder, 200, written=200)
    assert newest_complete(str(folder)) == (newest, [])


def test_an_older_file_with_a_higher_number_is_not_the_newest(folder: Path) -> None:
    checkpoint(folder, 900, written=20)
    assert newest_complete(str(folder)) == (str(folder / "model.ckpt-150"), [])


def test_a_checkpoint_of_another_name_is_not_used(folder: Path) -> None:
    for step in (50, 100, 150):
        (folder / f"model.ckpt-{step}.index").rename(folder / f"bert.ckpt-{step}.index")
    found, skipped = newest_complete(str(folder))
    assert found is None
    assert len(skipped) == 3


def test_with_an_empty_state_file_the_newest_checkpoint_is_used_with_a_message(folder: Path) -> None:
    (folder / "checkpoint").write_bytes(b"")
    found, skipped = newest_complete(str(folder))
    assert found == str(folder / "model.ckpt-150")
    assert skipped == [f"{folder / 'checkpoint'} names no checkpoint; the newest one there is used"]


def test_without_a_state_file_there_is_no_checkpoint_as_for_tensorflow(folder: Path) -> None:
    (folder / "checkpoint").unlink()
    assert newest_complete(str(folder)) == (None, [])


def test_a_checkpoint_that_failed_to_be_restored_is_passed_over(folder: Path) -> None:
    assert newest_complete(str(folder), [str(folder / "model.ckpt-150")])[0] == str(folder / "model.ckpt-100")


def test_names_with_quotes_and_letters_of_other_languages_are_read(tmp_path: Path) -> None:
    folder = tmp_path / 'mod"el é'
    folder.mkdir()
    checkpoint(folder, 5, written=5)
    escaped = str(folder / "model.ckpt-5").replace('"', '\\"').replace("é", "\\303\\251")
    note(folder, 6, escaped)
    assert newest_complete(str(folder)) == (str(folder / "model.ckpt-5"), [])
