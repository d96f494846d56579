"""Puts the parts together: watchdog outside, agent and relay inside, one exit code at the end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, cast

import msgspec

from dlrover_run import exit_codes
from dlrover_run.agent.host import explain_os_error
from dlrover_run.console.text import format_time_of_day, prefix_with_node
from dlrover_run.exit_reasons import ExitReason, in_scheme
from dlrover_run.features import FEATURES
from dlrover_run.output.run_directory import RunDir, create_run_dir, remove_run_dir
from dlrover_run.processes import tree, watchdog
from dlrover_run.spec import JobSpec, SpecError
from dlrover_run.words.log_level import is_debug
from dlrover_run.workers.template import process_title

if TYPE_CHECKING:
    from dlrover_run.agent.framework import AdapterFactory


class LauncherProgram(msgspec.Struct, frozen=True):
    """The program of a launcher. `name` precedes its lines on the console; `process` is the process name of its agent.

    `load_adapter` imports the adapter of its framework. It is called in the agent's process: the watchdog imports none
    of what that needs, and stays small.
    """

    name: str
    process: str
    load_adapter: Callable[[], AdapterFactory]


def _torch_adapter() -> AdapterFactory:
    from dlrover_run.workers.adapter import TorchAdapter

    return TorchAdapter


TRAINING = LauncherProgram("dlrover-run", "dlrover-agent", _torch_adapter)


def launch(
    spec: JobSpec, parent_pipe: int | None = None, result_fd: int | None = None, program: LauncherProgram = TRAINING
) -> int:
    """Run one job on this node, or on all of its nodes here, and return the exit code of the launcher.

    This process becomes the watchdog. The children that it has already are left alone. The agent is forked from it, so
    it must have no other threads. Raises SpecError when the log directory cannot be used.
    """
    tree.open_standard_streams()
    tree.spare_earlier_children()
    # Once, and not for each of several nodes on this machine.
    if not spec.console_name and (problem := tree.explain_unlisted()):
        _print(spec, f"{program.name}: warning: {problem}", timed=False)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Python would answer with a traceback; the default action ends the watchdog, and that ends the job.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for feature in FEATURES:
        if feature.nodes_here and feature.name in spec.settings:
            supervisor = import_module(feature.module("supervisor"))
            return cast(int, supervisor.supervise(spec, parent_pipe, result_fd))
    tree.become_subreaper()
    awaited = watchdog.block_signals(spec.handled_signals)
    run_dir = create_run_dir(spec.logs, spec.display_name)
    try:
        watchdog_end, agent_end = os.pipe()
        # The agent holds only the reading end, so it reads the end of file when the watchdog dies.
        try:
            agent = os.fork()
        except OSError as error:
            return _cannot_start(error, spec, program)
        if agent == 0:
            os.close(agent_end)
            parent_pipes = [watchdog_end] if parent_pipe is None else [watchdog_end, parent_pipe]
            _be_agent(spec, run_dir, parent_pipes, result_fd, program)
        os.close(watchdog_end)
        if result_fd is not None:
            os.close(result_fd)
        code = watchdog.watch(agent, awaited, agent_end, lambda line: _print(spec, f"{program.name}: {line}"))
        os.close(agent_end)
    finally:
        remove_run_dir(run_dir)
    if code < 0:
        from dlrover_run.failures.causes import describe_signal

        how = describe_signal(-code)
        _print(spec, f"{program.name}: the launcher's agent was killed by {how}; its workers were ended too")
        return in_scheme(ExitReason.STOPPED, exit_codes.of_signal(-code), spec.exit_codes)
    return code


def _be_agent(
    spec: JobSpec, run_dir: RunDir, parent_pipes: Sequence[int], result_fd: int | None, program: LauncherProgram
) -> None:
    """The whole life of the agent process. It never returns into the frames of the process that it was forked from."""
    code = in_scheme(ExitReason.INTERNAL_ERROR, exit_codes.INTERNAL_ERROR, spec.exit_codes)
    try:
        # A session of its own: the terminal's Ctrl-C comes through the watchdog only, and once.
        os.setsid()
        process_title.name_process(program.process)
        tree.become_subreaper()
        # An agent that is stopped could not see that the watchdog has died.
        tree.continue_without_parent()
        # Imported on this side of the fork only: the watchdog needs none of it and stays small.
        from dlrover_run.output.relay_start import start_relay
        from dlrover_run.processes.asyncio_import import import_asyncio_without_tls

        try:
            # It loads its modules while this process loads its own.
            started = start_relay((1, 2), shared=bool(spec.console_name))
        except OSError as error:
            code = _cannot_start(error, spec, program)
        else:
            if not spec.rendezvous.leased:
                import_asyncio_without_tls()
            from dlrover_run.agent.main import run_agent
            from dlrover_run.output.relay_client import RelayClient
            from dlrover_run.processes import event_loop

            make_adapter = program.load_adapter()
            relay = RelayClient(shared=bool(spec.console_name), started=started)
            code = event_loop.run(run_agent(spec, run_dir, parent_pipes, relay, result_fd, program.name, make_adapter))
    except BaseException as error:
        # A user needs a sentence; the traceback of a defect is printed on request.
        if is_debug(os.environ):
            import traceback

            _print(spec, traceback.format_exc().rstrip("\n"), timed=False)
        _print(spec, f"{program.name}: internal error: {error!r}; run with LOGLEVEL=DEBUG and report it")
    finally:
        # A console that was closed, or is full, must not lead back into those frames.
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _cannot_start(error: OSError, spec: JobSpec, program: LauncherProgram) -> int:
    _print(spec, f"{program.name}: the launcher's own processes could not be started: {explain_os_error(error)}")
    return in_scheme(ExitReason.CANNOT_START, exit_codes.CANNOT_START, spec.exit_codes)


def _print(spec: JobSpec, text: str, *, timed: bool = True) -> None:
    """Print a line, with the time of day for events while a job runs, while there is no `Console`: before the agent
    starts, or after it has ended."""
    when = f"{format_time_of_day(time.time())} " if timed else ""
    print(prefix_with_node(when + text, spec.console_name), file=sys.stderr)


def run() -> int:
    """Run the job in the file whose descriptor is the first argument (see `launch_request`)."""
    from dlrover_run.features.registry import decode_part
    from dlrover_run.launch_request import LaunchRequest, decode

    with open(int(sys.argv[1]), "rb") as file:
        request = decode(file.read(), LaunchRequest, decode_part)
    try:
        return launch(request.spec, request.parent_pipe, request.result_fd)
    except SpecError as mistake:
        _print(request.spec, f"dlrover-run: {mistake}", timed=False)
        return exit_codes.BAD_COMMAND_LINE
