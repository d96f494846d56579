"""Counting workers by device: how CUDA reads its variable, failures of NVML, and Intel GPUs in a simulated sysfs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.fake_nvml import FOUR, FakeNvml, FakeNvmlError

from dlrover_run.devices.count import (
    DeviceId,
    NvmlUnavailable,
    PhysicalGpu,
    count_workers,
    read_gpus,
    select_devices,
    sysfs_address,
    visible_devices,
)
from dlrover_run.devices.numa import binding_gpus
from dlrover_run.spec import SpecError

NO_DRIVER = FakeNvmlError(12, "NVML Shared Library Not Found")


def plain(uuids: list[str]) -> list[PhysicalGpu]:
    return [PhysicalGpu(DeviceId(uuid, f"0000:{index:02x}:00.0")) for index, uuid in enumerate(uuids)]


@pytest.mark.parametrize(
    ("setting", "seen"),
    [
        (None, FOUR),
        ("0,1,2,3", FOUR),
        ("2,0", ["GPU-bb33", "GPU-aa11"]),
        (" 1 , 3 ", ["GPU-aa22", "GPU-cc44"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,1", ["GPU-aa11"]),
        ("1,9,2", ["GPU-aa22"]),
        ("0,,1", ["GPU-aa11"]),
        ("1gpu,2x,+3", ["GPU-aa22", "GPU-bb33", "GPU-cc44"]),
        ("0,GPU-bb33", ["GPU-aa11"]),
        ("0,1,0", []),
        ("GPU-bb33,GPU-aa11", ["GPU-bb33", "GPU-aa11"]),
        ("GPU-b,GPU-c", ["GPU-bb33", "GPU-cc44"]),
        ("GPU-b,GPU-aa", ["GPU-bb33"]),
        ("GPU-aa", []),
        ("GPU-b,1", ["GPU-bb33"]),
        ("GPU-b,GPU-bb33", []),
        ("GPU-zz", []),
        ("MIG-1", []),
    ],
)
def test_visible_devices_is_read_as_cuda_reads_it(setting: str | None, seen: list[str]) -> None:
    assert [device.uuid for device in select_devices(setting, plain(FOUR))] == seen


@pytest.mark.torchrun
@pytest.mark.parametrize(
    "setting", ["2,0", "", "-1", "0,-1,1", "1,9,2", "0,,1", "1gpu,2x", "0,1,0", "GPU-b,GPU-aa", "GPU-b,1", "NoDevFiles"]
)
def test_the_count_is_that_of_torch(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = pytest.importorskip("torch.cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    monkeypatch.setattr(cuda, "_raw_device_count_nvml", lambda: len(FOUR))
    monkeypatch.setattr(cuda, "_raw_device_uuid_nvml", lambda: FOUR)
    assert len(select_devices(setting, plain(FOUR))) == cuda._device_count_nvml()


def test_one_mig_device_and_no_gpu_beside_it() -> None:
    nvml = FakeNvml(["GPU-a", "GPU-b", "GPU-c"], mig={"GPU-b": [None, "MIG-1", "MIG-2"], "GPU-c": []})
    settings = ["0", "1", "2", "MIG-2,MIG-1", "MIG-", "GPU-b", "GPU-a"]
    seen = {
        setting: [device.uuid for device in visible_devices({"CUDA_VISIBLE_DEVICES": setting}, nvml)]
        for setting in settings
    }
    assert [device.uuid for device in visible_devices({}, nvml)] == ["MIG-1"]
    assert seen == {
        "0": ["GPU-a"],
        "1": ["MIG-1"],
        "2": [],
        "MIG-2,MIG-1": ["MIG-2"],
        "MIG-": [],
        "GPU-b": ["MIG-1"],
        "GPU-a": ["GPU-a"],
    }
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "MIG-2"}, nvml)[0].pci_bus_id == "0000:1b:00.0"


def test_addresses_are_those_of_sysfs() -> None:
    gpus = read_gpus(FakeNvml(["GPU-a", "GPU-b"]))
    assert [gpu.device.pci_bus_id for gpu in gpus] == ["0000:1a:00.0", "0000:1b:00.0"]
    assert sysfs_address("00010000:3B:00.0") == "10000:3b:00.0"


def test_nvml_is_shut_down_even_when_a_gpu_is_lost() -> None:
    nvml = FakeNvml(["GPU-a", "GPU-b"], lost="GPU-b")
    with pytest.raises(NvmlUnavailable, match="GPU is lost"):
        read_gpus(nvml)
    assert nvml.shutdowns == 1


def count(kind: str, nvml: FakeNvml, tmp_path: Path, **environ: str) -> int:
    return count_workers(kind, environ, nvml, sysfs=tmp_path / "sys", dev=tmp_path / "dev", cpu_count=lambda: 7)


def test_gpu_counts_what_is_visible(tmp_path: Path) -> None:
    assert count("gpu", FakeNvml(FOUR), tmp_path) == 4
    assert count("gpu", FakeNvml(FOUR), tmp_path, CUDA_VISIBLE_DEVICES="1,3") == 2


@pytest.mark.parametrize(
    ("nvml", "environ", "words"),
    [
        (FakeNvml(init_error=NO_DRIVER), {}, "no NVIDIA driver was found"),
        (FakeNvml(init_error=FakeNvmlError(18, "Driver/library version mismatch")), {}, "version mismatch"),
        (FakeNvml(FOUR), {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='' shows none of the 4 GPUs"),
        (FakeNvml(["GPU-a"]), {"CUDA_VISIBLE_DEVICES": "7"}, "'7' shows none of the 1 GPU of"),
        (FakeNvml([]), {}, "shows no GPU"),
        (FakeNvml(["GPU-a"], mig={"GPU-a": []}), {}, "without a MIG device"),
    ],
)
def test_gpu_says_in_one_sentence_why_there_is_none(
    nvml: FakeNvml, environ: dict[str, str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as raised:
        count("gpu", nvml, tmp_path, **environ)
    text = str(raised.value)
    assert text.startswith("--nproc-per-node=gpu: ")
    assert words in text
    assert "give the number of workers instead" in text
    assert "\n" not in text


def test_auto_takes_gpus_then_discrete_xpus_then_cpus(tmp_path: Path) -> None:
    assert count("auto", FakeNvml(FOUR), tmp_path) == 4
    assert count("auto", FakeNvml(init_error=NO_DRIVER), tmp_path) == 7
    assert count("auto", FakeNvml(FOUR), tmp_path, CUDA_VISIBLE_DEVICES="") == 7
    intel_gpu(tmp_path, "renderD128", "0000:00:02.0", "i915")
    assert count("auto", FakeNvml(init_error=NO_DRIVER), tmp_path) == 7
    intel_gpu(tmp_path, "renderD129", "0000:4d:00.0", "xe")
    assert count("auto", FakeNvml(init_error=NO_DRIVER), tmp_path) == 1


def test_auto_does_not_fall_back_to_cpus_when_the_driver_is_broken(tmp_path: Path) -> None:
    broken = FakeNvml(init_error=FakeNvmlError(18, "Driver/library version mismatch"))
    with pytest.raises(SpecError, match="--nproc-per-node=auto: the NVIDIA driver does not answer"):
        count("auto", broken, tmp_path)


def test_cpu_is_the_affinity_of_this_process(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert count_workers("cpu", {}) == 1
    finally:
        os.sched_setaffinity(0, before)
    assert count_workers("cpu", {}) == len(before)


def test_an_unknown_kind_names_those_there_are() -> None:
    with pytest.raises(SpecError, match=r"--nproc-per-node=tpu: .*auto, gpu, cpu or xpu"):
        count_workers("tpu", {})


def test_without_a_driver_the_real_nvml_gives_a_clear_error() -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        pass
    else:
        pynvml.nvmlShutdown()
        pytest.skip("this machine has an NVIDIA driver")
    with pytest.raises(SpecError, match=r"--nproc-per-node=gpu: no NVIDIA driver was found \(NVML: .*give the number"):
        count_workers("gpu", {})


def intel_gpu(
    root: Path,
    node: str,
    address: str,
    driver: str,
    *,
    vendor: str = "0x8086",
    tiles: int = 0,
    gts: int = 0,
    here: bool = True,
) -> None:
    """One render node as the kernel lays it out: class/drm/renderDN/device leads to the PCI device."""
    device = root / "sys" / "devices" / "pci0000:00" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    drivers = root / "sys" / "bus" / "pci" / "drivers" / driver
    drivers.mkdir(parents=True, exist_ok=True)
    (device / "driver").symlink_to(drivers)
    for tile in range(tiles):
        (device / f"tile{tile}").mkdir()
    for gt in range(gts):
        (device / "drm" / "card1" / "gt" / f"gt{gt}").mkdir(parents=True)
    drm = root / "sys" / "class" / "drm" / node
    drm.mkdir(parents=True)
    (drm / "device").symlink_to(device)
    if here:
        (root / "dev" / "dri").mkdir(parents=True, exist_ok=True)
        (root / "dev" / "dri" / node).touch()


def xpus(root: Path, **environ: str) -> int:
    return count_workers("xpu", environ, None, sysfs=root / "sys", dev=root / "dev")


def test_xpu_counts_intel_gpus_of_either_driver_and_no_others(tmp_path: Path) -> None:
    intel_gpu(tmp_path, "renderD128", "0000:4d:00.0", "xe")
    intel_gpu(tmp_path, "renderD129", "0000:4e:00.0", "i915", gts=1)
    intel_gpu(tmp_path, "renderD130", "0000:4f:00.0", "amdgpu", vendor="0x1002")
    intel_gpu(tmp_path, "renderD131", "0000:50:00.0", "vfio-pci")
    intel_gpu(tmp_path, "renderD132", "0000:51:00.0", "xe", here=False)
    assert xpus(tmp_path) == 2


def test_xpu_counts_integrated_graphics_only_where_nothing_better_is(tmp_path: Path) -> None:
    intel_gpu(tmp_path, "renderD128", "0000:00:02.0", "i915", gts=2)
    assert xpus(tmp_path) == 1
    intel_gpu(tmp_path, "renderD129", "0000:4d:00.0", "xe", tiles=1)
    intel_gpu(tmp_path, "renderD130", "0000:4e:00.0", "xe", tiles=1)
    assert xpus(tmp_path) == 2


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 4),
        ({"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, 2),
        ({"ZE_AFFINITY_MASK": "0,3"}, 2),
        ({"ZE_AFFINITY_MASK": "3,3,9"}, 1),
        ({"ZE_AFFINITY_MASK": ""}, 4),
        ({"ZE_AFFINITY_MASK": "0.0,0.1,1", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, 2),
        ({"ONEAPI_DEVICE_SELECTOR": "level_zero:gpu"}, 4),
    ],
)
def test_xpu_follows_level_zero_with_two_cards_of_two_tiles(
    environ: dict[str, str], expected: int, tmp_path: Path
) -> None:
    intel_gpu(tmp_path, "renderD128", "0000:4d:00.0", "xe", tiles=2)
    intel_gpu(tmp_path, "renderD129", "0000:4e:00.0", "i915", gts=2)
    assert xpus(tmp_path, **environ) == expected


def test_xpu_errors_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="--nproc-per-node=xpu: no Intel GPU with the driver i915 or xe was found"):
        xpus(tmp_path)
    intel_gpu(tmp_path, "renderD128", "0000:4d:00.0", "xe")
    with pytest.raises(SpecError, match="ZE_AFFINITY_MASK='5' shows none"):
        xpus(tmp_path, ZE_AFFINITY_MASK="5")
    with pytest.raises(SpecError, match="cannot be counted under ONEAPI_DEVICE_SELECTOR='opencl:cpu'"):
        xpus(tmp_path, ONEAPI_DEVICE_SELECTOR="opencl:cpu")


def test_numa_binding_needs_a_driver_and_a_visible_gpu() -> None:
    assert len(binding_gpus("node", {}, FakeNvml(["GPU-a", "GPU-b"]))) == 2
    with pytest.raises(SpecError, match="--numa-binding=node needs NVIDIA GPUs: no NVIDIA driver was found"):
        binding_gpus("node", {}, FakeNvml(init_error=NO_DRIVER))
    with pytest.raises(SpecError, match=r"none is visible \(CUDA_VISIBLE_DEVICES='-1'\)"):
        binding_gpus("node", {"CUDA_VISIBLE_DEVICES": "-1"}, FakeNvml(["GPU-a"]))
