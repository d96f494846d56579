"""Launching from Python: the surface of `torch.distributed.launcher.api`, without torch.

A launch runs in a process of its own, the same that the command line starts. A caller's process may hold threads,
devices and children that a launcher in it could neither fork safely nor tell from its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import multiprocessing.spawn
import os
import pickle
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from dlrover_run.agent.verdict import Verdict
from dlrover_run.failures import describe_end
from dlrover_run.failures.outcome import WorkerEnd
from dlrover_run.spec import Entrypoint, JobSpec, LogSpec, SpecError, Std, StreamMap


@dataclass
class LaunchConfig:
    """What torch's class of this name holds, with the same names and meanings.

    `rdzv_backend` is empty for one node, where no rendezvous is needed; torch's default, the etcd of the v2 API, has no
    server left to speak to. `logs_specs` takes a `LogsSpecs` of ours or torch's `DefaultLogsSpecs`, `numa_options` the
    name of a binding or torch's `NumaOptions`.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: Any = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = ""
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None
    preload: list[str] | None = None

    def flags(self) -> list[str]:
        """The command line that means the same, without the script."""
        given: dict[str, object] = {
            "nnodes": f"{self.min_nodes}:{self.max_nodes}",
            "nproc-per-node": self.nproc_per_node,
            "rdzv-id": self.run_id,
            "role": self.role,
            "rdzv-endpoint": self.rdzv_endpoint,
            "rdzv-backend": self.rdzv_backend or "static",
            "rdzv-conf": ",".join(f"{key}={value}" for key, value in self.rdzv_configs.items() if key != "rank"),
            "node-rank": self.rdzv_configs.get("rank"),
            "max-restarts": self.max_restarts,
            "monitor-interval": self.monitor_interval,
            "start-method": self.start_method,
            "local-addr": self.local_addr,
            "event-log-handler": self.event_log_handler,
            "numa-binding": _binding_name(self.numa_options),
            "signals-to-handle": self.signals_to_handle,
            "shutdown-timeout": self.shutdown_timeout,
            "preload": _comma_list(self.preload),
        }
        flags = [f"--{name}={value}" for name, value in given.items() if value not in (None, "")]
        return [*flags, "--virtual-local-rank"] if self.virtual_local_rank else flags


@dataclass(frozen=True)
class LogsSpecs:
    """Where the ranks' output goes, with the arguments of torch's `DefaultLogsSpecs`: a `Std` for all ranks, or one by
    rank."""

    log_dir: str | None = None
    redirects: int | Mapping[int, int] = Std.NONE
    tee: int | Mapping[int, int] = Std.NONE
    local_ranks_filter: Collection[int] | None = None


def _log_spec(config: LaunchConfig) -> LogSpec:
    given = config.logs_specs or LogsSpecs()
    if not isinstance(given, LogsSpecs):
        # torch's class keeps its arguments under these names and offers no others.
        names = ("_root_log_dir", "_redirects", "_tee", "_local_ranks_filter")
        if not all(hasattr(given, name) for name in names):
            raise SpecError(
                f"logs_specs: {type(given).__name__} is not understood; give LogsSpecs or DefaultLogsSpecs."
            )
        given = LogsSpecs(*(getattr(given, name) for name in names))
    return LogSpec(
        log_dir=given.log_dir,
        redirects=_stream_map(given.redirects),
        tee=_stream_map(given.tee),
        shown_ranks=frozenset(given.local_ranks_filter) if given.local_ranks_filter else None,
        stdout_filters=tuple(config.duplicate_stdout_filters or ()),
        stderr_filters=tuple(config.duplicate_stderr_filters or ()),
        prefix_template=config.log_line_prefix_template,
    )


def _stream_map(value: int | Mapping[int, int]) -> StreamMap:
    if isinstance(value, Mapping):
        return StreamMap(by_rank={rank: Std(int(streams)) for rank, streams in value.items()})
    return StreamMap(default=Std(int(value)))


def _binding_name(options: Any) -> str | None:
    """`NumaOptions(affinity_mode=AffinityMode.NODE)` and the plain "node" name the same binding."""
    mode = getattr(options, "affinity_mode", options)
    return None if mode is None else str(getattr(mode, "value", mode))


def _comma_list(items: Sequence[str] | None) -> str:
    return ",".join(item.replace(",", ",,") for item in items or ())


class ChildFailedError(Exception):
    """A worker failed for good. `failures` are the ends of all ranks that ended badly of themselves, by global rank."""

    def __init__(self, name: str, verdict: Verdict) -> None:
        self.name = name
        self.failures: dict[int, WorkerEnd] = {end.rank: end for end in verdict.ends if end.failed}
        self.exit_code = verdict.exit_code
        self._verdict = verdict
        self._root = verdict.root
        # The plan's reason was given before a traceback had been read.
        told = f"rank {self._root.rank} {describe_end(self._root)}" if self._root else verdict.reason
        super().__init__(f"{name} failed: {verdict.error or told}")

    def __reduce__(self) -> tuple[Any, ...]:
        # So that it can be raised in one process and caught in another.
        return type(self), (self.name, self._verdict)

    def get_first_failure(self) -> tuple[int, WorkerEnd]:
        """The global rank that failed first, and how. Raises LookupError when no worker did, but the launcher gave
        up."""
        if self._root is None:
            raise LookupError("no worker failed; the launcher itself gave up")
        return self._root.rank, self._root


class elastic_launch:
    """`elastic_launch(config, entrypoint)(*args)` runs a function or a command on every rank.

    Returns each global rank's return value for a function (which must be picklable, as for multiprocessing's spawn) and
    an empty mapping for a command. Raises SpecError for a bad configuration, ChildFailedError when the job failed and
    KeyboardInterrupt when the user interrupted it.
    """

    def __init__(self, config: LaunchConfig, entrypoint: Callable[..., Any] | str) -> None:
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Launch, wait for the end and return the results."""
        from dlrover_run.cli import parse

        if isinstance(self._entrypoint, str):
            spec = parse([*self._config.flags(), "--no-python", self._entrypoint, *map(str, args)], os.environ)
            return launch_from_python(self._completed(spec))
        # The parser wants a program, and a function has none: any that exists stands in until the next lines replace
        # it.
        spec = parse([*self._config.flags(), "--no-python", sys.executable], os.environ)
        name = getattr(self._entrypoint, "__qualname__", repr(self._entrypoint))
        with _memory_file(_pickle_call(self._entrypoint, args)) as payload_fd:
            entrypoint = Entrypoint(kind="function", target=name, python=sys.executable, payload_fd=payload_fd)
            return launch_from_python(replace(self._completed(spec), entrypoint=entrypoint))

    def _completed(self, spec: JobSpec) -> JobSpec:
        """What flags cannot say, or would say otherwise: the command line invents an id for one node, and here one is
        given."""
        return replace(spec, run_id=self._config.run_id or str(uuid.uuid4().int), logs=_log_spec(self._config))


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """What `function_worker` reads: how to make the caller's main module importable, then the call itself."""
    preparation = multiprocessing.spawn.get_preparation_data("dlrover-run function")
    # A process's own key refuses to be pickled outside multiprocessing; as plain bytes it goes to our own children
    # only.
    preparation["authkey"] = bytes(multiprocessing.process.current_process().authkey)
    if not os.path.exists(preparation.get("init_main_from_path", os.devnull)):
        del preparation["init_main_from_path"]  # A program on standard input calls its file `<stdin>`.
    try:
        call = pickle.dumps((function, args))
    except Exception as error:
        raise SpecError(
            f"elastic_launch: the function or its arguments cannot be pickled ({error}); use a top-level function."
        ) from error
    if b"__main__" in call and not preparation.keys() & {"init_main_from_path", "init_main_from_name"}:
        raise SpecError(
            "elastic_launch: the function or an argument is defined in a notebook, an interactive session or "
            "`python -c`, which workers cannot import; put it in a file and import it from there."
        )
    return pickle.dumps(preparation) + call


def main(args: Sequence[str] | None = None) -> None:
    """`dlrover-run` called from Python with the arguments of a command line (default: this process's own).

    Returns when the job has succeeded. Raises SystemExit(2) for a bad command line, as argparse does, and
    ChildFailedError when the job failed.
    """
    from dlrover_run.cli import parse

    try:
        spec = parse(list(sys.argv[1:] if args is None else args), os.environ)
    except SpecError as error:
        print(f"dlrover-run: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    launch_from_python(spec)


def launch_from_python(spec: JobSpec) -> dict[int, Any]:
    """Run a job in a launcher process of its own and wait for it; see `elastic_launch` for what comes back and what is
    raised."""
    verdict, code, stopped_by = _run_launcher(spec)
    if stopped_by is signal.SIGINT:
        raise KeyboardInterrupt
    if verdict is None:
        raise ChildFailedError(
            spec.entrypoint.target,
            Verdict(code, "", error=f"the launcher process ended with {code} and left no verdict"),
        )
    if verdict.exit_code != 0:
        raise ChildFailedError(spec.entrypoint.target, verdict)
    return {rank: _loaded(rank, result) for rank, result in sorted(verdict.results.items())}


def _loaded(rank: int, result: bytes) -> Any:
    """What a rank returned; None, as with torch, for one whose function ended the process with 0 instead."""
    try:
        return pickle.loads(result) if result else None
    except Exception as error:
        raise SpecError(
            f"elastic_launch: what rank {rank} returned cannot be unpickled here ({type(error).__name__}: {error}); "
            "return plain data."
        ) from error


def _run_launcher(spec: JobSpec) -> tuple[Verdict | None, int, signal.Signals | None]:
    from dlrover_run.launch import LaunchRequest

    verdict_read, verdict_write = os.pipe()
    # The launcher reads the end of this pipe when this process is gone, however it went.
    lifeline_read, lifeline_write = os.pipe()
    request = LaunchRequest(spec=spec, lifeline=lifeline_read, verdict=verdict_write)
    inherited = [lifeline_read, verdict_write]
    if spec.entrypoint.payload_fd >= 0:
        inherited.append(spec.entrypoint.payload_fd)
    try:
        with _memory_file(msgspec.json.encode(request)) as request_fd, _Forwarding(spec.signals) as forwarding:
            launcher = subprocess.Popen(
                [sys.executable, "-m", "dlrover_run.launch", str(request_fd)],
                pass_fds=[request_fd, *inherited],
                # In our process group a Ctrl-C would reach it twice: from the terminal and from us.
                start_new_session=True,
            )
            forwarding.to(launcher)
            os.close(verdict_write)
            verdict_write = -1
            with open(verdict_read, "rb", closefd=False) as stream:
                answer = stream.read()
            code = launcher.wait()
    finally:
        for fd in (verdict_read, verdict_write, lifeline_read, lifeline_write):
            if fd >= 0:
                os.close(fd)
    verdict = msgspec.json.decode(answer, type=Verdict) if answer else None
    return verdict, code, forwarding.seen


class _Forwarding:
    """Passes the signals that would end this process on to the launcher while it runs, and remembers the first.

    Only a main thread may set handlers; a launch from another thread leaves them alone.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._signals = signals if threading.current_thread() is threading.main_thread() else ()
        self._previous: dict[signal.Signals, Any] = {}
        self._launcher: subprocess.Popen[bytes] | None = None
        self.seen: signal.Signals | None = None

    def __enter__(self) -> _Forwarding:
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def to(self, launcher: subprocess.Popen[bytes]) -> None:
        """Name the process that gets the signals; one that came before is passed on now."""
        self._launcher = launcher
        if self.seen is not None:
            launcher.send_signal(self.seen)

    def _take(self, number: int, frame: object) -> None:
        self.seen = self.seen or signal.Signals(number)
        if self._launcher is not None:
            self._launcher.send_signal(number)


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[int]:
    fd = os.memfd_create("dlrover-run")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
