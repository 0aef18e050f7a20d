"""Detects the accelerators of this machine from device files, without a library."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Literal

Accelerator = Literal["tpu", "gpu", "cpu"]
NVIDIA = Path("/dev/nvidiactl")
"""Exists if the NVIDIA driver is loaded."""
PCI = Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"
TPUS = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})
"""PCI device ids of TPUs from version 2 on, as in JAX; other devices of Google's machines have the same vendor id."""


def accelerator() -> Accelerator:
    """The best accelerator of this machine: a TPU, else a GPU, else the CPU."""
    for device in PCI.glob("*"):
        with suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "device"))
            if vendor == GOOGLE and kind in TPUS:
                return "tpu"
    return "gpu" if NVIDIA.exists() else "cpu"
