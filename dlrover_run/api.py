"""Launching from Python: the surface of `torch.distributed.launcher.api`, without torch."""

from __future__ import annotations

import multiprocessing.process
import multiprocessing.spawn
import os
import pickle
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dlrover_run.agent.verdict import Verdict
from dlrover_run.failures import describe_end
from dlrover_run.failures.outcome import WorkerEnd
from dlrover_run.launch_config import LaunchConfig, LogsSpecs, log_spec
from dlrover_run.launcher_process import run_launcher
from dlrover_run.memory_file import memory_file
from dlrover_run.spec import Entrypoint, JobSpec, SpecError

__all__ = ["ChildFailedError", "LaunchConfig", "LogsSpecs", "SpecError", "elastic_launch", "main"]


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

        # PET_* variables stand for flags of a command line; what the configuration leaves out is its own default.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
        if isinstance(self._entrypoint, str):
            spec = parse([*self._config.flags(), "--no-python", self._entrypoint, *map(str, args)], environ)
            return launch_from_python(self._completed(spec))
        # The parser wants a program, and a function has none: any that exists stands in until the next lines replace
        # it.
        spec = parse([*self._config.flags(), "--no-python", sys.executable], environ)
        name = getattr(self._entrypoint, "__qualname__", repr(self._entrypoint))
        with memory_file(_pickle_call(self._entrypoint, args)) as payload_fd:
            entrypoint = Entrypoint(kind="function", target=name, python=sys.executable, payload_fd=payload_fd)
            return launch_from_python(replace(self._completed(spec), entrypoint=entrypoint))

    def _completed(self, spec: JobSpec) -> JobSpec:
        """What flags cannot say, or would say otherwise: the command line invents an id for one node, and here one is
        given. Nodes that meet under a name need the same one, so none is invented for them."""
        run_id = self._config.run_id or (spec.run_id if spec.master or spec.etcd else str(uuid.uuid4().int))
        return replace(spec, run_id=run_id, logs=log_spec(self._config))


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

    Returns when the job has succeeded. Raises SystemExit as argparse does, with 2 for a bad command line and 0 after
    `--help` and the like, and ChildFailedError when the job failed.
    """
    from dlrover_run.cli import job_or_code

    asked = job_or_code(sys.argv[1:] if args is None else args)
    if isinstance(asked, int):
        raise SystemExit(asked)
    launch_from_python(asked)


def launch_from_python(spec: JobSpec) -> dict[int, Any]:
    """Run a job in a launcher process of its own and wait for it; see `elastic_launch` for what comes back and what is
    raised."""
    end = run_launcher(spec)
    if end.stopped_by is signal.SIGINT:
        raise KeyboardInterrupt
    verdict = end.verdict
    if verdict is None:
        error = f"the launcher process ended with {end.code} and left no verdict"
        raise ChildFailedError(spec.entrypoint.target, Verdict(end.code, "", error=error))
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
