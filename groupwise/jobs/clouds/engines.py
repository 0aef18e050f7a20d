"""Engines (Slurm and Ray): schedulers that decide on which machine and when a job starts, used as backends of a launch and as machines of a
fleet.

Attempts are laid out on the called machine, as everywhere, and its engine starts them. The differences between engines are in their
runners (`hosts/`), which answer like every runner, and in the options of their jobs (`slurm.py`, `ray.py`)."""

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
"""Requested amount of the resource that marks Ray nodes by GPU type. Ray itself uses the same amount: so small that it never runs out."""


class Options(Protocol):
    """Makes the engine's options for a job. Raises UsageError for options that users may not set."""

    def __call__(
        self, asks: Mapping[str, Any], gpus: int, limits: Limits, *, nodes: int = 1
    ) -> tuple[str, ...]: ...


class EngineBackend(MachineBackend):
    """A `Backend` that submits jobs to an engine, in whose queue they wait for resources."""

    capabilities = Capabilities(nodes=True, queues=True)

    def __init__(
        self, name: str, runner: SlurmRunner | RayRunner, where: str, options: Options
    ) -> None:
        """`where`: the called machine, for messages."""
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
    """The runner of a machine that submits to an engine, and calls that only this engine answers."""

    runner: Runner
    ask: Callable[[], Awaitable[object]]
    """Call the engine. Raises HostUnreachable if it does not answer."""
    try_options: Callable[[Sequence[str]], Awaitable[str]]
    """Make the engine validate a job with these options without creating it; returns its message. Raises HostUnreachable, RunnerRefused."""


@dataclass(frozen=True, slots=True)
class Way:
    """How to reach an engine."""

    host: Host
    """The machine that is called."""
    root: str
    """The runner's folder there."""
    python: str
    """The interpreter for jobs."""
    address: str | None = None
    """The engine's address, as seen from the machine; None: the default, or the engine has none."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """The resources that a fleet's job requests on one machine."""

    gpus: int = 0
    gpu_model: str | None = None
    """The engine's name for the GPU model."""
    cpus: int | None = None
    ram_mb: int | None = None
    options: Sequence[str] = ()
    """Additional options of the job, as the user wrote them."""
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """A kind of engine."""

    title: str
    """Its name in messages."""
    door: Callable[[Way], Door]
    options: Callable[[EngineRequest], tuple[str, ...]]
    """The engine's options for a job. Raises UsageError for options that do not exist, or that users may not set."""
    check_address: Callable[[str], object]
    """Check an address that a user wrote. Raises UsageError if it is invalid."""
    variables: tuple[str, ...] = ()
    """Environment variables of the called machine that calls to this engine use. Some contain secrets, which no other engine may get."""


def _slurm(way: Way) -> Door:
    runner = SlurmRunner(way.host, root=way.root, python=way.python, tended=True)
    return Door(runner, runner.jobs, runner.try_options)


def _sbatch_options(request: EngineRequest) -> tuple[str, ...]:
    # Slurm's M is 2**20 bytes, ours is 10**6.
    mebibytes = None if request.ram_mb is None else -(-request.ram_mb * 10**6 // 2**20)
    asks = {
        "cpus": request.cpus,
        "memory": None if mebibytes is None else f"{mebibytes}M",
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
"""Engines by the names in a fleet's rows."""
