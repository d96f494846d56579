"""Run a training script on the nodes of a Ray cluster: one actor for each node starts one `dlrover-run`.

    python examples/ray/train.py --nodes 2 -- --nproc-per-node=8 --max-restarts=3 train.py

What follows `--` is the command line of dlrover-run; the flags for several nodes are added. Ray starts the actor of a
node that dies on another node, where its launcher joins the job again; the first node, which hosts the master, must
live, or give `--rdzv-backend=etcd` with its endpoint. The exit code is that of the worker that failed. Ray shows equal
lines of workers once; `RAY_DEDUP_LOGS=0` shows them all.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Node:
    """One node of the job. When its node dies, Ray restarts it on another and calls `run` again."""

    def address(self) -> str:
        """The address of the node, where the first one hosts the master."""
        return str(ray.util.get_node_ip_address())

    def run(self, command: list[str], flags: list[str]) -> int:
        """Start the launcher and wait for its end; its exit code."""
        # The launcher gets SIGTERM when this process ends, also if it is killed, and gives its workers their time.
        return subprocess.run(["setpriv", "--pdeathsig=TERM", *command, *flags], stdin=subprocess.DEVNULL).returncode


def train(nodes: int, flags: list[str], *, resources: dict[str, float], command: list[str], port: int) -> int:
    """Run one launcher on each of `nodes` nodes of the cluster that Ray is connected to; the exit code of the job."""
    group = placement_group([resources] * nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    actors: list[Any] = [
        Node.options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index in range(nodes)
    ]
    first = ray.get(actors[0].address.remote())
    several = [
        f"--nnodes={nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={first}:{port}",
        f"--rdzv-id={os.getpid()}",
    ]
    codes = ray.get([actor.run.remote(command, [*several, *flags]) for actor in actors])
    # The node where a worker failed exits with that worker's code, the others with 1.
    return next((code for code in codes if code not in (0, 1)), max(codes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    parser.add_argument("--cpus", type=float, default=1, help="that each node reserves")
    parser.add_argument("--gpus", type=float, default=0, help="that each node reserves")
    parser.add_argument("--port", type=int, default=29400, help="of the master on the first node")
    parser.add_argument("--launcher", default="dlrover-run", help="where it is, if not on the PATH of the nodes")
    parser.add_argument("flags", nargs="+", help="of dlrover-run, the script and its arguments")
    options = parser.parse_args()
    ray.init(address=options.address)
    resources = {name: value for name, value in (("CPU", options.cpus), ("GPU", options.gpus)) if value}
    return train(options.nodes, options.flags, resources=resources, command=[options.launcher], port=options.port)


if __name__ == "__main__":
    sys.exit(main())
