"""The job that a launcher derives from its cluster: from recorded environments, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_environments import (
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
from command_lines import isolate
from places import place_of

from dlrover_run.cli import parse
from dlrover_run.spec import JobSpec, SpecError


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


def test_the_first_node_prints_each_value_and_its_source() -> None:
    spec, printed = job(SLURM, "--nnodes=3:4 --max-restarts=2", SLURM_NODEID="0", SLURMD_NODENAME="gpu07")
    assert printed == [
        "Slurm step 4711.0: 3:4 nodes (--nnodes), 8 workers on this node (CUDA_VISIBLE_DEVICES), "
        "node rank 0 (SLURM_NODEID), master at gpu07:22573 (SLURM_STEP_NODELIST), "
        "rdzv-id 4711.0 (SLURM_JOB_ID, SLURM_STEP_ID)."
    ]
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


def test_the_start_line_names_only_given_flags() -> None:
    first = {"SLURM_NODEID": "0", "SLURMD_NODENAME": "gpu07"}
    _, printed = job(SLURM, **first, CUDA_VISIBLE_DEVICES=None, SLURM_GPUS_ON_NODE=None, NODE_RANK="3")
    assert "1 worker on this node (default of --nproc-per-node), node rank 3 (NODE_RANK), " in printed[0]
    _, printed = job(SLURM, "--node-rank=0 --master-addr=gpu07", **first)
    assert "node rank 0 (--node-rank), node 0 at gpu07:29500 (--master-addr), " in printed[0]
    pod = {"KUBERNETES_SERVICE_HOST": "x", "MASTER_ADDR": "a", "RANK": "0", "WORLD_SIZE": "2"}
    _, printed = job(Recorded("pod", pod, "a", "", ""))
    assert "rdzv-id none (default of --rdzv-id)." in printed[0]


def test_static_uses_the_rank_and_the_address_of_the_cluster() -> None:
    spec, printed = job(SLURM, "--rdzv-backend=static")
    assert place(spec) == ("static", SLURM.endpoint)
    assert (spec.node_rank, printed) == (2, [])
    assert "it must be node 0" in refused(SLURM, "--master-addr=gpu09")
    assert "node 0 of" in refused(SLURM, "--rdzv-backend=static --node-rank=0")


def test_a_trainjob_becomes_elastic_on_request() -> None:
    spec, _ = job(TRAINJOB, "--rdzv-backend=c10d --nnodes=2:4")
    assert place(spec) == ("master", TRAINJOB.endpoint)
    assert spec.node_rank == 2


@pytest.mark.parametrize("flags", ["--nnodes=1", "--standalone", "--local-nodes=2", "--nnodes=2", "--nnodes=5"])
@pytest.mark.parametrize("recorded", [SLURM, OPEN_MPI, VOLCANO, LSF, PBS], ids=lambda recorded: recorded.name)
def test_a_size_that_contradicts_the_cluster_is_refused(recorded: Recorded, flags: str) -> None:
    sentence = refused(recorded, flags)
    assert "has 4 nodes" in sentence
    assert any(remedy in sentence for remedy in ("--cluster=none", "--nnodes=4"))


def test_an_elastic_size_and_spares_fit_the_nodes() -> None:
    spec, _ = job(SLURM, "--nnodes=2:3 --spares=1")
    assert (spec.rules.min_nodes, spec.rules.max_nodes, spec.rules.spares) == (2, 3, 1)
    assert "--spares=2" in refused(SLURM, "--nnodes=2")
    spec, _ = job(SLURM, "--nnodes=8 --rdzv-backend=c10d --rdzv-endpoint=gpu07:1")
    assert spec.rules.max_nodes == 8, "two steps of four nodes"


@pytest.mark.parametrize("given", ["localhost", "127.0.0.1:29400", "[::1]:29400"])
def test_an_endpoint_that_differs_on_each_node_is_refused(given: str) -> None:
    assert "another machine on each node" in refused(SLURM, f"--rdzv-backend=c10d --rdzv-endpoint={given}")
    assert "another machine on each node" in refused(SLURM, f"--rdzv-endpoint={given}")


def test_the_own_name_as_the_endpoint_of_a_job_that_starts_with_one_node_is_refused() -> None:
    line = "--rdzv-backend=c10d --rdzv-endpoint=gpu10:29400"
    assert "each node may have put its own name there" in refused(SLURM, f"--nnodes=1:4 {line}")
    assert place(job(SLURM, f"--nnodes=2:4 {line}")[0]) == ("master", "gpu10:29400")


def test_several_launchers_on_a_node_are_refused_with_the_command_for_one() -> None:
    many = {
        "SLURM_STEP_NUM_TASKS": "32",
        "SLURM_STEP_TASKS_PER_NODE": "8(x4)",
        "SLURM_LOCALID": "3",
        "SLURM_PROCID": "19",
        "SLURM_CPUS_PER_TASK": "6",
    }
    sentence = refused(SLURM, **many)
    assert "8 launchers on a node (32 tasks on 4 nodes)" in sentence
    command = "srun --nodes=4 --ntasks=4 --ntasks-per-node=1 --cpus-per-task=48 --gpus-per-node=8 dlrover-run train.py"
    assert f"`{command}`" in sentence
    assert "`mpirun -N 1 dlrover-run train.py`" in refused(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE="2")
    alone = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu10", "SLURM_NODEID": "0"}
    assert "8 launchers" in refused(
        SLURM, **alone, SLURM_STEP_NUM_TASKS="8", SLURM_STEP_TASKS_PER_NODE="8", SLURM_LOCALID="3"
    )
    # A job in which each task is a node of one worker.
    spec, _ = job(
        SLURM, "--nnodes=32 --nproc-per-node=1 --node-rank=19 --rdzv-backend=c10d --rdzv-endpoint=gpu07:1", **many
    )
    assert spec.rules.max_nodes == 32


STEP = [name for name in SLURM.environ if "STEP" in name]
BATCH_SCRIPT: dict[str, str | None] = {
    **dict.fromkeys(STEP), "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURMD_NODENAME": "gpu07"
}  # fmt: skip


def test_a_batch_script_without_srun_is_refused() -> None:
    sentence = refused(SLURM, **BATCH_SCRIPT)
    assert "srun did not start this launcher" in sentence
    assert "`srun --ntasks=4 --ntasks-per-node=1 dlrover-run train.py`" in sentence
    for flags in ("--nnodes=1", "--standalone", "--local-nodes=2", "--cluster=none"):
        spec, printed = job(SLURM, flags, **BATCH_SCRIPT)
        assert (spec.workers_per_node, printed) == (1, [])
    assert "mpirun -np 4 -N 1" in refused(PBS, PBS_TASKNUM="1", PBS_NODENUM="0")


def test_one_launcher_on_each_node_of_a_heterogeneous_job_is_started_by_a_part_for_each_component() -> None:
    parts = [
        f"--het-group={one} --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 dlrover-run train.py"
        for one, nodes in enumerate((1, 3))
    ]
    assert f"`srun {' : '.join(parts)}`" in refused(
        SLURM_COMPONENTS, SLURM_STEP_NUM_TASKS="8", SLURM_STEP_TASKS_PER_NODE="2(x4)"
    )
    assert "`srun --het-group=1 --nodes=2 --ntasks=2 --ntasks-per-node=1 --gpus-per-node=8 dlrover-run " in refused(
        SLURM_SECOND_COMPONENT, SLURM_STEP_NUM_TASKS="4", SLURM_STEP_TASKS_PER_NODE="2(x2)"
    )
    # A batch script runs in the first component, whose variables it has.
    first = {**BATCH_SCRIPT, "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "gpu07"}
    script = refused(SLURM_COMPONENTS, **first)
    assert "has 4 nodes (2 components, SLURM_HET_SIZE), and srun did not start this launcher" in script
    assert f"`srun {' : '.join(parts)}`" in script


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
    # With a terminal srun attaches one task, and may have started a shell in each.
    assert "--pty" in refused(SLURM, SLURM_PTY_PORT="4000")
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


@pytest.mark.parametrize(
    ("recorded", "changed", "flags", "size"),
    [
        (SLURM, STEP_OF_ONE, "", "1 node (SLURM_STEP_NUM_NODES), 8 workers on this node (CUDA_VISIBLE_DEVICES)"),
        (SLURM, SCRIPT_OF_ONE, "", "1 node (SLURM_JOB_NUM_NODES), 8 workers on this node (SLURM_GPUS_ON_NODE)"),
        (SLURM, SCRIPT_OF_ONE, "--nnodes=1", "1 node (--nnodes), 8 workers on this node (SLURM_GPUS_ON_NODE)"),
        (SLURM, SCRIPT_OF_ONE, "--standalone", "8 workers on this node (SLURM_GPUS_ON_NODE)"),
        (SLURM, SCRIPT_OF_ONE, "--nproc-per-node=2", "2 workers on this node (--nproc-per-node)"),
        (SLURM, {**SCRIPT_OF_ONE, "PET_NPROC_PER_NODE": "4"}, "", "4 workers on this node (PET_NPROC_PER_NODE)"),
        (SLURM, {**SCRIPT_OF_ONE, "SLURM_GPUS_ON_NODE": None}, "", "1 worker on this node (default of --nproc-per-n"),
        (SLURM, SALLOC, "--cluster=slurm", "8 workers on this node (SLURM_GPUS_ON_NODE)"),
        (SLURM, {**STEP_OF_ONE, "SLURM_PTY_PORT": "4000"}, "--cluster=slurm", "8 workers on this node"),
        (SAGEMAKER, {"SM_HOSTS": '["algo-3"]'}, "", "1 node (SM_HOSTS), 8 workers on this node (SM_NUM_GPUS)"),
        (INDEXED_JOB, POD_OF_ONE, "--nnodes=1", "1 node (--nnodes), 8 workers on this node (NVIDIA_VISIBLE_DEVICES)"),
        (INDEXED_JOB, POD_OF_ONE, "--standalone --nnodes=1", "8 workers on this node (NVIDIA_VISIBLE_DEVICES)"),
        (OPEN_MPI, ONE_PROCESS, "", "1 node (OMPI_COMM_WORLD_SIZE), 1 worker on this node (default of"),
    ],
)  # fmt: skip
def test_a_single_node_uses_the_worker_count_of_the_cluster(
    recorded: Recorded, changed: dict[str, str | None], flags: str, size: str
) -> None:
    """It has the same rendezvous as without a cluster."""
    spec, printed = job(recorded, flags, **changed)
    assert (spec.rendezvous.backend, spec.rules.max_nodes, len(printed)) == ("memory", 1, 1)
    assert size in printed[0]
    assert f"{spec.workers_per_node} worker" in printed[0]


def test_a_single_node_joins_others_by_flags_with_its_own_worker_count() -> None:
    spec, printed = job(SLURM, "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=gpu07:1 --rdzv-id=two", **STEP_OF_ONE)
    assert place(spec) == ("master", "gpu07:1")
    assert (spec.rules.max_nodes, spec.workers_per_node, spec.node_rank) == (2, 8, None)
    assert printed == [
        "Slurm step 4711.0: 2 nodes (--nnodes), 8 workers on this node (CUDA_VISIBLE_DEVICES), "
        "master at gpu07:1 (--rdzv-endpoint), rdzv-id two (--rdzv-id)."
    ]


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


def test_a_pod_without_a_number_of_pods_is_refused() -> None:
    pod = Recorded("pod", INDEXED_JOB.environ, "train-2", "", "", files=INDEXED_JOB.files)
    assert "give --nnodes=N" in refused(pod)
    assert "--nnodes=3 or more" in refused(pod, "--nnodes=1")
    assert "--nnodes=3 or more" in refused(pod, "--standalone")
    assert "headless Service" in refused(Recorded("pod", INDEXED_JOB.environ, "train-2", "", ""), "--nnodes=4")


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"SLURM_NODEID": "7"}, "SLURM_NODEID is 7"),
        ({"SLURM_NODEID": "1"}, "SLURMD_NODENAME gpu10 is number 2"),
        ({"SLURMD_NODENAME": "gpu99"}, "SLURMD_NODENAME gpu99 is not in"),
        ({"SLURM_STEP_NODELIST": "gpu[07,09-10"}, "unexpected"),
        ({"SLURM_STEP_NODELIST": "gpu[07-10,12-14]"}, "names 7"),
        ({"SLURM_STEP_NUM_NODES": "x"}, "SLURM_STEP_NUM_NODES 'x' is not an integer"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "4 nodes and 2 tasks"),
        (
            {"SLURM_HET_SIZE": "2", "SLURM_STEP_NODELIST": None},
            "2 components (SLURM_HET_SIZE), and SLURM_STEP_NODELIST",
        ),
        ({"PBS_JOBID": "1", "PBS_NODEFILE": "/f"}, "PBS_NODEFILE"),
        ({"SM_HOSTS": '["gpu10.cluster","b"]'}, "different jobs"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(changed: dict[str, str | None], part: str) -> None:
    assert part in refused(SLURM, **changed)
    # A command line with all values in flags needs no cluster.
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


def test_a_named_cluster_must_be_there() -> None:
    assert "LSB_JOBID" in refused(SLURM, "--cluster=lsf")
    assert "--cluster 'condor'" in refused(SLURM, "--cluster=condor")
    two = {"SM_HOSTS": '["gpu10.cluster","b"]'}
    assert job(SLURM, "--cluster=slurm", **two)[0].rules.max_nodes == 4
    assert job(SLURM, "--cluster=sagemaker", **two)[0].rules.max_nodes == 2


HOSTS = Recorded(
    "hosts", {}, "n02.cluster", "", "", files={"hosts": "# rack 1\nn01 slots=4\nn02 slots=4\nn03 slots=2\n"}
)


def test_a_hostfile_gives_the_job() -> None:
    spec, printed = job(HOSTS, "--hostfile=hosts")
    assert (spec.rules.max_nodes, spec.node_rank, spec.workers_per_node, printed) == (3, 1, 4, [])
    assert place_of(spec).master is not None
    assert (place_of(spec).master.host, place_of(spec).master.is_host) == ("n01", False)
    assert "cannot be read" in refused(HOSTS, "--hostfile=missing")
    stranger = Recorded("hosts", {}, "n09", "", "", files=HOSTS.files)
    assert "n09, is not in --hostfile" in refused(stranger, "--hostfile=hosts")
    assert "has 3 nodes (--hostfile hosts)" in refused(HOSTS, "--hostfile=hosts --nnodes=1")


def test_a_hostfile_completes_mpi_and_must_fit_a_step() -> None:
    three = Recorded("mpi", OPEN_MPI.environ, "n03", "", "", files=HOSTS.files)
    spec, _ = job(three, "--hostfile=hosts", OMPI_COMM_WORLD_SIZE="3", OMPI_APP_CTX_NUM_PROCS="3")
    assert place(spec)[1].startswith("n01:")
    assert spec.workers_per_node == 2
    assert "names 3 hosts" in refused(three, "--hostfile=hosts")
    in_step = Recorded("step", SLURM.environ, "n02", "", "", files=HOSTS.files)
    assert "names 3 hosts, and Slurm step 4711.0 has 4 nodes" in refused(in_step, "--hostfile=hosts")


def test_mpi_takes_precedence_inside_the_job_of_a_scheduler() -> None:
    """PBS writes its file on the first node only, and a step of Slurm may be that of mpirun's daemons."""
    in_pbs = Recorded("mpi", OPEN_MPI.environ, "n03", "", "")
    spec, _ = job(in_pbs, PBS_JOBID="81.head", PBS_NODEFILE="/not/here")
    assert (place(spec)[1].split(":")[0], spec.run_id) == ("192.0.2.2", "81.head")
    daemons = {"SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NODELIST": "gpu[09-10,12]", "SLURM_NODEID": "1"}
    spec, _ = job(in_pbs, **{**SLURM.environ, **daemons})
    assert (place(spec)[1].split(":")[0], spec.run_id, spec.rules.max_nodes) == ("gpu07", "4711", 4)


def test_the_first_pod_of_an_operator_uses_its_own_name_as_the_endpoint() -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "x", "MASTER_ADDR": "localhost", "RANK": "0", "WORLD_SIZE": "2"}
    first = Recorded("first", pod, "job-master-0", "", "")
    assert place(job(first)[0]) == ("master", "job-master-0:29400")
    assert "does not say where its nodes meet" in refused(first, RANK="1")


def test_the_ranks_of_a_worker_are_not_those_of_a_node() -> None:
    worker = {"KUBERNETES_SERVICE_HOST": "x", "MASTER_ADDR": "a", "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8"}
    assert job(Recorded("worker", worker, "pod", "", ""))[0].rendezvous.backend == "memory"


def test_mpi_without_hosts_needs_a_hostfile() -> None:
    assert "--hostfile" in refused(OPEN_MPI, OMPI_MCA_orte_hnp_uri=None)
    assert "does not say how many" in refused(Recorded("pmi", {"PMI_SIZE": "2", "PMI_RANK": "0"}, "n01", "", ""))
