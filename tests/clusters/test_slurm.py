"""Jobs of a real Slurm: what its users do to a job, and the exit codes that its accounting shows.

`make test-slurm` installs Debian's package where it can and runs only these tests. TRANSCRIPT=FILE writes the commands
and their output to that file.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from machines import machines
from slurm import CONTROLLER, Slurm, missing
from support.doc_pages import DOCS, ROOT, blocks
from support.harness import WAIT, WORKERS

from dlrover_run.features.local_nodes.network import why_not

pytestmark = [pytest.mark.long, pytest.mark.alone]

NODES = ["n1", "n2", "n3", "n4"]

LAUNCH = "srun --kill-on-bad-exit=0 dlrover-run"
"""How a job starts one launcher on each of its nodes."""


PROVE_WORLD = WORKERS / "prove_world.py"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm of four nodes, for all tests of this module."""
    if lacking := missing():
        pytest.skip(f"no Slurm, `make slurm` installs Debian's: {', '.join(lacking)} missing")
    if why := why_not():
        pytest.skip(f"no machines for Slurm's nodes: {why}")
    directory = tmp_path_factory.mktemp("slurm")
    with machines([CONTROLLER, *NODES], directory) as made:
        cluster = Slurm(made, NODES, directory)
        cluster.start()
        yield cluster
        if path := os.environ.get("TRANSCRIPT"):
            cluster.write_transcript(Path(path))


@pytest.fixture
def folder(slurm: Slurm, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The folder for the files of a test's workers; its jobs are ended after the test."""
    slurm.begin(request.function.__doc__)
    yield tmp_path
    slurm.run("scancel", "--full", "--signal=KILL", "--user=root", check=False, recorded=False)
    slurm.run("scancel", "--user=root", check=False, recorded=False)
    slurm.until_idle()


def script(*lines: str, launcher: str = LAUNCH) -> str:
    """A batch script."""
    return "#!/bin/bash\n" + "\n".join(line.replace("LAUNCH", launcher) for line in lines) + "\n"


def started(slurm: Slurm, folder: Path, world: int, job: int | str, generation: int = 0) -> list[dict[str, Any]]:
    """Wait until the workers of a world of this size have started the (generation + 1)th time. Return their facts."""
    return until_started(slurm, folder, world, lambda: slurm.output(job), generation)


def until_started(
    slurm: Slurm, folder: Path, world: int, output: Callable[[], str], generation: int = 0
) -> list[dict[str, Any]]:
    """As `started`, for what is no batch job; `output` is what it has printed."""
    files = [folder / f"start-{rank}-{generation}.json" for rank in range(world)]
    slurm.until(lambda: all(file.exists() for file in files), lambda: f"{files}: {output()}")
    return [json.loads(file.read_text()) for file in files]


def test_a_job_trains_as_one_world(slurm: Slurm, folder: Path) -> None:
    """A job of three nodes with two workers each."""
    job = slurm.submit(script(f"LAUNCH --nproc-per-node=2 {PROVE_WORLD}"), "--nodes=3", cwd=folder)
    slurm.until_ended(job)
    output = slurm.output(job)
    assert sum(line.endswith("all-reduce 63 of 6 ranks") for line in output.splitlines()) == 6, output
    accounting = slurm.accounting(job)
    assert accounting[f"{job}"] == accounting[f"{job}.0"] == ("COMPLETED", "0:0")


def test_the_example_trains(slurm: Slurm, folder: Path) -> None:
    """`sbatch examples/train.sbatch`: the digits on four nodes."""
    (folder / "examples").symlink_to(ROOT / "examples")
    text = (ROOT / "examples" / "train.sbatch").read_text()
    job = slurm.submit(text.replace("--checkpoint_dir", "--num_epochs=1 --checkpoint_dir"), cwd=folder)
    slurm.until_ended(job)
    assert "final accuracy" in slurm.output(job)
    assert slurm.accounting(job)[f"{job}"] == ("COMPLETED", "0:0")


def test_the_exit_code_of_a_worker_is_the_exit_code_of_the_job(slurm: Slurm, folder: Path) -> None:
    """Rank 1 of a job ends with code 7."""
    job = slurm.submit(script(f"LAUNCH {WORKERS / 'shared_folder.py'} {folder}"), "--nodes=2", cwd=folder)
    started(slurm, folder, 2, job)
    (folder / "fail-1").touch()
    slurm.until_ended(job)
    accounting = slurm.accounting(job)
    assert accounting[f"{job}"] == accounting[f"{job}.0"] == ("FAILED", "7:0"), slurm.output(job)


def test_the_command_in_a_refusal_is_correct(slurm: Slurm, folder: Path) -> None:
    """Two launchers on each node are refused; the command that the refusal names trains."""
    job = slurm.submit(script(f"srun --ntasks-per-node=2 dlrover-run {PROVE_WORLD}"), "--nodes=2", cwd=folder)
    slurm.until_ended(job)
    (corrected,) = set(re.findall(r"(srun .* dlrover-run [^`]*)", slurm.output(job)))
    assert slurm.accounting(job)[f"{job}"] == ("FAILED", "2:0"), slurm.output(job)
    job = slurm.submit(script(corrected), "--nodes=2", cwd=folder)
    slurm.until_ended(job)
    assert slurm.output(job).count("all-reduce 3 of 2 ranks") == 2, slurm.output(job)


def test_the_components_of_a_heterogeneous_job_train_as_one_world_or_each_by_itself(slurm: Slurm, folder: Path) -> None:
    """A heterogeneous job of one and two nodes: the command in its refusal trains on all, a step in one alone."""
    header = "#SBATCH --nodes=1 --ntasks-per-node=2\n#SBATCH hetjob\n#SBATCH --nodes=2 --ntasks-per-node=2\n"

    def batch(*lines: str) -> str:
        return script(*lines).replace("\n", f"\n{header}", 1)

    job = slurm.submit(batch(f"dlrover-run {PROVE_WORLD}"), cwd=folder)
    slurm.until_ended(job)
    (corrected,) = set(re.findall(r"`(srun [^`]*)`", slurm.output(job)))
    alone = f"srun --het-group=1 --nodes=2 --ntasks=2 --ntasks-per-node=1 dlrover-run {PROVE_WORLD}"
    job = slurm.submit(batch(corrected, alone), cwd=folder)
    slurm.until_ended(job)
    output = slurm.output(job)
    assert output.count("all-reduce 7 of 3 ranks") == 3, output
    assert output.count("all-reduce 3 of 2 ranks") == 2, output


def test_the_tasks_of_an_array_are_separate_jobs(slurm: Slurm, folder: Path) -> None:
    """An array of two tasks, each of two nodes, at the same time."""
    for task in "01":
        (folder / task).mkdir()
    line = f"LAUNCH {WORKERS / 'shared_folder.py'} {folder}/$SLURM_ARRAY_TASK_ID"
    job = slurm.submit(script(line), "--nodes=2", "--array=0-1", cwd=folder)
    worlds = [started(slurm, folder / task, 2, job) for task in "01"]
    assert len({member["host"] for world in worlds for member in world}) == 4
    assert {member["WORLD_SIZE"] for world in worlds for member in world} == {"2"}
    assert len({world[0]["TORCHELASTIC_RUN_ID"] for world in worlds}) == 2
    for task in "01":
        (folder / task / "end").touch()
    for task in "01":
        slurm.until_ended(f"{job}_{task}")
        assert slurm.accounting(f"{job}_{task}")[f"{job}_{task}"] == ("COMPLETED", "0:0")


def test_a_requeued_job_keeps_its_id(slurm: Slurm, folder: Path) -> None:
    """`scontrol requeue` of a job that trains."""
    job = slurm.submit(script(f"LAUNCH {WORKERS / 'shared_folder.py'} {folder}"), "--nodes=2", "--requeue", cwd=folder)
    started(slurm, folder, 2, job)
    slurm.run("scontrol", "requeue", str(job))
    again = started(slurm, folder, 2, job, generation=1)
    assert {member["SLURM_RESTART_COUNT"] for member in again} == {"1"}
    (folder / "end").touch()
    slurm.until_ended(job)
    assert slurm.show(job)["Restarts"] == "1"
    assert slurm.accounting(job)[f"{job}"] == ("COMPLETED", "0:0"), slurm.output(job)


def test_the_signal_before_the_time_limit_reaches_each_worker_once(slurm: Slurm, folder: Path) -> None:
    """`--signal=USR1@80` of a job with a time limit of two minutes: the workers save, and train on."""
    line = f"LAUNCH --forward-signals=USR1 {WORKERS / 'shared_folder.py'} {folder}"
    job = slurm.submit(script(line), "--nodes=2", "--time=2", "--signal=USR1@80", cwd=folder)
    started(slurm, folder, 2, job)
    notes = [folder / f"SIGUSR1-{rank}" for rank in range(2)]
    slurm.until(lambda: all(note.exists() for note in notes), lambda: slurm.output(job))
    (folder / "end").touch()
    slurm.until_ended(job)
    assert [len(note.read_text().split()) for note in notes] == [1, 1]
    assert list(folder.glob("SIGTERM-*")) == []
    assert slurm.accounting(job)[f"{job}"] == ("COMPLETED", "0:0"), slurm.output(job)


def test_a_preempted_job_saves_and_is_requeued(slurm: Slurm, folder: Path) -> None:
    """A job of a partition with more priority takes the nodes: the workers get the signal and their grace."""
    line = f"LAUNCH --forward-signals=USR1 {WORKERS / 'shared_folder.py'} {folder}"
    job = slurm.submit(script(line), "--nodes=4", "--partition=low", "--requeue", "--signal=USR1@10", cwd=folder)
    started(slurm, folder, 4, job)
    other = slurm.submit(script("srun true"), "--nodes=1", "--partition=high", cwd=folder)
    slurm.until_ended(other)
    notes = [folder / f"SIGUSR1-{rank}" for rank in range(4)]
    assert [len(note.read_text().split()) for note in notes] == [1] * 4
    again = started(slurm, folder, 4, job, generation=1)
    assert {member["SLURM_RESTART_COUNT"] for member in again} == {"1"}
    (folder / "end").touch()
    slurm.until_ended(job)
    assert slurm.accounting(job)[f"{job}"] == ("COMPLETED", "0:0"), slurm.output(job)


def test_a_job_that_gets_a_notice_requeues_itself(slurm: Slurm, folder: Path) -> None:
    """`scancel --signal=USR1` with `--preemption-notice`, and the requeue lines of docs/schedulers.md."""
    (requeue,) = [block.text for block in blocks(DOCS / "schedulers.md", "bash") if "scontrol requeue" in block.text]
    flags = "--preemption-notice=USR1@60 --exit-codes=kubernetes"
    job = slurm.submit(
        script(f"LAUNCH {flags} {WORKERS / 'shared_folder.py'} {folder} leave", requeue),
        "--nodes=2", "--requeue", "--open-mode=append", cwd=folder,
    )  # fmt: skip
    started(slurm, folder, 2, job)
    slurm.run("scancel", "--signal=USR1", str(job))
    again = started(slurm, folder, 2, job, generation=1)
    assert {member["DLROVER_REQUEUE_COUNT"] for member in again} == {"1"}
    assert [len((folder / f"SIGUSR1-{rank}").read_text().split()) for rank in range(2)] == [1, 1]
    (folder / "end").touch()
    slurm.until_ended(job)
    assert slurm.accounting(job)[f"{job}"] == ("COMPLETED", "0:0"), slurm.output(job)


def test_a_canceled_job_leaves_nothing(slurm: Slurm, folder: Path) -> None:
    """`scancel` of a job that trains."""
    job = slurm.submit(script(f"LAUNCH {WORKERS / 'shared_folder.py'} {folder}"), "--nodes=2", cwd=folder)
    world = started(slurm, folder, 2, job)
    slurm.run("scancel", str(job))
    slurm.until_ended(job)
    assert [len((folder / f"SIGTERM-{rank}").read_text().split()) for rank in range(2)] == [1, 1]
    slurm.until_idle()
    for member in world:
        left = [process for process in slurm.machines[member["host"]].processes() if "dlrover" in process.name()]
        assert left == []
    assert slurm.accounting(job)[f"{job}"][0] == "CANCELLED", slurm.output(job)


def test_a_job_continues_without_a_node_whose_daemon_dies(slurm: Slurm, folder: Path) -> None:
    """The slurmd of n2 is killed: Slurm declares the node down and ends the processes of the job on it."""
    line = f"LAUNCH --nnodes=2:3 {WORKERS / 'shared_folder.py'} {folder}"
    job = slurm.submit(
        script(line, launcher=LAUNCH.replace("srun", "srun --no-kill")), "--nodes=3", "--no-kill", cwd=folder
    )
    started(slurm, folder, 3, job)
    slurm.kill_node_daemon("n2")
    slurm.until(lambda: slurm.states()["n2"].startswith("down"), slurm.logs)
    assert slurm.state(job) == "RUNNING"
    slurm.start_node("n2")
    again = started(slurm, folder, 2, job, generation=1)
    assert {member["host"] for member in again} == {"n1", "n3"}
    (folder / "end").touch()
    slurm.until_ended(job)
    assert slurm.output(job).count("has trained on") == 2
    # If srun was informed that Slurm killed the task on n2, its exit code is that of this task, and so is the job's.
    assert slurm.accounting(job)[f"{job}"] in {("COMPLETED", "0:0"), ("FAILED", "9:0")}, slurm.output(job)


def test_a_step_continues_without_its_first_node(slurm: Slurm, folder: Path) -> None:
    """Every process on n1 is killed, the first node of a step from the login node. n1 does not return."""
    step = ["srun", "--no-kill", "--kill-on-bad-exit=0", "--nodelist=n1,n2,n3", "--nodes=3"]
    command = [*step, "dlrover-run", "--nnodes=2:3", WORKERS / "shared_folder.py", folder]
    slurm.note(f"$ {' '.join(map(str, command))}")
    output = folder / "srun.out"
    with output.open("w") as file:
        srun = slurm.machines[CONTROLLER].start(command, folder, slurm.environment, stdout=file, stderr=file)
    until_started(slurm, folder, 3, output.read_text)
    slurm.machines["n1"].lose_power()
    lost_at = time.monotonic()
    again = until_started(slurm, folder, 2, output.read_text, generation=1)
    slurm.note(f"(the others train again {time.monotonic() - lost_at:.1f} s after the loss of n1)")
    assert {member["host"] for member in again} == {"n2", "n3"}
    (folder / "end").touch()
    slurm.until(lambda: output.read_text().count("has trained on") == 2, output.read_text)
    # What srun itself makes of a lost node is not asserted: Slurm declares n1 down only after a while.
    srun.wait(WAIT)
    slurm.note(output.read_text().rstrip())
    assert "the master of the job is now at" in output.read_text()


def test_a_job_continues_without_a_node_that_loses_power(slurm: Slurm, folder: Path) -> None:
    """Every process on n4 is killed. It does not return, so this test is the last."""
    line = f"LAUNCH --nnodes=2:3 --rdzv-conf=lost_after=5 {WORKERS / 'shared_folder.py'} {folder}"
    job = slurm.submit(
        script(line, launcher=LAUNCH.replace("srun", "srun --no-kill")),
        "--nodelist=n2,n3,n4", "--nodes=3", "--no-kill", cwd=folder,
    )  # fmt: skip
    started(slurm, folder, 3, job)
    slurm.machines["n4"].lose_power()
    again = started(slurm, folder, 2, job, generation=1)
    assert [member["WORLD_SIZE"] for member in again] == ["2", "2"]
    assert {member["host"] for member in again} == {"n2", "n3"}
    (folder / "end").touch()
    slurm.until_ended(job)
    assert slurm.output(job).count("has trained on") == 2
    assert slurm.accounting(job)[f"{job}"] == ("COMPLETED", "0:0"), slurm.output(job)
