"""How one worker exited: the facts for the failure report, the exit code and the coordinator's decision."""

from __future__ import annotations

import signal

import msgspec


class RecordedError(msgspec.Struct, frozen=True):
    """What a worker wrote to its `TORCHELASTIC_ERROR_FILE`, by torch's `@record` or in the same format."""

    message: str
    traceback: str
    unix_time: float


class DeviceError(msgspec.Struct, frozen=True):
    """An error that the driver of a device reported and that explains the end of a worker.

    `clause` follows the text of the exit, such as `40 ms after Xid 79 of GPU 3 (fell off the bus): hardware`.
    `blames_device`: the device, a link or the driver is the cause, and not the program. `remedy` is what has to be done
    before a program can use the device again, so that this node must not go on; empty if the device can be used.
    """

    clause: str
    blames_device: bool
    remedy: str = ""


class WorkerExit(msgspec.Struct, frozen=True):
    """The exit of one worker process.

    `code` follows `subprocess`: an exit code, or minus a signal's number. `stopped_with` is the signal with which the
    launcher stopped the worker, so that a victim is never taken for the root cause; None: the worker ended by itself.
    `failed_first`: a stopped worker had recorded its error, or written its traceback, before it was stopped.
    `stderr_tail` is the end of its standard error as far as it is known, and of its standard output if both went to one
    console. `oom_kill` is a clause that follows the text of the exit, such as `the kernel's memory limit was hit
    (...)`, if the worker or a child of it was killed for lack of memory, else None. `full_disk` is a clause if the
    worker left no message and a disk that it wrote to had no space left, else None. `waited_for` is a clause on the
    workers for which a collective of this worker timed out, else None. `device_error` is what the driver of its device
    reported that explains the end, else None. `error_file` is the file from which `error` was read. `forwarded`:
    `--forward-signals` passed on the signal that killed it. `killed_for` is a clause on why the launcher killed it as a
    failure, empty if it did not; `has_lost_peer`: it had reported before that its group had lost a member.
    `name` is its name in messages if that is not its rank.
    """

    rank: int
    local_rank: int
    pid: int
    code: int
    unix_time: float
    stopped_with: signal.Signals | None = None
    error: RecordedError | None = None
    stderr_tail: str = ""
    stdout_path: str | None = None
    stderr_path: str | None = None
    oom_kill: str | None = None
    full_disk: str | None = None
    waited_for: str | None = None
    device_error: DeviceError | None = None
    error_file: str | None = None
    failed_first: bool = False
    forwarded: bool = False
    killed_for: str = ""
    has_lost_peer: bool = False
    name: str = ""

    @property
    def failed(self) -> bool:
        """Whether the worker failed by itself: its code is not 0, and not only because the launcher stopped it."""
        return self.code != 0 and (self.stopped_with is None or self.failed_first)

    @property
    def blames_device(self) -> bool:
        """Whether its device, and not the program, is the cause."""
        return self.device_error is not None and self.device_error.blames_device

    @property
    def exit_status(self) -> int:
        """The code as a shell reports it: 128 + n for signal n.

        A worker that had failed before our signal ended it counts as 1, Python's code for an uncaught exception.
        """
        if self.code < 0:
            return 1 if self.failed_first else 128 - self.code
        return self.code
