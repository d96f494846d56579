"""What is shown of the ids of jobs. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

SHORT_ID = 8
"""Characters of a generated id, where no other job's begins with the same."""

_FRESH_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def short_ids(jobs: Sequence[str]) -> dict[str, str]:
    """What is shown for each id: of one that a launcher has made up the beginning that tells it from the others."""
    shown = {}
    for job in jobs:
        shown[job] = job
        if _FRESH_ID.fullmatch(job):
            others = [other for other in jobs if other != job]
            lengths = range(SHORT_ID, len(job) + 1)
            length = next(n for n in lengths if not any(other.startswith(job[:n]) for other in others))
            shown[job] = job[:length]
    return shown


def short_id(job: str) -> str:
    """What is shown for one id among unknown others."""
    return short_ids([job])[job]
