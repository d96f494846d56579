"""Requests to a template whose caller has gone or was stopped: the template is a socket of the test."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from contextlib import suppress

import pytest
from support.virtual_loop import VirtualLoop

from dlrover_run.workers.template_client import LEARN_TIMEOUT, Imported, Template


async def next_request(theirs: socket.socket) -> None:
    async with asyncio.timeout(30):
        while True:
            with suppress(BlockingIOError):
                theirs.recv(100)
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("answer", [b"no JSON", b"{}", b'{"error": "no module"}'])
def test_the_error_of_a_request_that_was_given_up_is_no_error_of_the_next_one(answer: bytes) -> None:
    """Nothing needs the answer of the first one; the second one waits for its turn, and gets its own."""

    async def ask() -> Imported:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setblocking(False)
        program = [sys.executable, "-c", "input()"]
        with theirs, subprocess.Popen(program, stdin=subprocess.PIPE) as process:
            template = Template(process, ours)
            given_up = asyncio.ensure_future(template.learn())
            await next_request(theirs)
            given_up.cancel()
            learning = asyncio.ensure_future(template.learn())
            await asyncio.sleep(0)
            theirs.send(answer)
            await next_request(theirs)
            theirs.send(json.dumps({"imported": ["torch"], "skipped": []}).encode())
            learned = await asyncio.wait_for(learning, 30)
            process.kill()
            await template.close()
            return learned

    assert asyncio.run(ask()) == Imported(("torch",), ())


def test_an_answer_that_came_while_the_agent_was_stopped_is_taken_and_the_template_lives() -> None:
    async def ask() -> Imported:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setblocking(False)
        program = [sys.executable, "-c", "input()"]
        with theirs, subprocess.Popen(program, stdin=subprocess.PIPE) as process:
            template = Template(process, ours)
            learning = asyncio.ensure_future(template.learn())
            await next_request(theirs)
            theirs.send(json.dumps({"imported": ["torch"], "skipped": []}).encode())
            loop.pause(2 * LEARN_TIMEOUT)
            try:
                return await learning
            finally:
                process.kill()
                process.wait()
                await template.close()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(ask()) == Imported(("torch",), ())
