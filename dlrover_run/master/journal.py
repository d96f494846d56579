"""One job's journal: a file to which each plan is appended before it is sent to a node.

The first line is a header, each further line a plan; a successor needs only the last plan. Each line begins with a
checksum of it and of all lines before it, so a changed, missing or moved line is detected. A master that takes a job
over writes a new file and renames it to the journal's path. That compacts the journal, and a master that was stopped
meanwhile detects that it has been replaced: the file at that path is not the one that it holds open, and begins with a
later epoch. What another program has cut, overwritten or brought back from a copy is written anew.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.registry import decode_part

FORMAT = 3
"""The version of the file format, increased with each incompatible change."""

COMPACT_BYTES = 16 * 1024 * 1024
"""The size at which a journal is compacted while its job runs: hundreds of rounds of a large job."""

MAX_BYTES = 8 * COMPACT_BYTES
"""Maximum bytes of a journal that is read."""

TAKE_OVER_ATTEMPTS = 10
"""Attempts to take a journal over while other masters write theirs over it, each at a moment of a few milliseconds."""

_CHECKSUM = 8
"""Characters of the checksum at the start of a line: the CRC-32 of the rest, in hexadecimal digits."""


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
    """A journal is damaged; the message has the place and the remedy."""


class JournalReplaced(Exception):
    """Another master has taken the job over."""


def encode(contents: JournalContents) -> bytes:
    first = _line(msgspec.json.encode(contents.header), 0)
    return first if contents.plan is None else first + _line(msgspec.json.encode(contents.plan), _checksum_of(first))


def decode(data: bytes, job: str) -> JournalContents:
    """The contents of a journal; an incomplete last line is ignored. Raises ValueError, which names the line, for any
    other damage."""
    lines = data.split(b"\n")
    # The rest after the last newline is an incomplete line, or empty.
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
                plan = msgspec.json.decode(content, type=Plan, dec_hook=decode_part)
        except msgspec.MsgspecError as error:
            raise ValueError(f"line {number}: {error}") from None
    if header is None:
        raise ValueError("line 1: there is no whole header")
    return JournalContents(header, plan)


def _read_header(content: bytes, job: str) -> JournalHeader:
    kind = msgspec.json.decode(content, type=dict[str, msgspec.Raw]).get("format")
    if kind is None or bytes(kind) != b"%d" % FORMAT:
        raise ValueError("line 1: another version of dlrover-run wrote it")
    header = msgspec.json.decode(content, type=JournalHeader, dec_hook=decode_part)
    if header.job != job:
        raise ValueError("line 1: it belongs to another job")
    return header


def _line(content: bytes, before: int) -> bytes:
    return b"%08x %b\n" % (zlib.crc32(content, before), content)


def _checksum_of(line: bytes) -> int:
    return int(line[:_CHECKSUM], 16)


class Journal:
    """The journal of one job in `directory`, which must exist.

    `plan_age` is how many seconds ago the plan that `take_over` has found was decided, by the clock of the file system.

    Every write blocks until it is on the disk: 0.2 ms for a local disk, some milliseconds over a network.
    """

    def __init__(self, directory: Path, job: str) -> None:
        # The name helps a user to find the file; the digest distinguishes jobs with similar names.
        readable = re.sub(r"[^A-Za-z0-9._-]", "_", job)[:80]
        digest = hashlib.sha256(job.encode()).hexdigest()[:16]
        self.path = directory / f"job-{readable}-{digest}.journal"
        self._job = job
        self._fd = -1
        self._size = 0
        self._checksum = 0
        self._header: JournalHeader | None = None
        self._intact = False
        self.plan_age = 0.0
        self.repaired = False
        """Whether the last `append` has found that another program had changed the file, and written it anew."""

    def take_over(self, rules: JobRules, epoch: int) -> JournalContents:
        """Continue a predecessor's journal in a new file, and return the contents of that.

        Without a predecessor the job begins with these rules. The epoch is at least the given one and later than any
        in the old file. Raises JournalDamaged and OSError; the old file is then unchanged.
        """
        for _ in range(TAKE_OVER_ATTEMPTS):
            with contextlib.suppress(JournalReplaced):
                return self._take_over(rules, epoch)
        raise OSError(errno.EBUSY, "other masters take it over just now")

    def _take_over(self, rules: JobRules, epoch: int) -> JournalContents:
        """As `take_over`; raises JournalReplaced if another master has replaced the new file already."""
        self._remove_drafts()
        try:
            # Non-blocking, because the path may be a pipe.
            old = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            contents = JournalContents(JournalHeader(format=FORMAT, job=self._job, epoch=epoch, rules=rules))
            self._rewrite(contents)
            return contents
        try:
            data = _read_all(old)
            while True:
                decided_at = min(os.fstat(old).st_mtime_ns, time.time_ns())
                contents = self._next_contents(data, epoch)
                self._rewrite(contents, decided_at)
                # The predecessor checks after each of its writes whether it has been replaced. So each plan that it
                # sends is in the old file by now.
                seen, data = len(data), _read_all(old)
                # A predecessor that compacts makes its draft before it checks, so either it has seen this file, or its
                # draft is removed here before it becomes the journal, or it has become it.
                self._remove_drafts()
                if not self._check_ours():
                    raise JournalReplaced(f"another program has changed the journal {self.path}")
                if len(data) == seen:
                    self.plan_age = max(0, time.time_ns() - decided_at) / 1e9
                    return contents
        finally:
            os.close(old)

    def append(self, plan: Plan) -> None:
        """Make a plan durable. Raises JournalReplaced, and OSError if it could not be stored: try again."""
        # After a failed write the size is unknown.
        same_size = not self._intact or os.fstat(self._fd).st_size == self._size
        self.repaired = not (self._check_ours() and same_size)
        if self.repaired or not self._intact or self._size > COMPACT_BYTES:
            # A failed write may have left part of a line, so nothing is appended to it.
            assert self._header is not None, "a journal is taken over before it is written to"
            self._rewrite(JournalContents(self._header, plan), check=self._check_ours)
            return
        line = _line(msgspec.json.encode(plan), self._checksum)
        self._intact = False
        _write_all(self._fd, line)
        os.fdatasync(self._fd)
        if not self._check_ours():
            raise OSError(errno.ESTALE, "another program has changed it")
        self._size += len(line)
        self._checksum = _checksum_of(line)
        self._intact = True

    def remove(self) -> None:
        """Delete the journal of a job that is over, unless it is another master's by now."""
        with contextlib.suppress(JournalReplaced, OSError):
            self._check_ours()
            os.unlink(self.path)
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _next_contents(self, data: bytes, epoch: int) -> JournalContents:
        try:
            before = decode(data, self._job)
        except ValueError as error:
            raise JournalDamaged(
                f"the journal {self.path} is damaged, {error}. Move it away: the round is then recovered from the "
                "nodes of the job that still run; without any the job starts again"
            ) from None
        earlier = (before.header.epoch, before.plan.epoch if before.plan else 0)
        header = msgspec.structs.replace(before.header, epoch=max(epoch, *(number + 1 for number in earlier)))
        return JournalContents(header, before.plan)

    def _check_ours(self) -> bool:
        """Whether the file is the one that this master holds open; False if another program has put another one in its
        place. Raises JournalReplaced if that is another master's."""
        try:
            current = os.stat(self.path)
        except FileNotFoundError:
            raise JournalReplaced(f"the journal {self.path} was removed") from None
        ours = os.fstat(self._fd)
        if (current.st_dev, current.st_ino) == (ours.st_dev, ours.st_ino):
            return True
        if self._is_of_a_master():
            raise JournalReplaced(f"another master has taken over the journal {self.path}")
        return False

    def _is_of_a_master(self) -> bool:
        """Whether the file at the path was written by a master that has taken the job over: it begins with a later
        epoch, or is of another version. Raises OSError."""
        there = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            first = _read_all(there).partition(b"\n")[0]
        finally:
            os.close(there)
        content = first[_CHECKSUM + 1 :]
        if first[: _CHECKSUM + 1] != b"%08x " % zlib.crc32(content):
            return False
        try:
            header = _read_header(content, self._job)
        except (ValueError, msgspec.MsgspecError):
            return True
        return self._header is None or header.epoch > self._header.epoch

    def _remove_drafts(self) -> None:
        """Remove the drafts that a killed master has left behind, or that one makes which is being replaced."""
        for draft in self.path.parent.glob(f"{self.path.name}.*.new"):
            with contextlib.suppress(OSError):
                draft.unlink()

    def _rewrite(
        self, contents: JournalContents, decided_at: int | None = None, check: Callable[[], object] = lambda: None
    ) -> None:
        """Replace the file. `decided_at` is the time, in nanoseconds, at which its plan was decided, None for now: the
        file keeps it as its time, so that a master that takes over counts from then how old the plan is. `check` is
        called once the draft is complete, and may raise."""
        data = encode(contents)
        draft = f"{self.path}.{secrets.token_hex(4)}.new"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            _write_all(fd, data)
            if decided_at is not None:
                os.utime(fd, ns=(decided_at, decided_at))
            os.fsync(fd)
            check()
            os.rename(draft, self.path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
        self.close()
        self._header, self._fd, self._size, self._intact = contents.header, fd, len(data), False
        self._checksum = _checksum_of(data.split(b"\n")[-2])
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        self._intact = True


def _read_all(fd: int) -> bytes:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if status.st_size > MAX_BYTES:
        raise OSError(errno.EFBIG, f"a journal of {status.st_size} bytes is longer than {MAX_BYTES}")
    data = bytearray()
    while chunk := os.pread(fd, 1024 * 1024, len(data)):
        data += chunk
    return bytes(data)


def _write_all(fd: int, data: bytes) -> None:
    written = os.write(fd, data)
    if written < len(data):
        # The next attempt would fail with the reason; the most common one is a disk that became full.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
