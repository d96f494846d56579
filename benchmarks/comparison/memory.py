"""How much memory a process takes.

Memory is PSS: a page that n processes share counts 1/n in each, so a sum over processes counts each page once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def parse_pss(smaps_rollup: str) -> int:
    """Bytes of PSS in the text of /proc/PID/smaps_rollup; ValueError when the kernel gives none."""
    for line in smaps_rollup.splitlines():
        name, _, rest = line.partition(":")
        if name == "Pss":
            return int(rest.split()[0]) * 1024
    raise ValueError("smaps_rollup has no Pss line: the kernel is older than 4.14 or is built without it")


def read_pss(pids: Iterable[int], proc: Path = Path("/proc")) -> dict[int, int]:
    """PSS in bytes of each process that is still there."""
    found = {}
    for pid in pids:
        try:
            text = (proc / str(pid) / "smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text:
            found[pid] = parse_pss(text)
    return found
