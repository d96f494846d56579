"""The program that runs one rank of `elastic_launch(config, function)`: load the function, call it, hand its result
back.

The pickles come from and go to the Python process that called `elastic_launch`, through memory files of this machine
that only its own user can open; nothing that crosses a network is pickled.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.process
import multiprocessing.spawn
import os
import pickle
import sys
import time
import traceback
from string import Template
from typing import Any


def main() -> None:
    """`argv[1]` is the file of the call, `argv[2]` the file that takes the result."""
    call_path, result_path = sys.argv[1:3]
    try:
        result = _call(call_path)
    except Exception as error:
        _record(error)
        raise
    with open(result_path, "wb") as file:
        file.write(result)


def _call(call_path: str) -> bytes:
    """The pickled result of the call."""
    process: Any = multiprocessing.process.current_process()
    # A main module that launches outside `if __name__ == "__main__"` would launch again here; with this mark on the
    # process, `multiprocessing` refuses that and says what to do.
    process._inheriting = True
    try:
        with open(call_path, "rb") as payload:
            # The caller's main module first: the function may be defined in it, or need what it imports. Its sys.argv
            # comes too.
            multiprocessing.spawn.prepare(pickle.load(payload))
            function, args = pickle.load(payload)
    finally:
        del process._inheriting
    rank = os.environ["LOCAL_RANK"]
    result = function(
        *[Template(arg).safe_substitute(local_rank=rank) if isinstance(arg, str) else arg for arg in args]
    )
    try:
        return pickle.dumps(result)
    except Exception as error:
        # Of a class that came with the call by cloudpickle, which has been imported for that.
        for name in ("cloudpickle", "ray.cloudpickle"):
            with contextlib.suppress(Exception):
                return bytes(sys.modules[name].dumps(result))
        raise TypeError(f"what the function returned cannot be pickled ({error}); return plain data") from error


def _record(error: Exception) -> None:
    """Write the error file as torch's `@record` does, without torch. One that the function wrote itself stays."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    with open(path, "w") as file:
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)


if __name__ == "__main__":
    main()
