"""Cluster schedulers (Slurm and Ray): they decide on which machine and when a job starts. Used as backends of a launch and as machines of a
fleet. Stored data, options and messages call a scheduler an `engine`.

Attempts are laid out on the called machine, as everywhere, and its scheduler starts them. The differences between schedulers are in their
runners (`hosts/`), which answer like every runner, and in the options of their jobs: those that we set, and those that users may set."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from groupwise.core.errors import UsageError
from groupwise.jobs.clouds.backend import Capabilities, Order
from groupwise.jobs.clouds.machine import MachineBackend
from groupwise.jobs.hosts.driver import Runner, Scheduler
from groupwise.jobs.hosts.host import Host
from groupwise.jobs.hosts.ray import ADDRESS, GANG, RESOURCE_NAMES, TOKEN_VARIABLES, RayRunner
from groupwise.jobs.hosts.ray import NAME as RAY
from groupwise.jobs.hosts.slurm import NAME as SLURM
from groupwise.jobs.hosts.slurm import SlurmRunner
from groupwise.jobs.hosts.spec import Limits

SPARE_SECONDS = 120.0
"""Seconds that are added to a job's own limit for Slurm's: the runner then ends the job first, and records why."""
RESERVED_OPTIONS = (
    *("--job-name", "-J", "--chdir", "-D", "--output", "-o", "--error", "-e", "--open-mode"),
    *("--array", "-a", "--requeue", "--no-requeue", "--wrap", "--test-only", "--parsable"),
    *("--time", "-t", "--nodes", "-N", "--wait", "-W", "--export", "--input", "-i"),
    *("--ntasks", "-n", "--ntasks-per-node", "--clusters", "-M"),
)
"""Options of sbatch that users may not set: with them a job could not be found again, or would not be a single job."""
NAMED_OPTIONS = {
    "partition": "--partition",
    "account": "--account",
    "qos": "--qos",
    "cpus": "--cpus-per-task",
    "memory": "--mem",
}
"""Our own options that correspond to an option of sbatch."""
DEFAULT_CPUS = 1
"""CPUs of a job that requests none: with zero CPUs Ray would not count it, and would run it on the head next to its own processes."""
OWN_OPTIONS = {"CPU": "--cpus", "GPU": "--gpus", "memory": "--memory"}
"""Resources that have their own command-line option."""
MAX_AMOUNT = 1e9
"""Largest amount of a resource that may be requested."""
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
        submit_step = f"submit it to {runner.title} with {' '.join(options)}"
        verdict = await runner.try_options(options)
        return (
            f"prepare {order.name} in {root}, and {submit_step}",
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


# --- Slurm -----------------------------------------------------------------------------------------


def _connect_slurm(address: SchedulerAddress) -> SchedulerClient:
    runner = SlurmRunner(
        address.host, root=address.root, python=address.python, caller_watches=True
    )
    return SchedulerClient(runner, runner.jobs, runner.try_options)


def _slurm_request(request: SchedulerRequest) -> tuple[str, ...]:
    place_options = {
        "cpus": request.cpus,
        # Slurm's M is 2**20 bytes, ours is 10**6.
        "memory": None if request.ram_mb is None else f"{-(-request.ram_mb * 10**6 // 2**20)}M",
        "gpu": request.gpu_model,
        "options": request.options,
    }
    return sbatch_options(place_options, request.gpus, request.limits)


def sbatch_options(
    place_options: Mapping[str, Any], gpus: int, limits: Limits, *, nodes: int = 1
) -> tuple[str, ...]:
    """The options of sbatch for a job with these requests and `gpus` on each node. Raises UsageError as `_checked_options` does."""
    options = [
        f"{option}={place_options[name]}"
        for name, option in NAMED_OPTIONS.items()
        if place_options.get(name)
    ]
    options.append(f"--nodes={nodes}")
    if nodes > 1:
        options.append("--ntasks-per-node=1")
    if gpus:
        gpu_type = f"{place_options['gpu']}:" if place_options.get("gpu") else ""
        options.append(f"--gpus-per-node={gpu_type}{gpus}")
    if limits.time_seconds is not None:
        seconds = limits.time_seconds + (limits.grace_seconds or 0.0) + SPARE_SECONDS
        options.append(f"--time={math.ceil(seconds / 60)}")
    return (*options, *_checked_options(place_options.get("options", ())))


def _checked_options(options: Sequence[Any]) -> tuple[str, ...]:
    """Check options of sbatch that a user wrote. Raises UsageError for those in `RESERVED_OPTIONS`."""
    checked = tuple(map(str, options))
    for option in checked:
        name = option.partition("=")[0]
        if not option.startswith("-"):
            raise UsageError(
                f"--sbatch {option}: an option of sbatch is expected, with its value behind `=`, as --sbatch=--constraint=a100."
            )
        # sbatch also accepts abbreviated long options, and short options with the value directly after the letter.
        is_long = name.startswith("--")
        is_ours = (
            any(reserved.startswith(name) for reserved in RESERVED_OPTIONS)
            if is_long
            else name[:2] in RESERVED_OPTIONS
        )
        if is_ours:
            raise UsageError(
                f"--sbatch {option}: {name} is set by groupwise, so that the job is found again. "
                "Its time is --time-limit, its machines are --machines."
            )
    return checked


def _reject_address(text: str) -> None:
    raise UsageError(f"--address {text}: Slurm is found by its programs, and has none.")


# --- Ray -------------------------------------------------------------------------------------------


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


def _ray_request(request: SchedulerRequest) -> tuple[str, ...]:
    resources = resources_of(request.options, request.gpu_model if request.gpus else None)
    memory = None if request.ram_mb is None else request.ram_mb * 10**6
    place_options = {"cpus": request.cpus, "memory": memory, "resources": resources}
    return ray_options(place_options, request.gpus, request.limits)


def ray_options(
    place_options: Mapping[str, Any], gpus: int, limits: Limits, *, nodes: int = 1
) -> tuple[str]:
    """The options of the Jobs API for a job with these requests and `gpus` on each node. `limits` is ignored: Ray has none."""
    options: dict[str, Any] = {"entrypoint_num_cpus": place_options.get("cpus") or DEFAULT_CPUS}
    if gpus:
        options["entrypoint_num_gpus"] = gpus
    if place_options.get("memory"):
        options["entrypoint_memory"] = place_options["memory"]
    if place_options.get("resources"):
        options["entrypoint_resources"] = dict(place_options["resources"])
    if nodes > 1:
        resources = options.pop("entrypoint_resources", {})
        bundle = {RESOURCE_NAMES[name]: amount for name, amount in options.items()}
        options = {GANG: {"nodes": nodes, "bundle": {**bundle, **resources}}}
    return (json.dumps(options),)


def resources_of(words: Iterable[str], gpu_model: str | None = None) -> dict[str, float]:
    """Parse resource amounts from words of the form NAME=N, and add that of a GPU model unless a word names it. Raises UsageError for an
    invalid word, or a resource that has its own option."""
    resources: dict[str, float] = {}
    for word in words:
        name, _, number = word.rpartition("=")
        try:
            amount = float(number)
        except ValueError:
            amount = 0.0
        if not name or name.startswith("-") or not 0 < amount < MAX_AMOUNT:
            raise UsageError(
                f"--resource {word}: NAME=N is expected, a resource of Ray's nodes and a number above 0, as accelerator_type:A100=0.001."
            )
        if name in OWN_OPTIONS:
            raise UsageError(f"--resource {word}: this one is asked for by {OWN_OPTIONS[name]}.")
        if name in resources:
            raise UsageError(f"--resource {word}: {name} is repeated.")
        resources[name] = amount
    if gpu_model:
        resources.setdefault(f"accelerator_type:{gpu_model}", ACCELERATOR_TYPE_AMOUNT)
    return resources


def checked_address(address: str) -> str:
    """Normalize the address of a head's dashboard that a user wrote. Raises UsageError if it is invalid."""
    url = address.rstrip("/")
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or "," in url or "@" in url:
        raise UsageError(
            f"--address {address.rpartition('@')[2]}: the address of Ray's dashboard is expected, as that machine reaches it: {ADDRESS}. "
            "Its token is read there."
        )
    return url


SCHEDULERS: Mapping[str, SchedulerKind] = {
    SLURM: SchedulerKind("Slurm", _connect_slurm, _slurm_request, _reject_address),
    RAY: SchedulerKind("Ray", _connect_ray, _ray_request, checked_address, TOKEN_VARIABLES),
}
"""Schedulers by the names in a fleet's rows."""
