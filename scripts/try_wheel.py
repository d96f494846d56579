"""Installs a wheel into an empty environment and runs the README's first command there, as a user would.

    python scripts/try_wheel.py WHEEL

The command and what it prints are taken from the README, so the first thing that a reader sees is what the wheel does.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"

# What the README says of its script: rank 1 is killed at step 200 and meets a bug at 400. The second worker of the
# first round is the one that is killed, and it needs no torch.
TRAIN = """\
import os
import signal
import time

for step in range(100, 500, 100):
    loss = 1.8 * 100 / step if step < 400 else float("nan")
    if os.environ["RANK"] == "0" or step == 400:
        print(f"step {step}: loss {loss:.2f}", flush=True)
    time.sleep(0.2)
    if os.environ["RANK"] == "1" and step == 200 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ["RANK"] == "1" and loss != loss:
        raise ValueError(f"loss is nan at step {step}")
    if step == 400:
        time.sleep(60)
"""

# The sentences of the README's example that do not depend on the machine or the time.
SENTENCES = (
    "rank 1 was killed by SIGKILL, not by the launcher; restart 1 of 1",
    "train.py FAILED",
    "rank 1 raised ValueError: loss is nan at step 400",
)


def first_example(readme: str) -> tuple[list[str], str]:
    """Return the README's first command and the output that it shows."""
    block = re.search(r"^```console\n\$ (.*?)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    if block is None:
        raise SystemExit(f"{README} shows no command")
    return shlex.split(block[1], comments=True), block[2]


def main() -> int:
    """0 when the README's first command does with the installed wheel what the README shows."""
    wheel = Path(sys.argv[1]).resolve()
    command, shown = first_example(README.read_text())
    with tempfile.TemporaryDirectory(prefix="dlrover-wheel-") as place:
        directory = Path(place)
        venv.create(directory / "venv", with_pip=True)
        programs = directory / "venv" / "bin"
        subprocess.run([programs / "python", "-m", "pip", "install", "--quiet", wheel], check=True, timeout=600)
        (directory / "train.py").write_text(TRAIN)
        environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": place, "XDG_STATE_HOME": f"{place}/state"}
        done = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
    printed = done.stdout + done.stderr
    print(printed)
    missing = [sentence for sentence in SENTENCES if sentence not in shown or sentence not in printed]
    for sentence in missing:
        print(f"missing: {sentence} (in the README: {sentence in shown})")
    print(f"{wheel.name}: exit code {done.returncode}, {len(SENTENCES) - len(missing)} of {len(SENTENCES)} sentences")
    return 0 if done.returncode == 1 and not missing else 1


if __name__ == "__main__":
    sys.exit(main())
