"""The journal: it is read as it was written, or the damage is reported; a plan is used only after it is on disk."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.round import Failure, Member, RoundKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.master import journal
from dlrover_run.master.journal import (
    Journal,
    JournalContents,
    JournalDamaged,
    JournalHeader,
    JournalReplaced,
    decode,
    encode,
)
from dlrover_run.words.reasons import sentence

RULES = JobRules(min_nodes=2, max_nodes=4, max_restarts=3, store=("10.0.0.1", 29500))
HEADER = JournalHeader(format=journal.FORMAT, job="job", epoch=7, rules=RULES)


def plan(number: int) -> Plan:
    return Plan(
        epoch=7,
        clock=number + 0.1,
        phase=PlanPhase.TRAINING,
        key=RoundKey(7, number),
        members=tuple(Member(f"n{i}", "one", f"host{i}", 2) for i in range(2)),
        store_address="10.0.0.1",
        store_port=4000 + number,
        failure=Failure(0, "host0", "exited with code 1\n\x1b[31mé"),
        reasons=sentence(f"round {number}"),
    )


PLANS = [plan(number) for number in (1, 2, 3)]


def written(directory: Path, plans: list[Plan], job: str = "job") -> Journal:
    one = Journal(directory, job)
    one.take_over(RULES, 7)
    for each in plans:
        one.append(each)
    return one


def whole(tmp_path: Path) -> bytes:
    one = written(tmp_path, PLANS)
    one.close()
    return one.path.read_bytes()


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    assert decode(whole(tmp_path), "job") == JournalContents(HEADER, PLANS[-1])
    successor = Journal(tmp_path, "job")
    story = successor.take_over(JobRules(), 3)
    assert story == JournalContents(msgspec.structs.replace(HEADER, epoch=8), PLANS[-1])
    assert decode(successor.path.read_bytes(), "job") == story
    assert stat.S_IMODE(successor.path.stat().st_mode) == 0o600
    successor.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_cut_at_any_byte_leaves_the_plan_before_it_or_is_reported(tmp_path: Path) -> None:
    data = whole(tmp_path)
    ends = [found.end() for found in re.finditer(rb"\n", data)]
    for size in range(len(data)):
        lines = sum(end <= size for end in ends)
        if lines == 0:
            with pytest.raises(ValueError, match="line 1"):
                decode(data[:size], "job")
        else:
            assert decode(data[:size], "job").plan == (PLANS[lines - 2] if lines > 1 else None)


def test_a_flip_of_any_bit_is_reported_or_costs_the_last_line(tmp_path: Path) -> None:
    data = whole(tmp_path)
    last = data.rindex(b"\n", 0, len(data) - 1) + 1
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            try:
                story = decode(bytes(damaged), "job")
            except ValueError:
                continue
            # Without the newline before it, the last line has a part of the one before.
            assert place >= last - 1, f"a flip at byte {place} went unseen"
            assert story == JournalContents(HEADER, PLANS[-2] if place >= last else PLANS[-3])


@given(st.data())
def test_any_damage_gives_an_earlier_plan_or_is_reported(data: st.DataObject) -> None:
    original = b"".join([encode(JournalContents(HEADER)), *_plan_lines()])
    start = data.draw(st.integers(0, len(original)))
    end = data.draw(st.integers(start, min(len(original), start + 400)))
    damaged = original[:start] + data.draw(st.binary(max_size=60)) + original[end:]
    try:
        story = decode(damaged, "job")
    except ValueError:
        return
    assert story.header == HEADER
    assert story.plan in [None, *PLANS]


def _plan_lines() -> list[bytes]:
    first = encode(JournalContents(HEADER))
    before, lines = journal._checksum_of(first), []
    for each in PLANS:
        lines.append(journal._line(msgspec.json.encode(each), before))
        before = journal._checksum_of(lines[-1])
    return lines


def test_a_line_that_vanished_or_moved_is_reported() -> None:
    first, (one, two, three) = encode(JournalContents(HEADER)), _plan_lines()
    assert decode(first + one + two + three, "job").plan == PLANS[-1]
    for wrong in (one + three + three, two + one + three, one + one + two + three):
        with pytest.raises(ValueError, match="line"):
            decode(first + wrong, "job")


def test_damage_is_reported_with_the_file_the_line_and_a_remedy_and_the_file_is_left(tmp_path: Path) -> None:
    one = written(tmp_path, PLANS)
    one.close()
    data = bytearray(one.path.read_bytes())
    data[data.index(b"round 1")] = ord("R")
    one.path.write_bytes(data)
    with pytest.raises(JournalDamaged) as raised:
        Journal(tmp_path, "job").take_over(RULES, 9)
    assert str(one.path) in str(raised.value)
    assert "line 2: the checksum is wrong. Move it away" in str(raised.value)
    assert one.path.read_bytes() == bytes(data)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"format": 99}, "another version of dlrover-run"), ({"job": "other"}, "belongs to another job")],
)
def test_a_journal_that_is_not_ours_is_refused(changes: dict[str, object], words: str) -> None:
    foreign = encode(JournalContents(msgspec.structs.replace(HEADER, **changes)))
    with pytest.raises(ValueError, match=words):
        decode(foreign, "job")


def test_names_that_look_alike_have_files_of_their_own(tmp_path: Path) -> None:
    names = ["a/b", "a_b", "../../etc/passwd", ".", "..", "ä" * 255, "a\nb", "A" * 255, "A" * 254]
    paths = {Journal(tmp_path, name).path for name in names}
    assert len(paths) == len(names)
    assert {path.parent for path in paths} == {tmp_path}
    for name in names:
        written(tmp_path, PLANS, name).close()
    assert Journal(tmp_path, "a/b").take_over(RULES, 1).plan == PLANS[-1]


def test_each_successor_has_a_later_epoch_even_if_nothing_was_planned(tmp_path: Path) -> None:
    epochs = []
    for clock in (100, 50, 50, 200, 10):
        one = Journal(tmp_path, "job")
        epochs.append(one.take_over(RULES, clock).header.epoch)
        one.close()
    assert epochs == [100, 101, 102, 200, 201]


def test_a_successor_is_later_than_the_plan_of_a_coordinator_that_raised_its_epoch(tmp_path: Path) -> None:
    written(tmp_path, [msgspec.structs.replace(plan(1), epoch=5000)]).close()
    assert Journal(tmp_path, "job").take_over(RULES, 100).header.epoch == 5001


def test_a_master_that_was_replaced_writes_no_more(tmp_path: Path) -> None:
    asleep = written(tmp_path, PLANS[:1])
    successor = Journal(tmp_path, "job")
    successor.take_over(RULES, 1)
    with pytest.raises(JournalReplaced, match="another master has taken over"):
        asleep.append(PLANS[1])
    successor.append(PLANS[2])
    asleep.remove()
    assert decode(successor.path.read_bytes(), "job").plan == PLANS[2]


def _cut(path: Path, before: bytes) -> None:
    os.truncate(path, len(path.read_bytes()) - 10)


def _empty(path: Path, before: bytes) -> None:
    os.truncate(path, 0)


def _append(path: Path, before: bytes) -> None:
    with path.open("ab") as file:
        file.write(b"a note of the operator\n")


def _restore(path: Path, before: bytes) -> None:
    """As a program does that brings back an older copy of a directory."""
    copy = path.with_name("copy")
    copy.write_bytes(before)
    copy.replace(path)


def _overwrite(path: Path, before: bytes) -> None:
    _restore(path, b"not a journal\n")


def _replace_by_nothing(path: Path, before: bytes) -> None:
    _restore(path, b"")


@pytest.mark.parametrize("change", [_cut, _empty, _append, _restore, _overwrite, _replace_by_nothing])
def test_a_journal_that_another_program_has_changed_is_written_anew(
    tmp_path: Path, change: Callable[[Path, bytes], None]
) -> None:
    one = written(tmp_path, PLANS[:1])
    before = one.path.read_bytes()
    one.append(PLANS[1])
    assert not one.repaired
    change(one.path, before)
    one.append(PLANS[2])
    assert one.repaired
    one.append(PLANS[0])
    assert not one.repaired
    assert Journal(tmp_path, "job").take_over(RULES, 1).plan == PLANS[0]
    with pytest.raises(JournalReplaced):
        one.append(PLANS[1])


def test_a_master_of_another_version_has_taken_the_job_over_too(tmp_path: Path) -> None:
    one = written(tmp_path, PLANS[:1])
    _restore(one.path, encode(JournalContents(msgspec.structs.replace(HEADER, format=99))))
    with pytest.raises(JournalReplaced, match="another master has taken over"):
        one.append(PLANS[1])


def test_a_journal_that_was_removed_is_no_place_to_write_to(tmp_path: Path) -> None:
    one = written(tmp_path, PLANS[:1])
    one.path.unlink()
    with pytest.raises(JournalReplaced, match="was removed"):
        one.append(PLANS[1])


def test_what_a_predecessor_makes_known_in_the_last_moment_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predecessor = written(tmp_path, PLANS[:1])
    rename = os.rename

    def late(source: str, target: str) -> None:
        monkeypatch.setattr(os, "rename", rename)
        # It cannot know yet that it was replaced.
        predecessor.append(PLANS[1])
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    assert Journal(tmp_path, "job").take_over(RULES, 1).plan == PLANS[1]
    with pytest.raises(JournalReplaced):
        predecessor.append(PLANS[2])


def test_a_plan_that_was_written_while_the_journal_was_replaced_is_not_made_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predecessor = written(tmp_path, PLANS[:1])
    sync = os.fdatasync

    def late(fd: int) -> None:
        monkeypatch.setattr(os, "fdatasync", sync)
        Journal(tmp_path, "job").take_over(RULES, 1)

    monkeypatch.setattr(os, "fdatasync", late)
    with pytest.raises(JournalReplaced):
        predecessor.append(PLANS[1])


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _half(fd: int, data: bytes) -> int:
    return WRITE(fd, data[: len(data) // 2])


WRITE = os.write


@pytest.mark.parametrize(
    ("function", "failing"),
    [("write", _full), ("write", _half), ("fdatasync", _full)],
    ids=["full", "half a line", "not synchronised"],
)
def test_a_write_that_failed_leaves_no_trace_once_it_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, failing: object
) -> None:
    one = written(tmp_path, PLANS[:1])
    with monkeypatch.context() as disk:
        disk.setattr(os, function, failing)
        with pytest.raises(OSError, match="No space left"):
            one.append(PLANS[1])
        if function == "write":
            with pytest.raises(OSError, match="No space left"):
                one.append(PLANS[1])
    one.append(PLANS[1])
    one.append(PLANS[2])
    assert decode(one.path.read_bytes(), "job") == JournalContents(HEADER, PLANS[2])
    assert [path.name for path in tmp_path.iterdir()] == [one.path.name]


def test_a_disk_that_is_full_at_take_over_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = written(tmp_path, PLANS)
    one.close()
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", _full)
        with pytest.raises(OSError, match="No space left"):
            Journal(tmp_path, "job").take_over(RULES, 1)
    assert decode(one.path.read_bytes(), "job").plan == PLANS[-1]
    assert len(list(tmp_path.iterdir())) == 1


def test_drafts_of_a_master_that_died_are_removed(tmp_path: Path) -> None:
    one = written(tmp_path, PLANS)
    one.close()
    Path(f"{one.path}.deadbeef.new").write_text("half a li")
    Journal(tmp_path, "job").take_over(RULES, 1)
    assert [path.name for path in tmp_path.iterdir()] == [one.path.name]


def test_a_long_journal_is_compacted_while_the_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "COMPACT_BYTES", 2000)
    one = written(tmp_path, [plan(number) for number in range(1, 100)])
    assert one.path.stat().st_size < 4000
    assert decode(one.path.read_bytes(), "job").plan == plan(99)


def test_a_link_in_the_place_of_a_journal_is_not_followed(tmp_path: Path) -> None:
    one = Journal(tmp_path, "job")
    one.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        one.take_over(RULES, 1)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_in_the_place_of_a_journal_is_reported_at_once(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    one = Journal(tmp_path, "job")
    make(one.path)
    with pytest.raises(OSError, match="not a regular file"):
        one.take_over(RULES, 1)
