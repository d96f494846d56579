"""The command line of each torchrun, as `scripts/record_torchrun.py` has recorded it, compared with ours.

    python tests/support/torchrun_tables.py

prints the table of all flags.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from dlrover_run.command_line.flag import Flag
from dlrover_run.command_line.flags import BY_DEST

TABLES = Path(__file__).parents[1] / "torchrun"
VERSIONS = ("2.13.0", "2.14.1", "2.15.0")

SAME_DEFAULT = {"nnodes": {"1:1": "1"}}
"""Their default, and the text with the same meaning in ours."""


class Torchrun(NamedTuple):
    """The flags of one version of torchrun, by `dest`, without the script and its arguments."""

    version: str
    flags: dict[str, dict[str, Any]]
    variables: list[str]
    worker_variables: list[str]
    rendezvous_keys: list[str]
    launch_config: dict[str, str | None]


def torchrun(version: str) -> Torchrun:
    """Return the recorded table of one version."""
    table = json.loads((TABLES / f"{version}.json").read_text())
    flags = {row["dest"]: row for row in table["flags"] if row["spellings"][0].startswith("-")}
    others = (table[name] for name in ("variables", "worker_variables", "rendezvous_keys", "launch_config"))
    return Torchrun(table["torch"], flags, *others)


def takes_a_value(row: dict[str, Any]) -> bool:
    """Whether the argument after the flag is its value."""
    return row["action"] not in ("help", "check_env", "store_true") and row.get("nargs") != 0


def default_of(row: dict[str, Any]) -> str:
    """Return their default as text; empty if there is none."""
    default = row.get("default")
    text = "" if default is None or default == [] else str(default)
    return SAME_DEFAULT.get(row["dest"], {}).get(text, text)


def differences(row: dict[str, Any], flag: Flag | None) -> list[str]:
    """Return how our flag differs from this row; empty if a user of that torchrun finds the same."""
    if flag is None or flag.extension:
        return ["not here"]
    found = []
    if set(flag.spellings) != set(row["spellings"]):
        found.append(f"written {', '.join(flag.spellings)}")
    if flag.dest != row["dest"]:
        found.append(f"called {flag.dest}")
    if flag.variable != row["variable"]:
        found.append(f"variable {flag.variable}")
    if bool(flag.value and not flag.const) != takes_a_value(row):
        found.append("takes a value" if flag.value else "takes no value")
    if (flag.default or "") != default_of(row):
        found.append(f"default {flag.default!r}")
    if absent := [word for word in row.get("choices", ()) if word not in flag.choices]:
        found.append(f"without {', '.join(absent)}")
    return found


def main() -> None:
    """Print each flag of each version beside ours: `=` where ours is the same, `-` where that version has none."""
    tables = [torchrun(version) for version in VERSIONS]
    rows = [("flag", "variable", "type", "default", "choices", *VERSIONS)]
    for dest in dict.fromkeys(dest for table in tables for dest in table.flags):
        newest = next(table.flags[dest] for table in reversed(tables) if dest in table.flags)
        rows.append(
            (
                " ".join(word for word in newest["spellings"] if "_" not in word),
                newest["variable"] or "",
                newest.get("type", "word") if takes_a_value(newest) else "",
                default_of(newest),
                "|".join(newest.get("choices", ())),
                *(
                    ", ".join(differences(table.flags[dest], BY_DEST.get(dest))) or "=" if dest in table.flags else "-"
                    for table in tables
                ),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
