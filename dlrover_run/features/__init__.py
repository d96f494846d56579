"""The features, one line each: a folder with all that belongs to it, imported only by a job that has it.

Without its folder and its line, the rest works as before. A folder has, as far as its line says so:

- `flags`, with `FEATURE`: what it brings to the command line (`command_line.feature.FeatureFlags`). Each launch imports
  it;
- what takes part in decisions: `rules`, with `RECORDS`, its classes of parts of records; `text`, which registers
  its codes; and the module that is named after the `kind` of its rules, with its class of that protocol:
  `observer.OBSERVER`, `gate.GATE` or `engine.ENGINE`;
- `node`, with `NODE`, its class of `agent.node_feature.NodeFeature`, or of `workers.feature.WorkersFeature`: what an
  agent does for it;
- `columns`, with `COLUMNS`, what it adds to the tables of `status` (`job_status.shown.Columns`), and `metrics`, with
  `families()`, what it adds to `/metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from dlrover_run.coordination.records.parts import has_part
from dlrover_run.coordination.records.rules import applies

if TYPE_CHECKING:
    from dlrover_run.coordination.records.assignment import Assignment
    from dlrover_run.spec import JobSpec

    HasFeature = Callable[[str, JobSpec, Assignment], bool]
    """Whether a job has the feature of that name, by what its node knows so far."""


def by_rules(name: str, job: JobSpec, _: Assignment) -> bool:
    return applies(job.rules.parts, name)


def by_settings(name: str, job: JobSpec, _: Assignment) -> bool:
    return name in job.settings


def by_assignment(name: str, job: JobSpec, assignment: Assignment) -> bool:
    """A job has it by its rules, or by the rules of another node, which are those of the job."""
    waiting = () if assignment.waiting is None else assignment.waiting.parts
    return applies(job.rules.parts, name) or has_part(assignment.parts, name) or has_part(waiting, name)


def always(name: str, job: JobSpec, assignment: Assignment) -> bool:
    return True


def with_device(name: str, job: JobSpec, assignment: Assignment) -> bool:
    """A machine has it if it has a device file of NVIDIA."""
    # An agent has this module, but not all that read this list.
    from dlrover_run.devices import holders

    return holders.is_present()


def by_settings_or_device(name: str, job: JobSpec, assignment: Assignment) -> bool:
    return by_settings(name, job, assignment) or with_device(name, job, assignment)


class Feature(NamedTuple):
    """`name` is that of its folder, of its settings and of its parts of the records.

    `package` is the folder where it is not one of this package. `flags`, `columns` and `metrics` say whether it has
    these modules. `parts` are the names of its parts of the records, with the prefixes of their codes, which journals
    and event logs have; what decides for a part with another name than the feature's is in a folder of that name below.
    `node` says whether a node of a job has something to do for it, None if no node ever has; `any_engine`, whether that
    is so in a job without rounds of workers too. `nodes_here` says that a job with its settings starts all nodes on
    this machine: its module supervisor does what `launch.launch` does otherwise. `subcommands` says that the package
    has a table of that name, in capitals, for both programs, and `web` that a master with `--web` runs the server of
    its module `web.server`. `variables` is how the names of the variables begin that it gives to a worker: a
    launcher that runs in such a worker passes on none of them.
    """

    name: str
    package: str = ""
    flags: bool = False
    parts: Mapping[str, str] = {}
    node: HasFeature | None = None
    any_engine: bool = False
    columns: bool = False
    metrics: bool = False
    nodes_here: bool = False
    subcommands: bool = False
    web: bool = False
    variables: str = ""

    @property
    def folder(self) -> str:
        """The full name of its package."""
        return self.package or f"{__name__}.{self.name}"

    def module(self, part: str) -> str:
        """The full name of a module of the feature."""
        return f"{self.folder}.{part}"

    def deciding_module(self, part: str, module: str) -> str:
        """The full name of a module of what decides for one of its parts."""
        return self.module(module if part == self.name else f"{part}.{module}")


FEATURES = (
    Feature("node_check", flags=True, parts={"node_check": "health"}, node=by_assignment),
    Feature("parameter_servers", "tf_ps_runner.cluster", parts={"parameter_servers": "parameter_servers"}),
    Feature("local_nodes", flags=True, nodes_here=True),
    Feature("hangs", flags=True, parts={"stalls": "stall", "stragglers": "straggler"}, node=by_settings, metrics=True),
    Feature("survivors", flags=True, parts={"survivors": "survivors"}, node=by_rules, variables="DLROVER_SURVIVOR_"),
    Feature("reload", flags=True, parts={"reload": "reload"}, node=by_rules),
    Feature("autoscale", flags=True, parts={"autoscale": "autoscale"}, node=by_assignment),
    Feature("experiments", flags=True, parts={"experiments": "experiments"}, node=by_assignment),
    Feature("resources", node=always, any_engine=True, columns=True, metrics=True),
    Feature("device_errors", node=with_device),
    Feature("checkpoints", flags=True, node=by_settings, columns=True, metrics=True),
    Feature("job_cache", flags=True, node=by_settings_or_device),
    Feature("warm_workers", flags=True, node=by_settings),
    Feature("hooks", flags=True, node=by_settings),
    Feature("device_memory", node=with_device),
    Feature("operate", node=always, any_engine=True, subcommands=True, web=True),
)
"""In the order in which a decision asks the observers among them (the engine, which asks the gate, comes after them:
see `coordination.decide`), an agent calls them, and their flags stand in a panel of the help: first what says which
nodes take part, then what watches the workers, then what changes their number or keeps them, and last the commands of
the user and of operators, who see what all others have done."""
