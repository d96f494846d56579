"""dlrover-run: starts, watches and restarts distributed training; a drop-in for torchrun.

`main(args)`, `LaunchConfig` and `elastic_launch` are what a Python program calls. They are loaded when first used, so
that importing this package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_run.api import ChildFailedError, LaunchConfig, LogsSpecs, elastic_launch, main
    from dlrover_run.spec import SpecError

__all__ = ["ChildFailedError", "LaunchConfig", "LogsSpecs", "SpecError", "elastic_launch", "main"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dlrover_run import api

    return getattr(api, name)
