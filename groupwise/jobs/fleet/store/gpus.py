"""What was seen of a GPU, whoever saw it: a poller that looks at its machine, or a runner that would not start a job on it."""

from __future__ import annotations

from sqlalchemy.orm import Session

from groupwise.jobs.fleet.states import Observed
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.tables import GPU


def note_observed(
    session: Session,
    gpu: GPU,
    now: Observed,
    why: str | None,
    *,
    actor: str,
    job_id: str | None = None,
    epoch: int | None = None,
) -> bool:
    """Whether that is a change; every change is told."""
    before, gpu.detail = gpu.observed, why
    if before == now:
        return False
    gpu.observed = now
    events.append(
        session,
        actor=actor,
        kind=events.GPU_OBSERVED,
        job_id=job_id,
        epoch=epoch,
        vm_id=gpu.vm_id,
        before={"observed": before},
        after={"observed": now},
        detail={"index": gpu.index, "uuid": gpu.uuid, "why": why},
    )
    return True
