"""Finds the newest complete checkpoint of a directory.

A checkpoint is complete if its index can be read and each data file is as long as in the index. Checksums of the data
are compared where that is cheap. A damaged checkpoint is skipped and reported, and never deleted.
"""

from __future__ import annotations

import codecs
import os
import re
import time
from collections.abc import Collection, Iterator

from tf_ps_runner.worker import files
from tf_ps_runner.worker.checkpoint_index import Begins, DamagedIndex, read_index

MAX_SUMMED = 64 << 20
"""Bytes of data that are read to compare checksums, a tenth of a second's work; of larger files only the length is
checked, and TensorFlow compares the checksums while it restores."""

STATE_TIMEOUT = 3.0
"""Seconds for which a state file that cannot be read is tried again. A script that begins anew by intent, with its old
checkpoints in the same directory, waits as long once."""

STATE_INTERVAL = 0.2
"""Seconds between two of these attempts."""

STATE = "checkpoint"
"""The file in which TensorFlow records the newest checkpoint, and those that it keeps."""

_PATHS = re.compile(rb'^\s*(all_)?model_checkpoint_path(?:s)?\s*:\s*"((?:[^"\\\n]|\\.)*)"\s*$', re.MULTILINE)

_checked: dict[tuple[str, float], str | None] = {}
"""What is wrong with checkpoints whose checksums were compared, by path and time."""


def find_newest(directory: str, damaged: Collection[str] = ()) -> tuple[str | None, list[tuple[str, str]]]:
    """The newest complete checkpoint of a directory, as TensorFlow names it; None if there is none.

    `damaged` are not checked again. Also returns each checkpoint that was skipped, with a sentence on why; a
    sentence about the whole directory has an empty path. Raises the error of reading if nothing in the directory can
    be read for `STATE_TIMEOUT`.
    """
    skipped: list[tuple[str, str]] = []
    recorded_in = os.path.join(directory, STATE)
    try:
        state = _read_state(directory)
    except FileNotFoundError:
        # A user who removes it begins anew, as with TensorFlow; that there are checkpoints is said all the same.
        number = sum(name.endswith(".index") for name in files.list_names(directory))
        if number:
            is_are = "checkpoint is" if number == 1 else "checkpoints are"
            skipped.append(("", f"{recorded_in} is missing, so {number} {is_are} not used"))
        return None, skipped
    except Exception as error:
        if not files.list_names(directory):
            # Not the same as an empty directory: a fresh model would replace what cannot be read now.
            raise
        skipped.append(("", f"{recorded_in} cannot be read ({error}); the newest checkpoint there is used"))
        state = b'model_checkpoint_path: ""'
    recorded = [(bool(kept), _unescaped(path)) for kept, path in _PATHS.findall(state)]
    newest = next((path for kept, path in recorded if not kept), None)
    if newest is None:
        skipped.append(("", f"{recorded_in} names no checkpoint; the newest one there is used"))
    newest = newest or None
    seen = set(damaged)
    for path in _candidates(directory, newest, [path for kept, path in recorded if kept]):
        if path not in seen:
            seen.add(path)
            damage = find_damage(path)
            if damage is None:
                return path, skipped
            skipped.append((path, f"{path} is not complete ({damage})"))
    return None, skipped


def _read_state(directory: str) -> bytes:
    """The state file. One that is missing beside checkpoints, or that cannot be read, is read again for a while: a file
    system without an atomic rename has none for a moment at each save, and a network file system may be away. Raises
    what the last attempt raised."""
    until = time.monotonic() + STATE_TIMEOUT
    while True:
        try:
            return files.read(os.path.join(directory, STATE))
        except FileNotFoundError:
            if not any(name.endswith(".index") for name in files.list_names(directory)) or time.monotonic() >= until:
                raise
        except Exception:
            if time.monotonic() >= until:
                raise
        time.sleep(STATE_INTERVAL)


def find_damage(path: str) -> str | None:
    """Why a checkpoint is not complete, as a clause; None if it is complete."""
    try:
        lengths = read_index(files.read(path + ".index")).lengths
    except DamagedIndex as damaged:
        return str(damaged)
    except Exception:
        # The old format is one file; only TensorFlow can check whether it is complete.
        return None if files.exists(path) else "its index is missing"
    for shard, length in enumerate(lengths):
        name = f"{path}.data-{shard:05d}-of-{len(lengths):05d}"
        size = files.size(name)
        if size is None:
            return f"{os.path.basename(name)} is missing"
        if size < length:
            return f"{os.path.basename(name)} has {size} of {length} bytes"
    return _compare_checksums(path) if sum(lengths) <= MAX_SUMMED else None


def parts_in(path: str) -> dict[str, Begins] | None:
    """The parts of each variable of a checkpoint; None without an index, as in the format of before 2016, or with one
    that cannot be read."""
    try:
        return read_index(files.read(path + ".index")).parts
    except Exception:
        return None


def _candidates(directory: str, newest: str | None, kept: list[str]) -> Iterator[str]:
    """The checkpoints to check, in order: those written after TensorFlow's last record and before it could record them,
    the recorded newest, the others that it keeps from the newest on, and all others of that name in the directory."""
    names = [os.path.join(directory, path) for path in ([newest] if newest is not None else [])]
    names += [os.path.join(directory, path) for path in reversed(kept)]
    stem = re.sub(r"-\d+$", "", os.path.basename(names[0])) if names else "model.ckpt"
    numbered = re.compile(re.escape(stem) + r"-(\d+)\.index")
    matches = filter(None, map(numbered.fullmatch, files.list_names(directory)))
    stored = [(int(match[1]), os.path.join(directory, match[0][: -len(".index")])) for match in matches]
    stored.sort(reverse=True)
    recorded_at = files.modified(os.path.join(directory, STATE))
    last = next((step for step, path in stored if names and path == names[0]), -1)
    for step, path in stored:
        if names and step > last and files.modified(path + ".index") > recorded_at:
            yield path
    yield from names
    yield from (path for _, path in stored)


def _compare_checksums(path: str) -> str | None:
    """What TensorFlow finds wrong when it reads each tensor, which compares its checksum; None if nothing is wrong, or
    that is unknown."""
    reader = getattr(getattr(files.tensorflow(), "train", None), "load_checkpoint", None)
    key = (path, files.modified(path + ".index"))
    if reader is None or key in _checked:
        return _checked.get(key)
    damage = None
    try:
        tensors = reader(path)
        for name in tensors.get_variable_to_shape_map():
            tensors.get_tensor(name)
    except Exception as error:
        line = str(error).partition("\n")[0]
        if re.search(r"checksum|data loss|out of range|truncated|corrupt", line, re.IGNORECASE):
            damage = line[:200]
    _checked[key] = damage
    return damage


def _unescaped(text: bytes) -> str:
    return codecs.escape_decode(text)[0].decode("utf-8", "surrogateescape")
