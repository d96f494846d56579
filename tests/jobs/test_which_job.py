"""The ways in which an operator's command names a job of this machine, with real jobs."""

from __future__ import annotations

import json
import os
from pathlib import Path

from support.harness import OURS, Mailbox, finish, launch, run

from dlrover_run import exit_codes
from dlrover_run.features.operate.commands.asker import NO_JOB

BODY = "import os\npost(run_id=os.environ['TORCHELASTIC_RUN_ID'])\nwait_for_signals()\n"


def test_a_job_of_one_node_has_the_name_of_its_flag_and_is_found_by_all_that_names_it(
    tmp_path: Path, mailbox: Mailbox
) -> None:
    """A beginning of its id, the pid of the launcher, and the launcher's own flags, though its endpoint is unused. The
    id in the environment of the workers stays a fresh one for a job without a backend, as under torchrun."""
    name, flags = f"named-{os.getpid()}", ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:1"]
    script = mailbox.script("named.py", BODY)
    alone = launch(mailbox, f"--rdzv-id={name}-a", script, "--lr=1")
    flagged = launch(mailbox, *flags, f"--rdzv-id={name}-b", script)
    fixed = [launch(mailbox, "--nnodes=1", f"--master-port={port}", script) for port in (29417, 29418)]
    try:
        ids = {message["run_id"] for message in mailbox.gather(4)}
        assert f"{name}-b" in ids
        assert f"{name}-a" not in ids

        listed = {row["pid"]: row for row in json.loads(run(OURS, ["jobs", "--json"], cwd=tmp_path).out)}
        assert listed[alone.pid]["job"] == f"{name}-a"
        assert listed[alone.pid]["script"] == "named.py --lr=1"
        assert [listed[each.pid]["state"] for each in (alone, flagged, *fixed)] == ["training"] * 4

        def status(*words: str) -> tuple[int, str]:
            found = run(OURS, ["status", "--json", *words], cwd=tmp_path)
            return found.code, json.loads(found.out)["job"] if found.out else found.err

        for words in ([f"{name}-a"], [str(alone.pid)], [f"--rdzv-id={alone.pid}"], [f"--rdzv-id={name}-a"]):
            assert status(*words) == (0, f"{name}-a")
        assert status(*flags, f"--rdzv-id={name}-b") == (0, f"{name}-b")
        assert status(*flags, f"--rdzv-id={name}-a")[0] == NO_JOB
        code, said = status(name)
        assert code == exit_codes.BAD_COMMAND_LINE
        assert str(alone.pid) in said, "the table of those that may be meant"
        assert str(flagged.pid) in said
        assert str(fixed[0].pid) not in said
        assert status("a", "--rdzv-id=b")[0] == exit_codes.BAD_COMMAND_LINE
        assert [status(str(each.pid))[0] for each in fixed] == [0, 0], "of two static launchers each is found"
        assert run(OURS, ["stop", "--wait", str(fixed[0].pid)], cwd=tmp_path).code == exit_codes.SUCCESS
        assert finish(fixed[0]).code == exit_codes.STOPPED_ON_REQUEST
        assert fixed[1].poll() is None
    finally:
        for each in (alone, flagged, *fixed):
            if each.poll() is None:
                each.terminate()
                finish(each)
