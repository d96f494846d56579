"""`python benchmarks/gpu`, from anywhere, also without an installed dlrover-run."""

import os
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path[0] = str(BENCHMARKS)
# The stand-in for NCCL RAS is that of the tests. Jobs find the product of this checkout too.
sys.path[1:1] = [str(BENCHMARKS.parent), str(BENCHMARKS.parent / "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BENCHMARKS.parent), os.environ.get("PYTHONPATH")]))

from gpu.command import main  # noqa: E402 - found by the path above

sys.exit(main())
