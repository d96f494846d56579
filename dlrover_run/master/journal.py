"""One job's journal: a file to which each plan is appended before it is sent to a node.

The first line is a header, each further one a plan; the last plan is all that a successor needs. Each line begins with
a checksum of it and of all lines before it, so that no line can change, vanish or move unseen. A master that takes a
job over writes a new file and puts it in the place of the old one. That compacts the journal, and it shows a master
that was asleep that it has been replaced: the file at that path is not the one that it holds open.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import zlib
from pathlib import Path

import msgspec

from dlrover_run.coordination.model import Plan
from dlrover_run.coordination.rules import JobRules

FORMAT = 2
"""The version of the file format, increased with each incompatible change."""

COMPACT_BYTES = 16 * 1024 * 1024
"""The size at which a journal is compacted while its job runs: hundreds of rounds of a large job."""

MAX_BYTES = 8 * COMPACT_BYTES
"""The longest journal that is read."""

_CHECKSUM = 8
"""Characters with which a line begins: the CRC-32 of the rest, in hexadecimal digits."""


class JournalHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line: the job, its rules, and the epoch of the coordinator that began the file."""

    format: int
    job: str
    epoch: int
    rules: JobRules


class JournalContents(msgspec.Struct, frozen=True):
    """The content of a journal. `plan` is the last one, None before the first."""

    header: JournalHeader
    plan: Plan | None = None


class JournalDamaged(Exception):
    """A journal is damaged; the message says where and what to do."""


class JournalReplaced(Exception):
    """Another master has taken the job over; the message says so."""


def encode(story: JournalContents) -> bytes:
    """The bytes of a journal with this content."""
    first = _line(msgspec.json.encode(story.header), 0)
    return first if story.plan is None else first + _line(msgspec.json.encode(story.plan), _sum_of(first))


def decode(data: bytes, job: str) -> JournalContents:
    """The content of a journal, without a last line that was cut short. Raises ValueError, which names the line, for
    any other damage."""
    lines = data.split(b"\n")
    # What comes after the last newline was cut short; without a cut it is empty.
    torn = lines.pop() != b""
    header: JournalHeader | None = None
    plan: Plan | None = None
    checksum = 0
    for number, line in enumerate(lines, 1):
        content = line[_CHECKSUM + 1 :]
        checksum = zlib.crc32(content, checksum)
        if line[: _CHECKSUM + 1] != b"%08x " % checksum:
            if number == len(lines) and number > 1 and not torn:
                # The write was never completed, so this plan was never sent.
                break
            raise ValueError(f"line {number}: the checksum is wrong")
        try:
            if header is None:
                header = _read_header(content, job)
            else:
                plan = msgspec.json.decode(content, type=Plan)
        except msgspec.MsgspecError as error:
            raise ValueError(f"line {number}: {error}") from None
    if header is None:
        raise ValueError("line 1: there is no whole header")
    return JournalContents(header, plan)


def _read_header(content: bytes, job: str) -> JournalHeader:
    kind = msgspec.json.decode(content, type=dict[str, msgspec.Raw]).get("format")
    if kind is None or bytes(kind) != b"%d" % FORMAT:
        raise ValueError("line 1: another version of dlrover-run wrote it")
    header = msgspec.json.decode(content, type=JournalHeader)
    if header.job != job:
        raise ValueError("line 1: it belongs to another job")
    return header


def _line(content: bytes, before: int) -> bytes:
    return b"%08x %b\n" % (zlib.crc32(content, before), content)


def _sum_of(line: bytes) -> int:
    return int(line[:_CHECKSUM], 16)


class Journal:
    """The journal of one job in `directory`, which must be there.

    Every write blocks until the disk has it: 0.2 ms on a local one, some milliseconds over a network.
    """

    def __init__(self, directory: Path, job: str) -> None:
        # The name helps a person to find the file; the digest tells two jobs apart whose names look alike.
        readable = re.sub(r"[^A-Za-z0-9._-]", "_", job)[:80]
        digest = hashlib.sha256(job.encode()).hexdigest()[:16]
        self.path = directory / f"job-{readable}-{digest}.journal"
        self._job = job
        self._fd = -1
        self._size = 0
        self._checksum = 0
        self._header: JournalHeader | None = None
        self._whole = False

    def exists(self) -> bool:
        """Whether there is a journal of this job, ours or another master's."""
        return self.path.exists()

    def take_over(self, rules: JobRules, epoch: int) -> JournalContents:
        """Go on from what a predecessor wrote, in a new file, and return the story from here on.

        Without a predecessor the job begins with these rules. The epoch is at least the given one and later than any
        in the old file. Raises JournalDamaged and OSError; the old file is then as it was.
        """
        self._sweep()
        try:
            # Non-blocking, because the path may be a pipe.
            old = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            story = JournalContents(JournalHeader(format=FORMAT, job=self._job, epoch=epoch, rules=rules))
            self._rewrite(story)
            return story
        try:
            data = _read_all(old)
            while True:
                story = self._succeed(data, epoch)
                self._rewrite(story)
                # The predecessor looks after each of its writes whether it has been replaced. So what it made known
                # stands in the old file by now, or it does not make it known.
                seen, data = len(data), _read_all(old)
                if len(data) == seen:
                    return story
        finally:
            os.close(old)

    def append(self, plan: Plan) -> None:
        """Make a plan durable. Raises JournalReplaced, and OSError when it could not be stored: try again."""
        self._look()
        if not self._whole or self._size > COMPACT_BYTES:
            # What a write that failed has left is unknown, so nothing is added to it.
            assert self._header is not None, "a journal is taken over before it is written to"
            self._rewrite(JournalContents(self._header, plan))
            return
        line = _line(msgspec.json.encode(plan), self._checksum)
        self._whole = False
        _write_all(self._fd, line)
        os.fdatasync(self._fd)
        self._look()
        self._size += len(line)
        self._checksum = _sum_of(line)
        self._whole = True

    def remove(self) -> None:
        """Delete the journal of a job that is over. The file of another master is left alone."""
        with contextlib.suppress(JournalReplaced, OSError):
            self._look()
            os.unlink(self.path)
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _succeed(self, data: bytes, epoch: int) -> JournalContents:
        try:
            before = decode(data, self._job)
        except ValueError as error:
            raise JournalDamaged(
                f"the journal {self.path} is damaged, {error}. Move it away: nodes of the job that still run bring "
                "their round with them, and without any the job begins anew"
            ) from None
        earlier = (before.header.epoch, before.plan.epoch if before.plan else 0)
        header = msgspec.structs.replace(before.header, epoch=max(epoch, *(number + 1 for number in earlier)))
        return JournalContents(header, before.plan)

    def _look(self) -> None:
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            raise JournalReplaced(f"the journal {self.path} was removed") from None
        ours = os.fstat(self._fd)
        if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            raise JournalReplaced(f"another master has taken over the journal {self.path}")

    def _rewrite(self, story: JournalContents) -> None:
        data = encode(story)
        draft = f"{self.path}.{secrets.token_hex(4)}.new"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            _write_all(fd, data)
            os.fsync(fd)
            os.rename(draft, self.path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
        self.close()
        self._header, self._fd, self._size, self._whole = story.header, fd, len(data), False
        self._checksum = _sum_of(data.split(b"\n")[-2])
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        self._whole = True

    def _sweep(self) -> None:
        """Remove drafts that a master which died has left behind."""
        for draft in self.path.parent.glob(f"{self.path.name}.*.new"):
            with contextlib.suppress(OSError):
                draft.unlink()


def _read_all(fd: int) -> bytes:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    if status.st_size > MAX_BYTES:
        raise OSError(errno.EFBIG, f"a journal of {status.st_size} bytes is longer than {MAX_BYTES}")
    data = bytearray()
    while chunk := os.pread(fd, 1024 * 1024, len(data)):
        data += chunk
    return bytes(data)


def _write_all(fd: int, data: bytes) -> None:
    written = os.write(fd, data)
    if written < len(data):
        # The next attempt would say why; the commonest reason is a disk that became full in the middle.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
