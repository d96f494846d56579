"""The control groups of this process, read through /proc: where they are mounted, and the numbers in their files.

Version 1 and 2 of control groups. psutil has no cgroup counters.
"""

from __future__ import annotations

from pathlib import Path


def cgroup_directories(proc: Path, kind: str, controller: str) -> list[Path]:
    """The directories of this process's control group and its mounted ancestors, nearest first."""
    lines = (line.split(":", 2) for line in _lines(proc / "self" / "cgroup") if line.count(":") >= 2)
    own = next((path for _, controllers, path in lines if controller in controllers.split(",")), None)
    mount = _mount(proc, kind, controller)
    if own is None or mount is None:
        return []
    top, point = mount
    # In a container without a cgroup namespace the mount shows only the part of the tree below `top`.
    inside = own[len(top.rstrip("/")) :] if own == top or own.startswith(top.rstrip("/") + "/") else "/"
    here = point / inside.strip("/")
    return [here, *[parent for parent in here.parents if parent == point or point in parent.parents]]


def _mount(proc: Path, kind: str, controller: str) -> tuple[str, Path] | None:
    """The root inside the hierarchy and the mount point of one kind of cgroup file system."""
    for line in _lines(proc / "self" / "mountinfo"):
        left, _, right = line.partition(" - ")
        fields, filesystem = left.split(), right.split()
        if len(fields) < 5 or len(filesystem) < 3 or filesystem[0] != kind:
            continue
        if not controller or controller in filesystem[2].split(","):
            return fields[3], Path(fields[4])
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def read_cgroup_field(path: Path, name: str) -> int | None:
    """The number of a field in a cgroup file of several; None if it cannot be read."""
    for line in _lines(path):
        key, _, value = line.partition(" ")
        number = value.strip().removesuffix(" kB")
        if key == name and number.isdecimal():
            return int(number)
    return None


def read_cgroup_number(path: Path) -> int | None:
    """The number in a cgroup file; None if it has none, such as `max` for no limit."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None
