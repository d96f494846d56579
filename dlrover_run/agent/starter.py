"""How a worker is started: spawned, or forked from the template, with the reason told when forking is not possible."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence

from dlrover_run.agent.command import python_program
from dlrover_run.agent.environment import seatless_environments
from dlrover_run.agent.template_client import (
    Imported,
    ProgramKind,
    Template,
    TemplateError,
    UnsafeToFork,
    WorkerCommand,
)
from dlrover_run.spec import JobSpec
from dlrover_run.supervisor.process import ProcessSpec, spawn

LEARN_DELAY = 2.0
"""Seconds after a start at which the template imports what the new workers have imported.

Sooner it would compete with them for the processor while they start; a restart that comes earlier learns by itself.
"""


class Starter:
    """Starts the workers of every round of a job. `say` tells the person when forking was given up, and why. The
    template imports installed modules ahead, and such as lie in `ours`, directories of the launcher's own."""

    def __init__(self, spec: JobSpec, say: Callable[[str], None], ours: Sequence[str] = ()) -> None:
        self._spec = spec
        self._say = say
        self._ours = tuple(ours)
        self._program = python_program(spec.entrypoint)
        self._forking = spec.start_method == "forkserver"
        self._directory = ""
        self._template: Template | None = None
        self._imported: set[str] = set()
        self._told: set[str] = set()
        self._lesson: asyncio.TimerHandle | None = None
        self._learning: asyncio.Task[None] | None = None
        self._warming: asyncio.Task[None] | None = None
        if self._forking and self._program is None:
            self._give_up("only Python programs can be forked")

    @property
    def pids(self) -> set[int]:
        """The pid of the template, while it runs."""
        return {self._template.pid} if self._template is not None and not self._template.closed.done() else set()

    def has_imported(self, module: str) -> bool:
        """Whether there is a template that was told to import something of the library to which that module belongs. Of
        what a library imports in turn nothing is known."""
        return self._template is not None and module.partition(".")[0] in self._imported

    def warm(self, parent: Mapping[str, str]) -> None:
        """Start a template though no worker is to be started yet, for a node that waits for its place in the job.

        `parent` is the launcher's own environment. Raises SpecError when workers could not be started.
        """
        if self._forking and self._template is None and self._warming is None:
            self._warming = asyncio.ensure_future(self._make_ready(seatless_environments(self._spec, parent)))

    async def warmed(self, parent: Mapping[str, str]) -> None:
        """`warm`, and wait until that template is ready. Whoever waits no more leaves it as it is."""
        self.warm(parent)
        if self._warming is not None:
            await asyncio.wait([self._warming])

    async def prepare(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Have a template ready for workers with these environments: a new one, or the old one with what it has
        learned since."""
        if self._lesson is not None:
            self._lesson.cancel()
        for task in (self._warming, self._learning):
            if task is not None:
                # It may end in giving forking up; and a wait that is cancelled leaves it running.
                await asyncio.wait([task])
                await self._note_defect(task)
        self._warming = None
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

    async def start(self, start: ProcessSpec) -> int:
        """Start one worker and return its pid. Raises OSError when it cannot be started."""
        return await self._start(start, self._program, records=start.record_imports)

    async def start_folder(self, start: ProcessSpec, folder: str) -> int:
        """The same for a process that runs another program than the workers do: a folder with a `__main__`, by its
        path. Nothing is learned from it."""
        return await self._start(start, ("script", folder), records=False)

    async def _start(self, start: ProcessSpec, program: tuple[ProgramKind, str] | None, records: bool) -> int:
        if self._forking and self._template is not None and program is not None:
            stdin, stdout, stderr = start.stdio
            kind, target = program
            command = WorkerCommand(
                argv_title=start.argv,
                kind=kind,
                target=target,
                args=start.args,
                env=start.environment,
                cwd=self._directory,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                sched_affinity=start.cpus,
                record_imports=records,
            )
            try:
                return await self._template.fork(command)
            except TemplateError as error:
                await self._abandon(error)
        return spawn(start)

    def learn_later(self) -> None:
        """Let the template import what the workers that were just started import, once they have had time to."""
        if self._forking and self._template is not None:
            if self._lesson is not None:
                # One lesson for all that are started one after the other.
                self._lesson.cancel()
            self._lesson = asyncio.get_running_loop().call_later(LEARN_DELAY, self._begin_lesson)

    async def close(self) -> None:
        """End the template; workers that it has forked are not its own any more."""
        if self._lesson is not None:
            self._lesson.cancel()
        for task in (self._warming, self._learning):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
                await self._note_defect(task)
        if self._template is not None:
            await self._template.close()

    async def _replace_template(self, environments: Sequence[Mapping[str, str]]) -> None:
        # Libraries read the environment while they are imported, so the template has what all workers have in common.
        first, *others = environments
        common = {key: value for key, value in first.items() if all(o.get(key) == value for o in others)}
        # Ours from its first moment, so that no sweep takes it for something that was left behind.
        self._template = Template.start(self._spec.entrypoint.python, common, self._directory, os.getpid())
        self._imported.clear()
        prepared = await self._template.prepare(self._spec.preload, self._program, self._ours)
        self._note_imported(prepared)
        self._tell_skipped(prepared.skipped)

    def _note_imported(self, learned: Imported) -> None:
        self._imported |= {name.partition(":")[0].partition(".")[0] for name in learned.imported}

    def _tell_skipped(self, skipped: Sequence[str]) -> None:
        """Say what of `--preload` is not in the template, each once in a job; nobody asked for the other modules."""
        for sentence in skipped:
            if sentence not in self._told and sentence.startswith(tuple(f"{name}: " for name in self._spec.preload)):
                self._told.add(sentence)
                self._say(f"--preload {sentence}; it is left to the workers")

    def _begin_lesson(self) -> None:
        if self._learning is not None and not self._learning.done():
            # What is imported now was asked for before the last of them began.
            self.learn_later()
            return
        self._learning = asyncio.ensure_future(self._learn())

    async def _learn(self) -> None:
        if self._template is None:
            return
        try:
            self._note_imported(await self._template.learn())
        except UnsafeToFork as error:
            await self._abandon(error)
        except TemplateError as error:
            # It died while nobody needed it; the next round starts another.
            self._say(f"--start-method=forkserver: {error}; running workers are not affected")

    async def _note_defect(self, task: asyncio.Task[None]) -> None:
        """Give forking up after what nobody foresaw, in a task that nobody waited for while it ran."""
        if not task.cancelled() and (error := task.exception()) is not None:
            await self._abandon(TemplateError(f"internal error: {error!r}; please report it"))

    async def _abandon(self, error: TemplateError) -> None:
        self._give_up(str(error))
        if self._template is not None:
            await self._template.close()
            self._template = None

    def _give_up(self, reason: str) -> None:
        if not self._forking:
            return  # Another worker of the round has met the same.
        self._forking = False
        self._say(f"--start-method=forkserver: {reason}; workers are spawned instead")


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        # A spawned worker inherits even one that has been removed.
        raise TemplateError(f"the working directory has no name any more ({error.strerror})") from error
