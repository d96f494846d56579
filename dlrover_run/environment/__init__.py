"""What the environment of a launcher says about its job: the cluster, the nodes, this node's rank and where to meet.

This module imports nothing, so that a launcher outside of any cluster finds that out for free.
"""

from __future__ import annotations

from collections.abc import Mapping

MARKERS: Mapping[str, tuple[str, ...]] = {
    "mpi": (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_RANK",
        "PMI_SIZE",
        "MPI_LOCALNRANKS",
    ),
    "slurm": ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID", "SLURM_STEP_NUM_NODES"),
    "lsf": ("LSB_JOBID", "LSB_MCPU_HOSTS"),
    "pbs": ("PBS_JOBID", "PBS_NODEFILE"),
    "kubernetes": ("JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "VK_TASK_INDEX", "KUBERNETES_SERVICE_HOST"),
    "sagemaker": ("SM_HOSTS", "SM_CURRENT_HOST"),
    "vertex": ("CLUSTER_SPEC", "CLOUD_ML_JOB_ID"),
}
"""The variables that show each cluster, by its name in `--cluster`; a cluster without any of them is not looked at."""


_OUTER = {"RANK": "GROUP_RANK", "NUM": "GROUP_WORLD_SIZE"}


def without_outer_job(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a launcher without the numbers of the node that another launcher gave to its worker, when this
    one runs in that worker: its job has nodes of its own. Numbers that differ from those of the outer round come
    from elsewhere, and stay."""
    kept = dict(environ)
    if "TORCHELASTIC_RUN_ID" not in environ:
        return kept
    for prefix in ("NODE", "WORKER"):
        numbers = {f"{prefix}_{name}": environ.get(outer) for name, outer in _OUTER.items()}
        if all(environ.get(name) == number is not None for name, number in numbers.items()):
            for name in numbers:
                del kept[name]
    return kept


def is_marked(environ: Mapping[str, str], cluster: str) -> bool:
    """Whether a variable shows this cluster."""
    return any(environ.get(marker, "").strip() for marker in MARKERS[cluster])


def may_complete(environ: Mapping[str, str], cluster: str, *, hostfile: bool) -> bool:
    """Whether a cluster can complete the job, by the values of `--cluster` and `--hostfile`."""
    if cluster == "auto":
        return hostfile or any(is_marked(environ, name) for name in MARKERS)
    return hostfile or cluster != "none"
