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
import threading
from pathlib import Path

HERE = Path(__file__).parent
STEPS, KILL_AT = 300, 125
LOOK = 0.05
"""Seconds between two looks for a checkpoint."""
ENOUGH = 0.70
"""An AUC that nothing reaches without having learned the categories."""


def train(python: Path, data: Path, checkpoints: Path) -> int:
    """Run the job, and kill its second server when there is something to go back to; returns the exit code."""
    command = [
        *(sys.executable, "-m", "tf_ps_runner", "--ps=2", "--workers=1", f"--checkpoint-dir={checkpoints}"),
        *(HERE / "deepfm_graph.py", "--shards", f"--steps={STEPS}", "--print-steps=25"),
        *(f"--data={data}", f"--checkpoints={checkpoints}"),
    ]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "PYTHON_EXEC": str(python)}
    server: int | None = None
    step, killed, over = 0, threading.Event(), threading.Event()

    def kill() -> None:
        # Not when a line is printed: the last one may come before the chief has saved.
        while not over.wait(LOOK):
            if server is not None and may_kill(step, saved_step(checkpoints)):
                print(f"demo: killing the second server, pid {server}", flush=True)
                os.kill(server, signal.SIGKILL)
                killed.set()
                return

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            print(line, end="", flush=True)
            if found := re.search(r"\bps 1: pid = (\d+)", line):
                server = int(found[1])
            if found := re.search(r"\bstep (\d+):", line):
                step = max(step, int(found[1]))
    over.set()
    killer.join()
    if not killed.is_set():
        print("demo: no server was killed, for the job ended before its first checkpoint", flush=True)
    return job.returncode if killed.is_set() else job.returncode or 1


def saved_step(checkpoints: Path) -> int:
    """The step of the newest checkpoint, as TensorFlow notes it; 0 while there is none but that of the beginning."""
    try:
        noted = (checkpoints / "checkpoint").read_text()
    except FileNotFoundError:
        return 0
    found = re.search(r'^model_checkpoint_path: ".*-(\d+)"$', noted, re.MULTILINE)
    return int(found[1]) if found else 0


def may_kill(step: int, saved: int) -> bool:
    """Whether a lost server shows what is kept: something was saved, and something was trained after that."""
    return step >= KILL_AT and saved > 0


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
