r"""The verbatim command blocks of the published documents that start this kind of system or inject faults, and the
environments of their pods. `docs/published-experiments.md` lists the documents by the same names.
"""

from __future__ import annotations

CHAOS_TUTORIAL = {
    "preempted": """\
dlrover-run --network-check --exclude-straggler --nnodes=3:$WORKER_NUM \\
        --nproc_per_node=2 --max_restarts=3  --rdzv_conf pend_timeout=600 \\
        examples/pytorch/mnist/cnn_train.py --num_epochs 5 \\
        --training_data /data/mnist_png/training/ \\
        --validation_data /data/mnist_png/testing/""",
    "straggler": """\
(bash examples/pytorch/mnist/start_chaos.sh cpu-overload &) && \\
        dlrover-run --network-check --exclude-straggler --nnodes=3:$WORKER_NUM \\
        --nproc_per_node=2 --max_restarts=3  --rdzv_conf pend_timeout=600 \\
        examples/pytorch/mnist/cnn_train.py --num_epochs 5 \\
        --training_data /data/mnist_png/training/ \\
        --validation_data /data/mnist_png/testing/""",
    "fault node": """\
(bash examples/pytorch/mnist/start_chaos.sh kill-process &) && \\
        dlrover-run --network-check --exclude-straggler --nnodes=3:$WORKER_NUM \\
        --nproc_per_node=2 --max_restarts=3  --rdzv_conf pend_timeout=600 \\
        examples/pytorch/mnist/cnn_train.py --num_epochs 5 \\
        --training_data /data/mnist_png/training/ \\
        --validation_data /data/mnist_png/testing/""",
}
"""Document 001, "Fault-tolerance and Elasticity Experiments of DLRover ElasticJob"."""

CHAOS_BY_HAND = "sh examples/pytorch/mnist/start_chaos.sh cpu-overload "
"""The command that document 001 runs in a pod."""

CHAOS_ARTICLE = {
    "preempted": """\
dlrover-run --network-check --exclude-straggler --nnodes=3:$WORKER_NUM \\
        --nproc_per_node=2 --max_restarts=3 --rdzv_conf pend_timeout=600 \\
        examples/pytorch/mnist/cnn_train.py --num_epochs 5 \\
        --training_data /data/mnist_png/training/ \\
        --validation_data /data/mnist_png/testing/""",
    **{
        name: f"""\
(bash examples/pytorch/mnist/start_chaos.sh {verb} & amp;) & amp; & amp; \\
        dlrover-run --network-check --exclude-straggler --nnodes=3:$WORKER_NUM \\
        --nproc_per_node=2 --max_restarts=3 --rdzv_conf pend_timeout=600 \\
        examples/pytorch/mnist/cnn_train.py --num_epochs 5 \\
        --training_data /data/mnist_png/training/ \\
        --validation_data /data/mnist_png/testing/"""
        for name, verb in {
            "straggler": "cpu-overload",
            "fault node": "kill-process",
            "network, process": "no-chaos",
        }.items()
    },
}
"""Document 002, "Use ChaosBlade to verify DLRover's resiliency"; on its page each `&` is garbled."""

KUBEDL_ARGS = [
    "/workspace/examples/imagenet/main.py",
    "--arch=resnet50",
    "--epochs=20",
    "--batch-size=64",
    "--print-freq=50",
    "--workers=0",
    "/workspace/data/tiny-imagenet-200",
    "--checkpoint-file=/mnt/blob/data/checkpoint.pth.tar",
]
"""The container's arguments in document 004, "Run a Torch Elastic Job with KubeDL Operator"."""

KUBEDL_FLAGS = [
    "--rdzv_backend=etcd",
    "--rdzv_endpoint=etcd-service:2379",
    "--rdzv_id=resnet",
    "--nproc_per_node=1",
    "--nnodes=1:3",
]
"""The arguments that the operator prepends for the document's `elasticPolicy`."""

KUBEDL_POD = {"MASTER_ADDR": "resnet-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1"}
"""The variables that it sets in the pod of worker 0."""

TF_WORKER_POD = {
    "DLROVER_MASTER_ADDR": "elasticjob-deepctr-auto-scaling-job-dlrover-master:50001",
    "WORKER_TYPE": "worker",
    "WORKER_ID": "2",
    "WORKER_RANK": "0",
    "WORKER_NUM": "1",
    "TF_CONFIG": '{"cluster":{"worker":["deepctr-auto-scaling-job-edljob-worker-0:3333"],'
    '"ps":["deepctr-auto-scaling-job-edljob-ps-0.dlrover.svc:2222"],'
    '"chief":["deepctr-auto-scaling-job-edljob-chief-0:3333"]},"task":{"type":"worker","index":0}}',
}
"""The environment of worker 0's replacement in document 000, as `kubectl describe` shows it."""


MASTER = "elasticjob-chaos-test-dlrover-master:50001"


def torch_pod(worker_id: int, rank: int | None = None, master: str = MASTER) -> dict[str, str]:
    """Return the environment of a pod of four in documents 001 and 002; a replacement has the rank of another pod."""
    return {
        "DLROVER_MASTER_ADDR": master,
        "WORKER_TYPE": "worker",
        "WORKER_ID": str(worker_id),
        "WORKER_RANK": str(worker_id if rank is None else rank),
        "WORKER_NUM": "4",
    }


def typed(text: str, paths: dict[str, str]) -> str:
    """Return a block with its `&` repaired, and other paths in place of those of the image."""
    text = text.replace("& amp; & amp;", "&&").replace("& amp;", "&")
    for published, here in paths.items():
        text = text.replace(published, here)
    return text
