"""The workers' output, compared with torchrun in real launches: which bytes are in which file and on the console.

A launch of torchrun costs seconds, so each makes many observations. Where ours differs on purpose, the test says so.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.harness import OURS, Finished, Launcher, finish, only_long, run, start

from dlrover_run.events.records import FILE_NAME

pytestmark = pytest.mark.torchrun

BYTES_EACH = 200 * 1000 * 1000
"""The bytes of each of the two fast writers: enough for seconds in which the relay cannot keep up."""

LINE_BYTES = 250

PREAMBLE = "import os\nrank = int(os.environ['RANK'])\n"

# One write a line: with `python -u`, as both launchers start it, `print` writes the newline separately.
ONE_LINE_EACH = "os.write(1, b'out %d\\n' % rank)\nos.write(2, b'err %d\\n' % rank)\n"


def launch(launcher: Launcher, tmp_path: Path, code: str, *flags: str, **options: Any) -> Finished:
    """Run `code` with TMPDIR in a separate directory, `tmp_path/tmp`."""
    script = tmp_path / "script.py"
    script.write_text(f"{PREAMBLE}{code}")
    (tmp_path / "tmp").mkdir(exist_ok=True)
    env = {"TMPDIR": str(tmp_path / "tmp"), **options.pop("env", {})}
    return run(launcher, [*flags, script], cwd=tmp_path, env=env, **options)


def files(directory: Path) -> dict[str, bytes]:
    """Every file below, by its path there, without our event log."""
    found = (path for path in directory.rglob("*") if path.is_file() and path.name != FILE_NAME)
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def run_directory(logs: Path) -> Path:
    """The one directory of the one run in `logs`."""
    (only,) = (entry for entry in logs.iterdir() if not entry.is_symlink())
    return only


def lines(text: str, marker: str) -> list[str]:
    """The lines of workers, without those of the launcher."""
    return sorted(line for line in text.splitlines() if marker in line)


def test_every_value_of_redirect_and_tee_by_rank(launcher: Launcher, tmp_path: Path) -> None:
    """Ranks 0 to 3 redirect 0, 1, 2, 3; ranks 4 to 7 tee 0, 1, 2, 3. Output only to a file is not even text."""
    code = (
        "def write(fd, name):\n"
        "    data = f'{name} {rank}\\n'.encode()\n"
        "    if rank < 4 and rank & fd: data += b'x' * 1_000_000 + b'\\n\\xff\\0\\r no newline'\n"
        "    while data: data = data[os.write(fd, data):]\n"
        "write(1, 'out'); write(2, 'err')\n"
    )
    logs = tmp_path / "logs"
    flags = ["--nproc-per-node=8", "--role=me", f"--log-dir={logs}", "-r", "0:0,1:1,2:2,3:3", "-t", "4:0,5:1,6:2,7:3"]
    ended = launch(launcher, tmp_path, code, *flags, "--rdzv-id=some-id", "--master-port=0")
    assert ended.code == 0, ended.err
    more = b"x" * 1_000_000 + b"\n\xff\0\r no newline"
    expected = {}
    for rank in range(8):
        for bit, name in ((1, "out"), (2, "err")):
            if rank % 4 & bit:
                expected[f"attempt_0/{rank}/std{name}.log"] = f"{name} {rank}\n".encode() + (more if rank < 4 else b"")
    run_dir = run_directory(logs)
    assert run_dir.name.startswith("some-id_")
    assert files(run_dir) == expected
    assert lines(ended.out, "out ") == sorted(["out 0", "out 2", "out 4", "[me5]:out 5", "out 6", "[me7]:out 7"])
    assert lines(ended.err, "err ") == sorted(["err 0", "err 1", "err 4", "err 5", "[me6]:err 6", "[me7]:err 7"])
    # Ours differs: a directory without files is removed.
    assert (run_dir / "attempt_0" / "0").exists() is not launcher.is_ours
    assert list((tmp_path / "tmp").iterdir()) == []


def test_hidden_ranks_filters_prefix_and_a_restart(launcher: Launcher, tmp_path: Path) -> None:
    """Ranks 0 and 1 are tee'd and 2 and 3 are not; 1 and 2 are hidden. Rank 2 fails once, after all have written."""
    code = (
        "restart = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "for name, fd in (('out', 1), ('err', 2)):\n"
        "    for word in ('needle', 'a,b', 'hay', ''): os.write(fd, f'{name} {rank} {restart} {word}\\n'.encode())\n"
        "if restart == '0':\n"
        "    if rank == 2:\n"
        "        for other in (0, 1, 3): open(f'turn-{other}').close()\n"
        "        os._exit(1)\n"
        "    open(f'turn-{rank}', 'w').close()\n"
        "    __import__('signal').pause()\n"
    )
    for other in (0, 1, 3):
        os.mkfifo(tmp_path / f"turn-{other}")
    logs = tmp_path / "logs"
    flags = ["--nproc-per-node=4", f"--log-dir={logs}", "--tee=0:3,1:3", "--local-ranks-filter=0,3", "--role=me"]
    filters = ["--duplicate-stdout-filters=needle,a,,b", "--duplicate-stderr-filters=needle", "--max-restarts=1"]
    template = "${role_name}/${rank}/${local_rank}/${unknown}> "
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": template}
    ended = launch(launcher, tmp_path, code, *flags, *filters, env=env)
    assert ended.code == 0, ended.err

    def written(name: str, rank: int, restart: int, prefix: str = "", words: str = "needle a,b hay ") -> list[str]:
        return [f"{prefix}{name} {rank} {restart} {word}" for word in words.split(" ")]

    prefix = "me/0/0/${unknown}> "
    expected = {}
    for restart in (0, 1):
        folder = f"attempt_{restart}"
        for rank in (0, 1):
            for name in ("out", "err"):
                text = "".join(f"{line}\n" for line in written(name, rank, restart))
                expected[f"{folder}/{rank}/std{name}.log"] = text.encode()
        # The lines of a hidden rank are only in its own files.
        for name, words in (("out", "needle a,b"), ("err", "needle")):
            text = "".join(f"{line}\n" for line in written(name, 0, restart, prefix, words))
            expected[f"{folder}/filtered_std{name}.log"] = text.encode()
    # No worker records an error here, and both attempts have all their files after the restart.
    assert files(run_directory(logs)) == expected
    for name, shown in (("out", ended.out), ("err", ended.err)):
        both = [line for restart in (0, 1) for line in written(name, 0, restart, prefix) + written(name, 3, restart)]
        assert lines(shown, f"{name} ") == sorted(both)


def test_the_prefix_template_of_the_command_line_names_the_host(launcher: Launcher, tmp_path: Path) -> None:
    if launcher.is_older_than(2, 14):
        pytest.skip("a flag of later torchruns")
    flags = ["-t3", "--log-line-prefix-template", "${hostname}:${rank}:${nothing}$$ "]
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "not this one"}
    ended = launch(launcher, tmp_path, ONE_LINE_EACH, *flags, env=env)
    assert ended.code == 0, ended.err
    prefix = f"{socket.gethostname()}:0:${{nothing}}$ "
    assert (lines(ended.out, "out "), lines(ended.err, "err ")) == ([f"{prefix}out 0"], [f"{prefix}err 0"])


def test_a_log_directory_of_dev_null_writes_no_file(launcher: Launcher, tmp_path: Path) -> None:
    code = (
        "os.write(1, b'out %d %r\\n' % (rank, os.environ['TORCHELASTIC_ERROR_FILE']))\nos.write(2, b'err %d\\n' % rank)"
    )
    flags = ["--nproc-per-node=2", "--log-dir=/dev/null", "-r", "3", "-t", "3", "--local-ranks-filter=1"]
    ended = launch(launcher, tmp_path, code, *flags)
    assert ended.code == 0, ended.err
    assert lines(ended.out, "out ") == ["out 0 ''", "out 1 ''"]
    assert lines(ended.err, "err ") == ["err 0", "err 1"]
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "kept", "out", "err"),
    [
        ([], [], ["out 0"], ["err 0"]),
        (["-r", "3"], ["stdout.log", "stderr.log"], [], []),
        (["-r1", "--tee=2"], ["stdout.log", "stderr.log"], [], ["[default0]:err 0"]),
    ],
    ids=["nothing", "redirect", "tee"],
)
def test_without_a_log_directory(
    launcher: Launcher, tmp_path: Path, flags: list[str], kept: list[str], out: list[str], err: list[str]
) -> None:
    ended = launch(launcher, tmp_path, ONE_LINE_EACH, *flags)
    assert ended.code == 0, ended.err
    assert (lines(ended.out, "out "), lines(ended.err, "err ")) == (out, err)
    found = [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()]
    assert sorted(path.name for path in found) == sorted(kept)
    assert all(path.parts[-3:-1] == ("attempt_0", "0") for path in found)
    litter = list((tmp_path / "tmp").iterdir())
    # Ours differs: no empty directory is left in TMPDIR.
    assert len(litter) == (1 if kept or not launcher.is_ours else 0)


def test_a_second_job_with_the_same_id_overwrites_nothing(launcher: Launcher, tmp_path: Path) -> None:
    """The same id in the same directory."""
    flags = [f"--log-dir={tmp_path / 'logs'}", "-r", "1", "--rdzv-id=same", "--master-port=0"]
    # The two run at once, which costs the time of one.
    (tmp_path / "script.py").write_text("import sys\nprint(sys.argv[1])")
    jobs = [start(launcher, [*flags, tmp_path / "script.py", word], cwd=tmp_path) for word in ("one", "two")]
    assert [finish(job).code for job in jobs] == [0, 0]
    texts = [
        next(iter(files(directory).values()))
        for directory in (tmp_path / "logs").iterdir()
        if not directory.is_symlink()
    ]
    assert sorted(texts) == [b"one\n", b"two\n"]


@pytest.mark.parametrize("redirect", [True, *only_long(False)])
def test_the_report_has_a_traceback_that_was_not_recorded(tmp_path: Path, redirect: bool) -> None:
    """Ours differs: torchrun's report explains how to use `record` instead, and does not name a log file."""
    code = "def inner():\n    raise KeyError('the key')\nif rank == 1: inner()\n"
    logs = tmp_path / "logs"
    flags = ["-r", "3", f"--log-dir={logs}"] if redirect else []
    ended = launch(OURS, tmp_path, code, "--nproc-per-node=2", *flags)
    assert ended.code == 1
    console, failed, report = ended.err.partition("FAILED\n")
    assert failed
    assert re.search(r'script\.py", line \d+, in inner\n +raise KeyError', report)
    assert "KeyError: 'the key'" in report
    assert ("in inner" in console) is not redirect
    if redirect:
        assert f"Full log:   {run_directory(logs)}/attempt_0/1/stderr.log\n" in report
    else:
        assert "above, on this console" in report
        assert str(tmp_path / "tmp") not in report
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_full_disk_under_the_log_directory_is_named(tmp_path: Path) -> None:
    (disk := tmp_path / "disk").mkdir()
    code = (
        f"with open({str(disk / 'filler')!r}, 'wb', buffering=0) as file:\n"
        "    try:\n"
        "        while True: file.write(bytes(4096))\n"
        "    except OSError: pass\n"
        "print('these words find no room', flush=True)\n"
    )
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "full-log-dir", disk], check=True)
    try:
        ended = launch(OURS, tmp_path, code, "-r", "3", f"--log-dir={disk / 'logs'}")
    finally:
        subprocess.run(["umount", disk], check=True)
    assert ended.code != 0
    words = " ".join(ended.err.split())
    assert f"and no space is left on the disk of {disk}/logs/" in words, ended.err


def test_a_job_prints_where_its_logs_are_and_nothing_without_logs(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    filed = launch(OURS, tmp_path, "print(rank)\n", "--nproc-per-node=2", "-r", "3", f"--log-dir={logs}")
    run = run_directory(logs)
    assert re.fullmatch(rf"\d\d:\d\d:\d\d dlrover-run: 2 workers on this node, logs in {run}\n", filed.err)
    assert (logs / "latest" / "attempt_0" / "1" / "stdout.log").read_text() == "1\n"
    assert (logs / "latest").resolve() == run
    assert launch(OURS, tmp_path, "pass\n", "--nproc-per-node=2").err == ""


@pytest.mark.long
def test_two_workers_that_write_200_mb_each_lose_no_line(tmp_path: Path) -> None:
    """The console is a file, and both streams share it, as after `> log 2>&1`."""
    each, batch = BYTES_EACH // LINE_BYTES, 4000
    code = (
        f"each, width, batch = {each}, {LINE_BYTES - 1}, {batch}\n"
        "for first in range(0, each, batch):\n"
        "    fd = 1 + first // batch % 2\n"
        "    lines = ((b'%d %07d ' % (rank, number)).ljust(width, b'.') for number in range(first, first + batch))\n"
        "    body = b'\\n'.join(lines) + b'\\n'\n"
        "    while body: body = body[os.write(fd, body):]\n"
    )
    flags = ["--nproc-per-node=2", "-t", "3", f"--log-dir={tmp_path / 'logs'}"]
    console = tmp_path / "console"
    with console.open("wb") as file:
        ended = launch(OURS, tmp_path, code, *flags, stdout=file, stderr=subprocess.STDOUT)
    logs = list((tmp_path / "logs").rglob("*.log"))
    sizes = [path.stat().st_size for path in logs]
    seen: Counter[bytes] = Counter()
    last: dict[tuple[bytes, int], bytes] = {}
    try:
        with console.open("rb") as file:
            for line in file:
                if b" dlrover-run: " in line:
                    # The lines with the directory of the logs.
                    continue
                prefix, _, text = line.partition(b":")
                rank, number, _ = text.split(b" ", 2)
                stream = rank, int(number) // batch % 2
                assert (prefix, len(text)) == (b"[default%s]" % rank, LINE_BYTES), line[:100]
                # In order and complete: each line once.
                assert last.get(stream, b"") < number, line[:100]
                last[stream] = number
                seen[rank] += 1
    finally:
        for big in (console, *logs):
            big.unlink()
    assert ended.code == 0
    assert sizes == [BYTES_EACH // 2] * 4
    assert seen == {b"0": each, b"1": each}
