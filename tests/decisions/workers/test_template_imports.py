"""Reading what a program imports, without running it, and passing on what a worker imported."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import textwrap
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from dlrover_run.workers.template import fork_blockers
from dlrover_run.workers.template.import_scan import (
    ImportRoots,
    Scan,
    can_preload,
    changes_later_imports,
    executed_statements,
    find_import_roots,
    is_shared,
    resolve,
    scan_imports,
)
from dlrover_run.workers.template.importer import ImportLog, ImportRecorder, import_modules
from dlrover_run.workers.template.worker import apply_env_delta, env_delta

STDLIB = os.path.dirname(os.__file__)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A script's directory beside a site-packages with some installed modules."""
    installed = ["single.py", "pack/__init__.py", "pack/sub.py", "pack/deep/__init__.py", "pack/deep/er.py", "other.py"]
    for name in installed:
        file = tmp_path / "site-packages" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise RuntimeError('nothing may be executed here')\n")
    (tmp_path / "src").mkdir()
    return tmp_path


def scan(project: Path, files: dict[str, str], target: str = "main.py", kind: str = "script") -> Scan:
    source = project / "src"
    for name, text in files.items():
        file = source / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    path = [str(project / "site-packages")]
    where = find_import_roots(path, str(source), STDLIB)
    return scan_imports(kind, str(source / target) if kind == "script" else target, where, [str(source), *path])


def names(project: Path, text: str, **more: str) -> list[str]:
    return list(scan(project, {"main.py": text, **{f"{name}.py": body for name, body in more.items()}}).names)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import single\nimport pack.sub as s, other", ["single", "pack.sub", "other"]),
        ("from pack import sub, a_function\nfrom pack.deep import *", ["pack", "pack:sub", "pack.deep"]),
        ("import absent\nfrom pack import absent\nimport pack.absent", ["pack"]),
        ("try:\n    import single\nexcept ImportError:\n    import other\nelse:\n    import pack", ["single", "pack"]),
        ("if 1:\n    import single\nelse:\n    import other", ["single", "other"]),
        ("with x:\n    import single\nfor i in y:\n    import other", ["single", "other"]),
        ("class A:\n    import single\ndef f():\n    import other\nasync def g():\n    import pack", ["single"]),
        ("match x:\n    case 1:\n        import single", ["single"]),
        ("if __name__ == '__main__':\n    import single", ["single"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import single\nelse:\n    import other", ["other"]),
        ("import sys, this, antigravity", []),
        ("this is no Python", []),
    ],
)
def test_what_a_script_imports(project: Path, text: str, found: list[str]) -> None:
    assert [name for name in names(project, text) if name not in ("sys", "typing")] == found


def test_the_users_modules_are_read_but_not_named(project: Path) -> None:
    found = scan(
        project,
        {
            "main.py": "import other\nfrom mine import model\nimport mine.late, alone\n",
            "mine/__init__.py": "from . import base\n",
            "mine/base.py": "from ..beyond import nothing\nimport single\nfrom .model import x\n",
            "mine/model.py": "from pack.deep import er\n",
            "mine/late.py": "import pack.sub\n",
            "alone.py": "import alone, main\nif __name__ == '__main__':\n    import json\n",
        },
    )
    assert list(found.names) == ["other", "single", "pack.deep", "pack.deep:er", "pack.sub"]


def test_a_module_run_by_name(project: Path) -> None:
    files = {
        "mine/__init__.py": "import other\n",
        "mine/run.py": "from . import near\nif __name__ == '__main__':\n    import single\n",
        "mine/near.py": "import pack\n",
        "mine/__main__.py": "import pack.sub\n",
    }
    assert list(scan(project, files, "mine.run", "module").names) == ["other", "pack", "single"]
    assert list(scan(project, files, "mine", "module").names) == ["other", "pack.sub"]
    assert list(scan(project, files, "pack.sub", "module").names) == ["pack"]
    assert list(scan(project, files, "absent.module", "module").names) == []


def test_a_change_of_the_environment_ends_the_scan(project: Path) -> None:
    found = scan(
        project,
        {
            "main.py": "import other\nimport mine\nimport single\n",
            "mine.py": "import os, pack\nos.environ['A'] = '1'\n",
        },
    )
    assert [name for name in found.names if name != "os"] == ["other", "pack"]
    assert found.stopped_at == f"{project}/src/mine.py:2"


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("os.environ['A'] = '1'", True),
        ("environ['A'] += '1'", True),
        ("del os.environ['A']", True),
        ("x = os.environ.setdefault('A', '1')", True),
        ("os.environ |= more", True),
        ("os.putenv('A', '1')", True),
        ("load_dotenv()", True),
        ("sys.path.insert(0, '..')", True),
        ("sys.path = ['..'] + sys.path", True),
        ("sys.path[0] = '..'", True),
        ("sys.path.append('..')", False),
        ("sys.path += ['..']", False),
        ("x = os.environ['A'], os.environ.get('B'), os.path.join(sys.path[0])", False),
        ("config.update(a=1)\nos.path.insert", False),
        ("path.insert(0, 'x')", False),
    ],
)
def test_statements_that_change_later_imports(text: str, changes: bool) -> None:
    statements = list(executed_statements(ast.parse(text).body, entry=True))
    assert any(changes_later_imports(statement) for statement in statements) is changes


def test_the_deepest_directory_decides_whose_a_module_is() -> None:
    path = ["/usr/lib/python3.11", "/usr/lib/python3.11/lib-dynload", "/p/.venv/lib/python3.11/site-packages", "/extra"]
    where = find_import_roots(path, "/p", "/usr/lib/python3.11")
    assert where.own == ("/p", "/extra")
    assert where.is_shared("/p/.venv/lib/python3.11/site-packages/torch/__init__.py")
    assert where.is_shared("/usr/lib/python3.11/random.py")
    assert not where.is_shared("/p/model.py")
    assert not where.is_shared("/p2/site-packages.py")
    inside = find_import_roots(path, "/p/.venv/lib/python3.11/site-packages/examples", "/usr/lib/python3.11")
    assert not inside.is_shared("/p/.venv/lib/python3.11/site-packages/examples/near.py")
    assert find_import_roots(path, path[2], "/usr/lib/python3.11").is_shared(path[2] + "/numpy.py")


def test_resolving_executes_nothing(project: Path) -> None:
    path = [str(project / "site-packages")]
    spec = resolve("pack.deep.er", path)
    assert spec is not None
    assert spec.origin == str(project / "site-packages/pack/deep/er.py")
    assert resolve("pack.nothing.er", path) is None
    assert resolve("single.x", path) is None
    assert resolve("zipimport.nothing", path) is None
    assert "pack" not in sys.modules


def test_only_installed_modules_go_ahead(project: Path) -> None:
    installed, own = str(project / "site-packages"), str(project / "src")
    (project / "src" / "single.py").write_text("")
    (project / "src" / "space").mkdir()
    where = ImportRoots((installed,), (own,))
    assert can_preload("sys", where, [own, installed])
    assert can_preload("other", where, [own, installed])
    assert not can_preload("single", where, [own, installed]), "the user's own comes first"
    assert not can_preload("space", where, [own, installed])
    assert not can_preload("nothing", where, [own, installed])


def test_an_import_log_keeps_names_until_it_is_full() -> None:
    log = ImportLog(capacity=24)
    assert log.append("first")
    assert log.append("second")
    assert not log.append("third")
    assert log.finish() == ["first", "second"]
    assert not log.append("a")


def test_the_recorder_leaves_without_a_listener() -> None:
    log = ImportLog()
    recorder = ImportRecorder(log, {})
    sys.meta_path.insert(0, recorder)
    try:
        with pytest.raises(ImportError):
            __import__("there_is_no_such_module")
        assert recorder in sys.meta_path
        assert log.finish() == ["there_is_no_such_module"]
        with pytest.raises(ImportError):
            __import__("there_is_no_such_module")
        assert recorder not in sys.meta_path
    finally:
        if recorder in sys.meta_path:
            sys.meta_path.remove(recorder)


def test_a_module_that_a_library_only_looks_for_is_not_recorded() -> None:
    log = ImportLog()
    sys.meta_path.insert(0, recorder := ImportRecorder(log, {}))
    try:
        assert importlib.util.find_spec("there_is_no_such_module") is None
        with pytest.raises(ImportError):
            importlib.import_module("nor_this_one")
    finally:
        sys.meta_path.remove(recorder)
    assert log.finish() == ["nor_this_one"]


def test_importing_stops_at_the_first_reason() -> None:
    loaded: list[str] = []

    def load(name: str) -> str | None:
        loaded.append(name)
        return "b: no" if name == "b" else None

    outcome = import_modules(load, ["a", "b", "c", "d"], lambda: "a thread" if "c" in loaded else None)
    assert outcome == (["a", "c"], ["b: no"], "a thread", "c")
    assert loaded == ["a", "b", "c"]


def test_what_imports_did_to_the_environment_is_done_to_the_workers() -> None:
    change = env_delta({"KEPT": "1", "SET": "old", "GONE": "x"}, {"KEPT": "1", "SET": "new", "ADDED": "2"})
    assert apply_env_delta({"KEPT": "9", "SET": "old", "GONE": "x"}, change) == {
        "KEPT": "9",
        "SET": "new",
        "ADDED": "2",
    }
    assert apply_env_delta({"SET": "mine", "GONE": "y", "ADDED": "3"}, change) == {
        "SET": "mine",
        "GONE": "y",
        "ADDED": "3",
    }


@pytest.mark.parametrize(
    ("target", "mode", "reason"),
    [
        ("/dev/nvidia0", 0o020666, "the accelerator /dev/nvidia0 is open"),
        ("/dev/kfd", 0o020666, "the accelerator /dev/kfd is open"),
        ("/dev/dri/renderD128", 0o020666, "the accelerator /dev/dri/renderD128 is open"),
        ("socket:[1]", 0o140777, "a socket is open, which all workers would share"),
        ("anon_inode:[eventpoll]", 0o600, "anon_inode:[eventpoll] is open, which all workers would share"),
        ("/dev/urandom", 0o020666, None),
        ("/data/file", 0o100644, None),
    ],
)
def test_open_descriptors_that_forbid_a_fork(target: str, mode: int, reason: str | None) -> None:
    assert fork_blockers.descriptor_blocker({7: (target, mode)}) == reason


def test_the_command_line_is_overwritten_where_the_kernel_cannot_be_pointed_elsewhere() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\nimport dlrover_run.workers.template.process_title as title\n"
        "title._repoint = lambda *a: False\n"
        "title.set_process_title(['python', '-u', 'x.py'], {})\nprint(open('/proc/self/cmdline', 'rb').read())\n"
        "title.set_process_title(['y' * 100_000], {})\n"
        "print(set(open('/proc/self/cmdline', 'rb').read().rstrip(b'.\\0')))\n"
    )
    root = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", program, root], capture_output=True, text=True, timeout=60)
    first, second = done.stdout.splitlines()
    assert first.startswith("b'python -u x.py")
    assert "import" not in first
    assert second == str({ord("y")})


def test_the_launchers_own_directories_are_shared_wherever_they_lie(project: Path) -> None:
    (project / "src" / "ours" / "path").mkdir(parents=True)
    (project / "src" / "ours" / "path" / "boot.py").write_text("")
    path = [str(project / "src" / "ours" / "path"), str(project / "src"), str(project / "site-packages")]
    without = find_import_roots(path, str(project / "src"), STDLIB)
    where = find_import_roots(path, str(project / "src"), STDLIB, [str(project / "src" / "ours")])
    assert not can_preload("boot", without, path)
    assert can_preload("boot", where, path)
    assert where.shared == (path[0], path[2])


def test_a_module_whose_loader_only_borrows_an_installed_file_is_shared(project: Path) -> None:
    where = find_import_roots([str(project / "site-packages")], str(project / "src"), STDLIB)
    borrowed = ModuleSpec("distutils", None, origin=str(project / "site-packages" / "single.py"))
    assert not borrowed.has_location
    assert is_shared(borrowed, where)
