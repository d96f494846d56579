"""Seeds of a night: `make test-long` plays others each night, the same number of each program and place.

NIGHT is a date, by default today's; its digits are those of the seeds, so that no two nights have a seed in common, and
none has one of `make test`. The seed alone repeats a run: `python -m simulation 202611270042`.
"""

from __future__ import annotations

import os
from datetime import date
from typing import Any

from support.harness import only_long

SEEDS_OF_A_NIGHT = 10_000
"""Maximum number of seeds of one program and place in a night."""


def first_seed() -> int:
    """The first seed of the night. Raises ValueError if NIGHT is no date."""
    night = os.environ.get("NIGHT")
    day = date.fromisoformat(night) if night else date.today()
    return int(day.strftime("%Y%m%d")) * SEEDS_OF_A_NIGHT


def night_parts(count: int, size: int) -> list[Any]:
    """Return the parameters of a long test that plays `size` of `count` seeds of a night: where its seeds begin, from
    the first one of the night. They do not depend on the night, so the tests have the same names each night."""
    assert count <= SEEDS_OF_A_NIGHT
    return only_long(*range(0, count, size))
