"""Stands in for a node in tests of chaos: a watchdog, an agent that restarts processes that exit, and its workers.

    stand_in_node.py dlrover_run NUMBER-OF-WORKERS
    stand_in_node.py tf_ps_run NUMBER-OF-TASKS

Tasks are a chief, a worker and a server, in this order. With STAND_IN_CHECKS=N in the environment the first N processes
of rank 0 are those of a node check.

Each worker has a child, like a data loader, and has detached a service, which the agent inherits. The agent posts the
state changes of its children: `stopped`, `continued` or `ended`. All exit with their standard input, except the agent
and the watchdog, which have to be killed before.
"""

import os
import signal
import sys

from post import post

ROLES = ("chief", "worker", "ps")


def be_watchdog(program: str, workers: int) -> None:
    from dlrover_run.processes import tree
    from dlrover_run.workers.template import process_title

    if os.fork() == 0:
        os.setsid()
        process_title.name_process({"dlrover_run": "dlrover-agent", "tf_ps_run": "tf-ps-agent"}[program])
        tree.become_subreaper()
        be_agent(program, workers)
    os.wait()


def be_agent(program: str, workers: int) -> None:
    checks = int(os.environ.get("STAND_IN_CHECKS", "0"))
    if checks:  # start_chaos.sh finds the processes of a check by the path of that folder.
        from dlrover_run.features.node_check.node.check_runner import NODE_CHECK_FOLDER

    def start(rank: int, checks: int = 0) -> int:
        variables = worker_variables(rank, workers) if program == "dlrover_run" else task_variables(rank)
        command = [sys.executable, __file__, *(["check", NODE_CHECK_FOLDER] if checks else []), "worker"]
        # A `subprocess.Popen` that is dropped would reap a killed process at once, before the agent sees it.
        return os.posix_spawn(command[0], command, {**os.environ, **variables}, setsid=True)

    ranks = {start(rank, checks if rank == 0 else 0): rank for rank in range(workers)}
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
                checks -= rank == 0
                ranks[start(rank, max(0, checks) if rank == 0 else 0)] = rank


def worker_variables(rank: int, workers: int) -> dict[str, str]:
    numbers = {"RANK": str(10 + rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(workers)}
    return {**numbers, "TORCHELASTIC_RUN_ID": "stand-in"}


def task_variables(place: int) -> dict[str, str]:
    # The rank is only for the messages to the test.
    return {"RANK": str(place), "WORKER_TYPE": ROLES[place], "WORKER_RANK": "0", "WORKER_ID": "4", "TF_PS_VERSION": "1"}


def take_memory(number: int, frame: object) -> None:
    global taken
    taken = bytearray(os.urandom(1 << 20) * 24)
    post(what="taken")


def be_worker() -> None:
    below = os.fork()
    if below == 0:
        sys.stdin.read()
        os._exit(0)
    read_end, write_end = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.setsid()
        service = os.fork()
        if service == 0:
            os.setsid()
            sys.stdin.read()
            os._exit(0)
        os.write(write_end, str(service).encode())
        os._exit(0)
    os.waitpid(middle, 0)
    signal.signal(signal.SIGUSR1, take_memory)
    post(what="begun", below=below, service=int(os.read(read_end, 32)), agent=os.getppid())
    sys.stdin.read()


def be_check() -> None:
    """A process of the node check starts no others."""
    post(what="begun", below=os.getpid(), service=os.getpid(), agent=os.getppid())
    sys.stdin.read()


if __name__ == "__main__":
    if "check" in sys.argv:
        be_check()
    elif sys.argv[-1] == "worker":
        be_worker()
    else:
        be_watchdog(sys.argv[1], int(sys.argv[2]))
