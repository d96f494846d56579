"""Where the nodes of a job with parameter servers meet: as those of dlrover-run do, for a number that nobody fixes."""

from __future__ import annotations

from collections.abc import Mapping

from dlrover_run.command_line import flags, meeting
from dlrover_run.command_line.flags import Given
from dlrover_run.command_line.meeting import Meeting
from dlrover_run.command_line.settings import Settings
from dlrover_run.coordination.rules import MOST_NODES
from dlrover_run.spec import SpecError
from tf_ps_runner.command_line.options import BACKENDS

SHARED_ID = "none"
"""The name of a job whose nodes meet and whom nobody gave one, as for dlrover-run."""


def find_place(settings: Settings, environ: Mapping[str, str], *, visits: bool = False) -> Meeting:
    """The place. A node that hosts a whole job, and was told of no place, is alone; one that `visits` has no role. An
    endpoint of which nothing else is said is a master's. Raises SpecError."""
    role, backend = None if visits else settings.asked("role"), settings.asked("rdzv_backend")
    endpoint = settings.text("rdzv_endpoint")
    by_flag = bool(endpoint.text.strip())
    by_variable = bool(environ.get(meeting.MASTER_VARIABLE, "").strip())
    if backend is not None:
        flags.choice(*backend, BACKENDS)
    elif role is not None and not (by_flag or by_variable):
        raise SpecError(
            f"{role.place} {role.text} is one of several nodes, and nothing says where they meet: give "
            f"--rdzv-endpoint=HOST:PORT, where HOST is one of the nodes, or leave {role.place} out for a job on this "
            "machine alone."
        )
    alone = role is None and backend is None and not by_flag
    run_id = settings.asked("rdzv_id")
    if run_id is not None:
        meeting.shared_run_id(run_id)
    place = meeting.settle(
        meeting.Wish(
            nodes=Given("--role", "1" if alone else f"1:{MOST_NODES}"),
            spares=0,
            standalone=False,
            backend=backend or Given("--rdzv-backend", "c10d"),
            endpoint=endpoint,
            run_id=run_id or Given("--rdzv-id", "" if alone else SHARED_ID),
            node_rank=None,
            master_addr=None,
            master_port=None,
            environ=environ,
        ),
        _fresh_id(),
    )
    # What a cluster manager calls a pod is its own only among those of its role, and a rank is not a node's here.
    name = f"{role.text}-{place.node_id}" if role is not None and place.node_id else place.node_id
    return place._replace(node_rank=None, node_id=name)


def _fresh_id() -> str:
    import uuid

    return str(uuid.uuid4())
