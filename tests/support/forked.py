"""Programs that run in a new interpreter and in a worker of the forkserver, to be compared."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

AGENT = Path(__file__).parents[1] / "processes/forkserver_agent.py"
TIMEOUT = 240

PYTHON = os.environ.get("DLROVER_TEST_PYTHON", sys.executable)
"""The interpreter of the workers; it may have another version than the launcher's."""

ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


@dataclass
class Case:
    """One program, to be run in a new interpreter and in a forked one."""

    directory: Path
    kind: str = "script"
    target: str = "script.py"
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    stdin: str = "/dev/null"
    preload: tuple[str, ...] = ()
    scan: bool = True
    python: str = PYTHON
    start: str = ""
    """What the start-up code installs in forked workers."""

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        return {**kept, "PYTHONDONTWRITEBYTECODE": "1", **self.env}

    def fresh(self) -> tuple[int, str, str]:
        """The exit code, output and error output of a new interpreter."""
        middle = {"module": ["-m"], "script": []}[self.kind]
        env = {**self.environment, "RANK": "0", "TEMPLATE": "0", "FORKED_AT": "0"}
        with (
            open(self.stdin) as stdin,
            open(self.directory / "fresh.out", "w+") as out,
            open(self.directory / "fresh.err", "w+") as err,
        ):
            code = subprocess.run(
                [self.python, "-u", *middle, self.target, *self.args],
                cwd=self.directory,
                env=env,
                stdin=stdin,
                stdout=out,
                stderr=err,
                timeout=TIMEOUT,
                start_new_session=True,
            ).returncode
            texts = [ADDRESS.sub("0x", (file.seek(0), file.read())[1]) for file in (out, err)]
        return code, texts[0], texts[1]

    def agent(self, *steps: str, line_fd: int | None = None) -> dict[str, Any]:
        """Run the agent of the tests with these steps and return its answer."""
        out = self.directory / "out"
        out.mkdir(exist_ok=True)
        job = {
            "python": self.python,
            "kind": self.kind,
            "target": self.target,
            "args": self.args,
            "cwd": str(self.directory),
            "env": self.environment,
            "preload": self.preload,
            "scan": self.scan,
            "stdin": self.stdin,
            "out": str(out),
            "steps": steps,
            "line_fd": line_fd,
            "start": self.start,
        }
        done = subprocess.run(
            [sys.executable, str(AGENT)],
            input=json.dumps(job),
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT,
            pass_fds=() if line_fd is None else (line_fd,),
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def output(self, rank: int = 0) -> tuple[str, str]:
        out, err = ((self.directory / "out" / f"{rank}.{s}").read_text() for s in ("out", "err"))
        return ADDRESS.sub("0x", out), ADDRESS.sub("0x", err)

    def forked(self, *steps: str) -> tuple[int, str, str]:
        """The same as `fresh` for one forked worker; `steps` are those of the agent that start it."""
        result = self.agent(*(steps or ("fork",)), "wait")
        assert "workers" in result, result
        return result["workers"][0]["code"], *self.output()


def write(case: Case, text: str, name: str = "script.py") -> Case:
    path = case.directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return case


SCRIPTS = {
    "exception": "def f():\n    raise ValueError('bad')\nf()\n",
    "chained exception": "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e\n",
    "import of a missing module": "import there_is_no_such_module\n",
    "syntax error": "x = 1\nif x\n    pass\n",
    "indentation error": "def f():\n  x = 1\n y = 2\n",
    "exit code": "import sys\nsys.exit(3)\n",
    "exit message": "import sys\nsys.exit('stopped on purpose')\n",
    "exit through os": "import os\nprint('x')\nos._exit(7)\n",
    "raise SystemExit None": "raise SystemExit\n",
    "keyboard interrupt": "raise KeyboardInterrupt\n",
    "killed by a signal": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n",
    "own excepthook": "import sys, traceback\ndef h(t, v, tb):\n    print('hook', t, v, "
    "traceback.extract_tb(tb), sys.last_traceback is tb, sys.excepthook is h)\nsys.excepthook = h\n1/0\n",
    "excepthook that fails": "import sys\ndef h(t, v, tb):\n    raise RuntimeError('hook')\nsys.excepthook = h\n1/0\n",
    "atexit": "import atexit, threading, sys\natexit.register(print, 'first')\natexit.register(print, 'second')\n"
    "threading.Thread(target=lambda: (threading.main_thread().join(), print('thread'))).start()\n"
    "print('main ends')\natexit.register(lambda: print('third', file=sys.stderr))\n",
    "exception at exit": "import atexit\natexit.register(lambda: 1/0)\n",
    "exception in a thread": "import threading\nthreading.Thread(target=lambda: 1/0, name='T').start()\n",
    "warnings": "import warnings\nprint(len(warnings.filters), warnings.filters)\nwarnings.warn('careful')\n"
    "def f():\n    warnings.warn('deeper', stacklevel=2)\nf()\n",
    "logging": "import logging\nlogging.warning('w')\nprint(logging.root.handlers, logging.root.manager.loggerDict)\n",
    "future annotations off": "x: undefined_name_in_annotation = 1\n",
    "non-ASCII source": "# -*- coding: latin-1 -*-\nprint(ascii('h\xe9'), __file__)\nraise ValueError('\xe9')\n",
    "own module": "import sys\nsys.stdout.write('a')\nimport own_thing\n",
}

VIEWS = {
    "main's attributes": "import __main__\nprint(__name__, __file__, __spec__, type(__loader__), __loader__.name, "
    "__loader__.path, __package__, __doc__, __builtins__)\n"
    "print(sorted(vars(__main__)), __main__.__dict__ is globals(), getattr(__main__, '__annotations__', 0))\n",
    "argv, path and flags": "import sys\nprint(sys.argv, sys.orig_argv, sys.path, sys.flags, sys.warnoptions, "
    "sys._xoptions, sys.executable, sys.prefix)\n",
    "finders": "import sys\nnames = [getattr(f, '__name__', type(f).__name__) for f in sys.meta_path]\n"
    "print([n for n in names if n != 'ImportRecorder'])\n",
    "none of our modules": "import sys\nprint([n for n in sys.modules if 'dlrover' in n and 'editable' not in n])\n",
    "threads": "import os, threading\nm = threading.main_thread()\n"
    "print(m is threading.current_thread(), m.native_id == os.getpid(), threading.get_native_id() == os.getpid(),"
    " threading.active_count(), m.name, len(os.listdir('/proc/self/task')))\n",
    "signals": "import signal\nprint({s: str(signal.getsignal(s)).split(' at ')[0] for s in signal.valid_signals()})\n"
    "print(signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
    # The C library's own two signals, 32 and 33, are left out: posix_spawn, which may start a test, ignores them.
    "masks = [l.split() for l in open('/proc/self/status') if l.startswith('Sig') and 'SigQ' not in l]\n"
    "print({name: hex(int(mask, 16) & ~(3 << 31)) for name, mask in masks})\n",
    "open descriptors": "import os\nprint(sorted(fd for fd in os.listdir('/proc/self/fd') if int(fd) < 1000))\n",
    "streams": "import sys\nfor s in (sys.stdin, sys.stdout, sys.stderr):\n    print(s, s.name, s.mode, s.encoding, "
    "s.errors, s.line_buffering, s.write_through, type(s.buffer), s.newlines, s.closed, s.fileno(), s.seekable())\n"
    "print(sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__)\n",
    "C's stdout": "import ctypes, os\nc = ctypes.CDLL(None)\nc.puts(b'from C')\nprint('from Python')\n",
    "process": "import os\nprint(os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), os.getcwd(), os.umask(0), "
    "os.sched_getaffinity(0), os.nice(0), open('/proc/self/comm').read(), open('/proc/self/cmdline').read())\n",
    "environment": "import ctypes, os\nprint({n: v for n, v in os.environ.items() if n not in "
    "('TEMPLATE', 'FORKED_AT')})\nc = ctypes.CDLL(None)\nc.getenv.restype = ctypes.c_char_p\n"
    "print(c.getenv(b'RANK'), c.getenv(b'NOT_THERE'))\n"
    "e = open('/proc/self/environ').read().split(chr(0))\n"
    "print([v for v in e if not v.startswith(('TEMPLATE', 'FORKED_AT'))])\n",
    "multiprocessing's process": "import multiprocessing as m, os\np = m.current_process()\n"
    "print(p.name, p._identity, m.parent_process(), m.process.ORIGINAL_DIR, m.active_children(), len(p.authkey))\n",
    "collector": "import gc\nprint(gc.isenabled(), gc.get_threshold())\n",
}
"""Parts of one script, which prints all that a script can observe of its process."""


TORCH = {
    "data loader": """
        import torch
        from torch.utils.data import DataLoader, Dataset
        class Squares(Dataset):
            def __len__(self): return 8
            def __getitem__(self, i): return i * i, torch.initial_seed() == torch.utils.data.get_worker_info().seed
        for method in ("fork", "spawn"):
            if __name__ == "__main__":
                for batch in DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=method):
                    print(batch)
        """,
    "torch as imported": """
        import sys, torch, numpy, warnings, logging
        torch.manual_seed(3)
        print(torch.rand(2), torch.get_num_threads(), torch.get_num_interop_threads(), torch.__config__.parallel_info())
        print(torch.cuda.is_available(), torch.cuda._is_in_bad_fork(), torch.are_deterministic_algorithms_enabled())
        print(sorted(n for n, l in logging.Logger.manager.loggerDict.items() if getattr(l, "handlers", None)))
        print([h.stream is sys.stderr for h in logging.getLogger("torch").handlers])
        x = torch.rand(600, 600)
        print((x @ x).sum(), numpy.linalg.norm(x.numpy() @ x.numpy()))
        """,
    "torch.compile": """
        import torch
        @torch.compile
        def f(x, y): return torch.sin(x) * y + x.sum()
        torch.manual_seed(0)
        print(f(torch.rand(8), torch.rand(8)))
        """,
    "process group": """
        import os, torch, torch.distributed as dist
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", WORLD_SIZE="1", RANK="0")
        store = dist.TCPStore("127.0.0.1", 0, 1, True)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        t = torch.ones(3)
        dist.all_reduce(t)
        print(t)
        dist.destroy_process_group()
        """,
}
