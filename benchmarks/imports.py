"""How the workers of `--start-method=forkserver` start again after an import of each library. See
`benchmarks/README.md`.

A library that leaves a thread running, or opens an accelerator, a socket or a pipe when it is imported, makes a fork
unsafe. The template leaves it out, and the forked workers import it themselves.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple

from core.cases import Limits
from core.launchers import FORKSERVER, WORKERS, Job
from core.ratios import Lost
from core.report import Table
from core.run import Run, until_last
from core.series import Kept, Series, measured

MODULES = (
    *("PIL", "accelerate", "aiohttp", "boto3", "catboost", "cv2", "dask", "datasets", "duckdb", "einops", "fsspec"),
    *("grpc", "h5py", "httpx", "huggingface_hub", "hydra", "jax", "librosa", "lightgbm", "lightning", "lmdb"),
    *("matplotlib.pyplot", "mlflow", "networkx", "nltk", "numba", "numpy", "omegaconf", "onnxruntime", "orjson"),
    *("pandas", "peft", "polars", "pyarrow", "pydantic", "ray", "s3fs", "safetensors.torch", "scipy"),
    *("sentence_transformers", "sentencepiece", "skimage", "sklearn", "soundfile", "spacy", "statsmodels.api"),
    *("tensorboard", "timm", "tokenizers", "torch", "torchmetrics", "torchvision", "transformers", "wandb"),
    *("webdataset", "xgboost", "zarr"),
)

SCRIPT = """\
import {module}

import sys

sys.path.insert(0, {workers!r})

from reporting import open_gate, report, wait_at

gate = open_gate()
report("ready")
wait_at(gate)
"""

SPAWNED = "workers are spawned instead"
_LEFT_OUT = re.compile(r"--start-method=forkserver: (.*); each worker imports (\S+) itself")


class Row(NamedTuple):
    """How the workers of a script that imports `module` were started again. `seconds` is the time from the SIGKILL of
    one of two workers until both ran again in the next round, their imports included; None if they did not."""

    module: str
    version: str
    workers: str
    seconds: float | None

    @property
    def key(self) -> str:
        return self.module


def describe(output: str) -> str:
    """How the workers were started, from what the launcher has printed."""
    text = " ".join(output.split())
    if SPAWNED in text:
        return "spawned"
    left_out = [f"{module} ({reason})" for reason, module in _LEFT_OUT.findall(text)]
    return f"forked without {'; '.join(left_out)}" if left_out else "forked"


def version_of(module: str) -> str:
    """The version of the distribution that has the module; empty if it is not known."""
    names = metadata.packages_distributions().get(module.partition(".")[0], ())
    return metadata.version(names[0]) if names else ""


def measure(module: str, limits: Limits) -> Row:
    """Start two workers that import the module, kill one, and wait until both run again."""
    seconds, why = None, ""
    with Run() as run:
        script = run.directory / "script.py"
        script.write_text(SCRIPT.format(module=module, workers=str(WORKERS)))
        job = Job(str(script), workers=2, max_restarts=3)
        try:
            FORKSERVER.start(run, job)
            run.wait("ready", job.workers, limits.start)
            # The template learns meanwhile what its workers have imported.
            run.settle(limits.settle)
            victim = next(report for report in run.reports if report.rank == 1)
            killed = run.kill(victim.pid)
            again = until_last(
                killed, limits.recovery, lambda limit: run.wait("ready", job.workers, limit, first_attempt=1)
            )
            seconds = None if again.unended else (again.values or {}).get("")
        except Lost as lost:
            why = f"lost: {lost}"
        how = why or describe(run.output)
    return Row(module, version_of(module), how, seconds)


HEAD = ("import", "version", "workers", "kill to running")


def tables(kept: Sequence[Kept[Row]]) -> list[Table]:
    """The table of all modules."""
    runs = [one.run for one in kept]
    how = "one run each: SIGKILL of one of two workers until both run again, their imports included"
    others = sorted({*MODULES} - {one.module for one in runs})
    how += f"; not measured: {', '.join(others)}" if others else ""
    return [Table("imports", measured(kept, how), HEAD, [cells(one) for one in runs], text=(0, 1, 2))]


def cells(one: Row) -> list[str]:
    """A row of the table."""
    return [one.module, one.version, one.workers, f"{one.seconds:.2f} s" if one.seconds else "-"]


def absent(module: str, kept: Sequence[Kept[Row]]) -> str | None:
    """Why a module cannot be measured here; None if it can."""
    return None if importlib.util.find_spec(module.partition(".")[0]) else f"{module} is not installed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is installed; return 0."""
    parser = argparse.ArgumentParser(description="How workers start again after an import of each library.")
    parser.add_argument("modules", nargs="*", default=MODULES, help="modules (default: those that are installed)")
    SERIES.add_options(parser)
    options = parser.parse_args(arguments)
    return SERIES.run(parser, options, options.modules)


SERIES = Series(
    "Libraries and forked workers",
    "forkserver/imports",
    Row,
    lambda module: measure(module, Limits()),
    tables,
    lambda one: " | ".join(cells(one)),
    absent,
)

if __name__ == "__main__":
    sys.exit(main())
