"""What this machine can do, and how a process is set up for it."""

from __future__ import annotations

import contextlib
import ctypes
import platform
from pathlib import Path

import torch

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt(3)."""


def choose_device() -> str:
    """`cuda` where torch can use one, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu_count() -> int:
    """GPUs that torch sees on this machine."""
    return torch.cuda.device_count()


def has_bfloat16(device: str) -> bool:
    """Whether the processor multiplies bfloat16 itself. Others emulate it, slower than float32."""
    if device != "cpu":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    found = torch.cpu.get_capabilities()
    if found.get("architecture") == "x86_64":  # there oneDNN's own answer is yes for emulation, too
        return bool(found.get("avx512_bf16") or found.get("amx_bf16"))
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def describe_processor(device: str) -> str:
    """The processor by its name, for a CPU with the instruction set that torch uses on it."""
    if device != "cpu":
        return torch.cuda.get_device_name()
    return f"{_cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def torch_version() -> str:
    """Of torch, with the variant that is installed."""
    return str(torch.__version__)


def set_threads(threads: int) -> None:
    """Of torch, for one operation."""
    torch.set_num_threads(threads)


def prepare_process(threads: int) -> None:
    """Set torch's threads, let a GPU add products up in float32, and let the allocator keep what is freed.

    On virtual machines the first touch of fresh memory can cost more than the arithmetic done in it.
    """
    set_threads(threads)
    # Else a GPU may round partial sums to bfloat16, in which small changes of an adapter are lost.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(TRIM_THRESHOLD, -1)  # give nothing back, however much is free
        libc.mallopt(TOP_PAD, 64 << 20)


def give_back_memory() -> None:
    """Return to the system what was freed, before processes that would share it are forked."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
