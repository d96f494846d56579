"""Commands that go on writing end when the reader of their output does: `top | head`, `logs -f | head`."""

from __future__ import annotations

import os
import subprocess

from support.harness import OURS, WAIT, Mailbox, finish, launch

BODY = 'print("first", flush=True)\npost()\nwait_for_signals()\n'


def test_a_command_ends_with_the_reader_of_its_output(mailbox: Mailbox) -> None:
    name = f"unread-{os.getpid()}"
    flags = [f"--rdzv-id={name}", "--nproc-per-node=2"]
    job = launch(mailbox, *flags, mailbox.script("talk.py", BODY))
    try:
        mailbox.gather(2)
        for words in (["top"], ["logs", "-f"]):
            command = [*OURS.command, *words, name]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reader:
                assert reader.stdout is not None
                assert reader.stderr is not None
                assert reader.stdout.readline()
                reader.stdout.close()
                said = reader.stderr.read()
                assert (reader.wait(WAIT), said) == (0, ""), words
        assert job.poll() is None
    finally:
        job.terminate()
        finish(job)
