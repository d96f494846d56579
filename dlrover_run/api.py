"""The Python API: the names of `torch.distributed.launcher.api`, without torch."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing.process
import multiprocessing.spawn
import os
import pickle
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from dlrover_run.agent.result import JobResult
from dlrover_run.child_failed_error import ChildFailedError, child_failed_error
from dlrover_run.exit_reasons import reason_without_result
from dlrover_run.launch_config import LaunchConfig, LogsSpecs, log_spec
from dlrover_run.launch_request import memory_file
from dlrover_run.launcher_process import run_launcher
from dlrover_run.spec import Entrypoint, JobSpec, SpecError

__all__ = ["ChildFailedError", "LaunchConfig", "LogsSpecs", "SpecError", "elastic_launch", "main"]


class elastic_launch:
    """`elastic_launch(config, entrypoint)(*args)` runs a function or a command on every rank.

    Returns the return value of the function for each global rank of this node, and None for a command. The function and
    its arguments must be picklable, as for multiprocessing's spawn, or by cloudpickle if that is installed. Raises
    SpecError for a bad configuration, ChildFailedError when the job failed and KeyboardInterrupt when the user
    interrupted it.
    """

    def __init__(self, config: LaunchConfig, entrypoint: Callable[..., Any] | str) -> None:
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Launch, wait for the end and return the results."""
        from dlrover_run.cli import parse

        # PET_* variables are defaults of a command line; a configuration has its own defaults.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
        if isinstance(self._entrypoint, str):
            spec = parse([*self._config.flags(), "--no-python", self._entrypoint, *map(str, args)], environ)
            return launch_from_python(self._completed(spec))
        # The parser requires a program, and a function has none: any existing one serves until it is replaced below.
        spec = parse([*self._config.flags(), "--no-python", sys.executable], environ)
        name = getattr(self._entrypoint, "__qualname__", repr(self._entrypoint))
        with memory_file(_pickle_call(self._entrypoint, args)) as payload_fd:
            entrypoint = Entrypoint(kind="function", target=name, python=sys.executable, payload_fd=payload_fd)
            return launch_from_python(replace(self._completed(spec), entrypoint=entrypoint))

    def _completed(self, spec: JobSpec) -> JobSpec:
        """The job with the fields that flags cannot express. A single node gets the id of the configuration or a fresh
        one; several nodes need the same id, so none is generated for them."""
        run_id = self._config.run_id or (spec.run_id if spec.rendezvous.coordinated else str(uuid.uuid4().int))
        return replace(spec, run_id=run_id, logs=log_spec(self._config))


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The input of `function_worker`: how to import the caller's main module, then the call."""
    preparation = multiprocessing.spawn.get_preparation_data("dlrover-run function")
    # The key of a process cannot be pickled outside multiprocessing; as plain bytes it goes only to our own children.
    preparation["authkey"] = bytes(multiprocessing.process.current_process().authkey)
    if not os.path.exists(preparation.get("init_main_from_path", os.devnull)):
        del preparation["init_main_from_path"]  # The file of a program on standard input is `<stdin>`.
    try:
        call = pickle.dumps((function, args))
    except Exception as error:
        return _cloudpickle_call(function, args, preparation, f"cannot be pickled ({error})")
    if b"__main__" in call and not preparation.keys() & {"init_main_from_path", "init_main_from_name"}:
        where = "a notebook, an interactive session or `python -c`, which workers cannot import"
        return _cloudpickle_call(function, args, preparation, f"is defined in {where}")
    return pickle.dumps(preparation) + call


def _cloudpickle_call(
    function: Callable[..., Any], args: tuple[Any, ...], preparation: dict[str, Any], problem: str
) -> bytes:
    """The same for a call that pickle cannot send. cloudpickle sends the code of a function and the globals it uses,
    so workers need not import the main module, which on Ray is Ray's own."""
    cloudpickle = _cloudpickle()
    if cloudpickle is None:
        raise SpecError(
            f"elastic_launch: the function or an argument {problem}: install cloudpickle, or put a top-level function "
            "into a file and import it from there."
        )
    try:
        call = cloudpickle.dumps((function, args))
    except Exception as error:
        raise SpecError(f"elastic_launch: the function or an argument cannot be pickled ({error}).") from error
    main = ("init_main_from_path", "init_main_from_name")
    return pickle.dumps({key: value for key, value in preparation.items() if key not in main}) + bytes(call)


def _cloudpickle() -> Any:
    """The module, or Ray's copy of it in a Ray process; None if neither is installed."""
    for name in ("cloudpickle", "ray.cloudpickle") if "ray" in sys.modules else ("cloudpickle",):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    return None


def main(args: Sequence[str] | None = None) -> None:
    """`dlrover-run` called from Python with the arguments of a command line (default: this process's own).

    Returns when the job has succeeded. Raises SystemExit as argparse does, with 2 for a bad command line and 0 after
    `--help` and the like, and ChildFailedError when the job failed.
    """
    from dlrover_run.command_line.entry_point import job_or_code
    from dlrover_run.command_line.program import DLROVER_RUN

    job: JobSpec | int = job_or_code(DLROVER_RUN, sys.argv[1:] if args is None else args)
    if isinstance(job, int):
        raise SystemExit(job)
    launch_from_python(job)


def launch_from_python(spec: JobSpec) -> dict[int, Any]:
    """Run a job in a launcher process and wait for its end. `elastic_launch` documents the result and the errors."""
    end = run_launcher(spec)
    if end.stopped_by is signal.SIGINT:
        raise KeyboardInterrupt
    result = end.result
    if result is None:
        error = f"the launcher process ended with {end.code} and left no result"
        raise child_failed_error(
            spec.entrypoint.target, JobResult(end.code, reason_without_result(end.code), "", error=error)
        )
    if result.exit_code != 0:
        raise child_failed_error(spec.entrypoint.target, result)
    if spec.entrypoint.kind != "function":
        return {end.rank: None for end in sorted(result.ends, key=lambda end: end.rank)}
    return {rank: _loaded(rank, pickled) for rank, pickled in sorted(result.results.items())}


def _loaded(rank: int, pickled: bytes) -> Any:
    """The return value of a rank; None, as with torch, if the function ended the process with code 0 instead."""
    try:
        return pickle.loads(pickled) if pickled else None
    except Exception as error:
        raise SpecError(
            f"elastic_launch: the return value of rank {rank} cannot be unpickled here "
            f"({type(error).__name__}: {error}): return plain data."
        ) from error
