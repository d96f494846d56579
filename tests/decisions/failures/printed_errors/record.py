"""Records how Python and its libraries print an error: `python record.py`, where rich, typer, loguru and structlog are
installed. Recorded with rich 15.0, typer 0.29, loguru 0.7.3 and structlog 26.1 on Python 3.11."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ERRORS = {
    "own": 'ValueError("bad label 11 in " + path)',
    "peer": 'RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] '
    'Connection closed by peer [127.0.0.1]:29417")',
}
LOAD = 'def load(path):\n    label = 11\n    raise {error}\ndef main(): load("shard-0017")\n'
RICH = (
    "from rich.console import Console\nfrom rich.traceback import install\ninstall({options})\nimport err\nerr.main()\n"
)
COLOR = "console=Console(stderr=True, force_terminal=True, width=100), width=100"
LOGURU = """import sys
from loguru import logger
logger.remove()
logger.add(sys.stderr, {options})
import err
@logger.catch(onerror=lambda error: sys.exit(1))
def main(): err.main()
main()
"""
STRUCTLOG = """import sys, structlog
from structlog import dev, processors
stamps = [processors.add_log_level, processors.TimeStamper(fmt="iso")]
structlog.configure(processors=[*stamps, {options}], logger_factory=structlog.PrintLoggerFactory(sys.stderr))
import err
try: err.main()
except Exception: structlog.get_logger().exception("training failed", rank=1); sys.exit(1)
"""
LOGGING = """import logging, sys
class Each(logging.Formatter):
    def format(self, record):
        head = self.formatTime(record) + " [rank1] ERROR "
        return "\\n".join(head + line for line in super().format(record).splitlines())
handler = logging.StreamHandler()
handler.setFormatter({options})
logging.basicConfig(handlers=[handler])
import err
try: err.main()
except Exception: logging.exception("training failed"); sys.exit(1)
"""
GROUP = """import asyncio, err
async def fetch(shard):
    await asyncio.sleep(0.01)
    if shard != 16: err.main()
async def load():
    async with asyncio.TaskGroup() as group:
        for shard in range(16, 19): group.create_task(fetch(shard))
asyncio.run(load())
"""
PRINTERS = {
    "plain": "import err\nerr.main()\n",
    "plain-chain": "import err\ntry: err.main()\nexcept Exception as error:\n    try: {}['x']\n"
    "    except KeyError: err.main()\n",
    "rich": RICH.format(options=""),
    "rich-color": RICH.format(options=COLOR),
    "rich-narrow": RICH.format(options="width=40, console=Console(stderr=True, width=40)"),
    "rich-locals": RICH.format(options="show_locals=True"),
    "rich-ascii": RICH.format(options=""),
    "typer": "import typer, err\napp = typer.Typer()\n@app.command()\ndef main(): err.main()\napp()\n",
    "loguru": LOGURU.format(options="colorize=False"),
    "loguru-color": LOGURU.format(options="colorize=True"),
    "loguru-json": LOGURU.format(options="serialize=True"),
    "structlog-console": STRUCTLOG.format(options="dev.ConsoleRenderer(colors=False)"),
    "structlog-color": STRUCTLOG.format(options="dev.ConsoleRenderer(colors=True)"),
    "structlog-plain": STRUCTLOG.format(options="dev.ConsoleRenderer(exception_formatter=dev.plain_traceback)"),
    "structlog-json": STRUCTLOG.format(options="processors.format_exc_info, processors.JSONRenderer()"),
    "structlog-frames": STRUCTLOG.format(options="processors.dict_tracebacks, processors.JSONRenderer()"),
    "logging": LOGGING.format(options='logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s")'),
    "logging-each-line": LOGGING.format(options="Each()"),
    "group": GROUP,
}


def main() -> None:
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory(prefix="job") as directory:
        for kind, error in ERRORS.items():
            Path(directory, "err.py").write_text(LOAD.format(error=error))
            for name, program in PRINTERS.items():
                Path(directory, "train.py").write_text(program)
                encoding = "ascii" if "ascii" in name else "utf-8"
                done = subprocess.run(
                    [sys.executable, "train.py"],
                    cwd=directory,
                    env={
                        **os.environ,
                        "PYTHONDONTWRITEBYTECODE": "1",
                        "PYTHONIOENCODING": f"{encoding}:backslashreplace",
                    },
                    stderr=subprocess.PIPE,
                )
                assert done.returncode == 1, done.stderr.decode()
                (here / f"{kind}-{name}.txt").write_bytes(done.stderr)


if __name__ == "__main__":
    main()
