"""Stands in for the agent of real TensorFlow processes: starts them with a `TF_CONFIG`, and sends the orders of a test.

One unix socket serves all tasks of a cluster, which their tokens distinguish. Every wait here is for a message of a
process or for its exit, bounded by TIMEOUT.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from support.cluster import quiet_port

BOOT = Path(__file__).parents[2] / "tf_ps_runner" / "worker_path" / "tf_ps_boot.py"
SCRIPTS = Path(__file__).with_name("scripts")

TIMEOUT = 240.0
"""Seconds for each wait, after which the test fails; TensorFlow starts in 3 to 15."""

ENDING = 10.0
"""Seconds that a process may live without its connection to the agent."""

Message = dict[str, Any]


def run_booted(python: Path, *argv: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in an interpreter with TensorFlow, with the bootstrap in its path."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [str(python), *map(str, argv)],
        env={**os.environ, "PYTHONPATH": str(BOOT.parent), **quiet, **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


class Template:
    """Forks tasks from one interpreter that has imported TensorFlow."""

    def __init__(self, python: Path) -> None:
        self._changed = threading.Condition()
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._process = subprocess.Popen(
            [str(python), "-u", str(SCRIPTS / "template.py")],
            env={**os.environ, "PYTHONPATH": str(BOOT.parent), "TF_CPP_MIN_LOG_LEVEL": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def fork(self, number: int, script: Path, log: Path, environment: dict[str, str]) -> Forked:
        """Start a task."""
        task = {"number": number, "script": str(script), "log": str(log), "environment": environment}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task).encode() + b"\n")
        self._process.stdin.flush()
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._pids, TIMEOUT), "the template does not fork"
        return Forked(self, number, self._pids[number])

    def code(self, number: int, timeout: float) -> int | None:
        """Wait for the end of a task and return its exit code."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._codes, timeout)
            return self._codes.get(number)

    def close(self) -> None:
        """Close the template after the end of its tasks."""
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            with self._changed:
                numbers, value = (self._pids, "pid") if "pid" in message else (self._codes, "code")
                numbers[message["number"]] = message[value]
                self._changed.notify_all()


class Forked:
    """A forked task with the interface of a Popen."""

    def __init__(self, template: Template, number: int, pid: int) -> None:
        self._template = template
        self._number = number
        self.pid = pid

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._template.code(self._number, 0)

    def wait(self, timeout: float = TIMEOUT) -> int:
        """Its exit code; raises TimeoutExpired."""
        code = self._template.code(self._number, timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"task {self._number}", timeout)
        return code

    def kill(self) -> None:
        """SIGKILL."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Process:
    """One task: its process, its output, and its messages."""

    def __init__(self, cluster: ScriptedCluster, name: str, popen: subprocess.Popen[bytes] | Forked, log: Path) -> None:
        self.name = name
        self.popen = popen
        self.received: list[Message] = []
        self.line: socket.socket | None = None
        self._cluster = cluster
        self._log = log

    @property
    def output(self) -> str:
        """All output so far."""
        return self._log.read_text(errors="replace")

    def messages(self, what: str) -> list[Message]:
        """Its messages of one type."""
        return [message for message in self.received if message.get("type") == what]

    def wait_for_message(self, what: str, such: Callable[[Message], bool] = lambda _: True) -> Message:
        """Wait for the first message of a type that satisfies `such`, and return it."""
        return self._cluster.wait(
            lambda: next((message for message in self.messages(what) if such(message)), None),
            f"{self.name}: {what}",
            self,
        )

    def wait_step(self, step: int) -> int:
        """Wait until it has reported a step, or a later one."""
        return int(self.wait_for_message("step", lambda message: message["step"] >= step)["step"])

    @property
    def step(self) -> int:
        """The last step that it has reported."""
        return max((message["step"] for message in self.messages("step")), default=-1)

    def wait_end(self) -> int:
        """Its exit code."""
        try:
            return self.popen.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end; it printed:\n{self.output}") from None

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.popen.kill()
        self.popen.wait()


class ScriptedCluster:
    """The tasks of one job, which a test starts one by one."""

    def __init__(
        self, python: Path, script: str, folder: Path, workers: int = 1, forked: bool = False, **environment: str
    ) -> None:
        self.model = folder / "model"
        self.model.mkdir(exist_ok=True)
        self._python, self._folder = python, folder
        self._script = SCRIPTS / script
        self._environment = {"MODEL_DIR": str(self.model), **environment}
        self._workers = [f"127.0.0.1:{quiet_port()}" for _ in range(workers)]
        self._chief = f"127.0.0.1:{quiet_port()}"
        self._servers: list[str] = []
        self._processes: list[Process] = []
        self._template = Template(python) if forked else None
        self._changed = threading.Condition()
        self._order: Message = {}
        self.version = 0
        self.address = f"@tf-ps-test-{os.getpid()}-{quiet_port()}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + self.address[1:])
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> ScriptedCluster:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
        self._listener.close()
        if self._template is not None:
            self._template.close()
        if error is not None:
            for process in self._processes:
                print(f"--- {process.name}", *process.output.splitlines()[-30:], sep="\n")

    def new_version(self, servers: int) -> None:
        """Start a new set of servers. The processes of the old one are killed."""
        for process in self._processes:
            if process.popen.poll() is None:
                process.kill()
        self.version += 1
        self._servers = [f"127.0.0.1:{quiet_port()}" for _ in range(servers)]
        self.order(open=False, pause=False, save=False, ending=False)
        for rank in range(servers):
            self.start("ps", rank)

    def start(self, role: str, rank: int = 0, address: str | None = None, **environment: str) -> Process:
        """Start a task through the bootstrap, at its usual address or at another one."""
        if address is not None and role == "worker":
            self._workers[rank] = address
        cluster = {"chief": [self._chief], "worker": self._workers, "ps": self._servers}
        stated = {"cluster": cluster, "task": {"type": role, "index": rank}}
        number = len(self._processes)
        log = self._folder / f"{number}-{role}-{rank}.log"
        log.touch()
        whole = {
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "1",
            "CUDA_VISIBLE_DEVICES": "",
            # TensorFlow leaves generated code there when its process is killed.
            "TMPDIR": str(self._folder),
            **self._environment,
            **environment,
            "TF_CONFIG": json.dumps(stated),
            "TF_PS_AGENT": self.address,
            "TF_PS_TASK_TOKEN": str(number),
            "TF_PS_GATE": "1",
            "TF_PS_READY_AT_START": "1" if role == "evaluator" else "0",
            "PYTHONPATH": str(BOOT.parent),
        }
        popen: subprocess.Popen[bytes] | Forked
        if self._template is not None:
            popen = self._template.fork(number, self._script, log, whole)
        else:
            command = [str(self._python), "-u", str(BOOT), str(self._script)]
            with log.open("wb") as output:
                popen = subprocess.Popen(command, env=whole, stdout=output, stderr=subprocess.STDOUT)
        process = Process(self, f"{role}-{rank}", popen, log)
        with self._changed:
            self._processes.append(process)
            self._changed.notify_all()
        return process

    def order(self, **order: bool) -> None:
        """Change the order for all tasks."""
        with self._changed:
            self._order.update(order)
            for process in self._processes:
                if process.line is not None:
                    self._send(process.line)

    def wait(self, found: Callable[[], Any], what: str, process: Process | None = None) -> Any:
        """Wait until the messages satisfy `found`; fails at once if `process` has exited before."""
        with self._changed:

            def done() -> bool:
                return bool(found()) or (process is not None and process.popen.poll() is not None)

            self._changed.wait_for(done, TIMEOUT)
            result = found()
        assert result, f"{what} was not reported"
        return result

    def on_request(self, process: Process, line: socket.socket, text: bytes) -> None:
        """Answer a request: a chief's request for the state of the queues, which this cluster does not have."""
        line.sendall(json.dumps({"answer": json.loads(text)["request"]}).encode() + b"\n")

    def on_disconnect(self, process: Process) -> None:
        """Handle the end of a process's connection."""

    def _numbered(self, number: int) -> Process:
        """The task with that number, which may have connected before it was recorded."""
        self._changed.wait_for(lambda: len(self._processes) > number, TIMEOUT)
        return self._processes[number]

    def _send(self, line: socket.socket) -> None:
        try:
            line.sendall(json.dumps({"type": "order", "version": self.version, **self._order}).encode() + b"\n")
        except OSError:
            return

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._receive, args=(line,), daemon=True).start()

    def _receive(self, line: socket.socket) -> None:
        process: Process | None = None
        with line, line.makefile("rb") as lines:
            try:
                for text in lines:
                    message = json.loads(text)
                    with self._changed:
                        if message.get("type") == "hello":
                            process = self._numbered(int(message["token"]))
                            process.line = line
                        assert process is not None
                        process.received.append(message)
                        self._changed.notify_all()
                        if message.get("type") == "hello":
                            self._send(line)
                    if "request" in message:
                        self.on_request(process, line, text)
            except OSError:
                pass
        if process is not None:
            # A wait for its messages must detect that it has exited.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(ENDING)
        with self._changed:
            if process is not None:
                process.line = None
                self.on_disconnect(process)
            self._changed.notify_all()
