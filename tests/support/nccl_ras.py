"""A server that answers as the RAS threads of NCCL do, from a job that a test describes, or from a recorded report.

NCCL listens at NCCL_RAS_ADDR since 2.24. A client sends commands of one line each: `CLIENT PROTOCOL`, `TIMEOUT`,
`STATUS`, `VERBOSE STATUS`, and since 2.28.7 `SET FORMAT json`. The report ends with the connection. Its text has the
counts of those communicators only whose ranks differ; JSON has those of all.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

OPERATIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
"""What NCCL counts, in its order."""

STATES = ("NOCOMM", "INIT", "RUNNING", "FINALIZE", "ABORT")

DETAILS = 10
"""Ranks up to which a report that is not verbose lists them."""

CLIENT_TIMEOUT = 5.0
"""Seconds for which a report waits for a process that does not answer, unless the client names another limit."""

LINE_SIZE = 1024
RECORDED = Path(__file__).with_name("recorded") / "ras-hang-rank1-sleeps.txt"
END_TIMEOUT = 10.0
"""Seconds in which the threads of a server end."""


@dataclass(frozen=True)
class RasRank:
    """One rank of a communicator that has answered, and how many operations of each kind it has launched."""

    rank: int
    pid: int
    counts: Mapping[str, int] = field(default_factory=dict)
    host: str = "127.0.0.1"
    gpu: int = 0
    state: str = "RUNNING"

    def count(self, operation: str) -> int:
        return self.counts.get(operation, 0)

    @property
    def gpu_line(self) -> str:
        return f"GPU {self.gpu} managed by process {self.pid} on node {self.host}"


@dataclass(frozen=True)
class MissingRank:
    """A rank that has not answered: its process is stopped or cut off, or is `dead`. With `responsive` it has answered,
    and is no member of the communicator any more."""

    rank: int
    pid: int
    host: str = "127.0.0.1"
    gpu: int = 0
    responsive: bool = False
    dead: bool = False

    @property
    def gpu_line(self) -> str:
        return f"GPU {self.gpu} managed by process {self.pid} on node {self.host}"


@dataclass(frozen=True)
class Communicator:
    """One communicator; its ranks are numbered from 0, whatever their global ranks are."""

    hash: int
    ranks: Sequence[RasRank]
    missing: Sequence[MissingRank] = ()

    @property
    def size(self) -> int:
        return len(self.ranks) + len(self.missing)

    @property
    def states(self) -> list[str]:
        """The different states of its ranks, the one that a report names last."""
        found = {one.state for one in self.ranks} | {"NOCOMM" for one in self.missing if one.responsive}
        return sorted(found or {"RUNNING"}, key=STATES.index)

    @property
    def incomplete(self) -> list[MissingRank]:
        return [one for one in self.missing if not one.responsive]

    @property
    def mismatches(self) -> list[str]:
        """The operations of which its ranks have launched different numbers."""
        return [name for name in OPERATIONS if len({one.count(name) for one in self.ranks}) > 1]

    @property
    def errors(self) -> str:
        differs = self.mismatches or len(self.states) > 1
        return ",".join([*(["INCOMPLETE"] if self.incomplete else []), *(["MISMATCH"] if differs else [])]) or "OK"

    @property
    def nodes(self) -> list[int]:
        """The number of its ranks on each node, without those that are missing."""
        return [*Counter(one.host for one in self.ranks).values()]


@dataclass(frozen=True)
class RasJob:
    """All communicators of a job. `seconds` is what the collection of the report took."""

    communicators: Sequence[Communicator]
    version: str = "2.28.9"
    seconds: float = 0.0

    @property
    def processes(self) -> dict[tuple[str, int], set[int]]:
        """The GPUs of each process, by node and process id."""
        found: dict[tuple[str, int], set[int]] = {}
        for communicator in self.communicators:
            for one in (*communicator.ranks, *communicator.missing):
                found.setdefault((one.host, one.pid), set()).add(one.gpu)
        return found

    def lost(self, *, dead: bool) -> list[MissingRank]:
        """One rank of each process that has not answered."""
        missing = [one for each in self.communicators for one in each.incomplete if one.dead is dead]
        return [*{(one.host, one.pid): one for one in missing}.values()]


def text_report(job: RasJob, *, verbose: bool = False) -> str:
    """The report as text."""
    return head_of_text(job) + rest_of_text(job, verbose=verbose)


def head_of_text(job: RasJob) -> str:
    """The part that the process that is asked knows by itself, and sends at once."""
    processes = job.processes
    nodes = Counter(host for host, _ in processes)
    gpus = sum(map(len, processes.values()))
    each = max(map(len, processes.values()), default=0)
    row = f"{len(nodes):7d}  {max(nodes.values(), default=0):9d}  {each:11d}  {len(processes):9d}  {gpus:7d}\n"
    if len({*nodes.values()}) > 1:
        rows = "".join(f"{count:7d}  {size:9d}  {each:11d}\n" for size, count in Counter(nodes.values()).items())
        summary = (
            "  Nodes  Processes         GPUs\n          per node  per process\n"
            f"{rows}\n  Nodes  Processes         GPUs\n(total)    (total)      (total)\n"
            f"{len(nodes):7d}  {len(processes):9d}  {gpus:11d}\n"
        )
    else:
        summary = (
            "  Nodes  Processes         GPUs  Processes     GPUs\n"
            "(total)   per node  per process    (total)  (total)\n" + row
        )
    return (
        f"NCCL version {job.version} compiled with CUDA 13.0\nCUDA runtime version 13000, driver version 13000\n\n"
        f"Job summary\n===========\n\n{summary}\nCommunicators..."
    )


def rest_of_text(job: RasJob, *, verbose: bool = False) -> str:
    """What follows once all processes have answered, or the time is up."""
    groups = [
        list(members)
        for _, members in groupby(sorted(job.communicators, key=_group, reverse=True), key=lambda one: _group(one)[:4])
    ]
    table = "".join(_group_row(number, members) for number, members in enumerate(groups))
    heads = (
        "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n"
        "    #  in group  per comm  per node  per comm  in group\n"
    )
    named = [(f"#{n}-{m} ({one.hash:016x})", one) for n, group in enumerate(groups) for m, one in enumerate(group)]
    return "".join(
        (
            f" ({job.seconds:.3f}s)\n=============\n\n",
            heads + table if groups else "No communicator data collected!\n",
            "\nErrors\n======\n\n",
            *_lost_processes(job, verbose),
            *(_incomplete(name, one, verbose) for name, one in named if one.incomplete),
            "Warnings\n========\n\n",
            *(_mismatch(name, one, verbose) for name, one in named if "MISMATCH" in one.errors),
        )
    )


def json_report(job: RasJob) -> str:
    """The report as JSON."""
    return json.dumps(
        {
            "nccl_version": job.version,
            "cuda_runtime_version": 13000,
            "cuda_driver_version": 13000,
            "timestamp": "2026-11-27 12:00:00",
            "communicators_count": len(job.communicators),
            "communicators": [_json_communicator(one) for one in job.communicators],
            "ras": {"collection_time_sec": job.seconds, "timeouts_count": int(bool(job.lost(dead=False)))},
        },
        indent=2,
    )


def _json_communicator(one: Communicator) -> dict[str, object]:
    return {
        "hash": f"0x{one.hash:x}",
        "secondary_hash": f"0x{one.hash ^ 0x5A5A:x}:0x{one.hash ^ 0xA5A5:x}",
        "size": one.size,
        "ranks_count": len(one.ranks),
        "missing_ranks_count": len(one.missing),
        "ranks": [
            {
                **_json_place(rank),
                "status": {
                    "init_state": 7 if rank.state == "INIT" else 0,
                    "async_error": 0,
                    "finalize_called": rank.state == "FINALIZE",
                    "destroy_flag": False,
                    "abort_flag": rank.state == "ABORT",
                },
                "collective_counts": {name: rank.count(name) for name in OPERATIONS},
            }
            for rank in one.ranks
        ],
        "missing_ranks": [
            {**_json_place(rank), "status": {"unresponsive": not rank.responsive, "considered_dead": rank.dead}}
            for rank in one.missing
        ],
    }


def _json_place(one: RasRank | MissingRank) -> dict[str, object]:
    return {"rank": one.rank, "host": one.host, "pid": one.pid, "cuda_dev": one.gpu, "nvml_dev": one.gpu}


def _group(one: Communicator) -> tuple[int, int, int, tuple[bool, bool], int]:
    """What a report groups communicators by, the greatest first; of one group those that miss most ranks first."""
    errors = "INCOMPLETE" in one.errors, "MISMATCH" in one.errors
    return one.size, len(one.nodes), STATES.index(one.states[-1]), errors, len(one.missing)


def _group_row(number: int, members: Sequence[Communicator]) -> str:
    first = members[0]
    low, high = (choose(choose(one.nodes) for one in members) for choose in (min, max))
    per_node = str(low) if low == high else f"{low}-{high}"
    ranks = len({(one.host, one.pid, one.gpu) for each in members for one in each.ranks})
    return (
        f"{number:5d}  {len(members):8d}  {len(first.nodes):8d}  {per_node:>8}  {first.size:8d}  {ranks:8d}  "
        f"{first.states[-1]:>8}  {first.errors:>6}\n"
    )


def _lists(count: int, verbose: bool, total: int | None = None) -> bool:
    """Whether a report lists the ranks of such a number."""
    if count == 1:
        return True
    if verbose:
        return total is None or count < total / 2
    return count <= DETAILS and (total is None or count <= total / 4)


def _lost_processes(job: RasJob, verbose: bool) -> Iterator[str]:
    for dead, title, text in (
        (False, "INCOMPLETE", "Missing communicator data from {} job process{}"),
        (True, "DEAD", "{} job process{} considered dead (unreachable via the RAS network)"),
    ):
        lost = job.lost(dead=dead)
        if lost:
            plural = "es" if len(lost) > 1 else ""
            plural += (" are" if plural else " is") if dead else ""
            yield f"{title}\n  {text.format(len(lost), plural)}\n"
            if _lists(len(lost), verbose):
                for one in sorted(lost, key=lambda one: (one.host, one.pid)):
                    yield f"  Process {one.pid} on node {one.host} managing GPU {one.gpu}\n"
            yield "\n"


def _incomplete(name: str, one: Communicator, verbose: bool) -> str:
    lost = one.incomplete
    lines = [f"{name} INCOMPLETE", f"  Missing communicator data from {len(lost)} rank{'s' if len(lost) > 1 else ''}"]
    if _lists(len(lost), verbose):
        lines += [f"  Rank {each.rank} -- {each.gpu_line}" for each in lost]
    return "\n".join(lines) + "\n\n"


def _mismatch(name: str, one: Communicator, verbose: bool) -> str:
    text = f"{name} MISMATCH\n"
    if len(one.states) > 1:
        text += "  Communicator ranks have different status\n"
        left = [each for each in one.missing if each.responsive]
        by_state = [(state, [each for each in one.ranks if each.state == state]) for state in one.states]
        known: list[tuple[str, Sequence[RasRank | MissingRank]]] = [(state, each) for state, each in by_state if each]
        known += [("NOCOMM", left)] if left else []
        for state, ranks in sorted(known, key=lambda each: -len(each[1])):
            text += _ranks(ranks, f"have status {state}", f"has status {state}", one.size, verbose)
    for operation in one.mismatches:
        text += f"  Communicator ranks have different {operation} operation counts\n"
        counts = Counter(each.count(operation) for each in one.ranks)
        for count, _ in sorted(counts.items(), key=lambda each: (-each[1], -each[0])):
            what = f"launched up to operation {count}" if count else "not launched any operations"
            ranks = sorted((each for each in one.ranks if each.count(operation) == count), key=lambda each: each.rank)
            text += _ranks(ranks, f"have {what}", f"has {what}", one.size, verbose)
        text += "\n"
    return text


def _ranks(ranks: Sequence[RasRank | MissingRank], many: str, single: str, total: int, verbose: bool) -> str:
    if len(ranks) == 1:
        return f"  Rank {ranks[0].rank} {single} -- {ranks[0].gpu_line}\n"
    text = f"  {len(ranks)} ranks {many}\n"
    if _lists(len(ranks), verbose, total):
        text += "".join(f"  Rank {one.rank} -- {one.gpu_line}\n" for one in ranks)
    return text


@dataclass
class RasAnswers:
    """How a server answers. `job` is asked at each report; with `recorded` the report is that text, whatever is asked
    for. `knows_json` is False before NCCL 2.28.7. `protocol` is what the server calls its own. `delay` are the seconds
    before the second part of a report, for which NCCL waits for other processes; with `waits` it is the time limit of
    the client, as where one of them does not answer. With `silent` a connection is accepted and never answered, as by a
    process that is stopped. `damage` changes the bytes of a report.

    `asked` counts the reports that clients have asked for.
    """

    job: Callable[[], RasJob]
    knows_json: bool = True
    protocol: int = 2
    delay: float = 0.0
    waits: bool = False
    silent: bool = False
    damage: Callable[[bytes], bytes] = bytes
    recorded: bytes | None = None
    asked: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def converse(self, client: socket.socket) -> None:
        """Answer one client, until it has its report, goes, or the server ends."""
        with client, contextlib.suppress(OSError):
            if self.silent:
                self.ended.wait()
                return
            with client.makefile("rb") as commands:
                as_json, limit = False, CLIENT_TIMEOUT
                while line := commands.readline(LINE_SIZE):
                    command = line.decode(errors="replace").strip()
                    word = command.lower()
                    if word in ("status", "verbose status"):
                        self.asked += 1
                        delay = limit if self.waits else self.delay
                        self._send_report(client, as_json, delay, verbose=word.startswith("verbose"))
                        return
                    if word.startswith("set format ") and self.knows_json:
                        as_json = word.endswith(" json")
                    answer = self._answer(command)
                    if word.startswith("timeout ") and answer == "OK":
                        limit = float(word.partition(" ")[2])
                    client.sendall(answer.encode() + b"\n")

    def _answer(self, command: str) -> str:
        word, _, rest = command.partition(" ")
        match word.lower():
            case "client" if rest.lower().startswith("protocol "):
                return f"SERVER PROTOCOL {self.protocol}"
            case "timeout":
                return "OK" if rest.replace(".", "", 1).isdigit() else f"ERROR: Invalid timeout value {rest}"
            case "set" if self.knows_json:
                return "OK" if rest.lower() in ("format text", "format json") else f"ERROR: Invalid format {rest}"
        return f"ERROR: Unknown command {command}"

    def _send_report(self, client: socket.socket, as_json: bool, delay: float, verbose: bool) -> None:
        if self.recorded is not None:
            self.ended.wait(delay)
            client.sendall(self.damage(self.recorded))
            return
        began = time.monotonic()
        job = self.job()
        if not as_json:
            client.sendall(self.damage(head_of_text(job).encode()))
        self.ended.wait(delay)
        job = RasJob(job.communicators, job.version, job.seconds or time.monotonic() - began)
        rest = json_report(job) + "\n" if as_json else rest_of_text(job, verbose=verbose)
        client.sendall(self.damage(rest.encode()))


class RasServer:
    """A server with such answers at a port of its own, as a context manager."""

    def __init__(self, answers: RasAnswers) -> None:
        self.answers = answers
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._serve, daemon=True)]

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def address(self) -> str:
        """The value for NCCL_RAS_ADDR."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> RasServer:
        self._threads[0].start()
        return self

    def __exit__(self, *error: object) -> None:
        self.answers.ended.set()
        with contextlib.suppress(OSError):
            # Closing alone does not end an accept in another thread.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for thread in self._threads:
            thread.join(END_TIMEOUT)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                thread = threading.Thread(target=self.answers.converse, args=(client,), daemon=True)
                self._threads.append(thread)
                thread.start()


def recorded_report() -> str:
    """What NCCL 2.28.9 answered to STATUS on an H100 when rank 1 of 2 slept."""
    return RECORDED.read_text().partition("> OK\n")[2].partition("\n=== end of STATUS")[0]


def generated_job(
    ranks: int,
    counts: Callable[[int, int], Mapping[str, int]],
    groups: Sequence[Sequence[int]] = (),
    *,
    first_pid: int = 1000,
    per_node: int = 8,
    missing: Sequence[int] = (),
    version: str = "2.28.9",
) -> RasJob:
    """A job of that many ranks with a process id and a GPU each, on nodes of `per_node`: the default group of all, and
    these further groups of global ranks. `counts(group, rank)` are what a global rank has launched in a group, the
    default one being 0. The ranks of `missing` have not answered."""
    communicators = []
    for number, members in enumerate([range(ranks), *groups]):
        place = [(own, one, f"10.0.0.{one // per_node + 1}", one % per_node) for own, one in enumerate(members)]
        communicators.append(
            Communicator(
                0x1991020451F915DD + number,
                [
                    RasRank(own, first_pid + one, counts(number, one), host, gpu)
                    for own, one, host, gpu in place
                    if one not in missing
                ],
                [MissingRank(own, first_pid + one, host, gpu) for own, one, host, gpu in place if one in missing],
            )
        )
    return RasJob(communicators, version)
