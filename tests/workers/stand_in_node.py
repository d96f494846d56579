"""Plays a node of a job for a test of chaos: a watchdog, an agent that starts what ends again, and its workers.

    stand_in_node.py dlrover_run NUMBER-OF-WORKERS

Each worker has a process below it, as data loaders are, and has detached a service, which the agent inherits. The agent
posts what becomes of its children: `stopped`, `continued` or `ended`. All end with their standard input, but the agent
and the watchdog, which have to be killed before.
"""

import os
import subprocess
import sys

from post import post


def be_watchdog(workers: int) -> None:
    from dlrover_run.process_tree import tree

    if os.fork() == 0:
        os.setsid()
        tree.name_process("dlrover-agent")
        tree.become_subreaper()
        be_agent(workers)
    os.wait()


def be_agent(workers: int) -> None:
    ranks = {start_worker(rank, workers): rank for rank in range(workers)}
    while True:
        pid, status = os.waitpid(-1, os.WUNTRACED | os.WCONTINUED)
        if os.WIFSTOPPED(status):
            post(rank=ranks.get(pid, -1), what="stopped", of=pid)
        elif os.WIFCONTINUED(status):
            post(rank=ranks.get(pid, -1), what="continued", of=pid)
        else:
            rank = ranks.pop(pid, -1)
            post(rank=rank, what="ended", of=pid)
            if rank >= 0:
                ranks[start_worker(rank, workers)] = rank


def start_worker(rank: int, workers: int) -> int:
    numbers = {"RANK": str(10 + rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(workers)}
    command = [sys.executable, __file__, "worker"]
    # Nobody else collects it: the agent hears of all its children in one place.
    return subprocess.Popen(
        command, env={**os.environ, **numbers, "TORCHELASTIC_RUN_ID": "stand-in"}, start_new_session=True
    ).pid


def be_worker() -> None:
    below = os.fork()
    if below == 0:
        sys.stdin.read()
        os._exit(0)
    told, tell = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.setsid()
        service = os.fork()
        if service == 0:
            os.setsid()
            sys.stdin.read()
            os._exit(0)
        os.write(tell, str(service).encode())
        os._exit(0)
    os.waitpid(middle, 0)
    post(what="begun", below=below, service=int(os.read(told, 32)), agent=os.getppid())
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        be_worker()
    else:
        be_watchdog(int(sys.argv[2]))
