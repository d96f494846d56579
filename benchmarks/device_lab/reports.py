"""Answers what clients ask the processes of a job as NCCL RAS, from what these processes share.

A process listens itself (`device.c`), so one that is stopped accepts no client, and the kernel may choose any of them.
It hands the connection over to this program, together with its rank.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from pathlib import Path

from support.nccl_ras import Communicator, MissingRank, RasAnswers, RasJob, RasRank

from device_lab.shared import OPERATIONS, Shared, read_shared

SILENT = 3.0
"""Seconds without a keep-alive after which a process does not answer the others."""

HANDOVER_SIZE = 1024
END_TIMEOUT = 10.0


def ras_job(shared: Shared, asked: int, now: float) -> RasJob:
    """The communicators of a job as the process of rank `asked` knows them at that time of the monotonic clock."""
    hears = [rank for rank in range(shared.world) if now - shared.ranks[rank].heard_at <= SILENT]
    answering = {asked, *(hears if asked in hears else ())}
    communicators = []
    for group in range(shared.groups):
        members = [rank for rank in range(shared.world) if shared.members[group] >> rank & 1]
        found, missing = [], []
        for own, rank in enumerate(members):
            one = shared.ranks[rank]
            if rank in answering:
                counts = dict(zip(OPERATIONS, one.launched[group], strict=True))
                found.append(RasRank(own, one.pid, counts, gpu=one.device))
            elif one.pid:
                missing.append(MissingRank(own, one.pid, gpu=one.device))
        communicators.append(Communicator(0x1AB0000000000000 + group, found, missing))
    return RasJob(communicators)


class RasReports:
    """Answers for the job in a folder, as a context manager. `asked` counts the reports that clients asked for."""

    def __init__(self, folder: Path) -> None:
        self._answers: list[RasAnswers] = []
        self._threads: list[threading.Thread] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(folder / "ras"))

    @property
    def asked(self) -> int:
        return sum(one.asked for one in self._answers)

    def __enter__(self) -> RasReports:
        self._socket.listen(64)
        self._start(self._serve)
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            # Closing alone does not end an accept in another thread.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for one in self._answers:
            one.ended.set()
        for thread in self._threads:
            thread.join(END_TIMEOUT)

    def _start(self, run: object, *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sender, _ = self._socket.accept()
                with sender:
                    message, descriptors, _, _ = socket.recv_fds(sender, HANDOVER_SIZE, 1)
                if not descriptors:
                    continue
                (rank,) = struct.unpack_from("i", message)
                shared = read_shared(Path(message[4:].decode()))
                job = ras_job(shared, rank, time.monotonic())
                # NCCL waits for a process that does not answer until the client's time is up.
                answers = RasAnswers(lambda job=job: job, waits=bool(job.lost(dead=False)))  # type: ignore[misc]
                self._answers.append(answers)
                self._start(answers.converse, socket.socket(fileno=descriptors[0]))
