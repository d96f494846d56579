"""Stops an install that would download several GB of CUDA libraries that were not requested.

    .venv/bin/python scripts/refuse_cuda.py REQUIREMENT...

Asks pip what it would install, without installing it. Where a CPU build of torch is to be had (a local wheel, an index
of CPU builds), pip takes that for the pinned version; elsewhere the default build for Linux brings the CUDA libraries
along.
"""

from __future__ import annotations

import json
import subprocess
import sys


def cuda_packages(report: str) -> list[str]:
    """The packages of CUDA libraries in a pip installation report."""
    names = [item["metadata"]["name"] for item in json.loads(report)["install"]]
    return [name for name in names if name.lower().startswith(("nvidia-", "triton", "cuda-"))]


def main() -> int:
    """0 when the install is harmless, else 1 with what to do."""
    asked = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-", *sys.argv[1:]]
    answer = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=False)
    if answer.returncode != 0:
        return answer.returncode
    found = cuda_packages(answer.stdout)
    if not found:
        return 0
    print(
        f"This would download CUDA libraries of several GB ({found[0]} and {len(found) - 1} more).\n"
        "For a CPU build: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make ...; "
        "to have them: make CUDA=1 ...",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
