"""A job of the Criteo example under the real command, whose steps a test allows one by one, and faults to inject into
it.

Every wait is for a line on the console. Every process that is killed has printed its pid there and is a descendant of
the launcher of the test.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.harness import WAIT, environment
from support.job import CapturedProcess, Processes, kill_at_once, listen

EXAMPLE = Path(__file__).parents[3] / "examples" / "criteo_deeprec"
PACED = Path(__file__).parent / "scripts" / "paced.py"

GRAPH, STRATEGY = "deepfm_graph.py", "deepfm_strategy.py"

both_ways = pytest.mark.parametrize("script", [GRAPH, STRATEGY])
"""Runs a test with each of the example's two ways to train."""

STEPS = 300
"""Blocks of the data, each of which is one step."""

SAVE_STEPS = 50

LEARNED = 0.70
"""An AUC that no model reaches without having learned the categories: without them 0.603 is the maximum."""

NOISE = 0.02
"""The maximum difference between the AUCs of two runs that have seen the same blocks in different orders."""

ALL_STEPS = 30_000
"""More steps than any job trains."""

RESTORED = r"chief-\d+: has restored .*/model\.ckpt-(\d+)"
"""Printed when a chief has a complete model from a checkpoint."""

PAUSES = "of the next version answers?, so training pauses"
"""Printed when all training tasks are requested to leave after the current step, on which they may wait."""


@dataclass(frozen=True)
class Learned:
    """The content of the newest checkpoint."""

    step: int
    auc: float
    blocks_seen: int
    blocks_seen_more_than_once: int


class Node(CapturedProcess):
    """One launcher, and its descendants."""

    def up(self, key: str) -> psutil.Process:
        """Wait until that task, such as `ps-1`, runs the script."""
        found = self.search(rf"\[{key}\]:\w+ \d+: pid = (\d+)\s")
        process = psutil.Process(int(found[1]))
        assert self.pid in {parent.pid for parent in process.parents()}, f"{key} is none of {self.name}"
        return process

    def kill(self, *keys: str, with_signal: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to all of those tasks. Training tasks get it while they wait for the permission of the next
        step, so no step is interrupted.
        """
        processes = [self.up(key) for key in keys]
        for key in keys:
            self._rest(key)
        for process in processes:
            process.send_signal(with_signal)

    def _rest(self, key: str) -> None:
        deadline = time.monotonic() + WAIT
        while re.findall(rf"\[{key}\]:(waits|goes on)\n", self.output)[-1:] == ["goes on"]:
            assert listen([self], deadline), f"{key} does not stop at a step:\n{self.output}"

    def servers(self, key: str) -> list[str]:
        """The addresses of the servers that this task received."""
        return self.search(rf"\[{key}\]:servers = (.*)\n")[1].split()

    def others_stayed(self, *keys: str) -> bool:
        """Whether those tasks are the only ones of their roles and ranks that have run."""
        began = re.findall(r"\[([\w-]+)\]:(\w+ \d+): pid = ", self.output)
        places = {place for key, place in began if key in keys}
        return sorted(key for key, place in began if place in places) == sorted(keys)

    def lose(self) -> None:
        """Kill the launcher and its descendants at once, as when a machine loses power. No process cleans up, so the
        temporary files of that machine stay.
        """
        launcher = psutil.Process(self.pid)
        kill_at_once([launcher, *launcher.children(recursive=True)])
        assert self.finish() == -signal.SIGKILL


class Job:
    """One job: its data, checkpoints and pipes are in `directory`. `start` starts the launchers."""

    def __init__(self, python: Path, script: str, data: Path, directory: Path, **pace: str) -> None:
        self.script = script
        self.checkpoints = directory / "checkpoints"
        self.temporary = directory / "temporary"
        self.temporary.mkdir()
        self.run_id = f"faults-{os.getpid()}-{os.urandom(3).hex()}"
        self._directory, self._data, self._python = directory, data, python
        self._processes = Processes()
        self._pipes: dict[str, int] = {}
        self._pace: dict[str, str | None] = dict(pace)
        for name in ("steps", "saves"):
            path = directory / name
            os.mkfifo(path)
            # Opened for reading and writing, it neither waits for a reader nor reports the end without a writer.
            self._pipes[name] = os.open(path, os.O_RDWR)
            self._pace[f"PACE_{name.upper()}"] = str(path)

    def start(
        self, *flags: str, name: str = "tf-ps-run", env: Mapping[str, str] | None = None, program: Path = PACED
    ) -> Node:
        """Start a launcher, whose tasks run the script in that program."""
        command = [
            *(sys.executable, "-m", "tf_ps_runner", f"--rdzv-id={self.run_id}"),
            *(f"--checkpoint-dir={self.checkpoints}", *flags, str(program), self.script, "--shards"),
            *(f"--steps={STEPS}", "--print-steps=1", f"--save-steps={SAVE_STEPS}"),
            *(f"--data={self._data}", f"--checkpoints={self.checkpoints}"),
        ]
        ours = {"PYTHON_EXEC": str(self._python), "TMPDIR": str(self.temporary), "TF_CPP_MIN_LOG_LEVEL": "2"}
        process = subprocess.Popen(
            command,
            cwd=self._directory,
            env=environment({**ours, **self._pace, **(env or {})}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self._processes.add(Node(name, process))

    def allow(self, steps: int) -> None:
        """Allow this many steps, by any tasks."""
        os.write(self._pipes["steps"], b"." * steps)

    def allow_save(self) -> None:
        """Allow the checkpoint that is held to be written."""
        os.write(self._pipes["saves"], b".")

    def reach(self, step: int) -> None:
        """Wait until the model is at that step or a later one, in any task."""
        deadline = time.monotonic() + WAIT
        outputs = self._processes.outputs
        while not any(int(word) >= step for word in re.findall(r"step (\d+): loss", outputs())):
            assert listen(self._processes.captured, deadline), f"the model never was at step {step}:{outputs()}"

    def train(self, step: int, since: int = 0) -> None:
        """Allow the steps from `since` to `step`, and wait until they are done. Then every training task waits for the
        permission of the next one, and no step is in progress.
        """
        self.allow(step - since)
        self.reach(step)

    def scale(self, *flags: str) -> None:
        """Scale the running job with the command that users run."""
        command = [sys.executable, "-m", "tf_ps_runner", "scale", f"--rdzv-id={self.run_id}", *flags]
        done = subprocess.run(command, env=environment(), timeout=WAIT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def finish(self, *nodes: Node) -> Learned:
        """Allow all remaining steps, wait for the successful end, and return what was learned."""
        self.allow(ALL_STEPS)
        for node in nodes:
            assert node.finish() == 0, node.output
        return self.evaluate()

    def evaluate(self) -> Learned:
        command = [self._python, EXAMPLE / "evaluate.py", "--data", self._data, "--checkpoints", self.checkpoints]
        env = environment({"TF_CPP_MIN_LOG_LEVEL": "2"})
        done = subprocess.run(command, timeout=WAIT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        print(f"{self.script}: {done.stdout}", flush=True)
        return Learned(**json.loads(done.stdout))

    def close(self) -> None:
        """Fail unless every launcher has exited, none of their descendants lives, and none of their files is left."""
        for pipe in self._pipes.values():
            os.close(pipe)
        self._processes.close()
        files = [path.name for path in self.temporary.iterdir()]
        assert len(files) <= sum(node.process.returncode == -signal.SIGKILL for node in self._processes.captured), (
            f"left in the directory for temporary files: {files}{self._processes.outputs()}"
        )


MakeJob = Callable[..., Job]
"""`make_job(script, **pace)`; the variables of `pace` are those of `scripts/paced.py`."""


def change_servers(job: Job, node: Node, servers: int, before: int) -> None:
    """Request another number of servers, and wait until training continues with them."""
    job.scale(f"--ps={servers}")
    node.until(PAUSES)
    job.allow(20)
    noun = "parameter server" if servers == 1 else "parameter servers"
    saved = node.until(rf"{servers} {noun} instead of {before}; chief-\d+ saved at step (\d+)")
    restored = node.until(r"chief-\d+: has restored .*, and goes on after step (\d+)")
    assert restored[1] == saved[1]


def check_learned(found: Learned, undisturbed: float | None = None) -> None:
    """Fail unless each block was used and the model has the expected quality."""
    assert found.blocks_seen == STEPS, found
    assert found.auc > LEARNED, found
    if undisturbed is not None:
        assert abs(found.auc - undisturbed) < NOISE, f"{found}, and {undisturbed} undisturbed"


def check_exactly_once(found: Learned, undisturbed: float | None = None) -> None:
    """Fail unless each block was used once and the model has the expected quality."""
    check_learned(found, undisturbed)
    assert (found.step, found.blocks_seen_more_than_once) == (STEPS, 0), found
