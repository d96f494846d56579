"""A small agent for the tests of the forkserver: a subreaper that starts a template and forks workers from it.

It reads one JSON object from standard input and answers with one. `steps` name its actions in between; `TEMPLATE` in a
worker's environment is the template's pid.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

from dlrover_run.processes.process import ProcessSpec
from dlrover_run.workers import ahead
from dlrover_run.workers.starter import START_CODE, WANTED_VARIABLE
from dlrover_run.workers.template_client import Template, TemplateError, UnsafeToFork, fork_request

PR_SET_CHILD_SUBREAPER = 36
WAIT_TIMEOUT = 235


async def ended(pid: int) -> int:
    """The exit code of a child, as `subprocess` reports it, after its end."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    pidfd = os.pidfd_open(pid)
    loop.add_reader(pidfd, lambda: done.done() or done.set_result(None))
    try:
        await asyncio.wait_for(done, WAIT_TIMEOUT)
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def line_of(fd: int) -> str:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await asyncio.wait_for(ready, WAIT_TIMEOUT)
    finally:
        loop.remove_reader(fd)
    return os.read(fd, 65536).decode()


async def run(job: dict[str, Any]) -> dict[str, Any]:
    python, kind, target, args, cwd = job["python"], job["kind"], job["target"], job["args"], job["cwd"]
    env: dict[str, str] = job["env"]
    result: dict[str, Any] = {"agent": os.getpid(), "workers": [], "learned": [], "skipped": []}
    began = time.monotonic()
    template = Template.start(python, env, cwd)
    prepared = await template.prepare(job["preload"], (kind, target) if job["scan"] else None)
    result["prepared"] = prepared.imported
    result["skipped"] += prepared.skipped
    result["prepare_seconds"] = time.monotonic() - began
    middle = ["-m"] if kind == "module" else []
    title = (python, "-u", *middle, target, *args)
    running: list[tuple[int, int]] = []

    async def fork(rank: int, waiting: ahead.WorkerAhead | None = None) -> int | None:
        worker_env = {**env, "RANK": str(rank), "TEMPLATE": str(template.pid), "FORKED_AT": repr(time.monotonic())}
        if start := job.get("start"):
            worker_env[WANTED_VARIABLE] = start
        directory = job["out"]
        out, err = (os.open(f"{directory}/{rank}.{s}", os.O_CREAT | os.O_WRONLY, 0o600) for s in ("out", "err"))
        streams = (os.open(job["stdin"], os.O_RDONLY), out, err)
        spec = ProcessSpec(
            name=f"rank {rank}",
            argv=title,
            args=tuple(args),
            environment=worker_env,
            stdio=streams,
            record_imports=rank == 0,
        )
        start_code = START_CODE if start else None
        try:
            if waiting is None:
                return await template.fork(spec, (kind, target), cwd, start_code)
            request = fork_request(spec, (kind, target), cwd, start_code)
            return waiting.pid if await waiting.become(request, streams, None) else None
        finally:
            for fd in streams:
                os.close(fd)

    async def fork_ahead() -> ahead.WorkerAhead:
        spec = ProcessSpec(name="ahead", argv=(), environment=env)
        return ahead.WorkerAhead(*await template.fork_ahead(spec, cwd, 0, device=True))

    waiting: ahead.WorkerAhead | None = None
    for step in job["steps"]:
        if step == "fork":
            rank = len(running)
            running.append((rank, await fork(rank)))
        elif step == "ahead":
            waiting = await fork_ahead()
            result["ahead"] = {"pid": waiting.pid, **await waiting.prepare()}
            with open(f"/proc/{waiting.pid}/environ", "rb") as environ, open(f"/proc/{waiting.pid}/cmdline") as shown:
                result["ahead"]["environ"] = environ.read().decode().split("\0")
                result["ahead"]["title"] = shown.read()
        elif step == "become":
            assert waiting is not None, "it was forked ahead"
            pid = await fork(len(running), waiting)
            result["became"] = pid
            if pid is not None:
                running.append((len(running), pid))
        elif step in ("kill it", "stop it"):
            assert waiting is not None, "it was forked ahead"
            os.kill(waiting.pid, signal.SIGKILL if step == "kill it" else signal.SIGSTOP)
            ahead.TAKE_TIMEOUT = 0.1
        elif step == "close it":
            assert waiting is not None, "it was forked ahead"
            await waiting.close()
        elif step == "abandon":
            waiting = await fork_ahead()
            waiting._close_line()
            await waiting.closed
        elif step == "together":
            base = len(running)
            pids = await asyncio.gather(*(fork(base + n) for n in range(8)))
            running += [(base + n, pid) for n, pid in enumerate(pids)]
        elif step == "wait":
            for rank, pid in running[len(result["workers"]) :]:
                result["workers"].append({"rank": rank, "pid": pid, "code": await ended(pid)})
        elif step == "learn":
            learned = await template.learn()
            result["learned"] += learned.imported
            result["skipped"] += learned.skipped
        elif step == "abandon learn":
            # As for a round that is abandoned while it starts.
            learning = asyncio.ensure_future(template.learn())
            while template._answer is None:
                await asyncio.sleep(0)
            learning.cancel()
            await asyncio.wait([learning])
        elif step == "line":
            result["line"] = await line_of(job["line_fd"])
        elif step == "kill template":
            os.kill(template.pid, signal.SIGKILL)
            await template.closed
        elif step == "close":
            await template.close()
            result["template_code"] = template._process.returncode
        elif step == "interrupt":
            os.kill(running[-1][1], signal.SIGINT)
        elif step == "die":
            print(json.dumps(result), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    await template.close()
    return result


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    job = json.load(sys.stdin)
    try:
        result = asyncio.run(run(job))
    except UnsafeToFork as error:
        result = {"unsafe": str(error)}
    except TemplateError as error:
        result = {"error": str(error)}
    # A tracker of multiprocessing exits a moment after its worker; a process that never exits makes the test time out.
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
