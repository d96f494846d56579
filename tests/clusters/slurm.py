"""A separate Slurm for tests: Debian's programs, one controller, accounting in a database, and a daemon on each node.

Each node is a machine with its own address, host name and processes (`machines.py`), so nothing of the host's Slurm or
munge is read or changed, and nothing is left, however the test ends.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from machines import Machine, Machines
from support.harness import WAIT, WORKERS, until

PROGRAMS = (
    "munged", "slurmctld", "slurmd", "slurmdbd", "sbatch", "srun", "scontrol", "sacct", "mariadbd",
    "mariadb-install-db", "my_print_defaults", "unshare", "nsenter", "ip",
)  # fmt: skip

CONTROLLER = "ctl"

GRACE = 10
"""The grace period in seconds of a job of partition `low` that a job of partition `high` preempts."""

LOST_AFTER = 5
"""Seconds without an answer after which Slurm declares a node down."""


REQUEUE_AFTER = 10
"""Seconds that Slurm waits before it starts a requeued job again: the lifetime of its credentials, else 120."""

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "REQUEUED", "OUT_OF_MEMORY"}
"""States in which a job, or a step of it, no longer runs."""

POLL = 0.2
"""Seconds between two queries to Slurm."""


def missing() -> list[str]:
    """The programs that a Slurm needs and this machine does not have."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


class Slurm:
    """A cluster of `nodes` nodes with the partitions `low` (preemptible, the default) and `high`."""

    def __init__(self, machines: Machines, names: Sequence[str], directory: Path) -> None:
        self.machines = machines
        self.names = list(names)
        self.directory = directory
        self._transcript: list[str] = []
        self._outputs = directory
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:{_PATH}",
            "SLURM_CONF": str(directory / "slurm.conf"),
            "HOME": str(directory),
            # Jobs get it from sbatch, and their masters admit no client without it.
            "DLROVER_RDZV_TOKEN": secrets.token_hex(16),
        }

        self._configure()

    def _configure(self) -> None:
        here = self.directory
        (here / "munge.key").write_bytes(os.urandom(128))
        (here / "munge.key").chmod(0o400)
        (here / "slurm.conf").write_text(
            f"""\
ClusterName=test
SlurmctldHost={CONTROLLER}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={here}/munge.socket,cred_expire={REQUEUE_AFTER}
StateSaveLocation={here}/state
SlurmctldPidFile={here}/slurmctld.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdPidFile={here}/%n.pid
SlurmdLogFile={here}/%n.log
SlurmdSpoolDir={here}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
SlurmdParameters=config_overrides
SlurmdTimeout={LOST_AFTER}
ReturnToService=2
KillWait=10
MessageTimeout=60
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={CONTROLLER}
AccountingStoragePass={here}/munge.socket
NodeName={",".join(self.names)} CPUs=2 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime={GRACE} State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""
        )
        (here / "slurmdbd.conf").write_text(
            f"""\
DbdHost={CONTROLLER}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={here}/munge.socket
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=slurm
StoragePass=slurm
LogFile={here}/slurmdbd.log
PidFile={here}/slurmdbd.pid
"""
        )
        (here / "slurmdbd.conf").chmod(0o600)
        (here / "state").mkdir()

    def start(self) -> None:
        """Start all daemons, and wait until every node is idle."""
        here, controller = self.directory, self.machines[CONTROLLER]
        self._daemon(
            controller,
            "munged", "--foreground", "--force", f"--key-file={here}/munge.key", f"--socket={here}/munge.socket",
            f"--pid-file={here}/munged.pid", f"--log-file={here}/munged.log", f"--seed-file={here}/munged.seed",
        )  # fmt: skip
        subprocess.run(
            ["mariadb-install-db", "--no-defaults", f"--datadir={here}/database", "--user=root", "--skip-test-db"],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=WAIT,
        )  # fmt: skip
        (here / "user.sql").write_text(
            "CREATE USER slurm@'127.0.0.1' IDENTIFIED BY 'slurm';\nGRANT ALL ON slurm_acct_db.* TO slurm@'127.0.0.1';\n"
        )
        self._daemon(
            controller,
            "mariadbd", "--no-defaults", f"--datadir={here}/database", "--user=root",
            f"--socket={here}/database.socket", f"--pid-file={here}/mariadbd.pid", f"--init-file={here}/user.sql",
            "--bind-address=127.0.0.1", "--innodb-buffer-pool-size=32M", "--skip-name-resolve",
        )  # fmt: skip
        self.until(lambda: "ready for connections" in self._log("mariadbd"), lambda: "the database")
        self._daemon(controller, "slurmdbd", "-D")
        self.until(lambda: self._try("sacctmgr", "-n", "show", "cluster"), lambda: "slurmdbd")
        self._daemon(controller, "slurmctld", "-D")
        for name in self.names:
            self.start_node(name)
        self.until_idle()

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self._daemon(self.machines[name], "slurmd", "-D", "-N", name)

    def states(self) -> dict[str, str]:
        """The state of each node, as `sinfo` shows it."""
        shown = self.run(
            "sinfo", "--Node", "--noheader", "--partition=low", "--format=%N %T", check=False, recorded=False
        ).stdout
        return dict(line.split() for line in shown.splitlines() if len(line.split()) == 2)

    def until_idle(self) -> None:
        """Wait until no node that is up has a job."""
        self.until(
            lambda: set(self.states().values()) <= {"idle", "down", "down*"}, lambda: f"idle nodes: {self.states()}"
        )

    def kill_node_daemon(self, name: str) -> None:
        """Kill the daemon of a node. Its jobs keep running."""
        self.note(f"[{name}]$ kill -KILL $(pidof slurmd)")
        for process in self.machines[name].processes():
            if process.name() == "slurmd":
                process.kill()

    def run(
        self, *argv: str | Path, check: bool = True, cwd: Path | None = None, recorded: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands on the controller's machine."""
        command = self.machines[CONTROLLER].command(argv, cwd or self.directory, self.environment)
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=WAIT)
        assert not check or done.returncode == 0, (argv, done.stdout, done.stderr, self.logs())
        if recorded:
            self.note(f"$ {' '.join(map(str, argv))}\n{done.stdout}{done.stderr}".rstrip())
        return done

    def submit(self, script: str, *flags: str, cwd: Path) -> int:
        """Submit a batch script. Return the job id."""
        path = cwd / "job.sh"
        path.write_text(script)
        self._outputs = cwd
        self.note(f"$ cat job.sh\n{script.rstrip()}")
        done = self.run("sbatch", "--parsable", "--output=%A_%a.out", *flags, "job.sh", cwd=cwd)
        return int(done.stdout.strip().split(";")[0])

    def output(self, job: int | str) -> str:
        """The output of the job."""
        number, _, task = str(job).partition("_")
        return "".join(file.read_text(errors="replace") for file in self._outputs.glob(f"{number}_{task}*.out"))

    def show(self, job: int | str) -> dict[str, str]:
        """What `scontrol show job` reports of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", str(job), recorded=False).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: int | str) -> str:
        """The state of a job, such as RUNNING or COMPLETED."""
        return self.show(job)["JobState"]

    def until_ended(self, job: int | str) -> None:
        """Wait until a job has ended."""
        self.until(
            lambda: self.state(job) in ENDED, lambda: f"the end of job {job}: {self.show(job)}\n{self.output(job)}"
        )
        self.note(f"$ cat {job}.out\n{self.output(job).rstrip()}")

    def accounting(self, job: int | str) -> dict[str, tuple[str, str]]:
        """State and exit code of a job and its steps, as `sacct` shows them after the end of the job.

        After a requeue they are those of the last run.
        """

        def rows() -> list[list[str]]:
            flags = ("--parsable2", "--noheader", "--duplicates", "--format=JobID,State,ExitCode")
            shown = self.run("sacct", f"--jobs={job}", *flags, recorded=False).stdout
            return [line.split("|") for line in shown.splitlines()]

        # A step on a node whose daemon died may stay RUNNING in the accounting for ever; the job does not.
        self.until(
            lambda: any(row[0] == str(job) and row[1].split()[0] in ENDED for row in rows()),
            lambda: f"the accounting of job {job}: {rows()}",
        )
        self.run("sacct", f"--jobs={job}", "--duplicates", "--format=JobID%12,JobName%12,NNodes,State%12,ExitCode")
        return {name: (state.split()[0], code) for name, state, code in rows()}

    def begin(self, title: str | None) -> None:
        """Begin a section of the transcript."""
        self._transcript.append(f"\n## {(title or '').strip()}\n")

    def write_transcript(self, path: Path) -> None:
        """Write the commands and their output, without the block of each round and torch's notes on host names."""
        text = re.sub(r"[ \t]+$", "", "\n".join(self._transcript).lstrip(), flags=re.MULTILINE) + "\n"
        path.write_text(re.sub(r"^(\[W\d.*|.*Rendezvous complete.*|  \w+=.*)\n", "", text, flags=re.MULTILINE))

    def note(self, text: str) -> None:
        """Add a paragraph to the transcript."""
        self._transcript.append(text.replace(str(self._outputs), ".").replace(str(WORKERS), "tests/workers"))

    def logs(self) -> str:
        """The end of each daemon's log, for the message of a failed test."""
        return "".join(
            f"\n--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in self.directory.glob("*.log")
        )

    def _daemon(self, machine: Machine, name: str, *flags: str) -> None:
        with (self.directory / f"{machine.name}-{name}.log").open("a") as log:
            machine.start([name, *flags], self.directory, self.environment, stdout=log, stderr=log)

    def _log(self, name: str) -> str:
        return (self.directory / f"{CONTROLLER}-{name}.log").read_text(errors="replace")

    def _try(self, *argv: str) -> bool:
        return self.run(*argv, check=False, recorded=False).returncode == 0

    def until(self, condition: Callable[[], object], what: Callable[[], str]) -> None:
        """Poll until the condition is true, because Slurm reports no changes; `what` describes a failure."""
        until(condition, lambda: f"timed out waiting for {what()}{self.logs()}", interval=POLL)
