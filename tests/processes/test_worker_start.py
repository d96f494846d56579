"""The start-up code of a spawned worker: it runs before the script, and leaves the process as the user configured it.

A package that calls the hook stands in for torch, because importing torch takes seconds.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.harness import WAIT

from dlrover_run.observe.optimizer_steps import OptimizerHook
from dlrover_run.observe.page import VARIABLE, Progress, StepSource
from dlrover_run.observe.pages import ProgressPages
from dlrover_run.processes.process import ProcessSpec
from dlrover_run.spec import Entrypoint, JobSpec
from dlrover_run.workers import starter
from dlrover_run.workers.specs import wanted_at_start
from dlrover_run.workers.starter import START_CODE_PATH, WANTED_VARIABLE, Starter, with_start_code

OPTIMIZER = """
hooks = []
register_optimizer_step_post_hook = hooks.append

class Optimizer:
    def step(self):
        for hook in hooks:
            hook(self, (), {})
"""

SHOW = """
import os, sys
print(sys.argv, sys.orig_argv[1:], sys.path, os.environ.get("PYTHONPATH"), "DLROVER_WORKER_START" in os.environ)
print(sorted(vars(sys.modules["__main__"])), [name for name in sys.modules if name.split(".")[0] == "torch"])
"""

TRAIN = """
from torch.optim.optimizer import Optimizer
first, second = Optimizer(), Optimizer()
for _ in range(5):
    first.step()
    second.step()
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    optim = tmp_path / "torch" / "optim"
    optim.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("")
    (optim / "__init__.py").write_text("")
    (optim / "optimizer.py").write_text(OPTIMIZER)
    return tmp_path


@pytest.fixture
def pages() -> Iterator[ProgressPages]:
    opened = ProgressPages(1)
    yield opened
    opened.close()


def spawned(directory: Path, script: str, wanted: str = "optimizer-steps", **env: str) -> str:
    """The output of a spawned worker."""
    (directory / "script.py").write_text(script)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    chosen = {WANTED_VARIABLE: wanted} if wanted else {}
    done = subprocess.run(
        [sys.executable, "-u", "script.py", "--flag"],
        env=dict(with_start_code({**clean, **env, **chosen})),
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def counted(pages: ProgressPages) -> Progress:
    found = pages.read(0)
    assert found is not None
    return found


@pytest.mark.parametrize("path", [{}, {"PYTHONPATH": "/somewhere:/else"}])
def test_the_script_observes_what_it_would_without_the_hook(directory: Path, path: dict[str, str]) -> None:
    assert spawned(directory, SHOW, **path) == spawned(directory, SHOW, wanted="", **path)


def test_the_user_s_own_sitecustomize_runs(directory: Path) -> None:
    own = directory / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('of the user')")
    script = "import sitecustomize; print(sitecustomize.__file__)"
    assert spawned(directory, script, PYTHONPATH=str(own)) == f"of the user\n{own}/sitecustomize.py\n"


def test_children_of_the_worker_run_no_start_up_code(directory: Path) -> None:
    finders = "import sys; print([getattr(finder, '__module__', '') for finder in sys.meta_path])"
    script = f"import subprocess, sys\n{finders}\nsubprocess.run([sys.executable, '-c', {finders!r}])"
    own, of_child = spawned(directory, script).splitlines()
    assert "dlrover_run.observe.optimizer_steps" in own
    assert "dlrover_run.observe" not in of_child


def test_the_steps_of_the_first_optimizer_are_counted(directory: Path, pages: ProgressPages) -> None:
    spawned(directory, TRAIN, **{VARIABLE: pages.path(0)})
    assert counted(pages)[:5:4] == (5, StepSource.OPTIMIZER)


def test_a_report_of_the_script_takes_precedence_in_the_same_page(directory: Path, pages: ProgressPages) -> None:
    script = f"{TRAIN}\nfrom dlrover_run.observe import page\npage.add(page.StepSource.REPORT)\nfirst.step()"
    spawned(directory, script, **{VARIABLE: pages.path(0)})
    assert counted(pages)[:5:4] == (1, StepSource.REPORT)


def test_a_torch_without_the_hook_is_named(directory: Path) -> None:
    (directory / "torch" / "optim" / "optimizer.py").write_text("")
    printed = spawned(directory, "import torch.optim.optimizer\nprint('trains')")
    assert "--progress=optimizer has no effect" in printed
    assert printed.endswith("trains\n")


def test_another_optimizer_is_counted_once_the_first_is_gone() -> None:
    class Optimizer:
        pass

    steps: list[int] = []
    counter = OptimizerHook(steps.append, 2)
    first, second = Optimizer(), Optimizer()
    for optimizer in (first, second):
        counter(optimizer, (), {})
    assert steps == [2]
    del first, optimizer
    counter(second, (), {})
    assert steps == [2, 2]


JOB = JobSpec(Entrypoint("script", "x.py", python="python"), "job")


@pytest.mark.parametrize(
    ("job", "wanted"),
    [
        (JOB, ()),
        (replace(JOB, progress="optimizer"), ("optimizer-steps",)),
        (replace(JOB, progress="optimizer", entrypoint=Entrypoint("program", "x.sh")), ()),
    ],
)
def test_what_is_installed_in_a_worker(job: JobSpec, wanted: tuple[str, ...]) -> None:
    assert wanted_at_start(job) == wanted


def test_start_up_code_runs_only_in_a_worker_that_requests_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ProcessSpec] = []

    def spawn(spec: ProcessSpec) -> int:
        started.append(spec)
        return 1

    monkeypatch.setattr(starter, "spawn", spawn)
    plain = ProcessSpec(name="rank 0", argv=("python", "x.py"), environment={"PYTHONPATH": "/own"})
    asks = replace(plain, environment={**plain.environment, WANTED_VARIABLE: "optimizer-steps"})

    async def run() -> Any:
        workers = Starter(JOB, lambda sentence: None)
        await workers.start(asks)
        await workers.start(plain)
        await workers.start(plain, "/folder")

    asyncio.run(run())
    assert [spec.environment["PYTHONPATH"] for spec in started] == [f"{START_CODE_PATH}:/own", "/own", "/own"]
