"""Raw outputs of a job that hangs, as fixtures for the tests of the product: what NCCL RAS, the flight recorders, NVML
and nvidia-smi say, the threads and stacks of the workers, and what the launcher printed.

Whatever does not answer is left out; a measurement does not fail for want of a fixture.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from core.run import Run

ASK_TIMEOUT = 6.0
COMMAND_TIMEOUT = 8.0
"""Seconds for the answer of one source."""

GREETING_TIMEOUT, RAS_ATTEMPTS = 0.5, 6
"""Seconds for the first line of NCCL RAS, and how many processes are tried."""

RAS_COMMANDS = {
    "ras.txt": ("TIMEOUT 2", "VERBOSE STATUS"),
    "ras.json": ("TIMEOUT 2", "SET FORMAT json", "VERBOSE STATUS"),
}
"""By the file: the commands that NCCL is sent, the last of which it answers with a report."""

COMMANDS = {
    "nvidia-smi.txt": (
        "nvidia-smi",
        "--query-gpu=utilization.gpu,utilization.memory,power.draw,memory.used",
        "--format=csv",
    ),
    "nvidia-smi-pmon.txt": ("nvidia-smi", "pmon", "-c", "2", "-s", "um"),
    "nvml.json": (sys.executable, str(Path(__file__).with_name("nvml_figures.py"))),
}
"""By the file: the command whose output it has."""

MAX_RAW = 1 << 20
"""Bytes of a file that is kept."""

THREADS_OVER = 1.0
"""Seconds over which the processor time of threads is measured."""


def record(folder: Path, run: Run, pids: Sequence[int], logs: Path, environment: Mapping[str, str]) -> None:
    """Write the fixtures of a job that hangs to a folder, which is made anew. All sources are asked at once."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "console.txt").write_text(run.output)

    def from_ras(name: str) -> bytes:
        return ask_ras(ras_address(pids), RAS_COMMANDS[name])

    def from_command(name: str) -> bytes:
        whole = {**os.environ, **environment}
        command = COMMANDS[name]
        return subprocess.run(command, env=whole, capture_output=True, timeout=COMMAND_TIMEOUT, check=True).stdout

    sources: dict[str, Callable[[str], bytes]] = {
        **dict.fromkeys(RAS_COMMANDS, from_ras),
        **dict.fromkeys(COMMANDS, from_command),
        "threads.txt": lambda name: threads_text(pids).encode(),
    }

    def write(name: str) -> None:
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            (folder / name).write_bytes(sources[name](name))

    with ThreadPoolExecutor(len(sources)) as threads:
        list(threads.map(write, sources))
    # What the launcher has kept itself: stacks, RAS reports and the dumps of flight recorders.
    for pattern in ("**/hangs/*", "**/stacks.txt", "**/flight-recorder"):
        for kept in sorted(logs.glob(pattern)):
            _copy_small(kept, folder / kept.name)


def ras_address(pids: Sequence[int]) -> str:
    """Where the RAS threads of these workers answer, by the environment of one. Raises ValueError if it has none."""
    for pid in pids:
        with contextlib.suppress(OSError):
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            for entry in entries:
                if entry.startswith(b"NCCL_RAS_ADDR="):
                    return entry.partition(b"=")[2].decode()
    raise ValueError("no worker has NCCL_RAS_ADDR")


def ask_ras(address: str, commands: Sequence[str]) -> bytes:
    """What NCCL RAS answers to these commands, each line of which comes before the report. The kernel chooses among the
    processes that listen there, so one that is stopped may be met; then another is tried. Raises OSError."""
    host, _, port = address.rpartition(":")
    for attempt in range(1, RAS_ATTEMPTS + 1):
        with socket.create_connection((host, int(port)), ASK_TIMEOUT) as connection:
            connection.settimeout(GREETING_TIMEOUT if attempt < RAS_ATTEMPTS else ASK_TIMEOUT)
            reader = connection.makefile("rb")
            try:
                answer = _said(connection, reader, "CLIENT PROTOCOL 2")
            except TimeoutError:
                continue
            connection.settimeout(ASK_TIMEOUT)
            for command in commands[:-1]:
                answer += _said(connection, reader, command)
            connection.sendall(f"{commands[-1]}\n".encode())
            return answer + f"> {commands[-1]}\n".encode() + reader.read(MAX_RAW)
    raise TimeoutError(f"nothing at {address} answers")


def _said(connection: socket.socket, reader: BinaryIO, command: str) -> bytes:
    """A command and the line that answers it."""
    connection.sendall(f"{command}\n".encode())
    return f"> {command}\n".encode() + reader.readline()


def threads_text(pids: Sequence[int]) -> str:
    """The threads of the workers: the name, the state, the share of a processor, and where they wait in the kernel."""
    before = {pid: _threads(pid) for pid in pids}
    time.sleep(THREADS_OVER)
    lines = []
    for rank, pid in enumerate(pids):
        after = _threads(pid)
        lines.append(f"rank {rank}, process {pid}, {len(after)} threads")
        for thread, (name, state, ticks, where) in sorted(after.items()):
            used = (ticks - before[pid].get(thread, ("", "", ticks, ""))[2]) / os.sysconf("SC_CLK_TCK") / THREADS_OVER
            main = " main" if thread == pid else ""
            lines.append(f"  {thread} {name} {state} {100 * used:.0f} % {where}{main}")
    return "\n".join([*lines, ""])


def _threads(pid: int) -> dict[int, tuple[str, str, int, str]]:
    found = {}
    with contextlib.suppress(OSError):
        for folder in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                text = (folder / "stat").read_text()
                name, fields = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
                where = "?"
                with contextlib.suppress(OSError):
                    where = (folder / "wchan").read_text() or "-"
                found[int(folder.name)] = (name, fields[0], int(fields[11]) + int(fields[12]), where)
    return found


def _copy_small(source: Path, target: Path) -> None:
    for file in [source] if source.is_file() else sorted(source.glob("**/*")):
        with contextlib.suppress(OSError):
            if file.is_file() and file.stat().st_size <= MAX_RAW:
                place = target / file.relative_to(source) if file != source else target
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place)


def pack(folder: Path, archive: Path) -> None:
    """One file of all fixtures, which a lent machine sends back; it replaces that of before."""
    if not folder.is_dir():
        return
    fresh = archive.with_name(f".{archive.name}")
    with tarfile.open(fresh, "w:gz") as packed:
        packed.add(folder, "recorded")
    fresh.replace(archive)
