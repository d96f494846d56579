"""The cache of compiled code as a feature of a node: its directory, and the variables of each worker."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.devices.disks import network_disk
from dlrover_run.features.job_cache.settings import JobCacheSettings
from dlrover_run.features.job_cache.variables import own_variables, shared_by_nodes
from dlrover_run.output.run_directory import TEMP_PREFIX
from dlrover_run.workers.feature import WorkersFeature


class JobCache(WorkersFeature):
    """With `--job-cache`, all caches are in that directory, on a network disk in a folder of this host there, and stay.

    Without it, caches on a local disk stay where they are: they outlive restarts, and later jobs of the user find them.
    One that would be on a network disk, which nodes share, is in a directory of this job on a local disk. That is
    removed at the end, by the relay if this process is killed. What the user has set stays.
    """

    def __init__(self, services: AgentServices, tasks: FrameworkAdapter[Any]) -> None:
        super().__init__(services, tasks)
        self._directory = ""
        self._names: frozenset[str] | None = None
        """The variables that are set; None for all."""

    def open(self) -> None:
        if given := self._services.job.settings_of("job_cache", JobCacheSettings).directory:
            self._directory = os.path.join(given, os.uname().nodename) if network_disk(given) else given
            self._make(self._directory)
        else:
            temporary = tempfile.gettempdir()
            self._names = shared_by_nodes(os.environ, temporary, network_disk)
            # Without a local disk there is no better place.
            if self._names and not network_disk(temporary):
                self._directory = os.path.join(temporary, f"{TEMP_PREFIX}cache_{os.urandom(8).hex()}")
                self._services.relay.remove_at_end(self._directory)
                self._make(self._directory)

    def environment(self, key: RoundKey, local_rank: int) -> Mapping[str, str]:
        if not self._directory:
            return {}
        return {
            name: value
            for name, value in own_variables(self._directory, local_rank).items()
            if name not in os.environ and (self._names is None or name in self._names)
        }

    def _make(self, directory: str) -> None:
        try:
            os.makedirs(directory, 0o700, exist_ok=True)
        except OSError as error:
            self._services.console.info(
                f"warning: {directory} cannot be created ({error.strerror or error}): compiled code is not kept there"
            )
            self._directory = ""


NODE = JobCache
