"""Runs one of the example's scripts unchanged. It trains a step only when the test allows one.

    tf-ps-run ... paced.py deepfm_graph.py --shards ...

A batch is read only after a byte was read from the pipe PACE_STEPS, so that a test can inject a fault at a known
step, and no job ends before the fault. Where PACE_SAVE is a number, the first checkpoint of that step or a later one is
begun only after a byte from PACE_SAVES. When the test has exited the pipes are at their end, and the script no longer
waits.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[4] / "examples" / "criteo_deeprec"
ROLE = os.environ["WORKER_TYPE"]


def wait_for(variable: str) -> None:
    """Wait until the test allows one more."""
    with open(os.environ[variable], "rb", buffering=0) as pipe:
        pipe.read(1)


def pace_steps() -> None:
    import criteo

    read = criteo.Lines.read

    def read_when_allowed(self: Any, begin: int, end: int) -> list[bytes]:
        # The previous batch has been reported as used by now.
        print("waits", flush=True)
        wait_for("PACE_STEPS")
        print("goes on", flush=True)
        return read(self, begin, end)

    criteo.Lines.read = read_when_allowed


def pace_saves(script: str, step: int) -> None:
    import tensorflow as tf

    saver = tf.compat.v1.train.Saver if "graph" in script else tf.train.CheckpointManager
    save = saver.save
    mark = os.environ["PACE_SAVES"] + ".held"

    def save_when_allowed(self: Any, *args: Any, **kwargs: Any) -> Any:
        number = kwargs.get("global_step", args[-1] if args else -1)
        if int(number) >= step and not os.path.exists(mark):
            Path(mark).touch()
            print(f"a checkpoint is begun at step {int(number)}", flush=True)
            wait_for("PACE_SAVES")
        return save(self, *args, **kwargs)

    saver.save = save_when_allowed


def main() -> None:
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(EXAMPLE))
    print(f"servers = {' '.join(json.loads(os.environ['TF_CONFIG'])['cluster']['ps'])}", flush=True)
    if ROLE in ("chief", "worker"):
        pace_steps()
    if ROLE == "chief" and (step := os.environ.get("PACE_SAVE")):
        pace_saves(sys.argv[0], int(step))
    runpy.run_path(str(EXAMPLE / sys.argv[0]), run_name="__main__")


if __name__ == "__main__":
    main()
