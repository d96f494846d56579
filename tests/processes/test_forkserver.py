"""A worker forked from a template is compared with a new `python -u` in everything that a script can observe."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.forked import SCRIPTS, TIMEOUT, TORCH, VIEWS, Case, write
from support.harness import OURS, only_long, run

from dlrover_run.workers.template_client import BOOT, TEMPLATE_FOLDER


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


@pytest.mark.parametrize("source", [*SCRIPTS.values(), "".join(VIEWS.values())], ids=[*SCRIPTS, "all that it sees"])
def test_a_forked_script_behaves_as_a_spawned_one(case: Case, source: str) -> None:
    write(case, source)
    write(case, "print('own', __name__, __file__)\ndef g():\n    raise OSError(5, 'own')\ng()\n", "own_thing.py")
    case.args = ("--x", "", "two words", "--")
    assert case.forked() == case.fresh()


@pytest.mark.parametrize(
    "target", ["./script.py", "sub/../script.py", "link.py", "{}/script.py", "missing.py", "packed.zip", "sub"]
)
def test_any_way_to_name_a_script(case: Case, target: str) -> None:
    write(case, "import sys\nprint(sys.argv, sys.path, __file__, __spec__, sys.orig_argv)\nimport near\n1/0\n")
    write(case, "print(__file__)\n", "near.py")
    write(
        case, "import sys\nprint(sys.argv, sys.path[:2], __file__, __spec__, sys.orig_argv)\n1/0\n", "sub/__main__.py"
    )
    (case.directory / "elsewhere").mkdir()
    (case.directory / "link.py").symlink_to("script.py")
    with zipfile.ZipFile(case.directory / "packed.zip", "w") as archive:
        archive.write(case.directory / "sub" / "__main__.py", "__main__.py")
    case.target = target.format(case.directory)
    assert case.forked() == case.fresh()


@pytest.mark.parametrize("target", ["pack.inner", "pack", "there.is.none", "interrupted", "json.tool"])
def test_a_module(case: Case, target: str) -> None:
    code = "import sys\nprint(sys.argv, sys.path, __file__, __spec__.name, __package__, sys.orig_argv)\n"
    write(case, "print('pack', __name__)\n", "pack/__init__.py")
    write(case, code + "from . import other\nraise ValueError(1)\n", "pack/inner.py")
    write(case, "print(__name__)\n", "pack/other.py")
    write(case, code + "from .other import nothing\n", "pack/__main__.py")
    write(case, "raise KeyboardInterrupt\n", "interrupted.py")
    case.kind, case.target = "module", target
    assert case.forked() == case.fresh()


def test_a_path_for_runpy(case: Case) -> None:
    write(case, "import sys\nprint(__name__, sys.argv, __file__)\n")
    case.kind, case.target, case.args = "run_path", "script.py", ("a",)
    assert case.forked() == (0, "__main__ ['script.py', 'a'] script.py\n", "")


@pytest.mark.parametrize("stdin", ["script.py", "/dev/zero"])
def test_standard_input(case: Case, stdin: str) -> None:
    write(case, "import sys\nprint(sys.stdin.read(10), sys.stdin.mode)\n")
    case.stdin = str(case.directory / stdin)
    assert case.forked() == case.fresh()


@pytest.mark.parametrize(
    "env",
    [
        {
            "PYTHONHASHSEED": "7",
            "PYTHONOPTIMIZE": "1",
            "PYTHONIOENCODING": "latin-1:replace",
            "PYTHONPATH": "lib:/nowhere",
            "PYTHONWARNINGS": "error::ResourceWarning",
            "PYTHONSAFEPATH": "1",
        },
        {"LANG": "C", "PYTHONHASHSEED": "0"},
    ],
    ids=["settings", "C locale"],
)
def test_python_settings_in_the_environment(case: Case, env: dict[str, str]) -> None:
    write(
        case,
        "import locale, os, sys\nout = sys.stdout\nprint(sys.flags, out.encoding, out.errors, hash('x'), sys.path)\n"
        "print(os.environ.get('LC_CTYPE'), locale.getlocale())\nassert 0\n",
    )
    case.env = env
    assert case.forked() == case.fresh()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(case: Case, method: str) -> None:
    write(
        case,
        f"""
        import multiprocessing as mp, pickle
        class Point:
            def __init__(self, x): self.x = x
        def work(p, q):
            q.put((Point(p.x + 1), __name__, mp.current_process().name))
        if __name__ == "__main__":
            context = mp.get_context({method!r})
            queue = context.Queue()
            process = context.Process(target=work, args=(Point(1), queue))
            process.start()
            point, name, who = queue.get()
            process.join()
            print(type(point) is Point, point.x, name, who, process.exitcode)
            with context.Pool(2) as pool:
                print(pool.map(abs, [-1, -2]))
            print(type(pickle.loads(pickle.dumps(Point(3)))))
        """,
    )
    assert case.forked() == case.fresh()


@pytest.mark.long
@pytest.mark.torchrun
def test_random_numbers_differ_between_workers(case: Case) -> None:
    write(
        case,
        "import random, tempfile, uuid, multiprocessing, numpy, torch\n"
        "print(random.random(), numpy.random.rand(), torch.initial_seed(), torch.rand(1).item(),"
        " next(tempfile._get_candidate_names()), uuid.uuid4(), multiprocessing.current_process().authkey.hex())\n",
    )
    assert len(case.agent("fork", "fork", "fork", "wait")["workers"]) == 3
    drawn = [case.output(rank)[0].split() for rank in range(3)]
    assert [len(set(column)) for column in zip(*drawn, strict=True)] == [3] * 7


SLOW = ("torch.compile", "data loader", "torch as imported")


@pytest.mark.parametrize("name", [*(name for name in TORCH if name not in SLOW), *only_long(*SLOW)])
def test_torch(case: Case, name: str) -> None:
    write(case, TORCH[name])
    # Precompiled headers cover many kernels, take a minute, and stay in /tmp.
    inductor = {"CACHE_DIR": str(case.directory / "cache"), "CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    # Python's tracker of semaphores sometimes receives a removal only after it was asked to exit. It then warns of a
    # leak that does not exist, in a new interpreter as well.
    case.env = {
        "OMP_NUM_THREADS": "2",
        "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
        **{f"TORCHINDUCTOR_{name}": value for name, value in inductor.items()},
    }
    assert case.forked() == case.fresh()


@pytest.mark.long
def test_scikit_learn_and_pillow_leave_the_template_usable(case: Case) -> None:
    write(case, "import sklearn.datasets, PIL.Image\nprint(sklearn.datasets.load_digits().data.shape)\n")
    assert case.forked() == case.fresh()


def test_libraries_keep_what_they_initialized_during_their_import(case: Case) -> None:
    """The environment, search path, finders, exit handlers and C output of an installed library reach the worker."""
    site = case.directory / "lib" / "site-packages"
    write(
        case,
        """
        import atexit, ctypes, multiprocessing.util, os, sys
        os.environ["SET_BY_LIBRARY"] = "1"
        os.environ["RANK_OF_LIBRARY"] = os.environ.get("RANK", "none")
        sys.path.append("/added")
        class Finder:
            def find_spec(self, *a): return None
        sys.meta_path.append(Finder())
        atexit.register(print, "library's exit")
        multiprocessing.util.Finalize(None, print, ("library's finalizer",), exitpriority=1)
        kept = open(os.path.abspath(__file__))
        """,
        "lib/site-packages/installed.py",
    )
    write(
        case,
        "import os, sys\nimport installed\nprint(os.environ['SET_BY_LIBRARY'], sys.path, len(installed.kept.read()),"
        " [type(f).__name__ for f in sys.meta_path if type(f).__name__ != 'ImportRecorder'][-1])\n",
    )
    case.env = {"PYTHONPATH": str(site)}
    assert case.agent()["prepared"][-1] == "installed"
    assert case.forked() == case.fresh()


def test_a_library_reads_the_environment_that_the_script_set_for_it(case: Case) -> None:
    write(case, "import os\nread = os.environ.get('FOR_LIBRARY')\n", "lib/site-packages/installed.py")
    write(case, "import os\nos.environ['FOR_LIBRARY'] = 'x'\nimport installed\nprint(installed.read)\n")
    case.env = {"PYTHONPATH": str(case.directory / "lib" / "site-packages")}
    result = case.agent("fork", "wait", "learn", "fork", "wait")
    assert (result["prepared"], result["learned"]) == (["os"], [])
    line = f"{case.directory}/script.py:2"
    assert result["skipped"] == [f"what is imported after {line}, which changes os.environ or sys.path"]
    assert [case.output(rank) for rank in (0, 1)] == [case.fresh()[1:]] * 2 == [("x\n", "")] * 2


# Assumptions of the agent.


def test_a_worker_is_the_agents_child_and_dies_with_it(case: Case) -> None:
    reader, writer = os.pipe()
    fifo = case.directory / "fifo"
    os.mkfifo(fifo)
    write(
        case,
        f"import os\nprint(os.getppid(), os.getpid(), flush=True)\nfd = os.open({str(fifo)!r}, os.O_WRONLY)\n"
        "os.write(fd, b'up')\nimport signal\nsignal.pause()\n",
    )
    os.close(writer)
    os.close(reader)
    line_fd = os.open(fifo, os.O_RDWR)
    held = os.open(fifo, os.O_RDONLY)
    result = case.agent("fork", "line", "die", line_fd=line_fd)
    os.close(line_fd)
    assert result["line"] == "up"
    assert os.read(held, 1) == b"", "the fifo ends when its last writer exits"
    os.close(held)
    assert case.output()[0].split()[0] == str(result["agent"])


def test_workers_outlive_their_template(case: Case) -> None:
    write(
        case,
        "import os, signal, select\nt = int(os.environ['TEMPLATE'])\n"
        "try:\n    fd = os.pidfd_open(t)\n    select.select([fd], [], [], 60)\nexcept ProcessLookupError:\n    pass\n"
        "print('still here')\n",
    )
    result = case.agent("fork", "fork", "kill template", "wait")
    assert [w["code"] for w in result["workers"]] == [0, 0]
    assert [case.output(rank)[0] for rank in (0, 1)] == ["still here\n"] * 2


def test_a_fork_after_an_abandoned_request_gets_its_own_answer(case: Case) -> None:
    result = write(case, "import colorsys\n").agent("fork", "wait", "abandon learn", "fork", "wait")
    assert [w["code"] for w in result["workers"]] == [0, 0]


def test_the_template_exits_when_its_socket_closes(case: Case) -> None:
    assert write(case, "").agent("close")["template_code"] == 0


def bare_template(case: Case, *requests: tuple[dict[str, Any], tuple[int, ...]]) -> tuple[subprocess.Popen[str], Any]:
    """A template that was sent these requests, without an agent, and our end of its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [case.python, "-u", "-c", BOOT, str(TEMPLATE_FOLDER), str(theirs.fileno()), str(os.getpid())]
    pipes: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    template = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=case.environment, **pipes)
    theirs.close()
    ours.settimeout(TIMEOUT)
    for request, given in requests:
        body = os.memfd_create("request")
        os.write(body, json.dumps(request).encode())
        socket.send_fds(ours, [b"r"], [body, *given])
        os.close(body)
    return template, ours


PREPARE: tuple[dict[str, Any], tuple[int, ...]] = ({"op": "prepare", "preload": [], "kind": None, "target": ""}, ())


def test_a_template_whose_agent_stopped_listening_exits_silently(case: Case) -> None:
    template, ours = bare_template(case, PREPARE)
    ours.close()
    assert template.communicate(timeout=TIMEOUT) == ("", None)
    assert template.returncode == 0


def test_a_worker_that_the_agent_does_not_know_never_starts(case: Case) -> None:
    write(case, "open('began', 'w')\n")
    reader, go = os.pipe()
    program = {"argv_title": ["worker"], "kind": "script", "target": "script.py", "args": [], "env": case.environment}
    place = {"cwd": str(case.directory), "streams": [False] * 3, "affinity": None, "record": False}
    fork: dict[str, Any] = {"op": "fork", **program, **place}
    template, ours = bare_template(case, PREPARE, (fork, (reader,)))
    os.close(reader)
    assert "imported" in json.loads(ours.recv(65536))
    worker = os.pidfd_open(json.loads(ours.recv(65536))["pid"])
    # As if the template had died before it reported the worker.
    template.kill()
    os.close(go)
    assert select.select([worker], [], [], TIMEOUT)[0]
    os.close(worker)
    ours.close()
    template.communicate(timeout=TIMEOUT)
    assert not (case.directory / "began").exists()


def test_a_dead_template_is_reported(case: Case) -> None:
    result = write(case, "").agent("kill template", "fork")
    assert result["error"] == "the template was killed by SIGKILL"


def test_an_interpreter_that_does_not_exist(case: Case) -> None:
    case.python = "/no/such/python"
    result = write(case, "").agent()
    assert result["error"] == "the template /no/such/python could not be started: No such file or directory"


def test_an_interpreter_that_dies_while_it_imports(case: Case) -> None:
    write(case, "import os\nos._exit(9)\n", "lib/site-packages/fatal.py")
    case.env = {"PYTHONPATH": str(case.directory / "lib" / "site-packages")}
    assert write(case, "import fatal\n").agent("fork")["error"] == "the template ended with code 9"


def test_an_external_signal_interrupts_the_script(case: Case) -> None:
    fifo = case.directory / "fifo"
    os.mkfifo(fifo)
    write(
        case,
        f"import os, time\nfd = os.open({str(fifo)!r}, os.O_WRONLY)\ntry:\n"
        "    os.write(fd, b'up')\n    while True: time.sleep(0.1)\nfinally:\n    print('cleaned up')\n",
    )
    line_fd = os.open(fifo, os.O_RDWR)
    result = case.agent("fork", "line", "interrupt", "wait", line_fd=line_fd)
    os.close(line_fd)
    assert result["workers"][0]["code"] == -2
    out, err = case.output()
    assert out == "cleaned up\n"
    assert err.splitlines()[0] == "Traceback (most recent call last):"
    assert f'File "{case.directory}/script.py", line ' in err.splitlines()[1]
    assert err.splitlines()[-1] == "KeyboardInterrupt"


def test_a_large_environment(case: Case) -> None:
    write(case, "import os\nprint(sum(len(v) for n, v in os.environ.items() if n.startswith('BIG')))\n")
    case.env = {f"BIG{n}": "x" * 100_000 for n in range(10)}
    assert case.forked() == (0, "1000000\n", "")


# Reasons not to fork.

LIBRARIES = {
    "a thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, name='busy', daemon=True).start()\n",
        "after `import installed` the thread busy is running",
    ),
    "a socket": (
        "import socket\nkept = socket.socketpair()\n",
        "after `import installed` a socket is open, which all workers would share",
    ),
    "a process": ("import subprocess\nkept = subprocess.Popen(['sleep', '1000'])\n", "was started"),
    "a resource tracker": (
        "from multiprocessing import resource_tracker\nresource_tracker.ensure_running()\n",
        "after `import installed` a pipe is open, which all workers would share",
    ),
    "the user's module": ("import mine\n", "your module {}/mine.py takes the place of mine"),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_an_unfit_template_is_refused_with_the_reason(case: Case, name: str) -> None:
    code, reason = LIBRARIES[name]
    write(case, code, "lib/site-packages/installed.py")
    write(case, "import installed\n")
    write(case, "", "mine.py")
    case.env = {"PYTHONPATH": str(case.directory / "lib" / "site-packages")}
    result = case.agent("fork")
    assert reason.format(case.directory) in result["unsafe"]


def test_a_module_of_the_user_that_shadows_a_standard_one(case: Case) -> None:
    write(case, "import random\n")
    write(case, "", "random.py")
    write(case, "import random\n", "lib/site-packages/installed.py")
    case.env, case.preload = {"PYTHONPATH": str(case.directory / "lib" / "site-packages")}, ("installed",)
    assert f"your module {case.directory}/random.py takes the place of random" in case.agent("fork")["unsafe"]


# As pyarrow's jemalloc does, which reads its settings when it is loaded.
ALLOCATOR = """\
import os, threading
settings = os.environ.get("JE_ARROW_MALLOC_CONF", "").split(",")
if [each for each in settings if each.startswith("background_thread")][-1:] != ["background_thread:false"]:
    threading.Thread(target=threading.Event().wait, name="jemalloc_bg_thd", daemon=True).start()
"""

LOOKS = """\
import os, sys
print(*(name in sys.modules for name in ("threaded", "allocator", "colorsys")), os.environ.get("JE_ARROW_MALLOC_CONF"))
sys.stdout.flush()
import allocator, colorsys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
"""


@pytest.mark.parametrize("threaded", [False, True])
def test_a_module_that_leaves_a_thread_is_left_out_and_the_rest_is_forked(case: Case, threaded: bool) -> None:
    libraries = case.directory / "lib" / "site-packages"
    write(case, ALLOCATOR, "lib/site-packages/allocator.py")
    write(case, LIBRARIES["a thread"][0], "lib/site-packages/threaded.py")
    write(
        case, LOOKS.replace("import allocator, colorsys", "import allocator, threaded, colorsys") if threaded else LOOKS
    )
    flags = ["--start-method=forkserver", "--max-restarts=1"]
    env = {"PYTHONPATH": str(libraries), "JE_ARROW_MALLOC_CONF": "dirty_decay_ms:0"}
    ended = run(OURS, [*flags, case.target], cwd=case.directory, env=env)
    assert ended.code == 0, ended.err
    # The workers have what the user set.
    assert ended.out == "False True True dirty_decay_ms:0\n" * 2
    assert "spawned instead" not in ended.err
    line = (
        "after `import threaded` the thread busy is running; each worker imports threaded itself, and is forked with "
        "the rest"
    )
    assert ended.err.count(line) == threaded


def test_a_thread_that_no_import_has_started_is_blamed_on_none(case: Case) -> None:
    """As a library of LD_PRELOAD does."""
    write(case, LIBRARIES["a thread"][0], "path/sitecustomize.py")
    write(case, "import os\n")
    case.env = {"PYTHONPATH": str(case.directory / "path")}
    assert case.agent("fork")["unsafe"] == "before any import the thread busy is running"


# Preloaded modules.


def test_the_users_own_modules_are_never_imported_by_the_template(case: Case) -> None:
    write(case, "import mine.inner\nprint('script', mine.inner.pid)\n")
    write(case, "import os\nopen(os.environ['TRACE'], 'a').write(f'{os.getpid()}\\n')\n", "mine/__init__.py")
    write(case, "import os, colorsys\npid = os.getpid()\n", "mine/inner.py")
    case.env = {"TRACE": str(case.directory / "trace")}
    case.preload = ("mine",)
    result = case.agent("fork", "wait", "learn", "fork", "wait")
    assert "colorsys" in result["prepared"]
    assert result["skipped"] == ["mine: no installed module has this name"]
    pids = (case.directory / "trace").read_text().split()
    assert pids == [str(worker["pid"]) for worker in result["workers"]]


def test_learning_from_the_first_generation(case: Case) -> None:
    site = case.directory / "lib" / "site-packages"
    threaded = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    write(case, threaded, "lib/site-packages/threaded.py")
    write(
        case,
        "import sys\nprint('colorsys' in sys.modules, 'threaded' in sys.modules, type(sys.meta_path[0]).__name__)\n"
        "def main():\n    import threaded, colorsys, near, no_such_thing_optional\n"
        "try:\n    main()\nexcept ImportError:\n    pass\n",
    )
    write(case, "", "near.py")
    case.env = {"PYTHONPATH": str(site)}
    result = case.agent("fork", "wait", "learn", "fork", "wait")
    assert result["learned"][-1] == "colorsys"
    assert "threaded" not in result["learned"]
    assert len(result["skipped"]) == 1
    assert result["skipped"][0].startswith("threaded: the thread ")
    assert case.output(0)[0].startswith("False False ImportRecorder")
    assert case.output(1)[0].startswith("True False ")
    assert "ImportRecorder" not in case.output(1)[0]


def test_preload_reports_what_it_cannot_import(case: Case) -> None:
    write(case, "")
    case.preload = ("colorsys", "no_such_module_at_all")
    result = case.agent("fork", "wait")
    assert result["prepared"] == ["colorsys"]
    assert result["skipped"] == ["no_such_module_at_all: no installed module has this name"]
    assert result["workers"][0]["code"] == 0


@pytest.mark.long
@pytest.mark.torchrun
def test_eight_workers_at_once(case: Case) -> None:
    write(case, "import os, torch\nprint(os.environ['RANK'])\n")
    result = case.agent("together", "wait")
    assert [w["code"] for w in result["workers"]] == [0] * 8
    assert [case.output(rank)[0].strip() for rank in range(8)] == [str(rank) for rank in range(8)]
    assert len({w["pid"] for w in result["workers"]}) == 8


def test_start_up_code_runs_before_the_program_and_leaves_no_trace(tmp_path: Path) -> None:
    optim = tmp_path / "torch" / "optim"
    optim.mkdir(parents=True)
    (optim.parent / "__init__.py").write_text("")
    (optim / "__init__.py").write_text("")
    (optim / "optimizer.py").write_text("def register_optimizer_step_post_hook(hook): print(type(hook).__name__)")
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(sorted(os.environ), sys.path, sys.argv)\nimport torch.optim.optimizer")
    case = Case(tmp_path, start="optimizer-steps")
    code, printed, errors = case.fresh()
    assert (code, errors) == (0, "")
    # A new interpreter of this test runs no start-up code, so the hook is the only difference.
    assert case.forked() == (0, f"{printed}OptimizerHook\n", "")
