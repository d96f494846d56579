"""The rendezvous of a job with parameter servers: that of dlrover-run, for a number of nodes that is not fixed."""

from __future__ import annotations

from collections.abc import Mapping

from dlrover_run.command_line import rendezvous_options, values
from dlrover_run.command_line.parser import FlagValues
from dlrover_run.command_line.rendezvous_options import Rendezvous, RendezvousArgs
from dlrover_run.coordination.rules import MAX_NODES
from dlrover_run.spec import FlagValue, SpecError
from tf_ps_runner.command_line.options import BACKENDS


def rendezvous_args(flags: FlagValues, environ: Mapping[str, str], *, in_cluster: bool) -> RendezvousArgs:
    """The flags of the rendezvous. A cluster (`in_cluster`) has several nodes, and gives the endpoint.

    A node without a role and without an endpoint hosts the whole job alone. An endpoint without a backend is that of a
    master. Raises SpecError.
    """
    role, backend = flags.explicit("role"), flags.explicit("rdzv_backend")
    endpoint = flags.get("rdzv_endpoint")
    by_flag = bool(endpoint.text.strip()) or in_cluster
    by_variable = bool(environ.get(rendezvous_options.MASTER_VARIABLE, "").strip())
    if backend is not None:
        values.choice(*backend, BACKENDS)
    elif role is not None and not (by_flag or by_variable):
        raise SpecError(
            f"{role.source} {role.text} hosts one task of a job on several nodes and needs an endpoint: give "
            f"--rdzv-endpoint=HOST:PORT, where HOST is one of the nodes, or leave {role.source} out for a job on this "
            "machine only."
        )
    alone = role is None and backend is None and not by_flag
    run_id = flags.explicit("rdzv_id")
    if run_id is not None:
        values.shared_name(*run_id)
    return RendezvousArgs(
        nodes=FlagValue("--role", "1" if alone else f"1:{MAX_NODES}"),
        backend=backend or FlagValue("--rdzv-backend", "c10d"),
        endpoint=endpoint,
        run_id=run_id or FlagValue("--rdzv-id", "" if alone else rendezvous_options.UNNAMED),
        environ=environ,
    )


def resolve(flags: FlagValues, args: RendezvousArgs) -> Rendezvous:
    """The rendezvous of these options. Raises SpecError."""
    import uuid

    role = flags.explicit("role")
    rendezvous = rendezvous_options.resolve(args, str(uuid.uuid4()))
    # The name that a cluster manager gives a pod is unique only within its role, and its rank is not a node rank here.
    name = f"{role.text}-{rendezvous.node_id}" if role is not None and rendezvous.node_id else rendezvous.node_id
    return rendezvous._replace(node_rank=None, node_id=name)
