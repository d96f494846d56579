"""The manifests in examples/kubernetes and in the pages are valid by the published schemas, consistent, and accepted.

`kubernetes_schemas.json` has the schemas without descriptions, and of volumes only the common kinds. From: the OpenAPI
definitions of Kubernetes 1.34; the CustomResourceDefinitions of JobSet 0.12.0, Kubeflow Training Operator 1.9.0,
Kubeflow Trainer 2.3.0 and KubeDL 0.5.0. As with `kubectl apply --validate=strict`, an unknown field is an error. The
rules in CEL are not evaluated.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.doc_pages import PAGES, blocks
from support.places import place_of

from dlrover_run.cli import parse
from dlrover_run.environment.records import Context
from dlrover_run.exit_reasons import RETRIED
from dlrover_run.spec import JobSpec
from tf_ps_runner import cli as tf_ps_run

jsonschema = pytest.importorskip("jsonschema")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
SCHEMAS = json.loads((Path(__file__).parent / "kubernetes_schemas.json").read_text())

OF_KUBEDL = SCHEMAS["kinds"]["training.kubedl.io/v1alpha1/PyTorchJob"]["properties"]["spec"]["properties"]
OF_KUBEDL["enableElastic"] = {"type": "boolean"}
OF_KUBEDL["elasticPolicy"] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "rdzvBackend": {"type": "string"},
        "rdzvEndpoint": {"type": "string"},
        "minReplicas": {"type": "integer"},
        "maxReplicas": {"type": "integer"},
        "nProcPerNode": {"type": "integer"},
    },
}
"""No release of KubeDL has these fields of the published torchelastic-resnet.yaml; their schemas follow its text."""

FIRST_SUCCESS = {"rules": [{"succeededCount": 1}]}
"""The success policy of a Job that succeeds with its first pod."""

GRACE = 30
"""The grace period in seconds of a pod without terminationGracePeriodSeconds."""

Manifest = dict[str, Any]


def documents(file: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(file.read_text()))


def problems(document: Manifest) -> list[str]:
    """The reasons for which the API server would reject a document."""
    kind = f"{document['apiVersion']}/{document['kind']}"
    schema = {**SCHEMAS["kinds"][kind], "$defs": SCHEMAS["$defs"]}
    found = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in found]


GROUPS = {file.stem: documents(file) for file in FILES} | {
    block.place: found
    for page in PAGES
    for block in blocks(page, "yaml")
    if (found := [document for document in yaml.safe_load_all(block.text) if "kind" in document])
}
"""The documents that are applied together: those of a file, or of a block of a page."""

ALL = [
    pytest.param(document, id=f"{name}-{document['kind']}-{document['metadata']['name']}")
    for name, group in GROUPS.items()
    for document in group
]


@pytest.mark.parametrize("document", ALL)
def test_a_manifest_is_valid(document: Manifest) -> None:
    assert problems(document) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "completionMode"), 3),
        (("spec", "compltions"), 4),
        (("spec", "template", "spec", "containers", 0, "comand"), ["dlrover-run"]),
        (("spec", "template", "spec", "containers", 0, "command"), "dlrover-run train.py"),
        (("spec", "podFailurePolicy", "rules", 1, "onExitCodes", "values"), ["1"]),
    ],
)
def test_an_invalid_manifest_is_detected(path: tuple[str | int, ...], value: object) -> None:
    _, job = documents(ROOT / "examples" / "kubernetes" / "job.yaml")
    inner: Any = job
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    assert problems(job)


# --- pods


def parts_with(key: str, document: Any) -> Iterator[Manifest]:
    """The parts of a manifest that have this key, at any depth."""
    if isinstance(document, dict):
        if key in document:
            yield document
        for value in document.values():
            yield from parts_with(key, value)
    elif isinstance(document, list):
        for value in document:
            yield from parts_with(key, value)


pods, jobs = partial(parts_with, "containers"), partial(parts_with, "completions")
"""The specs of all pods, and of all Jobs, of a manifest."""


def variables_of(container: Manifest) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container.get("env", [])}


def argv_of(container: Manifest) -> list[str]:
    """The launcher's command line; a shell's is expanded with the variables of the container."""
    words: list[str] = [*container["command"], *container.get("args", [])]
    if words[:2] == ["/bin/bash", "-c"]:
        line = re.sub(r".*\bexec ", "", words[2])
        for name, value in variables_of(container).items():
            line = line.replace(f"${name}", value)
        words = shlex.split(line)
    return words


LAUNCHES = [
    pytest.param(group, document, pod, id=f"{group}-{document['metadata']['name']}-{number}")
    for group, made in GROUPS.items()
    for document in made
    for number, pod in enumerate(pods(document))
    if argv_of(pod["containers"][0])[0] in ("dlrover-run", "tf-ps-run")
]

OPERATORS: dict[str, dict[str, str]] = {
    "PyTorchJob": {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "train-worker-0:23456",
        "PET_RDZV_ID": "train",
        "PET_NNODES": "2:4",
        "PET_NPROC_PER_NODE": "1",
        "PET_MAX_RESTARTS": "3",
        "MASTER_ADDR": "train-worker-0",
        "MASTER_PORT": "23456",
    },
    "TrainJob": {
        "PET_NNODES": "4",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29400",
        "JOB_COMPLETION_INDEX": "1",
    },
    "Job": {"JOB_COMPLETION_INDEX": "1"},
    "JobSet": {"JOB_COMPLETION_INDEX": "1", "JOBSET_NAME": "train", "REPLICATED_JOB_NAME": "node", "JOB_INDEX": "0"},
}
OPERATORS["ClusterTrainingRuntime"] = OPERATORS["TrainJob"]
"""The variables that the controllers set in a pod; the kubelet adds KUBERNETES_SERVICE_HOST."""

KUBEDL = [
    "--rdzv_backend=c10d",
    "--rdzv_endpoint=etcd-service:2379",
    "--rdzv_id=resnet",
    "--nproc_per_node=1",
    "--nnodes=1:3",
]
"""The arguments that KubeDL prepends; with c10d in place of etcd, whose client not every environment has."""


@pytest.fixture(autouse=True)
def _image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The working directory of the image."""
    for name in ("examples", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("group", "document", "pod"), LAUNCHES)
def test_the_command_of_a_pod_starts_the_whole_job(group: str, document: Manifest, pod: Manifest) -> None:
    container = pod["containers"][0]
    words = argv_of(container)
    kind = "KubeDL" if group == "kubedl-resnet" else document["kind"]
    if kind == "KubeDL":
        words = [*container["command"], *KUBEDL, *container["args"]]
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", **OPERATORS.get(kind, {}), **variables_of(container)}
    if words[0] == "tf-ps-run":
        assert tf_ps_run.parse(words[1:], environ)
        return
    name = "train-node-0-1" if kind == "JobSet" else "train-1"
    hosts = f"10.1.2.3\t{name}.train.default.svc.cluster.local\t{name}\n"
    context = Context(hostname=name, read=lambda path: hosts if path == "/etc/hosts" else None, interactive=False)
    warnings: list[str] = []
    spec = parse(
        words[1:],
        environ,
        count_workers=lambda kind, environ: 1,
        warn=warnings.append,
        inform=lambda line: None,
        context=context,
    )
    assert warnings == []
    assert isinstance(spec, JobSpec)
    for job in jobs(document):
        assert job["completions"] == job["parallelism"] == spec.rules.max_nodes
        # A pod that is replaced at the end finds no node, and would fail a Job whose training has succeeded.
        assert (job.get("successPolicy") == FIRST_SUCCESS) == (spec.rules.min_nodes < spec.rules.max_nodes)
        if any(word.startswith("--rdzv-endpoint") for word in words):
            assert place_of(spec).master is not None
            assert place_of(spec).master.host == f"{document['metadata']['name']}-0.{pod['subdomain']}"
    assert spec.rules.max_nodes > 1
    if (gpus := container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu")) is not None:
        assert spec.workers_per_node == gpus
    for replicas in parts_with("restartPolicy", document):
        assert replicas["restartPolicy"] != "ExitCode" or spec.exit_codes == "kubernetes"
    assert spec.shutdown_timeout < pod.get("terminationGracePeriodSeconds", GRACE)


@pytest.mark.parametrize("made", GROUPS.values(), ids=GROUPS)
def test_what_a_manifest_refers_to_exists(made: list[Manifest]) -> None:
    """Services select pods of the group, subdomains are those of services, and `checkpoints.yaml` makes the claims."""
    services = {service["metadata"]["name"]: service["spec"] for service in made if service["kind"] == "Service"}
    labels = [{"job-name": one["metadata"]["name"], **_labels(one)} for one in made]
    for service in services.values():
        assert any(service["selector"].items() <= label.items() for label in labels)
    claims = {one["metadata"]["name"] for one in GROUPS["checkpoints"]}
    for pod in (pod for document in made for pod in pods(document)):
        assert pod.get("subdomain") in {None, *services}
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes.keys()
            address = variables_of(container).get("DLROVER_MASTER_ADDR")
            assert address is None or address.partition(":")[0] in services
        assert {volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values()} <= claims


def _labels(document: Manifest) -> dict[str, str]:
    """The labels of the pods of a manifest."""
    if document["kind"] == "Pod":
        return dict(document["metadata"].get("labels", {}))
    return dict(document.get("spec", {}).get("template", {}).get("metadata", {}).get("labels", {}))


def test_a_policy_for_failed_pods_fits_the_exit_codes() -> None:
    """Kubernetes requires `restartPolicy: Never` with it."""
    found = [job for group in GROUPS.values() for job in parts_with("podFailurePolicy", group)]
    assert len(found) > 1
    for job in found:
        pod = job["template"]["spec"]
        assert pod["restartPolicy"] == "Never"
        disrupted, failed = job["podFailurePolicy"]["rules"]
        assert disrupted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        assert failed == {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": sorted(RETRIED)}}
        (container,) = pod["containers"]
        variables = variables_of(container)
        assert variables.get("PET_EXIT_CODES") == "kubernetes" or "--exit-codes=kubernetes" in argv_of(container)


def test_the_image_has_what_the_manifests_use() -> None:
    """The Dockerfile installs extras that there are, copies all files, and is named as in the manifests."""
    text = (ROOT / "examples" / "Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    chosen = {*re.findall(r"(?:ARG |--build-arg )EXTRA=(\w+)", text), *re.findall(r"\$EXTRA,(\w+)", text)}
    assert chosen == {"mnist", "tf", "etcd"}
    assert chosen <= extras.keys()
    assert re.search(r"^COPY \. \.$", text, re.MULTILINE)
    ignored = (ROOT / "examples" / "Dockerfile.dockerignore").read_text()
    assert all((ROOT / kept).exists() for kept in re.findall(r"^!(.+)$", ignored, re.MULTILINE))
    for script in re.findall(r"python (\S+\.py)", text):
        assert (ROOT / script).is_file()
    ours = set(re.findall(r"-t (\S+)", text))
    images = {
        container["image"] for file in FILES for pod in pods(GROUPS[file.stem]) for container in pod["containers"]
    }
    assert {image for image in images if "/" not in image} == ours
