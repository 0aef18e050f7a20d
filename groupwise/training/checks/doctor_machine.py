"""The checks of `groupwise doctor` on the machine: libraries, cores, device, memory, disk, random numbers."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from groupwise.core.extras import how_to_install
from groupwise.core.findings import Finding
from groupwise.engine.models.memory import NEEDS_LESS

LIBRARIES = ("torch", "transformers", "peft", "tokenizers", "safetensors", "huggingface_hub")
"""Libraries that training imports."""
NEARLY_FULL = 0.8
"""Fraction of the free memory above which a plan is reported as tight."""
BUSY = 0.5
"""Load by other programs per core above which measured speeds are reported as too low."""

FIRST_SEED = 10880533986507347724
"""The value of `member_seed(0, 0, 0)`."""
FIRST_UNIFORM = 0.6934185669952335
"""The first number drawn with that seed."""
FIRST_START = (0.49625658988952637, 0.7682217955589294, 0.08847743272781372, 0.13203048706054688)
"""The first numbers of torch's generator with seed 0; they were equal on every processor tested."""


def libraries(versions: Mapping[str, str | None]) -> Finding:
    """Report the libraries that training imports; a missing one is a problem."""
    missing = [name for name, version in versions.items() if version is None]
    version_list = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if missing:
        return Finding(
            "libraries",
            "problem",
            f"not installed: {', '.join(missing)}",
            "neither sampling nor training works without them",
            how_to_install("train"),
            {"versions": dict(versions)},
        )
    python = platform.python_version()
    return Finding(
        "libraries",
        "ok",
        f"python {python}, {version_list}",
        data={"versions": {"python": python, **versions}},
    )


def installed_versions() -> dict[str, str | None]:
    """The version of each library; None if it is not installed. Imports none of them."""
    versions: dict[str, str | None] = {"groupwise": "(not installed)", **dict.fromkeys(LIBRARIES)}
    for name in versions:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def cores(threads: int, processes: int, available: int, load: float) -> Finding:
    """Compare torch's threads in all processes with the available cores, and report the load by other programs."""
    data = {"threads": threads, "processes": processes, "cores": available, "load": load}
    measured = f"{threads} thread{'s' * (threads > 1)} on {available} core{'s' * (available > 1)}, load {load:.1f}"
    if threads > available:
        return Finding(
            "cores",
            "warning",
            measured,
            "threads that share a core wait for each other, which is slower than fewer threads",
            f"run.threads={available}"
            + (f" run.processes={available}" if processes > available else ""),
            data,
        )
    if load > BUSY * available:
        return Finding(
            "cores",
            "warning",
            measured,
            "other programs are running: the measured speeds are lower than this machine's",
            "measure again when it is idle",
            data,
        )
    return Finding("cores", "ok", measured, data=data)


def device(name: str, kind: str, dtype: str, has_bfloat16: bool, has_tf32: bool) -> Finding:
    """Report the device and its number format: `dtype` is that of products, and `tf32` has weights in float32."""
    data = {
        "device": kind,
        "name": name,
        "dtype": dtype,
        "bfloat16": has_bfloat16,
        "tf32": has_tf32,
    }
    weights = "float32, products in TF32" if dtype == "tf32" else dtype
    measured = f"{kind} ({name}), weights in {weights}"
    if dtype == "bfloat16" and not has_bfloat16:
        return Finding(
            "device",
            "warning",
            measured,
            "this processor has no bfloat16 of its own and emulates it, slower than float32",
            "model.dtype=auto",
            data,
        )
    if kind == "cuda" and dtype != "bfloat16" and has_bfloat16:
        advice = "model.dtype=bfloat16 would need half of the memory for the weights"
        if dtype == "float32" and has_tf32:
            advice += ", and model.dtype=tf32 would multiply faster"
        return Finding("device", "ok", measured, advice, data=data)
    return Finding("device", "ok", measured, data=data)


def memory(needed_mib: float, free_mib: float | None) -> Finding:
    """Compare the memory that a run needs by its plan (MiB) with the free memory of the device."""
    data = {"needed_mib": needed_mib, "free_mib": free_mib}
    if free_mib is None:
        message = f"a run needs about {needed_mib:,.0f} MiB; this system does not say what is free"
        return Finding("memory", "skipped", message, data=data)
    measured = f"a run needs about {needed_mib:,.0f} MiB, {free_mib:,.0f} MiB are free"
    if needed_mib > free_mib:
        meaning = "the run would be killed, or fail because memory is short"
        return Finding("memory", "problem", measured, meaning, NEEDS_LESS, data)
    if needed_mib > NEARLY_FULL * free_mib:
        meaning = "the plan is an estimate, and this leaves little more"
        return Finding("memory", "warning", measured, meaning, NEEDS_LESS, data)
    return Finding("memory", "ok", measured, data=data)


def disk(folder: Path, needed_bytes: int, free_bytes: int) -> Finding:
    """Compare the size of a run's files (checkpoints, final weights, record) with the free space of the disk."""
    data = {"folder": str(folder), "needed_bytes": needed_bytes, "free_bytes": free_bytes}
    measured = f"a run writes about {size(needed_bytes)}, {size(free_bytes)} are free in {folder}"
    remedy = "make room, lower run.save_total_limit, or name another disk with run.dir"
    if free_bytes < needed_bytes:
        meaning = "the run would stop at the checkpoint that does not fit"
        return Finding("disk", "problem", measured, meaning, remedy, data)
    if free_bytes < 2 * needed_bytes:
        return Finding("disk", "warning", measured, "that is little for two runs", remedy, data)
    return Finding("disk", "ok", measured, data=data)


def random_numbers(seed: int, uniform: float, start: Sequence[float]) -> Finding:
    """Report whether this machine draws the same random numbers as every other machine."""
    same_draws = (seed, uniform) == (FIRST_SEED, FIRST_UNIFORM)
    same_start = tuple(start) == FIRST_START
    data = {"seed": seed, "uniform": uniform, "start": list(start)}
    if same_draws and same_start:
        measured = "seeds, sampled tokens and the adapter's start are drawn as on other machines"
        return Finding("random numbers", "ok", measured, data=data)
    subject = "the seeds of the sampler" if not same_draws else "the start of an adapter"
    return Finding(
        "random numbers",
        "warning" if same_draws else "problem",
        f"{subject} differ from those of other machines",
        "a run with the same seed gives something else here",
        "install the pinned releases (constraints.txt) to repeat a run of another machine",
        data,
    )


def size(count: int) -> str:
    """A number of bytes as text."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
