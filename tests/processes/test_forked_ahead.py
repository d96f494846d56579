"""A process that is forked ahead of its rank becomes a worker that is as a new `python -u`; what it does before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.forked import SCRIPTS, TORCH, VIEWS, Case, write
from support.harness import only_long, until

BECOMES = ("ahead", "become")
"""The steps of the test's agent that make a worker of such a process."""


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


ALL = {**SCRIPTS, "all that it sees": "".join(VIEWS.values())}

SHORT = ("all that it sees", "exception", "exit code", "atexit", "own module")


@pytest.mark.parametrize("name", [*SHORT, *only_long(*(name for name in ALL if name not in SHORT))])
def test_a_script_behaves_as_in_a_new_interpreter(case: Case, name: str) -> None:
    write(case, ALL[name])
    write(case, "print('own', __name__, __file__)\ndef g():\n    raise OSError(5, 'own')\ng()\n", "own_thing.py")
    case.args = ("--x", "", "two words", "--")
    assert case.forked(*BECOMES) == case.fresh()


@pytest.mark.parametrize("target", ["pack.inner", *only_long("pack", "there.is.none")])
def test_a_module(case: Case, target: str) -> None:
    write(case, "print('pack', __name__)\n", "pack/__init__.py")
    write(case, "import sys\nprint(sys.argv, sys.path, __spec__.name)\nraise ValueError(1)\n", "pack/inner.py")
    case.kind, case.target = "module", target
    assert case.forked(*BECOMES) == case.fresh()


def test_standard_input_and_settings_of_python(case: Case) -> None:
    write(case, "import sys\nprint(sys.stdin.read(10), sys.stdin.mode, sys.flags, hash('x'), sys.path)\n")
    case.stdin = str(case.directory / "script.py")
    case.env = {"PYTHONHASHSEED": "7", "PYTHONPATH": "lib:/nowhere", "PYTHONIOENCODING": "latin-1:replace"}
    assert case.forked(*BECOMES) == case.fresh()


@pytest.mark.parametrize("name", ["process group", *only_long("torch.compile", "data loader", "torch as imported")])
def test_torch(case: Case, name: str) -> None:
    write(case, TORCH[name])
    inductor = {"CACHE_DIR": str(case.directory / "cache"), "CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    case.env = {
        "OMP_NUM_THREADS": "2",
        "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
        **{f"TORCHINDUCTOR_{name}": value for name, value in inductor.items()},
    }
    assert case.forked(*BECOMES) == case.fresh()


@pytest.mark.long
@pytest.mark.torchrun
def test_random_numbers_differ_from_those_of_other_workers(case: Case) -> None:
    write(
        case,
        "import random, tempfile, uuid, multiprocessing, numpy, torch\n"
        "print(random.random(), numpy.random.rand(), torch.initial_seed(), torch.rand(1).item(),"
        " next(tempfile._get_candidate_names()), uuid.uuid4(), multiprocessing.current_process().authkey.hex())\n",
    )
    assert len(case.agent(*BECOMES, "fork", *BECOMES, "wait")["workers"]) == 3
    drawn = [case.output(rank)[0].split() for rank in range(3)]
    assert [len(set(column)) for column in zip(*drawn, strict=True)] == [3] * 7


LIBRARY = """\
import atexit, os, sys, threading
threading.Thread(target=threading.Event().wait, name="busy", daemon=True).start()
with open(os.environ["TRACE"], "a") as trace:
    print(os.getpid(), "RANK" in os.environ, os.environ.get("TEMPLATE"), file=trace)
print("imported", file=sys.stderr)
os.environ["SET_BY_LIBRARY"] = "1"
sys.path.append("/added")
atexit.register(print, "library's exit")
"""

USES = """\
import os, sys
print("threaded" in sys.modules, "colorsys" in sys.modules, "near" in sys.modules)
import threaded, near
def main():
    import colorsys
main()
print(os.environ["SET_BY_LIBRARY"], sys.path[-1], "RANK" in os.environ)
"""


@pytest.fixture
def learned(case: Case) -> Case:
    """A script that imports a module with a thread, which no template imports, one of its own, and one later."""
    write(case, LIBRARY, "lib/site-packages/threaded.py")
    write(case, USES)
    write(case, "import os\nopen(os.environ['TRACE'] + '.near', 'a').write(f'{os.getpid()}\\n')\n", "near.py")
    case.env = {"PYTHONPATH": str(case.directory / "lib" / "site-packages"), "TRACE": str(case.directory / "trace")}
    case.scan = False
    return case


@pytest.mark.parametrize("reads", [("learn",), ()], ids=["the template has learned", "it has not"])
def test_it_imports_what_the_workers_did_and_a_template_must_not_but_nothing_of_the_user(
    learned: Case, reads: tuple[str, ...]
) -> None:
    result = learned.agent("fork", "wait", *reads, *BECOMES, "wait")
    assert {"threaded"} <= set(result["ahead"]["imported"])
    assert learned.output(0)[0] == "False False False\n1 /added True\nlibrary's exit\n"
    assert learned.output(1)[0] == "True True False\n1 /added True\nlibrary's exit\n"
    # What an import prints has been printed once.
    assert [learned.output(rank)[1] for rank in (0, 1)] == ["imported\n", ""]
    pids = [str(worker["pid"]) for worker in result["workers"]]
    assert (learned.directory / "trace.near").read_text().split() == pids


def test_it_may_import_more_names_than_one_answer_holds(case: Case) -> None:
    """As those of torch with its compiler."""
    site = case.directory / "lib" / "site-packages"
    site.mkdir(parents=True)
    names = [f"m{number:03}{'x' * 196}" for number in range(400)]
    for name in names:
        (site / f"{name}.py").write_text("")
    write(
        case, f"import sys\nprint({names[-1]!r} in sys.modules)\ndef main():\n    import {', '.join(names)}\nmain()\n"
    )
    case.env = {"PYTHONPATH": str(site)}
    result = case.agent("fork", "wait", *BECOMES, "wait")
    assert 0 < len(result["ahead"]["imported"]) < len(names)
    assert [case.output(rank)[0] for rank in (0, 1)] == ["False\n", "True\n"]


def test_it_knows_nothing_of_a_round_before_it_has_a_rank(learned: Case) -> None:
    result = learned.agent("fork", "wait", *BECOMES, "wait")
    pid = str(result["ahead"]["pid"])
    traced = [line.split() for line in (learned.directory / "trace").read_text().splitlines()]
    assert [line[1:] for line in traced if line[0] == pid] == [["False", "None"]]
    assert not any(variable.startswith(("RANK=", "TEMPLATE=")) for variable in result["ahead"]["environ"])
    assert result["ahead"]["title"] == "dlrover-warm-worker\0"


def test_it_ends_when_it_is_not_wanted_and_when_its_agent_is_killed(case: Case) -> None:
    write(case, "")
    assert case.agent("ahead", "close it", "close")["template_code"] == 0
    assert case.agent("abandon", "fork", "wait")["workers"][0]["code"] == 0
    pid = case.agent("ahead", "die")["ahead"]["pid"]
    until(lambda: not os.path.exists(f"/proc/{pid}"))


@pytest.mark.parametrize("fault", ["kill it", "stop it"])
def test_one_that_was_killed_or_stopped_takes_no_rank(case: Case, fault: str) -> None:
    write(case, "open('began', 'a').write('x')\n")
    result = case.agent("ahead", fault, "become", "fork", "wait")
    assert result["became"] is None
    assert result["workers"][0]["code"] == 0
    assert (case.directory / "began").read_text() == "x"


CHOOSES = {
    "a function": ("def main():\n    os.environ['CUDA_VISIBLE_DEVICES'] = '1'\n", "CUDA_VISIBLE_DEVICES"),
    "module level": (
        "import sys\nsys.path.append('')\nos.environ['CUDA_LAUNCH_BLOCKING'] = '1'\n",
        "CUDA_LAUNCH_BLOCKING",
    ),
    "a module of the user": ("os.environ['OTHER'] = '1'\nimport own\n", "CUBLAS_WORKSPACE_CONFIG"),
    "a name that is computed": (
        "os.environ['CUDA' + '_VISIBLE_DEVICES'] = '1'\nimport own_later\n",
        "a variable of the device",
    ),
    "none": ("os.environ['NCCL_HOSTID'] = '1'\n", ""),
}


@pytest.mark.parametrize("where", CHOOSES)
def test_no_device_is_opened_for_a_script_that_may_choose_one(case: Case, where: str) -> None:
    """It would be too late in a process that has opened one. Without torch there is no device either way."""
    text, named = CHOOSES[where]
    write(case, f"import os\n{text}")
    write(case, "import os\nconfig = os.environ.get('CUBLAS_WORKSPACE_CONFIG')\n", "own.py")
    write(case, "", "own_later.py")
    opened = case.agent("fork", "wait", "learn", "ahead")["ahead"]["device"]
    assert opened == (f"the script names {named}" if named else "")


def test_for_a_script_that_changes_what_its_imports_see_nothing_is_imported(learned: Case) -> None:
    learned.scan = True
    write(learned, f"import os\nos.environ['FOR_LIBRARY'] = 'x'\n{USES}")
    result = learned.agent("fork", "wait", "learn", *BECOMES, "wait")
    assert result["ahead"]["imported"] == []
    assert [learned.output(rank) for rank in (0, 1)] == [
        ("False False False\n1 /added True\nlibrary's exit\n", "imported\n")
    ] * 2
