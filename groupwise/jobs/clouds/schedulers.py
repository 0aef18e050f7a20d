"""Cluster schedulers (Slurm and Ray): they decide on which machine and when a job starts. Used as backends of a launch and as machines of a
fleet. Stored data, options and messages call a scheduler an `engine`.

Attempts are laid out on the called machine, as everywhere, and its scheduler starts them. The differences between schedulers are in their
runners (`hosts/`), which answer like every runner, and in the options of their jobs (`slurm.py`, `ray.py`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from groupwise.core.errors import UsageError
from groupwise.jobs.clouds import ray, slurm
from groupwise.jobs.clouds.backend import Capabilities, Order
from groupwise.jobs.clouds.machine import MachineBackend
from groupwise.jobs.hosts.driver import Runner, Scheduler
from groupwise.jobs.hosts.port import Host
from groupwise.jobs.hosts.ray import ADDRESS, TOKEN_VARIABLES, RayRunner
from groupwise.jobs.hosts.ray import NAME as RAY
from groupwise.jobs.hosts.slurm import NAME as SLURM
from groupwise.jobs.hosts.slurm import SlurmRunner
from groupwise.jobs.hosts.spec import Limits

ACCELERATOR_TYPE_AMOUNT = 0.001
"""Requested amount of the resource that marks Ray nodes by GPU type. Ray itself uses the same amount: so small that it never runs out."""


class MakeOptions(Protocol):
    """Builds the scheduler's command-line options for a job. Raises UsageError for options that users may not set."""

    def __call__(
        self, place_options: Mapping[str, Any], gpus: int, limits: Limits, *, nodes: int = 1
    ) -> tuple[str, ...]: ...


class SchedulerBackend(MachineBackend):
    """A `Backend` that submits jobs to a scheduler, in whose queue they wait for resources."""

    capabilities = Capabilities(nodes=True)

    def __init__(
        self, name: str, runner: SlurmRunner | RayRunner, where: str, options: MakeOptions
    ) -> None:
        """`where`: the called machine, for messages."""
        super().__init__(name, runner, where)
        self._scheduler_runner, self._options = runner, options

    async def _scheduler(self, order: Order) -> Scheduler:
        options = self._options(
            order.place_options, order.gpus, order.spec.limits, nodes=order.nodes
        )
        return Scheduler(await self._scheduler_runner.engine_id(), options)

    async def _start_steps(
        self, order: Order, engine: Scheduler | None, root: str
    ) -> tuple[str, ...]:
        assert engine is not None
        runner, options = self._scheduler_runner, engine.options
        submit_step = f"give it to {runner.title}, with {' '.join(options)}"
        verdict = await runner.try_options(options)
        return (
            f"lay {order.name} out below {root}, and {submit_step}",
            f"{runner.title} says: {verdict}",
        )


@dataclass(frozen=True, slots=True)
class SchedulerClient:
    """The runner on a machine that submits to a scheduler (e.g. a login node), and two calls that the scheduler itself answers."""

    runner: Runner
    ping: Callable[[], Awaitable[object]]
    """Check that the scheduler answers. Raises HostUnreachable if it does not."""
    try_options: Callable[[Sequence[str]], Awaitable[str]]
    """Make the scheduler validate a job with these options without creating it; returns its message. Raises HostUnreachable,
    RunnerRefused."""


@dataclass(frozen=True, slots=True)
class SchedulerAddress:
    """How to reach a scheduler."""

    host: Host
    """The machine that is called."""
    root: str
    """The runner's folder there."""
    python: str
    """The interpreter for jobs."""
    address: str | None = None
    """The scheduler's address, as seen from the machine; None: the default, or it has none."""


@dataclass(frozen=True, slots=True)
class SchedulerRequest:
    """The resources that a fleet's job requests on one machine."""

    gpus: int = 0
    gpu_model: str | None = None
    """The scheduler's name for the GPU model."""
    cpus: int | None = None
    ram_mb: int | None = None
    options: Sequence[str] = ()
    """Additional options of the job, as the user wrote them."""
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class SchedulerKind:
    """A kind of scheduler."""

    title: str
    """Its name in messages."""
    connect: Callable[[SchedulerAddress], SchedulerClient]
    options: Callable[[SchedulerRequest], tuple[str, ...]]
    """The scheduler's options for a job. Raises UsageError for options that do not exist, or that users may not set."""
    check_address: Callable[[str], object]
    """Check an address that a user wrote. Raises UsageError if it is invalid."""
    credential_variables: tuple[str, ...] = ()
    """Environment variables of the called machine that calls to this scheduler use. Some contain secrets, which no other scheduler may
    get."""


def _connect_slurm(address: SchedulerAddress) -> SchedulerClient:
    runner = SlurmRunner(
        address.host, root=address.root, python=address.python, caller_watches=True
    )
    return SchedulerClient(runner, runner.jobs, runner.try_options)


def _sbatch_options(request: SchedulerRequest) -> tuple[str, ...]:
    place_options = {
        "cpus": request.cpus,
        # Slurm's M is 2**20 bytes, ours is 10**6.
        "memory": None if request.ram_mb is None else f"{-(-request.ram_mb * 10**6 // 2**20)}M",
        "gpu": request.gpu_model,
        "options": request.options,
    }
    return slurm.sbatch_options(place_options, request.gpus, request.limits)


def _reject_address(text: str) -> None:
    raise UsageError(f"--address {text}: Slurm is found by its programs, and has none.")


def _connect_ray(scheduler: SchedulerAddress) -> SchedulerClient:
    address = (scheduler.address or ADDRESS).rstrip("/")
    runner = RayRunner(
        scheduler.host,
        root=scheduler.root,
        python=scheduler.python,
        caller_watches=True,
        address=address,
    )

    return SchedulerClient(runner, runner.free_resources, runner.try_options)


def _ray_options(request: SchedulerRequest) -> tuple[str, ...]:
    resources = ray.resources_of(request.options)
    if request.gpus and request.gpu_model:
        resources.setdefault(f"accelerator_type:{request.gpu_model}", ACCELERATOR_TYPE_AMOUNT)
    memory = None if request.ram_mb is None else request.ram_mb * 10**6
    place_options = {"cpus": request.cpus, "memory": memory, "resources": resources}
    return ray.ray_options(place_options, request.gpus, request.limits)


SCHEDULERS: Mapping[str, SchedulerKind] = {
    SLURM: SchedulerKind("Slurm", _connect_slurm, _sbatch_options, _reject_address),
    RAY: SchedulerKind("Ray", _connect_ray, _ray_options, ray.checked_address, TOKEN_VARIABLES),
}
"""Schedulers by the names in a fleet's rows."""
