"""Machines that submit jobs to an engine (a cluster scheduler): Slurm's login node, or a machine that reaches Ray's head. Each is a row of
the fleet, with the size that its operator states.

Such a row has places instead of GPUs (`slots`): the number of jobs that may wait for its engine or run there. The engine chooses the
machine and the GPUs of a job, and the fleet's tables do not record them. So a job's requirements are compared with the sizes stated in the
row, and passed to the engine as options of its own program.

The column `vms.engine` is a `groupwise.api.schemas.fleet.EngineBody` as JSON, and users write it by hand: a row with an unreadable value
gets no job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from groupwise.api.schemas.fleet import EngineBody
from groupwise.core.errors import UsageError
from groupwise.core.settings.field_errors import field_errors
from groupwise.jobs.clouds.schedulers import SCHEDULERS, SchedulerRequest
from groupwise.jobs.fleet.queue.resources import Resources, fits_model
from groupwise.jobs.hosts.driver import Scheduler
from groupwise.jobs.hosts.spec import Limits


@dataclass(frozen=True, slots=True)
class Elastic:
    """The engine to which a machine submits jobs."""

    body: EngineBody
    problem: str | None = None
    """The reason why it gets no jobs; None: it may."""

    @property
    def title(self) -> str:
        """The engine's name for display."""
        kind = SCHEDULERS.get(self.body.name)
        return self.body.name if kind is None else kind.title

    def engine(self, resources: Resources, limits: Limits) -> Scheduler:
        """The engine and its options for a job. Raises UsageError if its options are invalid."""
        request = SchedulerRequest(
            resources.gpu_count,
            self.body.gpu_model,
            resources.cpus,
            resources.ram_mb,
            self.body.options,
            limits,
        )
        return Scheduler(self.body.name, SCHEDULERS[self.body.name].options(request))


def elastic_of(document: object) -> Elastic | None:
    """Read the column of a row; None: the machine starts jobs itself."""
    if document is None:
        return None
    try:
        body = EngineBody.model_validate(document)
    except ValidationError as error:
        errors = "; ".join(map(str, field_errors(error, EngineBody)))
        return Elastic(EngineBody(name="unreadable"), f"its engine: {errors}")
    problem = _unusable(body)
    return Elastic(body, problem and f"its engine: {problem}")


def problems(document: Mapping[str, Any]) -> list[str]:
    """All problems of a description of an engine."""
    try:
        body = EngineBody.model_validate(dict(document))
    except ValidationError as error:
        return [f"engine.{field_error}" for field_error in field_errors(error, EngineBody)]
    problem = _unusable(body)
    return [] if problem is None else [f"engine: {problem}"]


def _unusable(body: EngineBody) -> str | None:
    kind = SCHEDULERS.get(body.name)
    if kind is None:
        return f"there is none called {body.name!r}: {', '.join(SCHEDULERS)}"
    try:
        kind.options(SchedulerRequest(options=body.options))
        if body.address is not None:
            kind.check_address(body.address)
    except UsageError as error:
        return str(error)
    return None


def unfit(resources: Resources, elastic: Elastic) -> str | None:
    """The reason why the engine cannot run the job, even if all places are free; None: it can."""
    body, title = elastic.body, elastic.title
    if resources.machines > 1:
        return f"a job on several machines is not given to {title}, which begins each when it likes"
    if resources.named:
        return f"{title} chooses the GPUs there, so that none can be named"
    if resources.share_mb is not None:
        return f"{title} gives whole GPUs there, and no shares"
    if resources.gpu_count > body.gpus:
        limit = f"at most {body.gpus}" if body.gpus else "none"
        return f"GPUs that a job may have there: {limit}, {resources.gpu_count} wanted"
    model, memory = resources.gpu_model, resources.gpu_memory_mb
    if resources.gpus and not fits_model(model, body.gpu_model, body.gpu_memory_mb):
        other = f"not {model}" if model else "which a job gets if --gpu-model names their profile"
        return f"its GPUs are {body.gpu_model or 'of unknown model'}, {other}"
    if memory and (body.gpu_memory_mb or 0) < memory:
        memory_text = f"{body.gpu_memory_mb} MB" if body.gpu_memory_mb else "unknown memory"
        return f"its GPUs have {memory_text}, {memory} MB wanted"
    return None
