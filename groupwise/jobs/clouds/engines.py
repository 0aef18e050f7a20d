"""Engines that begin jobs in place of the machine that is spoken to, by their names: what a fleet needs to know of each.

Such a machine is a door: attempts are laid out there, as everywhere, and its engine begins them where and when it likes. What an engine
has of its own stands behind its runner (`hosts/`), which answers as every runner does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from groupwise.core.errors import UsageError
from groupwise.jobs.clouds import ray, slurm
from groupwise.jobs.hosts.driver import Runner
from groupwise.jobs.hosts.port import Host
from groupwise.jobs.hosts.ray import ADDRESS, TOKENS, TendedRay
from groupwise.jobs.hosts.ray import NAME as RAY
from groupwise.jobs.hosts.slurm import NAME as SLURM
from groupwise.jobs.hosts.slurm import TendedSlurm
from groupwise.jobs.hosts.spec import Limits

LITTLE = 0.001
"""Of the resource that marks Ray's nodes with a kind of GPU: as much as Ray itself asks for, so that it never runs out."""


@dataclass(frozen=True, slots=True)
class Door:
    """The runner of a machine that an engine stands behind, and what only that engine answers."""

    runner: Runner
    ask: Callable[[], Awaitable[object]]
    """Whether the engine answers. Raises HostUnreachable where it does not."""
    try_options: Callable[[Sequence[str]], Awaitable[str]]
    """What it says of a job with these, without a job. Raises HostUnreachable, RunnerRefused."""


@dataclass(frozen=True, slots=True)
class Way:
    """To an engine."""

    host: Host
    """The machine that is spoken to."""
    root: str
    """There."""
    python: str
    """The interpreter of jobs."""
    address: str | None = None
    """Of the engine, as that machine reaches it; None: the usual one, or it has none."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """By a job of a fleet, of one machine."""

    gpus: int = 0
    gpu_model: str | None = None
    """As the engine calls it."""
    cpus: int | None = None
    ram_mb: int | None = None
    options: Sequence[str] = ()
    """Of its row, as they were written."""
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One of them."""

    title: str
    """For people."""
    door: Callable[[Way], Door]
    options: Callable[[EngineRequest], tuple[str, ...]]
    """What is asked of it for a job. Raises UsageError for options that are none, or not for people to set."""
    check_address: Callable[[str], object]
    """As somebody wrote it. Raises UsageError for what is none."""
    variables: tuple[str, ...] = ()
    """Of the machine that is spoken to, by which the engine is asked; secrets among them, which are nobody else's."""


def _slurm(way: Way) -> Door:
    runner = TendedSlurm(way.host, root=way.root, python=way.python)
    return Door(runner, runner.jobs, runner.try_options)


def _sbatch_options(wanted: EngineRequest) -> tuple[str, ...]:
    asks = {
        "cpus": wanted.cpus,
        "memory": None if wanted.ram_mb is None else f"{wanted.ram_mb}M",
        "gpu": wanted.gpu_model,
        "options": wanted.options,
    }
    return slurm.sbatch_options(asks, wanted.gpus, wanted.limits)


def _no_address(word: str) -> None:
    raise UsageError(f"--address {word}: Slurm is found by its programs, and has none.")


def _ray(way: Way) -> Door:
    address = (way.address or ADDRESS).rstrip("/")
    runner = TendedRay(way.host, root=way.root, python=way.python, address=address)

    async def would(options: Sequence[str]) -> str:
        return f"try {options[0]}; free: {await runner.free()}"

    return Door(runner, runner.free, would)


def _ray_options(wanted: EngineRequest) -> tuple[str, ...]:
    resources = ray.resources_of(wanted.options)
    if wanted.gpus and wanted.gpu_model:
        resources.setdefault(f"accelerator_type:{wanted.gpu_model}", LITTLE)
    memory = None if wanted.ram_mb is None else wanted.ram_mb * 10**6
    return ray.ray_options(
        {"cpus": wanted.cpus, "memory": memory, "resources": resources}, wanted.gpus
    )


ENGINES: Mapping[str, EngineKind] = {
    SLURM: EngineKind("Slurm", _slurm, _sbatch_options, _no_address),
    RAY: EngineKind("Ray", _ray, _ray_options, ray.checked_address, TOKENS),
}
"""By the names that rows of a fleet have them under."""
