"""Engines that begin jobs in place of the machine that is called: Slurm and Ray, as backends of a launch and as machines of a fleet.

Attempts are laid out on that machine, as everywhere, and its engine begins them where and when it likes. What is special about an engine is
hidden by its runner (`hosts/`), which answers like every runner, and in the options of its jobs (`slurm.py`, `ray.py`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from groupwise.core.errors import UsageError
from groupwise.jobs.clouds import ray, slurm
from groupwise.jobs.clouds.backend import Capabilities, Order
from groupwise.jobs.clouds.machine import MachineBackend
from groupwise.jobs.hosts.driver import Engine, Runner
from groupwise.jobs.hosts.port import Host
from groupwise.jobs.hosts.ray import ADDRESS, TOKENS, RayRunner
from groupwise.jobs.hosts.ray import NAME as RAY
from groupwise.jobs.hosts.slurm import NAME as SLURM
from groupwise.jobs.hosts.slurm import SlurmRunner
from groupwise.jobs.hosts.spec import Limits

LITTLE = 0.001
"""Amount of the resource that marks Ray's nodes with a kind of GPU: the same as Ray itself uses, so small that it never runs out."""


class Options(Protocol):
    """Makes the engine's options for a job. Raises UsageError for options that users may not set."""

    def __call__(
        self, asks: Mapping[str, Any], gpus: int, limits: Limits, *, nodes: int = 1
    ) -> tuple[str, ...]: ...


class EngineBackend(MachineBackend):
    """A `Backend` that gives jobs to an engine, in whose queue they wait for what they need."""

    capabilities = Capabilities(nodes=True, queues=True)

    def __init__(
        self, name: str, runner: SlurmRunner | RayRunner, where: str, options: Options
    ) -> None:
        """`where`: the machine that is called, for people."""
        super().__init__(name, runner, where)
        self._engine_runner, self._options = runner, options

    async def _engine(self, order: Order) -> Engine:
        options = self._options(order.asks, order.gpus, order.spec.limits, nodes=order.nodes)
        return Engine(await self._engine_runner.word(), options)

    async def _begin_steps(self, order: Order, engine: Engine | None, root: str) -> tuple[str, ...]:
        assert engine is not None
        runner, options = self._engine_runner, engine.options
        gives = f"give it to {runner.title}, with {' '.join(options)}"
        says = await runner.try_options(options)
        return f"lay {order.name} out below {root}, and {gives}", f"{runner.title} says: {says}"


@dataclass(frozen=True, slots=True)
class Door:
    """The runner of a machine with an engine behind it, and the calls that only that engine answers."""

    runner: Runner
    ask: Callable[[], Awaitable[object]]
    """Call the engine. Raises HostUnreachable if it does not answer."""
    try_options: Callable[[Sequence[str]], Awaitable[str]]
    """The engine's verdict on a job with these options, without making one. Raises HostUnreachable, RunnerRefused."""


@dataclass(frozen=True, slots=True)
class Way:
    """How to reach an engine."""

    host: Host
    """The machine that is called."""
    root: str
    """The runner's folder there."""
    python: str
    """The interpreter of jobs."""
    address: str | None = None
    """The engine's address, as that machine reaches it; None: the usual one, or it has none."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """The needs of a fleet's job on one machine."""

    gpus: int = 0
    gpu_model: str | None = None
    """The model's name in the engine's terms."""
    cpus: int | None = None
    ram_mb: int | None = None
    options: Sequence[str] = ()
    """Options of the job's row, as they were written."""
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """A kind of engine."""

    title: str
    """Its name for people."""
    door: Callable[[Way], Door]
    options: Callable[[EngineRequest], tuple[str, ...]]
    """The engine's options for a job. Raises UsageError for options that do not exist, or that users may not set."""
    check_address: Callable[[str], object]
    """Check an address that a user wrote. Raises UsageError if it is not one."""
    variables: tuple[str, ...] = ()
    """Variables of the called machine that calls to the engine use. Some hold secrets, which no other engine may get."""


def _slurm(way: Way) -> Door:
    runner = SlurmRunner(way.host, root=way.root, python=way.python, tended=True)
    return Door(runner, runner.jobs, runner.try_options)


def _sbatch_options(request: EngineRequest) -> tuple[str, ...]:
    asks = {
        "cpus": request.cpus,
        "memory": None if request.ram_mb is None else f"{request.ram_mb}M",
        "gpu": request.gpu_model,
        "options": request.options,
    }
    return slurm.sbatch_options(asks, request.gpus, request.limits)


def _no_address(word: str) -> None:
    raise UsageError(f"--address {word}: Slurm is found by its programs, and has none.")


def _ray(way: Way) -> Door:
    address = (way.address or ADDRESS).rstrip("/")
    runner = RayRunner(way.host, root=way.root, python=way.python, tended=True, address=address)

    return Door(runner, runner.free, runner.try_options)


def _ray_options(request: EngineRequest) -> tuple[str, ...]:
    resources = ray.resources_of(request.options)
    if request.gpus and request.gpu_model:
        resources.setdefault(f"accelerator_type:{request.gpu_model}", LITTLE)
    memory = None if request.ram_mb is None else request.ram_mb * 10**6
    asks = {"cpus": request.cpus, "memory": memory, "resources": resources}
    return ray.ray_options(asks, request.gpus, request.limits)


ENGINES: Mapping[str, EngineKind] = {
    SLURM: EngineKind("Slurm", _slurm, _sbatch_options, _no_address),
    RAY: EngineKind("Ray", _ray, _ray_options, ray.checked_address, TOKENS),
}
"""Maps the names that a fleet's rows use to engines."""
