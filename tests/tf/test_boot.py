"""The bootstrap runs a script as the interpreter would, patches TensorFlow when it is imported, and opens nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from scripted_cluster import BOOT

LOOK = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "names": sorted(globals()), "file": globals().get("__file__"),
    "name": __name__, "orig": sys.orig_argv[1:], "spec": str(__spec__)[:40], "package": __package__,
    "main": sys.modules["__main__"].__dict__ is globals(),
}))
"""


def run(*command: str, at: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the bootstrap's directory in its path, as a task has it."""
    return subprocess.run(
        [sys.executable, "-u", *command],
        cwd=at,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(BOOT.parent), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def both(*program: str, at: Path) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """The result of a program under Python alone, and through the bootstrap."""
    return run(*program, at=at), run(str(BOOT), *program, at=at)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Programs of each kind."""
    (tmp_path / "look.py").write_text(LOOK)
    (tmp_path / "fail.py").write_text("def inner():\n    1 / 0\n\n\ninner()\n")
    (tmp_path / "wrong.py").write_text("print('never')\nx = = 1\n")
    (tmp_path / "leave.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    (tmp_path / "message.py").write_text("raise SystemExit('a last message')\n")
    (tmp_path / "hooked.py").write_text(
        "import sys, traceback\n"
        "sys.excepthook = lambda kind, value, trace: print(len(traceback.extract_tb(trace)), kind.__name__)\n"
        "raise KeyError('x')\n"
    )
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "module.py").write_text(LOOK)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(LOOK)
    return tmp_path


@pytest.mark.parametrize(
    "program",
    [
        ("look.py", "--an", "-m", "argument"),
        ("./look.py",),
        ("-m", "package.module", "one", "-m"),
        ("folder", "one"),
    ],
    ids=["script", "relative script", "module", "directory"],
)
def test_a_program_observes_what_it_observes_under_python_alone(project: Path, program: tuple[str, ...]) -> None:
    alone, booted = both(*program, at=project)
    assert json.loads(booted.stdout) == json.loads(alone.stdout)


@pytest.mark.parametrize(
    "program",
    [("fail.py",), ("wrong.py",), ("leave.py", "7"), ("message.py",), ("hooked.py",), ("nowhere.py",)],
    ids=["exception", "syntax error", "exit code", "last message", "own hook", "no such file"],
)
def test_a_program_exits_as_it_exits_under_python_alone(project: Path, program: tuple[str, ...]) -> None:
    alone, booted = both(*program, at=project)
    assert (booted.returncode, booted.stdout, booted.stderr) == (alone.returncode, alone.stdout, alone.stderr)


def test_a_child_of_multiprocessing_finds_the_script_again(project: Path) -> None:
    (project / "children.py").write_text(
        "import multiprocessing, os\n"
        "def double(x):\n    return 2 * x, os.path.basename(__file__)\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(double, (21,)))\n"
    )
    assert run(str(BOOT), "children.py", at=project).stdout == "(42, 'children.py')\n"


def test_without_a_program_the_bootstrap_prints_its_usage(tmp_path: Path) -> None:
    finished = run(str(BOOT), at=tmp_path)
    assert (finished.returncode, finished.stderr.startswith("usage: tf_ps_boot.py SCRIPT")) == (2, True)


def test_importing_the_bootstrap_opens_and_starts_nothing(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "agent"))
        agent.listen()
        agent.setblocking(False)
        look = (
            "import os, sys\n"
            "before = os.listdir('/proc/self/fd')\n"
            "import tf_ps_boot\n"
            "same = os.listdir('/proc/self/fd') == before\n"
            "print(same, len(os.listdir('/proc/self/task')), 'tensorflow' in sys.modules)\n"
        )
        finished = run("-c", look, at=tmp_path, TF_PS_AGENT=str(tmp_path / "agent"), TF_CONFIG="nonsense")
        with pytest.raises(BlockingIOError):
            agent.accept()
    assert (finished.stdout, finished.stderr) == ("True 1 False\n", "")


def test_the_package_beside_the_bootstrap_is_imported_and_no_other(tmp_path: Path) -> None:
    look = (
        "import tf_ps_boot, importlib.util, tf_ps_runner.worker.agent_connection as it\n"
        "print(it.__file__, importlib.util.find_spec('dlrover_run'))\n"
    )
    finished = run("-S", "-c", look, at=tmp_path)
    assert finished.stdout == f"{BOOT.parents[1] / 'worker' / 'agent_connection.py'} None\n", finished.stderr


def test_a_missing_attribute_of_tensorflow_is_reported_and_the_script_continues(tmp_path: Path) -> None:
    training = tmp_path / "tensorflow" / "python" / "training"
    training.mkdir(parents=True)
    for folder in (training, training.parent, training.parent.parent):
        (folder / "__init__.py").touch()
    (training.parents[1] / "__init__.py").write_text("__version__ = '9.9'\n")
    (training / "session_manager.py").write_text("class SessionManager:\n    pass\n")
    (tmp_path / "script.py").write_text(
        "import tensorflow, tensorflow.python.training.session_manager as it\n"
        "import tf_ps_boot\n"
        "from tf_ps_runner.worker.agent_connection import agent\n"
        "agent().report('ready')\n"
        "print(it.SessionManager.__name__, it.__loader__ is it.__spec__.loader, type(it.__loader__).__name__)\n"
    )
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "agent"))
        agent.listen()
        finished = run(str(BOOT), "script.py", at=tmp_path, TF_PS_AGENT=str(tmp_path / "agent"))
        line, _ = agent.accept()
        with line, line.makefile() as lines:
            messages = [json.loads(text) for text in lines]
    assert finished.stdout == "SessionManager True SourceFileLoader\n"
    notes = [message["text"] for message in messages if message["type"] == "note"]
    assert len(notes) == 1, finished.stderr
    assert notes[0].startswith("TensorFlow 9.9 has no ")
    assert "goes back to the last checkpoint" in notes[0]


RESTORE = """
from tf_ps_runner.worker import checkpoints

# What the patches do before the first step of a chief, whatever its script has imported by then.
checkpoints.RestoredModel().report(0)
"""


def test_the_queues_are_restored_with_the_model_although_the_script_has_not_imported_its_hooks(tmp_path: Path) -> None:
    (tmp_path / "restore.py").write_text(RESTORE)
    address, received = f"@tf-ps-boot-{os.getpid()}", []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + address[1:])
        listener.listen()
        listener.settimeout(60)

        def answer() -> None:
            line, _ = listener.accept()
            with line, line.makefile("rb") as lines:
                for text in lines:
                    message = json.loads(text)
                    received.append(message["type"])
                    if "request" in message:
                        line.sendall(json.dumps({"answer": message["request"]}).encode() + b"\n")

        agent = threading.Thread(target=answer)
        agent.start()
        config = json.dumps({"task": {"type": "chief", "index": 0}})
        done = run(str(BOOT), "restore.py", at=tmp_path, TF_CONFIG=config, TF_PS_AGENT=address, TF_PS_TASK_TOKEN="t")
        agent.join()
    assert done.returncode == 0, done.stderr
    assert received == ["hello", "rollback", "restored"]
