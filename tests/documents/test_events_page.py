"""The page on the event log lists the events and their fields as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec

from dlrover_run.events.records import AnyEvent, Event, name_of
from dlrover_run.events.writer import KEPT_FILES, MAX_BYTES
from dlrover_run.failures.causes import Cause

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "events.md").read_text()


def test_each_event_has_a_row_with_its_fields() -> None:
    rows = re.findall(r"^\| `(dlrover[\w.]+)` \|[^|]*\|([^|]*)\|$", PAGE, re.MULTILINE)
    common = {field.name for field in msgspec.structs.fields(Event)}
    known = {
        name_of(kind): [field.name for field in msgspec.structs.fields(kind) if field.name not in common]
        for kind in get_args(AnyEvent)
    }
    assert {name: re.findall(r"`(\w+)`", fields) for name, fields in rows} == known


def test_the_causes_and_the_sizes_are_named() -> None:
    sentence = next(line for line in PAGE.splitlines() if line.startswith("The `cause` of a failure"))
    assert set(re.findall(r"`(\w+)`", sentence)) == {"cause", *Cause}
    assert f"at {MAX_BYTES >> 20} MiB" in PAGE
    assert {4: "five files"}[KEPT_FILES] in PAGE
