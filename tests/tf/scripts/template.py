"""Imports the bootstrap and TensorFlow once, and forks a task for each line on its standard input.

A line says {"number", "script", "log", "environment"}. Answers are lines {"number", "pid"} when a task begins and
{"number", "code"} when it has ended.
"""

import json
import os
import runpy
import sys

import tensorflow  # noqa: F401
import tf_ps_boot  # noqa: F401 - the first one of what a template imports


def send(**message):
    os.write(1, json.dumps(message).encode() + b"\n")


def become(task):
    os.environ.clear()
    os.environ.update(task["environment"])
    log = os.open(task["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv[:] = [task["script"]]
    sys.path.insert(0, os.path.dirname(task["script"]))
    runpy.run_path(task["script"], run_name="__main__")


def watch(task):
    """Wait for a task in an intermediate process, because only its parent gets its exit code."""
    worker = os.fork()
    if worker == 0:
        become(task)
        sys.exit(0)
    send(number=task["number"], pid=worker)
    _, status = os.waitpid(worker, 0)
    send(number=task["number"], code=-os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
    os._exit(0)


def main():
    for line in iter(sys.stdin.buffer.readline, b""):
        if os.fork() == 0:
            watch(json.loads(line))


main()
