"""All that a process of this node is given before it begins: its console, its memory, its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from dlrover_run.agent.environment import fill_macros
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.output.streams import RunDir
from dlrover_run.policies.parameter_servers.model import Role
from dlrover_run.supervisor.process import ProcessSpec
from tf_ps_runner.agent import environment
from tf_ps_runner.agent.hosted import Hosted
from tf_ps_runner.agent.outputs import open_outputs
from tf_ps_runner.agent.telling import Telling
from tf_ps_runner.memory.hold import MemoryHold
from tf_ps_runner.spec import ServersSpec


class Outfits:
    """Makes the outfits of one node's processes. `common` is what all of them have in their environment."""

    def __init__(self, spec: ServersSpec, run_dir: RunDir, relay: RelayClient, telling: Telling) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._relay = relay
        self._telling = telling
        self._scratch = environment.make_scratch(run_dir)
        if self._scratch is not None:
            # The relay is the last to end, also when watchdog and agent are killed together.
            relay.remove_at_end(self._scratch)
        self.common = environment.common_environment(os.environ, self._scratch)

    def give(self, hosted: Hosted, variables: Mapping[str, str]) -> ProcessSpec:
        """The outfit of a task, with these variables of its own. Raises SpecError when its logs cannot be had."""
        task, entrypoint = hosted.task, self._spec.job.entrypoint
        hosted.outputs = open_outputs(self._spec.job.logs, self._run_dir, self._relay, str(task.key))
        hosted.memory = MemoryHold.open(str(task.key), task.memory)
        self._telling.limited(hosted.memory.kept_by)
        args = fill_macros(entrypoint.args, task.rank)
        return ProcessSpec(
            name=str(task.key),
            record_imports=task.role in (Role.CHIEF, Role.WORKER),
            argv=environment.boot_command(entrypoint, args),
            args=args,
            environment={**self.common, **variables},
            stdio=hosted.outputs.stdio,
            before_exec=hosted.memory.enter,
        )
