"""A save starts the workers again: with real processes, files and editors' ways to write them."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import OURS, WAIT, Mailbox, environment, launch, still_alive, watched
from support.job import CapturedProcess, Processes

TRAIN = """
import os
import helper
post(value=helper.VALUE, world=os.environ["WORLD_SIZE"])
if not helper.ENDS:
    wait_for_signals()
"""


class Project:
    """A script and its module, which each worker posts the value of."""

    def __init__(self, mailbox: Mailbox, processes: Processes) -> None:
        self.mailbox = mailbox
        self.directory = mailbox.directory / "project"
        self.directory.mkdir()
        self.helper = self.directory / "helper.py"
        self.script = self.directory / "train.py"
        mailbox.script("project/train.py", TRAIN)
        self._processes = processes

    def start(self, *flags: str) -> CapturedProcess:
        job = launch(self.mailbox, "--reload", *flags, "project/train.py", stderr=subprocess.STDOUT)
        return self._processes.add(CapturedProcess("the job", job))

    def write(self, value: object, ends: bool = False) -> None:
        self.helper.write_text(f"VALUE = {value}\nENDS = {ends}\n")

    def values(self, count: int) -> list[Any]:
        return [message["value"] for message in self.mailbox.gather(count)]


@pytest.fixture
def project(mailbox: Mailbox) -> Iterator[Project]:
    processes = Processes()
    made = Project(mailbox, processes)
    made.write(1)
    yield made
    processes.close()


def end(job: CapturedProcess, number: signal.Signals = signal.SIGINT) -> None:
    job.signal(number)
    assert job.finish() == 128 + number, job.output


def test_a_save_starts_all_workers_again_and_costs_no_restart(project: Project) -> None:
    job = project.start("--nproc-per-node=2")
    assert project.values(2) == [1, 1]
    project.write(2)
    assert project.values(2) == [2, 2]
    # As vim and emacs do.
    other = project.directory / "4913"
    other.write_text("VALUE = 3\nENDS = False\n")
    project.helper.rename(project.directory / "helper.py~")
    other.rename(project.helper)
    assert project.values(2) == [3, 3]
    project.script.write_text(f"{project.script.read_text()}\n")
    assert project.values(2) == [3, 3]
    end(job)
    assert job.has_printed("into the round, project/helper.py was saved; round 2 with 1 node")
    assert job.has_printed("project/train.py was saved; round 4")
    assert "restart 1" not in job.output


def test_a_half_written_file_is_reported_and_the_workers_go_on(project: Project) -> None:
    job = project.start()
    assert project.values(1) == [1]
    project.helper.write_text("VALUE = (\n")
    job.until_prints("project/helper.py line 1: '(' was never closed: VALUE = (; the workers go on until the next save")
    project.write(2)
    assert project.values(1) == [2]
    end(job)


def test_a_crash_is_on_the_screen_and_waits_for_the_next_save(project: Project) -> None:
    project.write("1 / 0")
    job = project.start("--nproc-per-node=2", "--max-restarts=0")
    job.until_prints("ZeroDivisionError: division by zero; the next save starts the workers again")
    assert job.has_printed("Traceback (most recent call last)")
    project.write(2)
    assert project.values(2) == [2, 2]
    project.write(3, ends=True)
    assert project.values(2) == [3, 3]
    job.until_prints("every worker has succeeded; the next save starts the workers again")
    project.write(4)
    assert project.values(2) == [4, 4]
    end(job)


def test_a_module_that_did_not_exist_is_found_when_it_is_written(project: Project) -> None:
    project.helper.unlink()
    job = project.start()
    job.until_prints("No module named 'helper'; the next save starts the workers again")
    project.write(2)
    assert project.values(1) == [2]
    project.helper.unlink()
    job.until_prints("project/helper.py deleted: the workers go on until the next save")
    project.write(3)
    assert project.values(1) == [3]
    end(job)


def test_without_the_library_that_watches_a_save_is_found_too(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = project.mailbox.directory / "shadow/watchfiles"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('this test has none')")
    path = os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONPATH", path)
    job = project.start()
    assert project.values(1) == [1]
    project.write(2)
    assert project.values(1) == [2]
    end(job)


def test_what_spawned_workers_import_counts_by_their_directory(project: Project) -> None:
    job = project.start("--start-method=spawn", "--nproc-per-node=2")
    assert project.values(2) == [1, 1]
    project.write(2)
    assert project.values(2) == [2, 2]
    end(job)


def test_each_file_below_a_directory_of_the_flag_counts(project: Project) -> None:
    other = project.mailbox.directory / "other/deep"
    other.mkdir(parents=True)
    (other / "unused.py").write_text("1")
    job = project.start("--reload-dir=other")
    assert project.values(1) == [1]
    (other / "unused.py").write_text("12")
    assert project.values(1) == [1]
    end(job)
    assert job.has_printed("other/deep/unused.py was saved")


def test_two_saves_of_one_size_in_one_second_are_both_read(project: Project) -> None:
    """Python would take the compiled code of the first for that of the second."""
    job = project.start()
    assert project.values(1) == [1]
    second = int(time.time()) + 1000
    for value in (2, 3, 4):
        saved = project.directory / "saved"
        saved.write_text(f"VALUE = {value}\nENDS = False\n")
        os.utime(saved, (second + value / 10, second + value / 10))
        saved.rename(project.helper)
        assert project.values(1) == [value]
    end(job)


def test_local_nodes_start_again_together_and_once(project: Project) -> None:
    job = project.start("--local-nodes=2", "--nproc-per-node=1")
    assert project.values(2) == [1, 1]
    project.write(2)
    assert project.values(2) == [2, 2]
    project.write(3)
    assert project.values(2) == [3, 3]
    assert project.mailbox.pending() == []
    end(job)


def test_a_module_in_site_packages_that_changes_makes_a_new_template(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = project.mailbox.directory / "site-packages/installed.py"
    library.parent.mkdir()
    library.write_text("VALUE = 'old'\n")
    path = os.pathsep.join(filter(None, [str(library.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONPATH", path)
    project.script.write_text(
        "import installed\n" + project.script.read_text().replace("helper.VALUE", "installed.VALUE")
    )
    job = project.start("--preload=installed")
    assert project.values(1) == ["old"]
    library.write_text("VALUE = 'another'\n")
    assert project.values(1) == ["another"]
    end(job)
    assert job.has_printed("the workers start from a new template")


class Terminal:
    """A terminal with a launcher as its foreground job, which a test types into."""

    def __init__(self, project: Project, *flags: str) -> None:
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.chdir(project.mailbox.directory)
            command = [sys.executable, "-m", "dlrover_run", "--reload", *flags, "project/train.py"]
            os.execve(sys.executable, command, environment({"TEST_MAILBOX": project.mailbox.name}))
        self.mode = termios.tcgetattr(self._terminal)
        self._shown = b""

    def until(self, text: bytes) -> None:
        """Read until this is shown, after what was waited for before."""
        while text not in self._shown:
            self._shown += os.read(self._terminal, 4096)
        self._shown = self._shown.partition(text)[2]

    def type(self, text: bytes) -> None:
        os.write(self._terminal, text)

    def has_its_mode(self) -> bool:
        return termios.tcgetattr(self._terminal) == self.mode

    def finish(self) -> int:
        """Read to the end, and return the exit code."""
        with watched(self.pid) as guard:
            while still_alive(guard, 0):
                try:
                    os.read(self._terminal, 4096)
                except OSError:
                    break
            assert not still_alive(guard, WAIT)
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_keys_start_again_and_end_while_nothing_runs(project: Project) -> None:
    """In a terminal that keeps its usual mode, so that a kill leaves nothing behind."""
    project.write(1, ends=True)
    terminal = Terminal(project)
    assert project.values(1) == [1]
    terminal.until(b"q and Enter")
    assert terminal.has_its_mode()
    terminal.type(b"r\n")
    assert project.values(1) == [1]
    terminal.until(b"r was pressed")
    terminal.until(b"q and Enter")
    terminal.type(b"other\n")
    terminal.until(b"q and Enter")
    terminal.type(b"q\n")
    terminal.until(b"SIGINT received")
    assert terminal.finish() == 128 + signal.SIGINT


def test_a_breakpoint_in_one_rank_has_the_terminal_before_and_after_a_save(project: Project) -> None:
    project.write(41, ends=True)
    stop = "\nif os.environ['RANK'] == '1':\n    breakpoint()\npost(value='after')\n"
    project.script.write_text(project.script.read_text() + stop)
    terminal = Terminal(project, "--nproc-per-node=2")
    terminal.until(b"(Pdb) ")
    terminal.type(b"p helper.VALUE + 1\n")
    terminal.until(b"42")
    project.write(51, ends=True)
    terminal.until(b"(Pdb) ")
    terminal.until(b"(Pdb) ")
    terminal.type(b"p helper.VALUE + 1\n")
    terminal.until(b"52")
    terminal.type(b"c\n")
    terminal.until(b"every worker has succeeded")
    terminal.until(b"q and Enter")
    terminal.type(b"q\n")
    assert terminal.finish() == 128 + signal.SIGINT


def test_a_kill_of_the_launcher_leaves_no_process_and_the_terminal_as_it_was(project: Project) -> None:
    project.write(1, ends=True)
    terminal = Terminal(project)
    terminal.until(b"q and Enter")
    os.kill(terminal.pid, signal.SIGKILL)
    assert terminal.has_its_mode()
    assert terminal.finish() == -signal.SIGKILL


def test_the_script_of_another_machine_is_refused(tmp_path: Path) -> None:
    command = [*OURS.command, "--reload", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node0", __file__]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment())
    assert done.returncode == 2
    assert "--reload watches the files of one machine, and --nnodes 2 has others" in done.stderr
