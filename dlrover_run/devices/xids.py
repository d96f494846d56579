"""NVIDIA's Xid errors: the class of each number, and whether the GPU can be used after it. Pure.

A driver reports an error of a GPU by its Xid number. Numbers and recommended actions are those of NVIDIA's catalog for
Ampere and later GPUs, https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html (in the copy that
leptonai/gpud made in October 2025); the classes are ours. Numbers that the catalog calls unused are left out.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class XidClass(enum.StrEnum):
    """What an Xid error says about its cause. The names are in event logs and stable.

    PROGRAM: the program that used the GPU. MEMORY: the memory of the GPU. LINK: NVLink or C2C. HARDWARE: another part
    of the GPU, its power, or the PCIe bus. DRIVER: the driver or its firmware. UNKNOWN: several of them, or a number
    that is not in the table. NOTE: no error, or only the consequence of another one or of the end of a program.
    """

    PROGRAM = "program"
    MEMORY = "memory"
    LINK = "link"
    HARDWARE = "hardware"
    DRIVER = "driver"
    UNKNOWN = "unknown"
    NOTE = "note"


class Xid(NamedTuple):
    """A row of the table. With `needs_reset`, NVIDIA's immediate action is a reset of the GPU or a reboot, so that a
    program that is started before fails too."""

    kind: XidClass
    text: str
    needs_reset: bool = False


_P, _M, _L, _H, _D, _U, _N = XidClass

_UNLISTED = Xid(_U, "not in NVIDIA's table")

_COPY_ENGINES = (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))
_VIDEO_ENGINES = (60, 82, 83, 84, 86, 88, 89, *range(96, 106), 139, 142)

XIDS: dict[int, Xid] = {
    8: Xid(_U, "stopped processing"),
    11: Xid(_P, "invalid commands of the program"),
    13: Xid(_P, "exception in a kernel of the program"),
    14: Xid(_N, "an error that a test has made"),
    25: Xid(_P, "invalid commands of the program"),
    31: Xid(_P, "the program's own address"),
    32: Xid(_P, "invalid commands of the program"),
    37: Xid(_D, "error of the driver's firmware"),
    38: Xid(_D, "error of the driver's firmware"),
    43: Xid(_P, "stopped after a fault of the program"),
    44: Xid(_U, "fault while switching contexts"),
    45: Xid(_N, "cleanup after another error or the end of a program"),
    46: Xid(_H, "stopped processing", needs_reset=True),
    48: Xid(_M, "uncorrectable memory error", needs_reset=True),
    54: Xid(_H, "its power cable is not connected", needs_reset=True),
    62: Xid(_H, "its microcontroller has halted", needs_reset=True),
    63: Xid(_N, "broken memory will be remapped"),
    64: Xid(_M, "broken memory could not be remapped", needs_reset=True),
    66: Xid(_D, "illegal access by the driver"),
    67: Xid(_D, "illegal access by the driver"),
    # NVIDIA's device plugin for Kubernetes ignores this one and 109 as errors of programs.
    68: Xid(_P, "exception in a video decoder"),
    69: Xid(_P, "invalid commands of the program"),
    74: Xid(_L, "NVLink error"),
    78: Xid(_D, "the virtual GPU could not be started"),
    79: Xid(_H, "fell off the bus", needs_reset=True),
    80: Xid(_P, "corrupted commands of the program"),
    92: Xid(_M, "many corrected memory errors"),
    93: Xid(_N, "its configuration memory is worn"),
    94: Xid(_M, "memory error contained in one program"),
    95: Xid(_M, "memory error not contained in one program", needs_reset=True),
    106: Xid(_N, "a test message"),
    107: Xid(_N, "a test message"),
    108: Xid(_L, "address error of an NVLink peer"),
    # NVIDIA recommends a reset. A kernel that never ends causes it too, so the driver's state decides.
    109: Xid(_P, "timeout while switching contexts"),
    110: Xid(_D, "security fault", needs_reset=True),
    119: Xid(_D, "the driver's firmware does not answer", needs_reset=True),
    120: Xid(_D, "error of the driver's firmware", needs_reset=True),
    121: Xid(_L, "C2C link error"),
    136: Xid(_L, "a link could not be trained", needs_reset=True),
    137: Xid(_L, "NVLink privilege error"),
    140: Xid(_M, "memory error that was not recovered", needs_reset=True),
    141: Xid(_D, "error of a CUDA fast path"),
    143: Xid(_H, "could not be initialized", needs_reset=True),
    **{number: Xid(_L, "NVLink error") for number in range(144, 151)},
    151: Xid(_D, "key rotation failed", needs_reset=True),
    152: Xid(_U, "memory error of the deep-learning accelerator"),
    153: Xid(_U, "timeout of the deep-learning accelerator"),
    154: Xid(_N, "the recovery action has changed"),
    155: Xid(_L, "NVLink error of its software", needs_reset=True),
    156: Xid(_H, "a broken part was retired", needs_reset=True),
    157: Xid(_H, "a broken part could not be retired"),
    158: Xid(_H, "fatal timeout", needs_reset=True),
    159: Xid(_U, "error of the coherent interconnect"),
    160: Xid(_U, "a channel was retired"),
    161: Xid(_U, "a channel could not be retired"),
    162: Xid(_N, "power smoothing is on again"),
    163: Xid(_N, "power smoothing is off"),
    164: Xid(_N, "power smoothing has a short life left"),
    165: Xid(_N, "power smoothing has no life left"),
    166: Xid(_L, "NVLink traffic before its encryption"),
    167: Xid(_H, "fatal timeout of the PCIe bus", needs_reset=True),
    168: Xid(_M, "less memory than it was built with"),
    169: Xid(_H, "its security controller has halted", needs_reset=True),
    170: Xid(_L, "NVLink interrupt in confidential mode"),
    171: Xid(_M, "uncorrectable error of its DRAM"),
    172: Xid(_M, "uncorrectable error of its SRAM"),
    **dict.fromkeys(_COPY_ENGINES, Xid(_U, "error of a copy engine")),
    **dict.fromkeys(_VIDEO_ENGINES, Xid(_U, "error of a video engine")),
}
"""By number. For 166 and above the catalog names no action: `needs_reset` there follows the description."""


def classify(number: int) -> Xid:
    """The row of an Xid number. Called for each error that a driver reports, and for each in the kernel log."""
    return XIDS.get(number, _UNLISTED)


def is_error_of_device(kind: XidClass) -> bool:
    """Whether the device, a link or the driver is the cause, and not the program."""
    return kind in (XidClass.MEMORY, XidClass.LINK, XidClass.HARDWARE, XidClass.DRIVER)
