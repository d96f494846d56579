"""Environments of launchers in clusters: the variables of node 2 of a job of four, and the job that is detected.

The variables of Open MPI are those of version 4.1; the others follow the documentation of each cluster. Variables that
mean nothing to a launcher are left out, except some that could be mistaken for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dlrover_run.environment.records import Context


@dataclass(frozen=True)
class Recorded:
    """One launcher: its variables and machine, the flags that the cluster needs, and the resulting job."""

    name: str
    environ: Mapping[str, str]
    hostname: str
    endpoint: str
    run_id: str
    files: Mapping[str, str] = field(default_factory=dict)
    flags: str = ""
    workers: int = 8
    rank: int | None = 2
    backend: str = "master"
    nodes: int = 4

    def context(self, *, interactive: bool = False) -> Context:
        return Context(self.hostname, self.files.get, interactive, "dlrover-run train.py", lambda host: False)


GPUS = "0,1,2,3,4,5,6,7"

SLURM = Recorded(
    "Slurm step",
    {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOBID": "4711",
        "SLURM_JOB_NAME": "job.sh",
        "SLURM_JOB_NODELIST": "gpu[07,09-10,12]",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_NODELIST": "gpu[07,09-10,12]",
        "SLURM_NNODES": "4",
        "SLURM_NTASKS": "4",
        "SLURM_NPROCS": "4",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_TASKS_PER_NODE": "1(x4)",
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_STEP_NODELIST": "gpu[07,09-10,12]",
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.250",
        "SLURM_SRUN_COMM_HOST": "10.0.0.250",
        "SLURM_NODEID": "2",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
        "SLURMD_NODENAME": "gpu10",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_GPUS_PER_NODE": "8",
        "SLURM_JOB_GPUS": GPUS,
        "CUDA_VISIBLE_DEVICES": GPUS,
    },
    "gpu10.cluster",
    "gpu07:22573",
    "4711.0",
)

SLURM_ARRAY = replace(
    SLURM,
    name="Slurm job array, requeued",
    environ={
        **SLURM.environ,
        "SLURM_JOB_ID": "4713",
        "SLURM_ARRAY_JOB_ID": "4700",
        "SLURM_ARRAY_TASK_ID": "13",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_STEP_ID": "1",
    },
    endpoint="gpu07:15494",
    run_id="4700_13.1-restart2",
)

SLURM_SMALL_STEP = replace(
    SLURM,
    name="Slurm step on fewer nodes than its job",
    environ={
        **SLURM.environ,
        "SLURM_STEP_NODELIST": "gpu[09-10]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": "1",
        "SLURM_PROCID": "1",
    },
    endpoint="gpu09:22573",
    rank=1,
    nodes=2,
)

COMPONENTS = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu07",
    "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu[09-10,12]",
    "SLURM_JOB_NUM_NODES_HET_GROUP_1": "3",
}
"""The variables that Slurm 22.05 adds in a heterogeneous job, as far as a launcher reads them."""

SLURM_COMPONENTS = replace(
    SLURM, name="Slurm step in all components of its heterogeneous job", environ={**SLURM.environ, **COMPONENTS}
)

SLURM_SECOND_COMPONENT = replace(
    SLURM_SMALL_STEP,
    name="Slurm step in one component of its heterogeneous job",
    environ={
        **SLURM_SMALL_STEP.environ,
        **COMPONENTS,
        "SLURM_JOB_NODELIST": "gpu[09-10,12]",
        "SLURM_JOB_NUM_NODES": "3",
    },
)

POD_HOSTS = (
    "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost\n"
    "10.244.1.7\t{name}.train.default.svc.cluster.local\t{name}\n"
)

INDEXED_JOB = Recorded(
    "Kubernetes indexed Job",
    {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_SERVICE_PORT": "443",
        "HOSTNAME": "train-2",
        "JOB_COMPLETION_INDEX": "2",
        "NVIDIA_VISIBLE_DEVICES": ",".join(f"GPU-{number}" for number in range(8)),
    },
    "train-2",
    "train-0.train.default.svc.cluster.local:29400",
    "train",
    files={"/etc/hosts": POD_HOSTS.format(name="train-2")},
    flags="--nnodes=4",
)

JOBSET = Recorded(
    "JobSet",
    {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "JOB_COMPLETION_INDEX": "2",
        "JOBSET_NAME": "llm",
        "REPLICATED_JOB_NAME": "workers",
        "JOB_INDEX": "0",
        "JOBSET_RESTART_ATTEMPT": "1",
        "NVIDIA_VISIBLE_DEVICES": "all",
    },
    "llm-workers-0-2",
    "llm-workers-0-0.llm.ml.svc.cluster.local:29400",
    "llm",
    files={"/etc/hosts": "10.244.1.7\tllm-workers-0-2.llm.ml.svc.cluster.local\tllm-workers-0-2\n"},
    flags="--nnodes=4",
    workers=1,
)

TRAINJOB = Recorded(
    "Kubeflow TrainJob",
    {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "JOB_COMPLETION_INDEX": "2",
        "PET_NNODES": "4",
        "PET_NPROC_PER_NODE": "8",
        "PET_NODE_RANK": "2",
        "PET_MASTER_ADDR": "llm-node-0-0.llm",
        "PET_MASTER_PORT": "29400",
    },
    "llm-node-0-2",
    "llm-node-0-0.llm:29400",
    "llm-node-0",
    backend="static",
)

PYTORCHJOB = Recorded(
    "Kubeflow PyTorchJob, elastic",
    {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "job-worker-0:23456",
        "PET_RDZV_ID": "job",
        "PET_NNODES": "2:4",
        "PET_NPROC_PER_NODE": "8",
        "MASTER_ADDR": "job-worker-0",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": "4",
        "RANK": "2",
    },
    "job-worker-2",
    "job-worker-0:23456",
    "job",
)

VOLCANO = Recorded(
    "Volcano",
    {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "VC_TASK_INDEX": "2",
        "VK_TASK_INDEX": "2",
        "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job,job-worker-2.job,job-worker-3.job",
        "VC_WORKER_NUM": "4",
    },
    "job-worker-2",
    "job-worker-0.job:29400",
    "job-worker",
    workers=1,
)

OPEN_MPI = Recorded(
    "Open MPI",
    {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_NODE_RANK": "0",
        "OMPI_UNIVERSE_SIZE": "4",
        "OMPI_APP_CTX_NUM_PROCS": "4",
        "OMPI_MCA_orte_num_nodes": "4",
        "OMPI_MCA_ess_base_jobid": "93847553",
        "OMPI_MCA_ess_base_vpid": "2",
        "OMPI_MCA_orte_hnp_uri": "93847552.0;tcp://192.0.2.2:57203;tcp6://[fd00::2]:46953",
        "OMPI_MCA_orte_local_daemon_uri": "93847552.2;tcp://192.0.2.4:40001",
        "PMIX_NAMESPACE": "93847553",
        "PMIX_RANK": "2",
    },
    "n03",
    "192.0.2.2:16869",
    "93847553",
    workers=1,
)

INTEL_MPI = Recorded(
    "MPICH in PBS",
    {
        "PMI_SIZE": "4",
        "PMI_RANK": "2",
        "MPI_LOCALNRANKS": "1",
        "MPI_LOCALRANKID": "0",
        "PBS_JOBID": "81.head",
        "PBS_NODEFILE": "/var/spool/pbs/aux/81.head",
        "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2",
    },
    "n03",
    "n01:25886",
    "81.head",
    files={"/var/spool/pbs/aux/81.head": "n01\nn01\nn02\nn02\nn03\nn03\nn04\nn04\n"},
    workers=2,
)

PBS = Recorded(
    "PBS",
    {
        "PBS_JOBID": "81.head",
        "PBS_JOBNAME": "train",
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_NODEFILE": "/var/spool/pbs/aux/81.head",
        "PBS_NODENUM": "2",
        "PBS_TASKNUM": "4",
    },
    "n03.cluster",
    "n01:25886",
    "81.head",
    files={"/var/spool/pbs/aux/81.head": "n01\nn02\nn03\nn04\n"},
    workers=1,
)

LSF = Recorded(
    "LSF",
    {
        "LSB_JOBID": "900",
        "LSB_JOBNAME": "train",
        "LSB_JOBINDEX": "0",
        "LSB_MCPU_HOSTS": "batch2 1 n01 42 n02 42 n03 42 n04 42",
        "LSF_PM_TASKID": "3",
        "CUDA_VISIBLE_DEVICES": GPUS,
    },
    "n03",
    "n01:28658",
    "900",
)

SAGEMAKER = Recorded(
    "SageMaker",
    {
        "SM_HOSTS": '["algo-1","algo-10","algo-2","algo-3"]',
        "SM_CURRENT_HOST": "algo-3",
        "SM_NUM_GPUS": "8",
        "TRAINING_JOB_NAME": "llm-2026",
        "CLUSTER_SPEC": "",
    },
    "ip-10-0-1-3.ec2.internal",
    "algo-1:20543",
    "llm-2026",
)

VERTEX = Recorded(
    "Vertex AI",
    {
        "CLUSTER_SPEC": '{"cluster":{"workerpool0":["cmle-0:2222"],"workerpool1":["cmle-1:2222","cmle-2:2222",'
        '"cmle-3:2222"]},"environment":"cloud","task":{"type":"workerpool1","index":1}}',
        "CLOUD_ML_JOB_ID": "6001",
        "RANK": "2",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "cmle-0",
        "MASTER_PORT": "3333",
        "CUDA_VISIBLE_DEVICES": GPUS,
    },
    "cmle-2",
    "cmle-0:3333",
    "6001",
)

ALL = (
    SLURM,
    SLURM_ARRAY,
    SLURM_SMALL_STEP,
    SLURM_COMPONENTS,
    SLURM_SECOND_COMPONENT,
    INDEXED_JOB,
    JOBSET,
    TRAINJOB,
    PYTORCHJOB,
    VOLCANO,
    OPEN_MPI,
    INTEL_MPI,
    PBS,
    LSF,
    SAGEMAKER,
    VERTEX,
)
