"""Code that TensorFlow generates from functions is written where it goes with the job.

Autograph writes a file for each function it converts, and removes it only at the interpreter's own end, which a process
that is killed does not come to.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tf_ps_runner.worker.patching import Patch, after_import, place

SCRATCH = "TF_PS_SCRATCH"
"""The variable with a directory that is removed with the job, as the agent sets it."""


def register() -> None:
    """Have the module of TensorFlow changed once it is imported."""
    lost = "processes that are killed leave files of Autograph's in the directory for temporary ones"
    after_import("tensorflow.python.autograph.pyct.loader", lost, change_loader)


def change_loader(module: Any) -> Sequence[Patch]:
    """Write generated code to the directory of the job. For `tensorflow.python.autograph.pyct.loader`."""
    temporary = place(module, "tempfile")
    place(temporary, "NamedTemporaryFile")
    return [Patch(module, "tempfile", _InScratch(temporary))]


class _InScratch:
    """The module `tempfile`, but for where its files are made."""

    def __init__(self, temporary: Any) -> None:
        self._temporary = temporary

    def __getattr__(self, name: str) -> Any:
        return getattr(self._temporary, name)

    def NamedTemporaryFile(self, *args: Any, **kwargs: Any) -> Any:
        """As that of `tempfile`, in the directory of the job while there is one."""
        directory = os.environ.get(SCRATCH)
        if directory and os.path.isdir(directory):
            kwargs.setdefault("dir", directory)
        return self._temporary.NamedTemporaryFile(*args, **kwargs)
