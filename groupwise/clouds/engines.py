"""Engines that begin jobs in place of the machine that is spoken to, by their names: what a fleet needs to know of each.

Such a machine is a door: attempts are laid out there, as everywhere, and its engine begins them where and when it likes. What an engine
has of its own stands behind its runner (`hosts/`), which answers as every runner does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.clouds import slurm
from groupwise.hosts.driver import Runner
from groupwise.hosts.port import Host
from groupwise.hosts.slurm import NAME as SLURM
from groupwise.hosts.slurm import TendedSlurm
from groupwise.hosts.spec import Limits


@dataclass(frozen=True, slots=True)
class Door:
    """The runner of a machine that an engine stands behind, and what only that engine answers."""

    runner: Runner
    ask: Callable[[], Awaitable[object]]
    """Whether the engine answers. Raises HostUnreachable where it does not."""
    try_options: Callable[[Sequence[str]], Awaitable[str]]
    """What it says of a job with these, without a job. Raises HostUnreachable, RunnerRefused."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One of them."""

    title: str
    """For people."""
    door: Callable[[Host, str, str], Door]
    """From the way to the machine, the root there and the interpreter of jobs."""
    options: Callable[[Mapping[str, Any], int, Limits], tuple[str, ...]]
    """What is asked of it for a job: `cpus`, `memory`, `gpu` (a model), `options` as they are; so many GPUs; limits."""
    checked: Callable[[Sequence[str]], tuple[str, ...]]
    """Options as somebody wrote them. Raises UsageError for one that is none, or that is not for people to set."""


def _slurm(host: Host, root: str, python: str) -> Door:
    runner = TendedSlurm(host, root=root, python=python)
    return Door(runner, runner.jobs, runner.try_options)


ENGINES: Mapping[str, EngineKind] = {
    SLURM: EngineKind("Slurm", _slurm, slurm.sbatch_options, slurm.checked_options),
}
"""By the names that rows of a fleet have them under."""
