"""Whom the node check names, and whom the published rule would, in simulated worlds: `python benchmarks/node_check.py`.

No process is started and no time is measured. `benchmarks/README.md` tells more.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

# The simulated truth is that of the tests, so that what the table shows is what they hold us to.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from comparison import machine
from node_check_bench.rates import measure, table

HERE = Path(__file__).resolve().parent
SIZES = (2, 3, 4, 5, 8, 16, 32, 64)
CASES = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the worlds, judge them, and write `rates.json` and `rates.md`."""
    parser = argparse.ArgumentParser(description="Whom the node check names in simulated worlds, and who is healthy.")
    parser.add_argument("--cases", type=int, default=CASES, help=f"worlds for each line (default: {CASES})")
    parser.add_argument("--nodes", type=int, nargs="+", default=SIZES, help="how many nodes (default: 2 to 64)")
    parser.add_argument(
        "--output", type=Path, default=HERE / "results" / "node-check", help="directory for the results"
    )
    options = parser.parse_args(arguments)
    if options.cases < 1 or min(options.nodes) < 2:
        parser.error("--cases must be at least 1, and --nodes at least 2")
    sizes = sorted(set(options.nodes))

    where = machine.look(HERE.parent)
    rates = measure(sizes, options.cases)
    lines = table(rates)
    print(*lines, sep="\n")
    options.output.mkdir(parents=True, exist_ok=True)
    document = {
        "commit": where.commit,
        "date": where.date,
        "options": {"cases": options.cases, "nodes": sizes},
        "rates": [dataclasses.asdict(rate) for rate in rates],
    }
    (options.output / "rates.json").write_text(json.dumps(document, indent=2) + "\n")
    (options.output / "rates.md").write_text(
        "\n".join(
            [
                "# Node check: whom it names",
                "",
                f"{options.cases} simulated worlds for each line; {where.date}; commit {where.commit}. "
                "`docs/node-check.md` says how to read it.",
                "",
                *lines,
                "",
            ]
        )
    )
    print(f"Results are in {options.output}.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
