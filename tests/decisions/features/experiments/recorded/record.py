"""Runs the programs of bugs.txt, each several times in another directory, with other numbers and another rank, and
writes what they print on standard error to failures.json. Needs torch; run it from this directory:

    python record.py
"""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import sys
import tempfile
from pathlib import Path

RUNS = 3
HERE = Path(__file__).parent
BEGIN = "import os, random\nV, RANK, DIR = random.Random(int(os.environ['V'])), os.environ['RANK'], os.getcwd()\n"


def programs() -> dict[str, str]:
    parts = re.split(r"^### (.*)\n", (HERE / "bugs.txt").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def run(text: str, variant: int) -> tuple[int, str]:
    """Its exit code and what it wrote on standard error."""
    with tempfile.TemporaryDirectory(prefix=random.choice(["tmp", "job_", "run-"])) as name:
        (Path(name) / "train.py").write_text(BEGIN + text)
        sys.stdout.flush()
        child = os.fork()
        if not child:
            os.chdir(name)
            os.environ.update(V=str(variant), RANK=str(variant % 8))
            with open("stderr", "wb") as file:
                os.dup2(file.fileno(), 2)
            sys.argv = ["train.py"]
            # As `python train.py` does it: what is not caught is printed by the interpreter, without the frames here.
            try:
                runpy.run_path(f"{name}/train.py", run_name="__main__")
            except SystemExit as error:
                os._exit(error.code if isinstance(error.code, int) else 1)
            except BaseException as error:
                trace = error.__traceback__
                while trace is not None and trace.tb_frame.f_code.co_filename != f"{name}/train.py":
                    trace = trace.tb_next
                sys.excepthook(type(error), error.with_traceback(trace or error.__traceback__), trace)
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, (Path(name) / "stderr").read_bytes().decode(errors="replace")


def main() -> None:
    import torch  # noqa: F401 - the children have it then

    found = {}
    for name, text in programs().items():
        runs = [run(text, random.randrange(10**6)) for _ in range(RUNS)]
        found[name] = [{"code": code, "stderr": shortened(stderr)} for code, stderr in runs]
        print(name, [code for code, _ in runs], len(runs[0][1]))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(runs)}" for name, runs in found.items())
    (HERE / "failures.json").write_text(f"{{{lines}}}\n")


def shortened(text: str) -> str:
    """Without the middle of a very long recursion, as a launcher keeps only the end of what a worker printed."""
    return text if len(text) < 6000 else text[:1500] + text[-4000:]


if __name__ == "__main__":
    main()
