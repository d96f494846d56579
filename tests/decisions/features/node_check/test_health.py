"""The inspection of a machine before its devices are tried: GPUs with a simulated NVML, limits also with real ones."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_nvml import FOUR, FakeNvml, FakeNvmlError
from support.golden import assert_screens

from dlrover_run.devices import NodeProblem
from dlrover_run.features.node_check.decision.model import MAX_PROBLEM
from dlrover_run.features.node_check.node.gpus import (
    MAX_MEMORY_IN_USE,
    XidErrors,
    find_gpu_problems,
    parse_xids,
    read_kernel_log,
)
from dlrover_run.features.node_check.node.machine import (
    MIN_DISK_BYTES,
    MIN_INODES,
    MIN_OPEN_FILES,
    PIDS_PER_WORKER,
    SHM_PER_WORKER,
    LimitSources,
    find_limit_problems,
    find_node_problems,
)

GOLDEN = Path(__file__).parent
GIB = 1 << 30
UNSUPPORTED = FakeNvmlError(3, "Not Supported")


@dataclass
class HealthNvml(FakeNvml):
    """NVML with the health of its GPUs, by UUID; a value that is not set is that of a healthy, current GPU."""

    used: dict[str, int] = field(default_factory=dict)
    users: dict[str, list[tuple[int, int | None]]] = field(default_factory=dict)
    ecc: dict[str, int] = field(default_factory=dict)
    rows: dict[str, tuple[int, int, int, int] | None] = field(default_factory=dict)
    pages_pending: set[str] = field(default_factory=set)
    recovery: dict[str, int | None] = field(default_factory=dict)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(used=self.used.get(handle, GIB // 2), total=80 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Sequence[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.users.get(handle, [])]

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, error_type: int, counter_type: int) -> int:
        assert (error_type, counter_type) == (1, 0), "uncorrected ones since the driver was loaded"
        return self.ecc.get(handle, 0)

    def nvmlDeviceGetRemappedRows(self, handle: Any) -> Sequence[int]:
        rows = self.rows.get(handle, (0, 0, 0, 0))
        if rows is None or handle in self.mig:
            raise UNSUPPORTED
        return rows

    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: Any) -> int:
        return 1 if handle in self.pages_pending else 0

    def nvmlDeviceGetFieldValues(self, handle: Any, fields: Sequence[int]) -> Sequence[Any]:
        assert fields == [230]
        action = self.recovery.get(handle, 0)
        value = SimpleNamespace(uiVal=0 if action is None else action)
        return [SimpleNamespace(nvmlReturn=3 if action is None else 0, value=value)]


class SilentNvml(HealthNvml):
    """An old GPU with an old driver, which supports none of the queries."""

    def refuse(self, *_: Any) -> Any:
        raise UNSUPPORTED

    nvmlDeviceGetMemoryInfo = nvmlDeviceGetComputeRunningProcesses = nvmlDeviceGetTotalEccErrors = refuse
    nvmlDeviceGetRemappedRows = nvmlDeviceGetRetiredPagesPendingStatus = nvmlDeviceGetFieldValues = refuse


def problems(
    nvml: HealthNvml | None,
    workers: int = 4,
    gpu_each: bool = False,
    dev: Path = Path("/nowhere"),
    log: str = "",
    **env: str,
) -> list[NodeProblem]:
    found = list(find_gpu_problems(workers, env, gpu_each, nvml, dev, lambda: log))
    for problem in found:
        assert "\n" not in problem.text
        assert not problem.text.endswith(".")
        assert ": " in problem.text, "what is wrong, then what to do"
        assert len(problem.text) <= MAX_PROBLEM
    return found


def only(found: list[NodeProblem], *words: str, severe: bool) -> None:
    """Assert that there is one problem, with this text and this severity."""
    assert len(found) == 1, found
    assert [word for word in words if word not in found[0].text] == []
    assert found[0].severe is severe, found


def test_a_machine_without_a_driver_is_well_and_loads_no_nvml(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from dlrover_run.features.node_check.node.gpus import find_gpu_problems\n"
        f"print(list(find_gpu_problems(2, {{}}, dev=Path({str(tmp_path)!r}))))\n"
        "print([name for name in ('pynvml', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n"


INIT_FAILED = FakeNvmlError(18, "Driver/library version mismatch")
NO_LIBRARY = FakeNvmlError(12, "NVML Shared Library Not Found")
LOST = HealthNvml(FOUR, lost="GPU-bb33")
SEE = "CUDA_VISIBLE_DEVICES"

PROBLEMS: list[tuple[str, HealthNvml | None, dict[str, Any], bool]] = [
    ("no driver, and GPUs are named", None, {SEE: "0,1"}, False),
    ("no driver, and each worker needs a GPU", None, {"gpu_each": True}, True),
    ("half a driver, and GPUs are named", HealthNvml(init_error=NO_LIBRARY), {SEE: "0"}, True),
    ("the driver does not answer", HealthNvml(FOUR, init_error=INIT_FAILED), {}, False),
    ("the driver does not answer, and GPUs are named", HealthNvml(FOUR, init_error=INIT_FAILED), {SEE: "0"}, True),
    ("the driver does not answer, and each worker needs a GPU", HealthNvml(FOUR, init_error=INIT_FAILED),
     {"gpu_each": True}, True),
    ("fewer GPUs than are named", HealthNvml(FOUR[:3]), {SEE: "0,1,2,3"}, True),
    ("fewer GPUs than workers that need one each", HealthNvml(FOUR[:3]), {"gpu_each": True}, True),
    ("fewer GPUs than workers", HealthNvml(FOUR[:3]), {}, False),
    ("fewer visible GPUs than workers", HealthNvml(FOUR), {SEE: "0,1"}, False),
    ("no visible GPU for a worker that needs one", HealthNvml(FOUR), {"workers": 1, "gpu_each": True, SEE: ""}, True),
    ("a name that no GPU has", HealthNvml(FOUR[:1]), {"workers": 1, SEE: "GPU-zz99"}, True),
    ("a lost GPU", LOST, {}, True),
    ("a lost GPU that is named by number", LOST, {"workers": 1, SEE: "2"}, True),
    ("a lost GPU that is named by UUID", LOST, {"workers": 1, SEE: "GPU-bb33"}, True),
    *((f"the driver wants action {action} first", HealthNvml(FOUR, recovery={"GPU-aa22": action}), {}, True)
      for action in (1, 2, 3, 6, 7)),
    ("rows that could not be replaced", HealthNvml(FOUR, rows={"GPU-aa11": (0, 8, 0, 1)}), {}, True),
    ("a reset for rows that may wait", HealthNvml(FOUR, rows={"GPU-aa11": (0, 1, 1, 0)}), {}, False),
    ("a reset for pages that may wait", HealthNvml(FOUR, pages_pending={"GPU-cc44"}), {}, False),
    *((f"3 uncorrected errors, rows {rows}, action {action}",
       HealthNvml(FOUR, ecc={"GPU-aa22": 3}, rows={"GPU-aa22": rows}, recovery={"GPU-aa22": action}), {}, severe)
      for rows, action, severe in (((0, 1, 0, 0), 0, False), ((0, 1, 0, 0), None, False), (None, 0, False),
                                   (None, None, True))),
    ("another process fills a GPU",
     HealthNvml(FOUR, used={"GPU-aa11": 61 * GIB}, users={"GPU-aa11": [(7, GIB), (4711, 60 * GIB), (8, None)]}), {},
     False),
    ("an unknown process fills a GPU",
     HealthNvml(FOUR, used={"GPU-aa11": 61 * GIB}, users={"GPU-aa11": []}), {}, False),
    ("more workers than the one MIG device that CUDA shows", HealthNvml(["GPU-a"], mig={"GPU-a": ["MIG-1", "MIG-2"]}),
     {"workers": 2, SEE: "MIG-1,MIG-2"}, False),
    ("errors of the past on a MIG GPU",
     HealthNvml(["GPU-a"], mig={"GPU-a": ["MIG-1"]}, ecc={"GPU-a": 1}, recovery={"GPU-a": None}),
     {"workers": 1}, False),
]  # fmt: skip


def test_the_problems_of_gpus_are_those_of_the_golden_file() -> None:
    found = {title: problems(nvml, **given) for title, nvml, given, _ in PROBLEMS}
    severe = {title: [problem.severe for problem in one] for title, one in found.items()}
    assert severe == {title: [severe] for title, *_, severe in PROBLEMS}
    assert_screens(GOLDEN / "gpu_problems.txt", {title: one.text for title, (one,) in found.items()})


HEALTHY: list[tuple[str, HealthNvml | None, dict[str, Any]]] = [
    ("all GPUs", HealthNvml(FOUR), {}),
    ("some GPUs", HealthNvml(FOUR), {"workers": 2, "gpu_each": True, SEE: "2,3"}),
    ("old GPUs that report nothing", SilentNvml(FOUR), {}),
    ("no driver, and GPUs are hidden", None, {SEE: ""}),
    ("half a driver, and no GPU is expected", HealthNvml(init_error=NO_LIBRARY), {}),
    *((f"GPUs are hidden by {setting!r}", HealthNvml(FOUR), {"workers": 1, SEE: setting})
      for setting in ("", "-1", "NoDevFiles", "0,-1,1")),
    ("workers on CPUs beside no GPU", HealthNvml([]), {}),
    ("a lost GPU that the job does not see", LOST, {"workers": 3, SEE: "0,1,3"}),
    *((f"the driver wants action {action} some time", HealthNvml(FOUR, recovery={"GPU-aa22": action}), {})
      for action in (0, 4, 5, None, 99)),
    ("a GPU that is just not full", HealthNvml(FOUR, used={"GPU-aa11": int(80 * GIB * MAX_MEMORY_IN_USE)}), {}),
]  # fmt: skip


@pytest.mark.parametrize(("nvml", "given"), [row[1:] for row in HEALTHY], ids=[row[0] for row in HEALTHY])
def test_no_problem_is_found(nvml: HealthNvml | None, given: dict[str, Any]) -> None:
    before = nvml.shutdowns if nvml is not None else 0
    assert problems(nvml, **given) == []
    assert nvml is None or nvml.init_error or nvml.shutdowns == before + 1


def test_gpus_that_the_job_does_not_see_are_not_its_concern() -> None:
    nvml = HealthNvml(
        FOUR,
        used={"GPU-aa11": 79 * GIB},
        ecc={"GPU-aa11": 1},
        rows={"GPU-aa11": (0, 0, 0, 1)},
        recovery={"GPU-aa11": 1},
    )
    assert problems(nvml, 2, CUDA_VISIBLE_DEVICES="1,2", log="NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off") == []
    assert len(problems(nvml, 2, CUDA_VISIBLE_DEVICES="1,0")) == 4


def test_a_mig_device_is_well_and_has_the_errors_of_its_gpu() -> None:
    nvml = HealthNvml(["GPU-a", "GPU-b"], mig={"GPU-b": ["MIG-1", "MIG-2"]}, used={"GPU-b": 79 * GIB})
    assert problems(nvml, 1) == []
    assert problems(nvml, 1, CUDA_VISIBLE_DEVICES="MIG-2,MIG-1") == []
    nvml.recovery["GPU-b"] = 1
    only(problems(nvml, 1, CUDA_VISIBLE_DEVICES="MIG-2"), "GPU 1 (0000:1b:00.0) has failed", severe=True)
    assert problems(nvml, 1, CUDA_VISIBLE_DEVICES="GPU-a") == []


KERNEL_LOG = """\
<6>[   12.500000] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.158.01
<3>[ 1000.250000] NVRM: Xid (PCI:0000:1a:00): 31, pid=77, name=python, Ch 00000010, MMU Fault
<3>[ 1500.000000] NVRM: Xid (PCI:0000:1b:00): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked
<3>[ 2000.000000] NVRM: Xid (PCI:0000:1b:00): 94, pid=1896, name=python, Contained: CE User Channel (0x9)
<3>[ 2000.750000] NVRM: Xid (PCI:0000:1B:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected
[ 2001.000000] NVRM: Xid (PCI:0000:1b:00): 45, pid=1896, name=python, Ch 00000009
NVRM: Xid (PCI:0001:05:00 GPU-I:01): 79, GPU has fallen off the bus.
NVRM: Xid (0000:03:00): 48, An uncorrectable double bit error
somebody writes Xid 79 here
"""


def test_the_errors_of_each_gpu_are_found_in_the_kernels_log() -> None:
    assert parse_xids(KERNEL_LOG) == {
        "0000:1b:00": XidErrors(2, 74, 2000.75),
        "0001:05:00": XidErrors(1, 79, None),
        "0000:03:00": XidErrors(1, 48, None),
    }
    assert parse_xids("") == {}


def test_an_error_in_the_kernels_log_is_a_warning_as_the_gpu_may_have_been_reset_since() -> None:
    only(
        problems(HealthNvml(FOUR), log=KERNEL_LOG),
        "has 2 errors of GPU 1 (0000:1b:00.0)",
        "Xid 74, ",
        "h ago",
        severe=False,
    )


def test_the_kernels_log_is_read_up_to_its_end_or_not_at_all() -> None:
    try:
        dmesg = subprocess.run(["dmesg", "--syslog", "--notime"], capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        pytest.skip("this machine has no dmesg")
    log = read_kernel_log()
    assert [line for line in dmesg.stdout.splitlines()[-1:] if line not in log] == []
    assert log == "" or dmesg.returncode == 0


def test_the_severe_come_first() -> None:
    nvml = HealthNvml(FOUR, used={"GPU-aa11": 79 * GIB}, recovery={"GPU-cc44": 1})
    found = find_node_problems(4, None, {}, nvml=nvml, dev=Path("/nowhere"))
    assert [problem.severe for problem in found][:2] == [True, False]
    assert any("/nowhere/shm cannot be used" in problem.text for problem in found)


def test_this_machine_is_looked_at_without_a_fault() -> None:
    assert [problem for problem in find_node_problems(1, None, {}) if problem.severe] == []


SPACIOUS = os.statvfs_result((4096, 4096, 1 << 30, 1 << 29, 1 << 29, 1 << 20, 1 << 20, 1 << 20, 0, 255))


def machine(limit: int | None = 20000, proc: Path = Path("/nowhere"), **spaces: Any) -> LimitSources:
    """A machine with enough space, except for the folders whose path contains a key of this mapping."""

    def statvfs(path: str) -> os.statvfs_result:
        return next((space for word, space in spaces.items() if word in path), SPACIOUS)

    return LimitSources(statvfs, lambda: limit, proc)


def short(machine: LimitSources, workers: int = 2, log_dir: str | None = None, **environ: str) -> list[str]:
    found = list(find_limit_problems(workers, log_dir, environ, Path("/dev"), machine))
    assert [problem for problem in found if problem.severe] == []
    return [problem.text for problem in found]


def space(free: int, whole: int = 100 * GIB, files: int = 1 << 20, files_free: int = 1 << 20, flags: int = 0) -> Any:
    return os.statvfs_result((1, 1, whole, free, free, files, files_free, files_free, flags, 255))


def test_nothing_is_short_on_a_spacious_machine() -> None:
    assert short(machine()) == []
    assert short(machine(limit=None)) == []
    assert short(machine(limit=MIN_OPEN_FILES)) == []
    assert short(machine(shm=space(2 * SHM_PER_WORKER))) == []
    assert short(machine(tmp=space(MIN_DISK_BYTES, files_free=MIN_INODES))) == []
    assert short(machine(tmp=space(MIN_DISK_BYTES, files=0, files_free=0))) == [], "btrfs counts no inodes"


def test_what_is_short_is_that_of_the_golden_file(tmp_path: Path) -> None:
    full = machine(**{str(tmp_path): space(300 << 20)})
    groups = {version: group(tmp_path / str(version), version, "20", "100") for version in (1, 2)}
    texts = {
        "the shared memory of a container": short(machine(shm=space(64 << 20, 64 << 20))),
        "shared memory that is full of leftovers": short(machine(shm=space(SHM_PER_WORKER, 24 * GIB))),
        "open files": short(machine(limit=256)),
        "a full disk with the logs, which is reported once": short(
            full, log_dir=str(tmp_path / "not" / "there" / "yet"), TMPDIR=str(tmp_path)
        ),
        "a full disk with temporary files": short(full, TMPDIR=str(tmp_path)),
        **{f"processes, control group v{version}": short(machine(proc=proc)) for version, proc in groups.items()},
    }
    assert {title: len(found) for title, found in texts.items()} == dict.fromkeys(texts, 1)
    assert_screens(
        GOLDEN / "machine_problems.txt", {title: text.replace(str(tmp_path), "DIR") for title, (text,) in texts.items()}
    )


def test_the_real_limit_of_open_files_is_read() -> None:
    code = (
        "from dlrover_run.features.node_check.node.machine import find_node_problems\n"
        "print([found.text for found in find_node_problems(1, None, {}) if 'files open' in found.text])"
    )

    def warnings(limit: int) -> str:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard)),
        )
        return done.stdout.strip()

    assert "may have 300 files open" in warnings(300)
    assert warnings(2000) == "[]"


def group(root: Path, version: int, current: str, most: str) -> Path:
    """A /proc of a process in the control group `/a/b`, whose files are under `root`."""
    here = root / "cg" / "a" / "b"
    here.mkdir(parents=True)
    (here / "pids.current").write_text(current + "\n")
    (here / "pids.max").write_text(most + "\n")
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    kind = "cgroup2 cgroup rw" if version == 2 else "cgroup cgroup rw,pids"
    (proc / "self" / "mountinfo").write_text(f"30 25 0:26 / {root / 'cg'} rw shared:4 - {kind}\n")
    (proc / "self" / "cgroup").write_text("0::/a/b\n" if version == 2 else "8:pids:/a/b\n0::/\n")
    return proc


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("most", ["max", str(20 + 2 * PIDS_PER_WORKER)])
def test_enough_processes_are_not_reported(version: int, most: str, tmp_path: Path) -> None:
    assert short(machine(proc=group(tmp_path, version, "20", most))) == []


def test_the_tightest_of_the_groups_above_counts(tmp_path: Path) -> None:
    proc = group(tmp_path, 2, "20", "max")
    (tmp_path / "cg" / "a" / "pids.current").write_text("90\n")
    (tmp_path / "cg" / "a" / "pids.max").write_text("100\n")
    (tmp_path / "cg" / "pids.current").write_text("5\n")
    (tmp_path / "cg" / "pids.max").write_text("60\n")
    (text,) = short(machine(proc=proc))
    assert "may have 100 processes and threads and has 90" in text


LOOK = """
import json, os, subprocess, sys
from pathlib import Path
from dlrover_run.features.node_check.node.machine import find_limit_problems
for folder, options in json.loads(sys.argv[1]).items():
    os.makedirs(folder)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)
dev, logs, temporary = sys.argv[2:]
print(json.dumps([a.text for a in find_limit_problems(1, logs, {"TMPDIR": temporary}, Path(dev))]))
"""


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., list[str]]:
    """Inspects real tmpfs file systems, mounted for one process in a mount namespace of its own."""
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        allowed = subprocess.run([*inside, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("no user may mount a file system on this machine")

    def see(**mounts: str) -> list[str]:
        folders = {str(tmp_path / name.replace("_", "/")): options for name, options in mounts.items()}
        places = [str(tmp_path / name) for name in ("dev", "logs", "temporary")]
        command = [*inside, sys.executable, "-c", LOOK, json.dumps(folders), *places]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found: list[str] = json.loads(done.stdout)
        return [text for text in found if str(tmp_path) in text]

    return see


def test_real_file_systems_that_are_small_are_reported(look: Callable[..., list[str]], tmp_path: Path) -> None:
    found = look(dev_shm="size=64m", logs="size=8m", temporary="size=2g,nr_inodes=100")
    assert found[0].startswith(f"{tmp_path}/dev/shm has 64 MiB free of 64 MiB")
    assert found[1].startswith(f"the disk of {tmp_path}/logs has 8 MiB free of 8 MiB, and logs go there")
    assert found[2].startswith(f"the disk of {tmp_path}/temporary has room for 99 more files of 100")
    assert len(found) == 3


def test_a_real_file_system_that_is_read_only_is_reported(look: Callable[..., list[str]], tmp_path: Path) -> None:
    found = look(dev_shm="size=1g", logs="size=2g,ro", temporary="size=2g")
    assert [text.partition(",")[0] for text in found] == [f"{tmp_path}/logs is mounted read-only"]


def test_real_file_systems_with_room_are_well(look: Callable[..., list[str]]) -> None:
    assert look(dev_shm="size=1g", logs="size=2g", temporary="size=2g") == []
