"""The job that a launcher derives from its cluster: from recorded environments, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cluster_environments import (
    ALL,
    INDEXED_JOB,
    LSF,
    OPEN_MPI,
    PBS,
    SAGEMAKER,
    SLURM,
    SLURM_COMPONENTS,
    SLURM_SECOND_COMPONENT,
    TRAINJOB,
    VOLCANO,
    Recorded,
)
from support.command_lines import isolate
from support.golden import assert_screens
from support.places import place_of

from dlrover_run.cli import parse
from dlrover_run.spec import JobSpec, SpecError

FIRST = {"SLURM_NODEID": "0", "SLURMD_NODENAME": "gpu07"}
"""What differs on the first node of the step."""

SIZES = ("--nnodes=1", "--standalone", "--local-nodes=2", "--nnodes=2", "--nnodes=5")
"""Sizes that contradict four nodes."""

TWO_STEPS = "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=gpu07:1 --rdzv-id=two"


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path, monkeypatch)


def job(
    recorded: Recorded, flags: str = "", *, interactive: bool = False, **changed: str | None
) -> tuple[JobSpec, list[str]]:
    """The job of a launcher with these flags and changed variables (None removes one), and its output."""
    environ = {name: text for name, text in {**recorded.environ, **changed}.items() if text is not None}
    printed: list[str] = []
    spec = parse(
        [*recorded.flags.split(), *flags.split(), "train.py"],
        environ,
        warn=lambda sentence: printed.append(f"warning: {sentence}"),
        inform=printed.append,
        context=recorded.context(interactive=interactive),
    )
    return spec, printed


def refused(recorded: Recorded, flags: str = "", **changed: str | None) -> str:
    with pytest.raises(SpecError) as error:
        job(recorded, flags, **changed)
    sentence = str(error.value)
    assert sentence.isprintable()
    assert sentence.endswith(".")
    return sentence


def place(spec: JobSpec) -> tuple[str, str]:
    """The backend, and the meeting place of the nodes."""
    host, port = (
        (place_of(spec).master.host, place_of(spec).master.port)
        if place_of(spec).master
        else place_of(spec).store or ("", 0)
    )
    return spec.rendezvous.backend, f"{host}:{port}"


@pytest.mark.parametrize("recorded", ALL, ids=lambda recorded: recorded.name)
def test_a_recorded_environment_gives_the_whole_job(recorded: Recorded) -> None:
    spec, printed = job(recorded)
    assert printed == [], "only the first node prints what was taken from the cluster"
    assert place(spec) == (recorded.backend, recorded.endpoint)
    assert (spec.rules.max_nodes, spec.node_rank, spec.run_id) == (recorded.nodes, recorded.rank, recorded.run_id)
    assert spec.workers_per_node == recorded.workers
    if place_of(spec).master and not any(name.startswith("PET_RDZV") for name in recorded.environ):
        assert place_of(spec).master.is_host is False, "its first node hosts the master, whatever the names resolve to"
        listed = place_of(spec).master.hosts
        assert not listed or (listed[0], len(listed)) == (place_of(spec).master.host, recorded.nodes), (
            "its others are in order"
        )


@pytest.mark.parametrize("recorded", [SLURM, PBS, LSF], ids=lambda recorded: recorded.name)
def test_the_nodes_that_a_cluster_lists_may_find_each_other_without_the_first(recorded: Recorded) -> None:
    spec, _ = job(recorded)
    assert place_of(spec).master is not None
    assert len(place_of(spec).master.hosts) == recorded.nodes
    elsewhere, _ = job(recorded, "--rdzv-endpoint=elsewhere:4000 --rdzv-backend=c10d")
    assert place_of(elsewhere).master is not None
    assert place_of(elsewhere).master.hosts == (), "an endpoint that is none of them says where they meet"


@pytest.mark.parametrize("recorded", ALL, ids=lambda recorded: recorded.name)
def test_cluster_none_takes_nothing_from_the_cluster(recorded: Recorded) -> None:
    spec, _ = job(recorded, "--cluster=none --nnodes=1 --rdzv-backend=static --rdzv-endpoint=", PET_MASTER_PORT=None)
    assert spec.rendezvous.backend == "memory"


def test_the_first_node_hosts_the_master() -> None:
    spec, _ = job(SLURM, "--nnodes=3:4", **FIRST)
    assert place_of(spec).master is not None
    assert place_of(spec).master.is_host is True


def test_flags_and_variables_take_precedence() -> None:
    spec, _ = job(
        SLURM,
        "--rdzv-backend=c10d --rdzv-endpoint=gpu09:1234 --nproc-per-node=2 --rdzv-id=mine --node-rank=1",
        PET_NNODES="2:4",
    )
    assert place(spec) == ("master", "gpu09:1234")
    assert (spec.rules.min_nodes, spec.workers_per_node, spec.run_id, spec.node_rank) == (2, 2, "mine", 1)
    spec, _ = job(SLURM, NODE_RANK="3", DLROVER_MASTER_ADDR="master.svc:4000")
    assert place(spec) == ("master", "master.svc:4000")
    assert (spec.node_rank, spec.rules.max_nodes, spec.run_id) == (3, 4, "4711.0")


def test_static_uses_the_rank_and_the_address_of_the_cluster() -> None:
    spec, printed = job(SLURM, "--rdzv-backend=static")
    assert place(spec) == ("static", SLURM.endpoint)
    assert (spec.node_rank, printed) == (2, [])


def test_a_trainjob_becomes_elastic_on_request() -> None:
    spec, _ = job(TRAINJOB, "--rdzv-backend=c10d --nnodes=2:4")
    assert place(spec) == ("master", TRAINJOB.endpoint)
    assert spec.node_rank == 2


@pytest.mark.parametrize("flags", SIZES)
@pytest.mark.parametrize("recorded", [SLURM, OPEN_MPI, VOLCANO, LSF, PBS], ids=lambda recorded: recorded.name)
def test_a_size_that_contradicts_the_cluster_is_refused(recorded: Recorded, flags: str) -> None:
    sentence = refused(recorded, flags)
    assert any(remedy in sentence for remedy in ("--cluster=none", "--nnodes=4"))


def test_an_elastic_size_and_spares_fit_the_nodes() -> None:
    spec, _ = job(SLURM, "--nnodes=2:3 --spares=1")
    assert (spec.rules.min_nodes, spec.rules.max_nodes, spec.rules.spares) == (2, 3, 1)
    spec, _ = job(SLURM, "--nnodes=8 --rdzv-backend=c10d --rdzv-endpoint=gpu07:1")
    assert spec.rules.max_nodes == 8, "two steps of four nodes"


MANY = {
    "SLURM_STEP_NUM_TASKS": "32",
    "SLURM_STEP_TASKS_PER_NODE": "8(x4)",
    "SLURM_LOCALID": "3",
    "SLURM_PROCID": "19",
    "SLURM_CPUS_PER_TASK": "6",
}


def test_what_is_refused_where_nodes_meet_by_the_cluster_may_be_given_by_flags() -> None:
    spec, _ = job(SLURM, "--nnodes=2:4 --rdzv-backend=c10d --rdzv-endpoint=gpu10:29400")
    assert place(spec) == ("master", "gpu10:29400")
    # A job in which each task is a node of one worker.
    line = "--nnodes=32 --nproc-per-node=1 --node-rank=19 --rdzv-backend=c10d --rdzv-endpoint=gpu07:1"
    assert job(SLURM, line, **MANY)[0].rules.max_nodes == 32


STEP = [name for name in SLURM.environ if "STEP" in name]
BATCH_SCRIPT: dict[str, str | None] = {
    **dict.fromkeys(STEP), "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURMD_NODENAME": "gpu07"
}  # fmt: skip


def test_a_batch_script_without_srun_may_be_a_job_of_its_own() -> None:
    for flags in ("--nnodes=1", "--standalone", "--local-nodes=2", "--cluster=none"):
        spec, printed = job(SLURM, flags, **BATCH_SCRIPT)
        assert (spec.workers_per_node, printed) == (1, [])


def test_nothing_is_detected_in_an_interactive_shell() -> None:
    shells: list[dict[str, str | None]] = [
        {**BATCH_SCRIPT, "SLURM_JOB_NAME": "interactive", "SLURM_STEP_ID": "4294967290"},
        {**BATCH_SCRIPT, "SLURM_PROCID": None, "SLURM_NODEID": None},
        {**BATCH_SCRIPT, "SLURM_JOB_NAME": "bash"},
    ]
    for shell in shells:
        spec, printed = job(SLURM, **shell)
        assert spec.rendezvous.backend == "memory"
        assert len(printed) == 1, "a hint"
    for recorded in (INDEXED_JOB, VOLCANO, PBS):
        spec, printed = job(recorded, "--nnodes=1", interactive=True)
        assert (spec.rendezvous.backend, printed) == ("memory", [])
    spec, printed = job(VOLCANO, interactive=True)
    assert "--cluster=kubernetes" in printed[0]
    assert job(VOLCANO, "--cluster=kubernetes", interactive=True)[0].rules.max_nodes == 4
    with pytest.raises(SpecError, match="srun did not start this launcher"):
        job(SLURM, "--cluster=slurm", **shells[0])
    assert job(OPEN_MPI, interactive=True)[0].rules.max_nodes == 4, "no shell has the variables of mpirun"


ONE_PROCESS = {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_APP_CTX_NUM_PROCS": "1"}


STEP_OF_ONE = {
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_STEP_NODELIST": "gpu10",
    "SLURM_NODEID": "0",
}
SCRIPT_OF_ONE: dict[str, str | None] = {**BATCH_SCRIPT, "SLURM_JOB_NUM_NODES": "1", "CUDA_VISIBLE_DEVICES": None}
POD_OF_ONE = {"JOB_COMPLETION_INDEX": "0"}
SALLOC: dict[str, str | None] = {**SCRIPT_OF_ONE, "SLURM_JOB_NAME": "interactive"}


ALONE: dict[str, tuple[Recorded, dict[str, str | None], str]] = {
    "a step of one node": (SLURM, {**STEP_OF_ONE}, ""),
    "a batch script of one node": (SLURM, SCRIPT_OF_ONE, ""),
    "the same, with the number of nodes": (SLURM, SCRIPT_OF_ONE, "--nnodes=1"),
    "the same, standalone": (SLURM, SCRIPT_OF_ONE, "--standalone"),
    "the same, with a number of workers": (SLURM, SCRIPT_OF_ONE, "--nproc-per-node=2"),
    "the same, with a variable": (SLURM, {**SCRIPT_OF_ONE, "PET_NPROC_PER_NODE": "4"}, ""),
    "the same, without GPUs": (SLURM, {**SCRIPT_OF_ONE, "SLURM_GPUS_ON_NODE": None}, ""),
    "salloc, with the cluster": (SLURM, SALLOC, "--cluster=slurm"),
    "a step with a terminal, with the cluster": (SLURM, {**STEP_OF_ONE, "SLURM_PTY_PORT": "4000"}, "--cluster=slurm"),
    "one host of SageMaker": (SAGEMAKER, {"SM_HOSTS": '["algo-3"]'}, ""),
    "one pod": (INDEXED_JOB, {**POD_OF_ONE}, "--nnodes=1"),
    "one pod, standalone": (INDEXED_JOB, {**POD_OF_ONE}, "--standalone --nnodes=1"),
    "one process of MPI": (OPEN_MPI, {**ONE_PROCESS}, ""),
}


@pytest.mark.parametrize(("recorded", "changed", "flags"), ALONE.values(), ids=list(ALONE))
def test_a_single_node_uses_the_worker_count_of_the_cluster(
    recorded: Recorded, changed: dict[str, str | None], flags: str
) -> None:
    """It has the same rendezvous as without a cluster."""
    spec, printed = job(recorded, flags, **changed)
    assert (spec.rendezvous.backend, spec.rules.max_nodes, len(printed)) == ("memory", 1, 1)
    assert f"{spec.workers_per_node} worker" in printed[0]


def test_a_single_node_joins_others_by_flags_with_its_own_worker_count() -> None:
    spec, _ = job(SLURM, TWO_STEPS, **STEP_OF_ONE)
    assert place(spec) == ("master", "gpu07:1")
    assert (spec.rules.max_nodes, spec.workers_per_node, spec.node_rank) == (2, 8, None)


@pytest.mark.parametrize(
    ("recorded", "changed", "flags", "interactive"),
    [
        (SLURM, SALLOC, "", False),
        (SLURM, {**SCRIPT_OF_ONE, "SLURM_PROCID": None}, "", False),
        (SLURM, SCRIPT_OF_ONE, "", True),
        (SLURM, {**STEP_OF_ONE, "SLURM_PTY_PORT": "4000"}, "", False),
        (SLURM, STEP_OF_ONE, "", True),
        (SLURM, STEP_OF_ONE, "--cluster=none", False),
        (SLURM, STEP_OF_ONE, "--local-nodes=2", False),
        (SAGEMAKER, {"SM_HOSTS": '["algo-3"]'}, "", True),
        (INDEXED_JOB, POD_OF_ONE, "--nnodes=1", True),
    ],
)
def test_every_node_is_in_one_crowd_and_the_last_node_is_alone(
    recorded: Recorded, changed: dict[str, str | None], flags: str, interactive: bool
) -> None:
    spec, printed = job(recorded, flags, interactive=interactive, **changed)
    assert (spec.workers_per_node, printed) == (1, [])


def test_a_trainjob_of_one_node_runs_as_without_a_cluster() -> None:
    spec, _ = job(TRAINJOB, PET_NNODES="1", PET_NODE_RANK="0", JOB_COMPLETION_INDEX="0", PET_MASTER_PORT=None)
    assert spec.rules.max_nodes == 1


CONTRADICTIONS: list[dict[str, str | None]] = [
    {"SLURM_NODEID": "7"},
    {"SLURM_NODEID": "1"},
    {"SLURMD_NODENAME": "gpu99"},
    {"SLURM_STEP_NODELIST": "gpu[07,09-10"},
    {"SLURM_STEP_NODELIST": "gpu[07-10,12-14]"},
    {"SLURM_STEP_NUM_NODES": "x"},
    {"SLURM_STEP_NUM_TASKS": "2"},
    {"SLURM_HET_SIZE": "2", "SLURM_STEP_NODELIST": None},
    {"PBS_JOBID": "1", "PBS_NODEFILE": "/f"},
    {"SM_HOSTS": '["gpu10.cluster","b"]'},
]


@pytest.mark.parametrize("changed", CONTRADICTIONS, ids=str)
def test_a_command_line_with_all_values_needs_no_cluster(changed: dict[str, str | None]) -> None:
    line = "--nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=gpu07:29400 --nproc-per-node=8 --rdzv-id=4711"
    assert place(job(SLURM, line, **changed)[0]) == ("master", "gpu07:29400")


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_STEP_NUM_TASKS": "8", "SLURM_CPUS_PER_TASK": "9" * 5000},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_APP_CTX_NUM_PROCS": "9" * 5000},
        {"SLURM_STEP_ID": None, "SLURM_JOB_ID": None, "LSB_JOBID": "1", "LSB_MCPU_HOSTS": f"gpu10 {'9' * 5000}"},
    ],
)
def test_a_number_of_thousands_of_digits_is_refused_in_one_sentence(changed: dict[str, str | None]) -> None:
    """Python raises ValueError for such a number."""
    refused(SLURM, **changed)


def test_a_named_cluster_is_used_alone() -> None:
    two = {"SM_HOSTS": '["gpu10.cluster","b"]'}
    assert job(SLURM, "--cluster=slurm", **two)[0].rules.max_nodes == 4
    assert job(SLURM, "--cluster=sagemaker", **two)[0].rules.max_nodes == 2


HOSTS = Recorded(
    "hosts", {}, "n02.cluster", "", "", files={"hosts": "# rack 1\nn01 slots=4\nn02 slots=4\nn03 slots=2\n"}
)


MPI_WITH_HOSTS = Recorded("mpi", OPEN_MPI.environ, "n03", "", "", files=HOSTS.files)
FIRST_POD = Recorded(
    "first",
    {"KUBERNETES_SERVICE_HOST": "x", "MASTER_ADDR": "localhost", "RANK": "0", "WORLD_SIZE": "2"},
    "job-master-0",
    "",
    "",
)


def test_a_hostfile_gives_the_job() -> None:
    spec, printed = job(HOSTS, "--hostfile=hosts")
    assert (spec.rules.max_nodes, spec.node_rank, spec.workers_per_node, printed) == (3, 1, 4, [])
    assert place_of(spec).master is not None
    assert (place_of(spec).master.host, place_of(spec).master.is_host) == ("n01", False)


def test_a_hostfile_completes_mpi() -> None:
    spec, _ = job(MPI_WITH_HOSTS, "--hostfile=hosts", OMPI_COMM_WORLD_SIZE="3", OMPI_APP_CTX_NUM_PROCS="3")
    assert place(spec)[1].startswith("n01:")
    assert spec.workers_per_node == 2


def test_mpi_takes_precedence_inside_the_job_of_a_scheduler() -> None:
    """PBS writes its file on the first node only, and a step of Slurm may be that of mpirun's daemons."""
    in_pbs = Recorded("mpi", OPEN_MPI.environ, "n03", "", "")
    spec, _ = job(in_pbs, PBS_JOBID="81.head", PBS_NODEFILE="/not/here")
    assert (place(spec)[1].split(":")[0], spec.run_id) == ("192.0.2.2", "81.head")
    daemons = {"SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NODELIST": "gpu[09-10,12]", "SLURM_NODEID": "1"}
    spec, _ = job(in_pbs, **{**SLURM.environ, **daemons})
    assert (place(spec)[1].split(":")[0], spec.run_id, spec.rules.max_nodes) == ("gpu07", "4711", 4)


def test_the_first_pod_of_an_operator_uses_its_own_name_as_the_endpoint() -> None:
    assert place(job(FIRST_POD)[0]) == ("master", "job-master-0:29400")


def test_the_ranks_of_a_worker_are_not_those_of_a_node() -> None:
    worker = {"KUBERNETES_SERVICE_HOST": "x", "MASTER_ADDR": "a", "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8"}
    assert job(Recorded("worker", worker, "pod", "", ""))[0].rendezvous.backend == "memory"


def test_what_is_taken_and_what_is_refused_are_those_of_the_golden_file() -> None:
    first_of = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu10", "SLURM_NODEID": "0", "SLURM_LOCALID": "3"}
    no_gpus = {"CUDA_VISIBLE_DEVICES": None, "SLURM_GPUS_ON_NODE": None, "NODE_RANK": "3"}
    pod = Recorded("pod", INDEXED_JOB.environ, "train-2", "", "", files=INDEXED_JOB.files)
    launcher = Recorded("pod", {**FIRST_POD.environ, "MASTER_ADDR": "a"}, "a", "", "")
    component = {**BATCH_SCRIPT, "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "gpu07"}
    two_each = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "2(x4)"}
    own_name = "--nnodes=1:4 --rdzv-backend=c10d --rdzv-endpoint=gpu10:29400"
    taken: dict[str, tuple[Recorded, str, dict[str, str | None]]] = {
        "the first node of a step": (SLURM, "--nnodes=3:4 --max-restarts=2", {**FIRST}),
        "a rank by a variable, no GPUs": (SLURM, "", {**FIRST, **no_gpus}),
        "the address of node 0": (SLURM, "--node-rank=0 --master-addr=gpu07", {**FIRST}),
        "the first pod of an operator": (launcher, "", {}),
        "a step of one node that joins others": (SLURM, TWO_STEPS, {**STEP_OF_ONE}),
        **{title: (recorded, flags, changed) for title, (recorded, changed, flags) in ALONE.items()},
    }
    refusals: dict[str, tuple[Recorded, str, dict[str, str | None]]] = {
        **{f"a size, in {name.name}: {flags}": (name, flags, {}) for name in (SLURM, PBS) for flags in SIZES},
        "an address that is not that of node 0": (SLURM, "--master-addr=gpu09", {}),
        "a rank that is not that of this node": (SLURM, "--rdzv-backend=static --node-rank=0", {}),
        "localhost as the endpoint": (SLURM, "--rdzv-backend=c10d --rdzv-endpoint=localhost", {}),
        "an address of this machine as the endpoint": (SLURM, "--rdzv-endpoint=127.0.0.1:29400", {}),
        "the own name as the endpoint": (SLURM, own_name, {}),
        "8 launchers on a node": (SLURM, "", {**MANY}),
        "8 launchers on one node": (
            SLURM, "", {**first_of, "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "8"},
        ),
        "2 launchers of mpirun on a node": (OPEN_MPI, "", {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}),
        "a batch script without srun": (SLURM, "", BATCH_SCRIPT),
        "a batch script without srun, in PBS": (PBS, "", {"PBS_TASKNUM": "1", "PBS_NODENUM": "0"}),
        "2 launchers on each node of two components": (SLURM_COMPONENTS, "", {**two_each}),
        "2 launchers on each node of one component": (
            SLURM_SECOND_COMPONENT, "", {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
        ),
        # A batch script runs in the first component, whose variables it has.
        "a batch script of two components without srun": (SLURM_COMPONENTS, "", {**component}),
        "a step with a terminal": (SLURM, "", {"SLURM_PTY_PORT": "4000"}),
        "a pod without the number of pods": (pod, "", {}),
        "a pod with too small a number": (pod, "--nnodes=1", {}),
        "a pod, standalone": (pod, "--standalone", {}),
        "a pod without a headless Service": (Recorded("pod", INDEXED_JOB.environ, "train-2", "", ""), "--nnodes=4", {}),
        **{f"variables that contradict each other: {changed}": (SLURM, "", changed) for changed in CONTRADICTIONS},
        "a cluster that is not there": (SLURM, "--cluster=lsf", {}),
        "a cluster that does not exist": (SLURM, "--cluster=condor", {}),
        "a host file that is not there": (HOSTS, "--hostfile=missing", {}),
        "a host that is not in its file": (
            Recorded("hosts", {}, "n09", "", "", files=HOSTS.files), "--hostfile=hosts", {},
        ),
        "fewer nodes than the host file has": (HOSTS, "--hostfile=hosts --nnodes=1", {}),
        "a host file that does not fit mpirun": (MPI_WITH_HOSTS, "--hostfile=hosts", {}),
        "a host file that does not fit a step": (
            Recorded("step", SLURM.environ, "n02", "", "", files=HOSTS.files), "--hostfile=hosts", {},
        ),
        "a later pod of an operator with localhost": (FIRST_POD, "", {"RANK": "1"}),
        "mpirun without hosts": (OPEN_MPI, "", {"OMPI_MCA_orte_hnp_uri": None}),
        "PMI without hosts": (Recorded("pmi", {"PMI_SIZE": "2", "PMI_RANK": "0"}, "n01", "", ""), "", {}),
    }  # fmt: skip
    screens = {
        title: "\n".join(job(recorded, flags, **changed)[1]) for title, (recorded, flags, changed) in taken.items()
    }
    screens |= {title: refused(recorded, flags, **changed) for title, (recorded, flags, changed) in refusals.items()}
    assert_screens(Path(__file__).with_name("cluster_messages.txt"), screens)
