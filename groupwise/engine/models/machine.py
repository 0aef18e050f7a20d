"""Detects the abilities of this machine, and sets up a process for them.

Before a run this module only reads files where possible (for the device and the instruction sets), because importing torch takes a second.

A container's CPU limit (`docker --cpus`, a limit of Kubernetes) leaves every core visible. The kernel reports it in files of control
groups (cgroups), which come in two versions. Groups are nested, and the narrowest limit holds; in a container often only the root group
is visible.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from groupwise.core.errors import ConfigError
from groupwise.core.extras import not_installed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from groupwise.engine.models.config import Dtype, ModelConfig

CPUINFO = Path("/proc/cpuinfo")
DEVICES = Path("/dev")
DRIVERS = ("nvidia*", "nvhost*", "nvgpu*", "nvmap", "dxg", "kfd")
"""Linux device files of GPUs that torch can use: NVIDIA's, those of its Jetson boards and of WSL, AMD's."""
INSTRUCTIONS = {"AVX512": {"avx512vl", "avx512bw", "avx512dq", "fma"}, "AVX2": {"avx2", "fma"}}
"""Instruction sets that torch distinguishes, with the CPU flags that each needs; torch uses the first that the CPU has."""
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt(3)."""


def choose_device() -> str:
    """`cuda` if torch can use a GPU, else `cpu`."""
    if not is_gpu_build():
        return "cpu"
    if sys.platform == "linux" and not any(any(DEVICES.glob(name)) for name in DRIVERS):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def is_gpu_build() -> bool:
    """True if torch is a build for GPUs, whether or not this machine has one."""
    build = _torch_version_module()
    return build.cuda is not None or build.hip is not None


@cache
def _torch_version_module() -> ModuleType:
    """The `version` module of torch, loaded without importing torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise ModuleNotFoundError(not_installed("A model", "train", "torch"), name="torch")
    path = Path(torch.origin).with_name("version.py")
    spec = importlib.util.spec_from_file_location("torch_version", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gpu_count() -> int:
    """GPUs that torch sees on this machine."""
    import torch

    return torch.cuda.device_count()


def choose_dtype(config: ModelConfig, full: bool, device: str) -> Dtype:
    """Number format of the weights: `model.dtype`, where `tf32` keeps float32.

    For `auto` it is float32 if all weights are trained or the device lacks bfloat16, else bfloat16.
    """
    if config.dtype in ("float32", "bfloat16"):
        return config.dtype
    if full or config.dtype == "tf32":
        return "float32"
    return "bfloat16" if has_bfloat16(device) else "float32"


def choose_tf32(config: ModelConfig, device: str) -> bool:
    """True if `model.dtype` is `tf32`. Raises ConfigError if the device cannot compute in TF32."""
    if config.dtype != "tf32":
        return False
    if device == "cpu":
        why = "this run computes on the CPU, which has no TF32"
    elif not has_tf32(device):
        why = f"{describe_processor(device)} has no TF32 (NVIDIA's GPUs have it from Ampere on)"
    else:
        return True
    raise ConfigError(
        f"model.dtype is tf32, but {why}. Set model.dtype=float32 for the same weights with exact products, or model.dtype=auto."
    )


def has_tf32(device: str) -> bool:
    """True if the device is a GPU that can compute float32 matrix products in TF32."""
    import torch

    return device != "cpu" and torch.cuda.is_tf32_supported()


def has_bfloat16(device: str) -> bool:
    """True if the device has bfloat16 instructions. Other devices emulate them, more slowly than float32."""
    if device == "cpu" and (flags := _cpu_flags()):
        return not flags.isdisjoint({"avx512_bf16", "amx_bf16"})
    import torch

    if device != "cpu":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    # oneDNN's own check is also true for emulation.
    if capabilities.get("architecture") == "x86_64":
        return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def describe_processor(device: str) -> str:
    """Name of the GPU or CPU; for a CPU with the instruction set that torch uses on it."""
    if device == "cpu":
        return f"{_cpu_line('model name') or platform.processor() or platform.machine()} ({_instructions()})"
    import torch

    return torch.cuda.get_device_name()


def _instructions() -> str:
    """The CPU's instruction set, by torch's name for it."""
    if "ATEN_CPU_CAPABILITY" not in os.environ:
        flags = _cpu_flags()
        for name, needed in INSTRUCTIONS.items():
            if needed <= flags:
                return name
    import torch

    return torch.backends.cpu.get_cpu_capability()


def _cpu_flags() -> set[str]:
    """Flags of an x86 CPU, as Linux reports them; empty on other systems."""
    return set(_cpu_line("flags").split())


def _cpu_line(key: str) -> str:
    """The value of this key in /proc/cpuinfo for the first core; empty if missing."""
    with contextlib.suppress(OSError):
        for line in CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return ""


def torch_version() -> str:
    """Version of torch, including the installed variant (`+cpu`, `+cu126`)."""
    return str(_torch_version_module().__version__)


def set_threads(threads: int) -> None:
    """Set how many threads torch uses for one operation."""
    import torch

    torch.set_num_threads(threads)


def prepare_process(threads: int) -> None:
    """Set torch's threads, make GPUs sum products in float32, and make the allocator keep freed memory.

    On virtual machines the first access to fresh memory can cost more than the arithmetic on it.
    """
    import torch

    set_threads(threads)
    # Products inside of an attention's deterministic gradient want one of two settings; NVIDIA documents both.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Otherwise a GPU may round partial sums to bfloat16, which loses small changes of an adapter.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(TRIM_THRESHOLD, -1)  # never return memory to the system
        libc.mallopt(TOP_PAD, 64 << 20)


_run_products = {"tf32": False}
"""What the run of this process chose."""


def set_tf32(enabled: bool) -> None:
    """Let GPUs compute float32 matrix products of sampler and learner (`engine_products`) in TF32, or exactly in float32.

    It holds for a whole run: a recorded token of a GPU keeps what was set when it was recorded.
    """
    _run_products["tf32"] = enabled


@contextmanager
def engine_products() -> Generator[None]:
    """Context manager, or decorator, for code that computes with a model: its products are what `set_tf32` chose for this run.

    Torch's switch belongs to the whole process. It is restored, so that other code of the process keeps its own choice, unless another of
    its threads multiplies at that moment. Nothing may be awaited inside. Torch's older switch is set, which also sets the newer
    `fp32_precision`: with the newer one alone, torch refuses to read the older one, which other libraries ask for. Products on the CPU
    stay as they are.
    """
    import torch

    tf32 = _run_products["tf32"]
    on_gpu: Any = torch.backends.cuda.matmul
    on_cpu: Any = cast("Any", torch.backends.mkldnn).matmul
    previous = on_gpu.fp32_precision, on_cpu.fp32_precision
    if (previous[0] == "tf32") == tf32:
        yield
        return
    older = None
    with suppress(RuntimeError):  # the newer switch alone was used
        older = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    on_cpu.fp32_precision = previous[1]
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        on_gpu.fp32_precision, on_cpu.fp32_precision = previous


def exact_products(dtype: torch.dtype) -> bool:
    """True if sampler and learner compute matrix products of this number format in float32, rounded to neither bfloat16 nor TF32."""
    import torch

    return dtype == torch.float32 and not _run_products["tf32"]


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor of main memory on this device. A GPU goes on computing meanwhile, and this thread does not wait for it.

    A copy from ordinary memory would wait until all that was started before is done.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def give_back_memory() -> None:
    """Return freed memory to the system, before processes that would share it are forked."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")

_ROOTS = ("0::/", "0:cpu:/")
"""Root groups of both cgroup versions, in the format of `OWN_CGROUPS`."""
_LIMITS = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""Files of both cgroup versions that hold the allowed CPU time and the period for it, both in microseconds."""


def available_cores() -> int:
    """Number of cores that this process may use: its CPU affinity, or its container's share of CPU time (rounded up) if that is less."""
    if hasattr(os, "sched_getaffinity"):
        bound_to = len(os.sched_getaffinity(0))
    else:
        bound_to = os.cpu_count() or 1
    limits = map(_cgroup_limit, _cgroup_folders())
    return min([bound_to, *(limit for limit in limits if limit is not None)])


def _cgroup_folders() -> Iterator[Path]:
    """Folders of the cgroups of this process and of their parents."""
    lines = [*_ROOTS]
    with suppress(OSError):  # a system without cgroups
        lines += OWN_CGROUPS.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root, group = CGROUPS / "cpu" if controllers else CGROUPS, Path(path.lstrip("/"))
        yield from (root / folder for folder in (group, *group.parents))


def _cgroup_limit(group: Path) -> int | None:
    """Cores that this one group allows, rounded up; None if it sets no limit."""
    for names in _LIMITS:
        with suppress(OSError, ValueError):  # no such files, or `max`
            text = " ".join((group / name).read_text() for name in names)
            quota, period = map(int, text.split())
            if min(quota, period) > 0:
                return -(-quota // period)
    return None
