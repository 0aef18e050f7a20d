"""The accelerators of this machine, found by its files and without a library."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Literal

Accelerator = Literal["tpu", "gpu", "cpu"]
NVIDIA = Path("/dev/nvidiactl")
"""There where the driver of most GPUs is."""
PCI = Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"
TPUS = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})
"""PCI ids of TPUs from version 2 on, as JAX knows them; other devices of Google's machines have the same vendor."""


def accelerator() -> Accelerator:
    """The best kind that this machine has: a TPU, else a GPU, else neither."""
    for device in PCI.glob("*"):
        with suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "device"))
            if vendor == GOOGLE and kind in TPUS:
                return "tpu"
    return "gpu" if NVIDIA.exists() else "cpu"
