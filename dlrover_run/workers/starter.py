"""Starts workers: forked from the template, or spawned, with a message with the cause if forking is not possible."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from dlrover_run.background import Background
from dlrover_run.processes.process import ProcessSpec, spawn
from dlrover_run.spec import JobSpec
from dlrover_run.words.log_level import internal_error, log_frames
from dlrover_run.workers.ahead import WorkerAhead
from dlrover_run.workers.environment import environments_before_ranks, python_program
from dlrover_run.workers.startup_probe import STORE_TIMEOUT
from dlrover_run.workers.template_client import (
    Imported,
    ImportedFiles,
    Template,
    TemplateError,
    UnsafeToFork,
    fork_request,
)

IMPORT_DELAY = 2.0
"""Seconds after a start at which the template imports what the new workers have imported.

Sooner it would compete with them for the processor while they start. A restart that comes earlier imports first.
"""

MAX_UNFIT = 3
"""Modules that are left out of the template because a fork after their import is not safe, one template after the
other. With more of them the workers are spawned."""

START_CODE_PATH = Path(__file__).resolve().parent.parent / "worker_path"

START_CODE = str(START_CODE_PATH / "sitecustomize.py")

WANTED_VARIABLE = "DLROVER_WORKER_START"
"""The variable of a worker that tells the code in `worker_path` what to install, separated by commas. Without it, that
code does not run."""


class Starter:
    """Starts the workers of every round of a job. `log` prints why workers are not forked. The template imports
    installed modules in advance, and modules in `ours`, directories of the launcher itself."""

    def __init__(self, spec: JobSpec, log: Callable[[str], None], ours: Sequence[str] = ()) -> None:
        self._spec = spec
        self._log = log
        self._ours = tuple(ours)
        self._program = python_program(spec.entrypoint)
        self._forking = spec.start_method == "forkserver"
        self._directory = ""
        self._template: Template | None = None
        self._imported: set[str] = set()
        self._reported: set[str] = set()
        self._unfit: list[str] = []
        self._import_timer: asyncio.TimerHandle | None = None
        self._importing: asyncio.Task[None] | None = None
        self._prestarting: asyncio.Task[None] | None = None
        self._background = Background(self._note_internal_error)
        self.recording_goes_on = False
        """Whether a worker goes on recording what it imports until `learn` is called, and not for IMPORT_DELAY only."""
        self.store_timeout = STORE_TIMEOUT
        """Seconds for which the workers of the next round wait for its store; see `StartupProbe`."""
        self.watches_files = False
        """Whether a feature calls `files`, so that a worker records its imports until its end."""
        if self._forking and self._program is None:
            self._give_up("only Python programs can be forked")

    @property
    def forks(self) -> bool:
        """Whether workers are forked, and so begin within milliseconds."""
        return self._forking

    @property
    def is_prestarting(self) -> bool:
        """Whether a template that was started before there is a worker still imports."""
        return self._prestarting is not None and not self._prestarting.done()

    @property
    def pids(self) -> set[int]:
        """The pid of the template, while it runs."""
        return {self._template.pid} if self._template is not None and not self._template.closed.done() else set()

    def has_imported(self, module: str) -> bool:
        """Whether a template runs that has imported a module of the same library on request. Modules that a library
        imports in turn are not known."""
        return self._template is not None and module.partition(".")[0] in self._imported

    def prestart(self, parent: Mapping[str, str], on_ready: Callable[[], None] = lambda: None) -> None:
        """Start a template before there is a worker to start, for a node that waits for its ranks. `on_ready` is called
        when it has imported what it can, or cannot be used.

        `parent` is the launcher's own environment. Raises SpecError when workers could not be started.
        """
        if self._forking and self._template is None and self._prestarting is None:
            self._prestarting = self._background.start(self._make_ready(environments_before_ranks(self._spec, parent)))
            self._prestarting.add_done_callback(lambda _: on_ready())

    async def prestarted(self, parent: Mapping[str, str]) -> None:
        """`prestart`, and wait until that template is ready. A caller that is cancelled leaves the template running."""
        self.prestart(parent)
        if self._prestarting is not None:
            await asyncio.wait([self._prestarting])

    async def prepare(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Have a template ready for workers with these environments: a new one, or the old one after it has imported
        what the last workers did."""
        # Either may end in giving forking up; and a wait that is cancelled leaves them running.
        await self._wait_for_background()
        self._prestarting = None
        await self._make_ready(environments)

    async def _make_ready(self, environments: Sequence[Mapping[str, str]]) -> None:
        if not self._forking:
            return
        try:
            self._directory = _working_directory()
            if self._template is None or self._template.closed.done():
                await self._replace_template(environments)
            else:
                self._note_imported(await self._template.learn())
        except TemplateError as error:
            await self._abandon(error)

    async def start(
        self, spec: ProcessSpec, folder: str | None = None, until: asyncio.Future[Any] | None = None
    ) -> int:
        """Start one worker and return its pid. With `folder`, the process runs that folder's `__main__` in place of the
        workers' program. A forked one begins when `until` is done. Raises OSError when it cannot be started."""
        program = self._program if folder is None else ("script", folder)
        if self._forking and self._template is not None and program is not None:
            try:
                watch = self.watches_files
                return await self._template.fork(spec, program, self._directory, _start_code(spec), until, watch)
            except TemplateError as error:
                await self._abandon(error)
        return spawn(replace(spec, environment=with_start_code(spec.environment)))

    async def fork_ahead(self, spec: ProcessSpec, local_rank: int, device: bool) -> WorkerAhead:
        """Fork a process that waits to become a worker of this local rank, and let it begin to prepare: to import what
        the workers have imported and, with `device`, to open the device. The environment of `spec` has nothing of a
        round. Raises TemplateError."""
        if self._template is None or not self._forking:
            raise TemplateError("no template runs")
        pid, line = await self._template.fork_ahead(spec, self._directory, local_rank, device)
        return WorkerAhead(pid, line)

    async def start_ahead(
        self, ahead: WorkerAhead, spec: ProcessSpec, until: asyncio.Future[Any] | None = None
    ) -> int | None:
        """Have a process that was forked ahead become this worker, which begins when `until` is done. Returns its pid,
        or None if that process cannot; it is killed then."""
        assert self._program is not None, "only Python programs are forked"
        request = fork_request(spec, self._program, self._directory, _start_code(spec))
        return ahead.pid if await ahead.become(request, spec.stdio, until) else None

    async def learn(self) -> None:
        """Let the template import now what the workers have imported since their start."""
        if self._template is not None and self._forking:
            await self._import_learned(goes_on=False)

    def import_later(self) -> None:
        """Let the template import what the workers that were just started import, once they have had time to: once for
        all workers that start one after the other."""
        if self._forking and self._template is not None:
            if self._import_timer is not None:
                self._import_timer.cancel()
            self._import_timer = asyncio.get_running_loop().call_later(IMPORT_DELAY, self._begin_import)

    async def files(self) -> ImportedFiles | None:
        """The files that the last workers and the template have imported; None if no template runs."""
        if self._template is None or self._template.closed.done():
            return None
        try:
            return await self._template.files()
        except TemplateError:
            # The next start finds out the same, and prints it.
            return None

    async def renew(self) -> None:
        """End the template, so that the next start makes another one, which imports everything anew."""
        await self._wait_for_background()
        await self._close_template()

    async def close(self) -> None:
        """End the template. Workers that it has forked are children of the agent and go on."""
        self._background.cancel()
        await self._wait_for_background()
        if self._template is not None:
            await self._template.close()

    async def _wait_for_background(self) -> None:
        """Wait for the prestart and for the import, and stop forking after an unexpected error in one of them."""
        if self._import_timer is not None:
            self._import_timer.cancel()
        for task in (self._prestarting, self._importing):
            if task is not None:
                await asyncio.wait([task])
                if not task.cancelled() and (error := task.exception()) is not None:
                    self._note_internal_error(error)
                    await self._close_template()

    async def _replace_template(self, environments: Sequence[Mapping[str, str]]) -> None:
        # Libraries read the environment while they are imported, so the template has what all workers have in common.
        first, *others = environments
        common = {key: value for key, value in first.items() if all(o.get(key) == value for o in others)}
        # Assigned before the first await, so that the orphan killer never takes it for an orphan.
        while True:
            self._template = Template.start(self._spec.entrypoint.python, common, self._directory)
            self._imported.clear()
            try:
                prepared = await self._template.prepare(self._spec.preload, self._program, self._ours, self._unfit)
                break
            except UnsafeToFork as unsafe:
                if not unsafe.module or unsafe.module in self._unfit or len(self._unfit) == MAX_UNFIT:
                    raise
                # What was imported cannot be undone. The next template stops at nothing before this module.
                self._unfit.append(unsafe.module)
                self._log(
                    f"--start-method=forkserver: {unsafe}; each worker imports {unsafe.module} itself, and is forked "
                    "with the rest"
                )
        self._note_imported(prepared)
        # Which modules of `--preload` are not in the template, each once in a job. Other modules were not requested.
        requested = tuple(f"{name}: " for name in self._spec.preload)
        for sentence in prepared.skipped:
            if sentence not in self._reported and sentence.startswith(requested):
                self._reported.add(sentence)
                self._log(f"--preload {sentence}; it is left to the workers")

    def _note_imported(self, learned: Imported) -> None:
        self._imported |= {name.partition(":")[0].partition(".")[0] for name in learned.imported}

    def _begin_import(self) -> None:
        if self._importing is not None and not self._importing.done():
            # The import that runs was requested before the last workers started.
            self.import_later()
            return
        self._importing = self._background.start(self._import_learned(self.recording_goes_on))

    async def _import_learned(self, goes_on: bool) -> None:
        if self._template is None:
            return
        try:
            self._note_imported(await self._template.learn(goes_on))
        except UnsafeToFork as error:
            await self._abandon(error)
        except TemplateError as error:
            # It died while it was not needed; the next round starts another.
            self._log(f"--start-method=forkserver: {error}; running workers are not affected")

    async def _abandon(self, error: TemplateError) -> None:
        self._give_up(str(error))
        await self._close_template()

    async def _close_template(self) -> None:
        if self._template is not None:
            await self._template.close()
            self._template = None

    def _note_internal_error(self, error: BaseException) -> None:
        if self._forking:
            self._give_up(internal_error(error))
            log_frames(self._log, error)

    def _give_up(self, reason: str) -> None:
        if not self._forking:
            return  # Another worker of the round has reported it.
        self._forking = False
        self._log(f"--start-method=forkserver: {reason}; workers are spawned instead")


def with_start_code(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of a spawned process, which imports `worker_path/sitecustomize.py` if something is to be
    installed in it. The command line stays that of torchrun."""
    if WANTED_VARIABLE not in environment:
        return environment
    entries = (str(START_CODE_PATH), environment.get("PYTHONPATH", ""))
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, entries))}


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        # A spawned worker inherits even one that has been removed.
        raise TemplateError(f"the working directory has no name any more ({error.strerror})") from error


def _start_code(spec: ProcessSpec) -> str | None:
    """The file whose function a forked worker calls before its program, if its environment asks for that."""
    return START_CODE if WANTED_VARIABLE in spec.environment else None
