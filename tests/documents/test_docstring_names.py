"""A lower-case name in backticks in a docstring is a name of the code that it describes: of the class or one that it
extends, and of the module for a function."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = [path for package in ("dlrover_run", "tf_ps_runner") for path in sorted((ROOT / package).rglob("*.py"))]

NAME = re.compile(r"`([a-z_][a-z0-9_]*)`")

ELSEWHERE = frozenset(
    [
        "AskStacks.note_stacks",
        "Cause.memory",
        "ElasticBatchSampler.batch_sampler",
        "ElasticBatchSampler.collate_fn",
        "Entrypoint.elastic_launch",
        "JobEnded.failed",
        "JobEnded.finished",
        "LastStep.destroy_process_group",
        "LastStep.stop_agreement",
        "LaunchConfig.etcd",
        "LaunchRequest.command",
        "LauncherEnd.subprocess",
        "Program.launch",
        "Program.read_job",
        "PsJobSpec.preload",
        "PsJobSpec.start_method",
        "RestoredModel.live",
        "ScaleCommandEnded.subprocess",
        "StatusLines.status",
        "StragglerStatus.computing",
        "StragglerStatus.data",
        "StragglerStatus.disk",
        "StragglerStatus.network",
        "StragglerStatus.processor",
        "StragglerStatus.time",
        "Store.ca",
        "Stream.file",
        "Stream.inherit",
        "Stream.null",
        "Stream.relay",
        "Stream.stderr",
        "Survivor.init_process_group",
        "SurvivorsAssignment.reconfigure_timeout",
        "Suspect.round_detectors",
        "TaskState.serve",
        "WorkerExit.subprocess",
        "WorkerExited.mono",
        "WorkerExited.subprocess",
        "WorkerReady.mono",
        "WorkerReady.step",
        "WorkerReady.store",
        "WorkerStalled.mono",
        "WorkerStarted.mono",
    ]
)
"""Names of other modules, of parameters and of values, as `Class.name`: what a docstring may name all the same."""


FUNCTIONS_ELSEWHERE = frozenset(
    [
        "_first_environment.sitecustomize",
        "_pickle_call.function_worker",
        "batches.schedule",
        "claim.schedule",
        "clock_text.events",
        "decode_part.dec_hook",
        "describe_exit_code.subprocess",
        "end_static.static",
        "find_gpu_problems.pynvml",
        "fork.begin",
        "fork.ps",
        "name_process.ps",
        "name_process.top",
        "read_cgroup_number.max",
        "run.__main__",
        "run.relay_start",
        "scan_imports.run_path",
        "scan_imports.script",
        "send_signal.sudo",
        "share_console.print",
        "start.__main__",
    ]
)
"""As `ELSEWHERE`, as `function.name`."""


def names_elsewhere() -> set[str]:
    """Each name that its class does not have, as `Class.name`."""
    found = set()
    for path in MODULES:
        tree = ast.parse(path.read_text())
        classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        for name, node in classes.items():
            if not (words := NAME.findall(ast.get_docstring(node) or "")):
                continue
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            code = "\n".join(_code(classes[each]) for each in (name, *bases) if each in classes)
            for word in words:
                if not re.search(rf"\b_?{word}\b", code):
                    found.add(f"{name}.{word}")
    return found


def names_outside_the_module() -> set[str]:
    """Each name in the docstring of a function that its module does not have, as `function.name`."""
    found = set()
    for path in MODULES:
        text = path.read_text()
        if not NAME.search(text):
            continue
        names = set(re.findall(r"\w+", re.sub(r'"""[\s\S]*?"""', "", text)))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                words = NAME.findall(ast.get_docstring(node) or "")
                found |= {f"{node.name}.{word}" for word in words if not names & {word, f"_{word}"}}
    return found


def _code(node: ast.ClassDef) -> str:
    """The source of a class without its docstring."""
    return "\n".join(ast.unparse(statement) for statement in node.body[1:])


def test_each_name_in_the_docstring_of_a_class_is_a_name_of_that_class() -> None:
    assert not names_elsewhere() - ELSEWHERE


def test_each_name_in_the_docstring_of_a_function_is_a_name_of_its_module() -> None:
    assert not names_outside_the_module() - FUNCTIONS_ELSEWHERE
