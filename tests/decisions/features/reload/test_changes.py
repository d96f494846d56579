"""What follows from saved files, by what they are at each look: one restart for one change, however it is written."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dlrover_run.features.reload.changes import (
    KEPT_QUIET,
    MISSING_QUIET,
    QUIET,
    Action,
    Files,
    Signature,
    Verdict,
    Watched,
    decide,
)
from dlrover_run.features.reload.files import (
    MAX_LOCK,
    forget_bytecode,
    git_writes,
    python_files,
    snapshot,
    syntax_problem,
)

STARTED = 100


class Looks:
    """Workers that have read `a` and `b`, and a template that has read `lib`; a test writes files and looks."""

    def __init__(self) -> None:
        self.now = 10.0
        self.own: dict[str, Signature] = {"a": (1, 5, 1), "b": (1, 5, 2)}
        self.kept: dict[str, Signature] = {"lib": (1, 5, 3)}
        self.watched = Watched().add(self.own, self.kept, STARTED, STARTED)
        self.restarts: list[Verdict] = []

    def look(self) -> Verdict:
        self.watched, verdict = decide(self.watched, Files(dict(self.own), dict(self.kept)), self.now)
        if verdict.action not in (Action.NOTHING, Action.WAIT):
            self.restarts.append(verdict)
        return verdict

    def write(self, *names: str) -> None:
        """Another content, of the same size, with another time."""
        for name in names:
            files = self.kept if name in self.kept else self.own
            before = files.get(name) or (STARTED, 5, 9)
            files[name] = (before[0] + 1000, before[1], before[2])

    def pass_time(self, seconds: float) -> Verdict:
        """Look at each time that a verdict asks for."""
        end = self.now + seconds
        verdict = self.look()
        while verdict.at is not None and verdict.at <= end:
            self.now = verdict.at
            verdict = self.look()
        self.now = end
        return self.look()


def test_nothing_follows_from_files_that_are_as_the_workers_have_read_them() -> None:
    looks = Looks()
    assert looks.pass_time(60) == Verdict(Action.NOTHING)


def test_a_saved_file_is_one_restart_once_it_is_quiet() -> None:
    looks = Looks()
    looks.write("a")
    assert looks.look() == Verdict(Action.WAIT, at=looks.now + QUIET)
    looks.pass_time(60)
    assert looks.restarts == [Verdict(Action.RESTART, ("a",))]


def test_an_editor_that_writes_twice_is_one_restart() -> None:
    looks = Looks()
    for _ in range(3):
        looks.write("a")
        looks.look()
        looks.now += QUIET / 2
    looks.pass_time(60)
    assert looks.restarts == [Verdict(Action.RESTART, ("a",))]


def test_an_editor_that_renames_is_one_restart_and_no_deletion() -> None:
    looks = Looks()
    looks.own["a"] = None
    looks.pass_time(MISSING_QUIET / 2)
    looks.own["a"] = (2000, 7, 77)
    looks.pass_time(60)
    assert looks.restarts == [Verdict(Action.RESTART, ("a",))]


def test_a_checkout_of_a_hundred_files_is_one_restart() -> None:
    looks = Looks()
    names = [f"file{number}" for number in range(100)]
    looks.own |= dict.fromkeys(names, (1, 1, 1))
    looks.watched = looks.watched.add(looks.own, {}, STARTED, STARTED)
    for name in names:
        looks.write(name)
        looks.look()
        looks.now += QUIET / 10
    looks.pass_time(60)
    assert looks.restarts == [Verdict(Action.RESTART, tuple(names))]


def test_files_that_are_quiet_wait_for_the_end_of_a_checkout() -> None:
    looks = Looks()
    looks.write("a")
    files = Files(dict(looks.own), dict(looks.kept))
    looks.watched, _ = decide(looks.watched, files, looks.now)
    looks.watched, verdict = decide(looks.watched, files, looks.now + 60, lambda paths: paths == ("a",))
    assert verdict == Verdict(Action.WAIT, at=looks.now + 60 + QUIET)
    assert decide(looks.watched, files, looks.now + 60)[1] == Verdict(Action.RESTART, ("a",))


def test_a_lock_of_git_delays_a_restart_unless_it_was_left_behind(tmp_path: Path) -> None:
    for tree, lock in ((tmp_path / "tree", "tree/.git"), (tmp_path / "worktree", "tree/.git/worktrees/one")):
        (tree / "deep").mkdir(parents=True)
        (tmp_path / lock).mkdir(parents=True)
        if not (tree / ".git").exists():
            (tree / ".git").write_text(f"gitdir: {tmp_path / lock}\n")
        file = tmp_path / lock / "index.lock"
        now = time.time()
        assert not git_writes([str(tree / "deep/a.py")], now)
        file.touch()
        assert git_writes([str(tree / "deep/a.py"), str(tmp_path / "none/b.py")], now)
        assert not git_writes([str(tree / "deep/a.py")], now + MAX_LOCK + 10)
        file.unlink()


def test_a_deleted_file_starts_nothing_and_is_said_once() -> None:
    looks = Looks()
    looks.own["a"] = None
    looks.pass_time(60)
    assert looks.restarts == [Verdict(Action.DELETED, deleted=("a",))]
    looks.write("b")
    looks.pass_time(60)
    assert looks.restarts[1:] == [Verdict(Action.RESTART, ("b",))]
    looks.own["a"] = (5000, 1, 1)
    looks.pass_time(60)
    assert looks.restarts[2:] == [Verdict(Action.RESTART, ("a",))], "it is there again"


def test_a_change_of_what_the_template_holds_is_a_new_template_once_the_installation_is_quiet() -> None:
    looks = Looks()
    looks.kept["lib"] = None
    looks.pass_time(KEPT_QUIET / 2)
    looks.kept["lib"] = (5000, 1, 1)
    looks.write("a")
    assert looks.pass_time(KEPT_QUIET / 2).action is Action.WAIT
    looks.pass_time(60)
    assert looks.restarts == [Verdict(Action.NEW_TEMPLATE, ("lib", "a"))]


def test_a_module_that_is_known_late_counts_if_it_was_saved_after_the_workers_had_begun() -> None:
    looks = Looks()
    looks.own |= {"old": (STARTED, 1, 1), "new": (STARTED + 1, 1, 1), "missing": None}
    looks.watched = looks.watched.add(looks.own, {}, STARTED, STARTED)
    looks.pass_time(60)
    assert looks.restarts == [Verdict(Action.RESTART, ("new",))]
    looks.own["missing"] = (STARTED + 5, 1, 1)
    looks.pass_time(60)
    assert looks.restarts[1:] == [Verdict(Action.RESTART, ("missing",))]


def test_a_module_that_is_installed_while_the_template_imports_counts_too() -> None:
    looks = Looks()
    looks.kept["late"] = (STARTED + 1, 1, 1)
    looks.watched = looks.watched.add({}, looks.kept, STARTED, STARTED)
    looks.pass_time(60)
    assert looks.restarts == [Verdict(Action.NEW_TEMPLATE, ("late",))]


def test_workers_that_begin_have_read_what_was_saved_before() -> None:
    looks = Looks()
    looks.write("a", "b")
    looks.look()
    looks.watched = looks.watched.begin(looks.own)
    assert looks.pass_time(60) == Verdict(Action.NOTHING)
    looks.watched = looks.watched.forget_kept().add({}, {"lib": (9, 9, 9)}, STARTED, STARTED)
    looks.kept = {"lib": (9, 9, 9)}
    assert looks.pass_time(60) == Verdict(Action.NOTHING), "a new template has read the new module"


def test_a_signature_differs_after_a_write_in_place_a_rename_and_a_deletion(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    seen = [snapshot([str(file)])[str(file)]]
    assert seen == [None]
    file.write_text("1")
    seen += snapshot([str(file)]).values()
    file.write_text("1 + 1")
    seen += snapshot([str(file)]).values()
    (tmp_path / "b.py").write_text("1 + 1")
    os.replace(tmp_path / "b.py", file)
    seen += snapshot([str(file)]).values()
    assert len(set(seen)) == 4


def test_the_files_below_a_directory_are_those_that_a_person_edits(tmp_path: Path) -> None:
    for name in ("a.py", "sub/b.py", ".git/c.py", "__pycache__/d.py", "venv/lib/e.py", "sub/data.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "venv/pyvenv.cfg").touch()
    found = {str(Path(path).relative_to(tmp_path)) for path in python_files([str(tmp_path)])}
    assert found == {"a.py", "sub/b.py"}
    assert python_files([str(tmp_path)], deep=False) == [str(tmp_path / "a.py")]


def test_compiled_code_of_a_saved_file_is_removed_as_python_may_take_it_for_the_new_one(tmp_path: Path) -> None:
    names = ("a.cpython-311.pyc", "a.cpython-311.opt-1.pyc", "ab.cpython-311.pyc")
    (tmp_path / "__pycache__").mkdir()
    for name in names:
        (tmp_path / "__pycache__" / name).touch()
    forget_bytecode([str(tmp_path / "a.py"), str(tmp_path / "b.so"), str(tmp_path / "gone/c.py")])
    assert [path.name for path in (tmp_path / "__pycache__").iterdir()] == [names[2]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1", ""),
        ("x = (\n", "a.py line 1: '(' was never closed: x = ("),
        ("return 3", "a.py line 1: 'return' outside function: return 3"),
        ("x = '\\d'", ""),
    ],
)
def test_a_half_written_file_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.so").write_bytes(b"\0")
    files = [str(tmp_path / name) for name in ("b.so", "a.py")]
    # Python 3.11 reports the place of a statement in its own words.
    assert syntax_problem(files).removesuffix(": return 3") == problem.removesuffix(": return 3")
    assert "gone.py" in syntax_problem([str(tmp_path / "gone.py")])
