"""The newest complete checkpoint of a directory.

A checkpoint is complete if its index can be read and each data file is as long as the index says. Checksums of the data
are compared where that is cheap. A damaged checkpoint is skipped and reported, and never deleted.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Collection, Iterator

from tf_ps_runner.worker import files
from tf_ps_runner.worker.checkpoint_index import DamagedIndex, lengths, parts

MAX_SUMMED = 64 << 20
"""Bytes of data that are read to compare checksums, a tenth of a second's work; of larger files only the length is
checked, and TensorFlow compares the checksums while it restores."""

STATE = "checkpoint"
"""The file in which TensorFlow records the newest checkpoint, and those that it keeps."""

_PATHS = re.compile(rb'^\s*(all_)?model_checkpoint_path(?:s)?\s*:\s*"((?:[^"\\\n]|\\.)*)"\s*$', re.MULTILINE)

_summed: dict[tuple[str, float], str | None] = {}


def newest_complete(directory: str, passed_over: Collection[str] = ()) -> tuple[str | None, list[str]]:
    """The newest complete checkpoint of a directory, as TensorFlow names it, and a sentence for each one skipped.

    None if there is none. `passed_over` are not checked again.
    """
    found, skipped = look(directory, passed_over)
    return found, [f"{path} is not whole ({why})" if path else why for path, why in skipped]


def look(directory: str, passed_over: Collection[str] = ()) -> tuple[str | None, list[tuple[str, str]]]:
    """The same, with each skipped one as its path and a clause that says what is wrong with it."""
    skipped: list[tuple[str, str]] = []
    try:
        state = files.read(os.path.join(directory, STATE))
    except Exception:
        return None, []
    recorded = [(bool(kept), _unescaped(path)) for kept, path in _PATHS.findall(state)]
    newest = next((path for kept, path in recorded if not kept), None)
    if newest is None:
        skipped.append(("", f"{os.path.join(directory, STATE)} names no checkpoint; the newest one there is taken"))
    seen = set(passed_over)
    for path in _candidates(directory, newest, [path for kept, path in recorded if kept]):
        if path in seen:
            continue
        seen.add(path)
        why = find_damage(path)
        if why is None:
            return path, skipped
        skipped.append((path, why))
    return None, skipped


def find_damage(path: str) -> str | None:
    """Why a checkpoint is not complete, as a clause; None if it is complete."""
    try:
        index = files.read(path + ".index")
    except Exception:
        # The old format is one file; only TensorFlow can tell whether it is complete.
        return None if files.size(path) is not None else "its index is missing"
    try:
        needed = lengths(index)
    except DamagedIndex as damaged:
        return str(damaged)
    for shard, length in enumerate(needed):
        name = f"{path}.data-{shard:05d}-of-{len(needed):05d}"
        size = files.size(name)
        if size is None:
            return f"{os.path.basename(name)} is missing"
        if size < length:
            return f"{os.path.basename(name)} has {size} of {length} bytes"
    return _other_sums(path) if sum(needed) <= MAX_SUMMED else None


def parts_in(path: str) -> dict[str, frozenset[tuple[int, ...]]] | None:
    """The parts of each variable of a checkpoint, as in `checkpoint_index.parts`; None without an index, as in the
    format of before 2016, or with one that cannot be read."""
    try:
        return parts(files.read(path + ".index"))
    except Exception:
        return None


def _candidates(directory: str, newest: str | None, kept: list[str]) -> Iterator[str]:
    """The checkpoints to check, in order: those written after TensorFlow's last record and before it could record them,
    the recorded newest, the others that it keeps from the newest on, and all others of that name in the directory."""
    names = [os.path.join(directory, path) for path in ([newest] if newest is not None else [])]
    names += [os.path.join(directory, path) for path in reversed(kept)]
    stem = re.sub(r"-\d+$", "", os.path.basename(names[0])) if names else "model.ckpt"
    numbered = re.compile(re.escape(stem) + r"-(\d+)\.index")
    there = []
    for name in files.list_names(directory):
        found = numbered.fullmatch(name)
        if found:
            there.append((int(found.group(1)), os.path.join(directory, name[: -len(".index")])))
    there.sort(reverse=True)
    noted = files.modified(os.path.join(directory, STATE))
    last = next((step for step, path in there if names and path == names[0]), -1)
    yield from (path for step, path in there if names and step > last and files.modified(path + ".index") > noted)
    yield from names
    yield from (path for _, path in there)


def _other_sums(path: str) -> str | None:
    """Have TensorFlow read each tensor, which compares its checksum; None if nothing is wrong, or that is unknown."""
    reader = getattr(getattr(files.tensorflow(), "train", None), "load_checkpoint", None)
    key = (path, files.modified(path + ".index"))
    if reader is None or key in _summed:
        return _summed.get(key)
    why = None
    try:
        tensors = reader(path)
        for name in tensors.get_variable_to_shape_map():
            tensors.get_tensor(name)
    except Exception as error:
        words = str(error).splitlines()[0] if str(error) else ""
        if re.search(r"checksum|data loss|out of range|truncated|corrupt", words, re.IGNORECASE):
            why = words[:200]
    _summed[key] = why
    return why


def _unescaped(text: bytes) -> str:
    return codecs.escape_decode(text)[0].decode("utf-8", "surrogateescape")
