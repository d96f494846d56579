"""Train on two parameter servers, kill one of them in the middle, and look at what was learned and what was lost.

    python demo.py --python PYTHON_WITH_TENSORFLOW --directory demo/criteo

Ends with 0 when the model is as good as it should be and each block of the data was used.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
STEPS, KILL_AT = 300, 175
ENOUGH = 0.70
"""An AUC that nothing reaches without having learned the categories."""


def train(python: Path, data: Path, checkpoints: Path) -> int:
    """Run the job, and kill its second server once step KILL_AT is told; returns the exit code."""
    command = [
        *(sys.executable, "-m", "tf_ps_runner", "--ps=2", "--workers=1", f"--checkpoint-dir={checkpoints}"),
        *(HERE / "deepfm_graph.py", "--shards", f"--steps={STEPS}", "--print-steps=25"),
        *(f"--data={data}", f"--checkpoints={checkpoints}"),
    ]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "PYTHON_EXEC": str(python)}
    server: int | None = None
    killed = False
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            print(line, end="", flush=True)
            if found := re.search(r"\bps 1: pid = (\d+)", line):
                server = int(found[1])
            found = re.search(r"\bstep (\d+):", line)
            if found and int(found[1]) >= KILL_AT and server is not None and not killed:
                print(f"demo: killing the second server, pid {server}", flush=True)
                os.kill(server, signal.SIGKILL)
                killed = True
    return job.returncode if killed else job.returncode or 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="the interpreter with TensorFlow")
    parser.add_argument("--directory", type=Path, default=Path("demo/criteo"), help="for the data and the checkpoints")
    args = parser.parse_args()
    # Not resolved: an environment's interpreter is a link, and knows by its own path what is installed for it.
    python = args.python.absolute()
    data, checkpoints = args.directory.absolute() / "data", args.directory.absolute() / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    subprocess.run([python, HERE / "generate.py", data], check=True)
    code = train(python, data, checkpoints)
    if code:
        return code
    evaluation = [python, HERE / "evaluate.py", "--data", data, "--checkpoints", checkpoints]
    found = json.loads(subprocess.run(evaluation, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)
    print(
        f"demo: AUC {found['auc']} after step {found['step']} (0.603 without categories, 0.806 at best); "
        f"{found['blocks_seen']} of {STEPS} blocks used, {found['blocks_seen_more_than_once']} of them more than once"
    )
    return 0 if found["auc"] > ENOUGH and found["blocks_seen"] == STEPS else 1


if __name__ == "__main__":
    sys.exit(main())
