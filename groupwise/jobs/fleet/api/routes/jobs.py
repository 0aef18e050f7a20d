"""Jobs: submit, show, cancel, hold, release, retry, remove. A submission with an idempotency key is made once, even if it is repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import Field

from groupwise.api.schemas.fleet import (
    MAX_JOBS,
    CancelJobsBody,
    FleetBody,
    JobsBody,
    PruneBody,
    ReasonBody,
)
from groupwise.api.schemas.idempotency import idempotency_key
from groupwise.api.schemas.keys import Role
from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.api.serving import (
    DOCUMENTS,
    Context,
    RequestContext,
    changes,
    document,
    reads,
)
from groupwise.jobs.fleet.operations import jobs, prune, submission
from groupwise.jobs.fleet.queue.request import MAX_FILES, JobRequest
from groupwise.jobs.fleet.states import JobStatus

TAG = "jobs"

Project = Annotated[
    str | None,
    Query(
        max_length=80,
        description="Project that it counts for; without it the key's own, or `default`.",
    ),
]


class ArrayBody(FleetBody):
    """Jobs that are accepted together or not at all."""

    jobs: list[JobRequest] = Field(min_length=1, max_length=MAX_JOBS)


async def submit_job(
    context: Context, request: Request, body: JobRequest, project: Project = None
) -> Response:
    """Accept a job; once this is answered it is on disk. The same Idempotency-Key again answers with the same job."""
    accepted = await _submit_jobs(context, request, [body], project)
    return document(accepted[0], 201)


async def submit_jobs(
    context: Context, request: Request, body: ArrayBody, project: Project = None
) -> Response:
    """Accept several jobs, all of them or none. The same Idempotency-Key again answers with the same jobs."""
    return document(await _submit_jobs(context, request, body.jobs, project), 201)


async def _submit_jobs(
    context: RequestContext, request: Request, requests: list[JobRequest], project: str | None
) -> list[dict[str, Any]]:
    with _callers_mistakes():
        accepted = await context.run(
            submission.submit_all,
            requests,
            project=project,
            key=idempotency_key(request.headers),
            allowed=context.serving.allowed,
        )
    context.serving.notifier.notify([job["job_id"] for job in accepted])
    return accepted


async def plan_job(context: Context, body: JobRequest, project: Project = None) -> Response:
    """The job that would be submitted, where it could run now, and why it would wait; nothing is submitted."""
    with _callers_mistakes():
        planned = await context.run(
            submission.plan, body, project=project, allowed=context.serving.allowed
        )
    return document(planned)


@contextmanager
def _callers_mistakes() -> Generator[None]:
    """Turn a UsageError of admission, which is the caller's mistake, into a refusal."""
    try:
        yield
    except UsageError as error:
        raise Refusal("invalid_request", error.message) from error


async def list_jobs(
    context: Context,
    ids: Annotated[
        list[str] | None,
        Query(max_length=jobs.MAX_LISTED, description="Only these; several times for several."),
    ] = None,
    status: Annotated[list[JobStatus] | None, Query(description="One or several.")] = None,
    project: Annotated[str | None, Query(max_length=80)] = None,
    name: Annotated[str | None, Query(max_length=256)] = None,
    kind: Annotated[str | None, Query(max_length=80, description="GRPO, COMMAND …")] = None,
    vm: Annotated[str | None, Query(max_length=80, description="Where it runs, or ran.")] = None,
    label: Annotated[
        list[str] | None, Query(description="`key=value`; with several all must be so.")
    ] = None,
    older_than: Annotated[
        str | None,
        Query(max_length=80, description="Those made before this job: the last of a list."),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=jobs.MAX_LISTED)] = 50,
) -> Response:
    """Jobs, the newest first."""
    job_filter = jobs.filter_of(
        ids=ids,
        status=status,
        project=project,
        name=name,
        kind=kind,
        vm=vm,
        label=label,
        older_than=older_than,
        limit=limit,
    )
    return document(await context.read(jobs.listing, job_filter))


async def show_job(context: Context, job_id: str) -> Response:
    """All about one job: its attempts with their evidence, why it waits, what happened to it."""
    return document(await context.read(jobs.show, job_id))


async def follow_job(context: Context, job_id: str) -> Response:
    """Its status, exit code, reason, and the epochs of its attempts: a short answer for clients that poll."""
    return document(await context.read(jobs.progress, job_id))


async def cancel_job(context: Context, job_id: str, body: ReasonBody | None = None) -> Response:
    """Cancel it in any state. Answers 202; the status is `cancelled` once nothing of the job is left. Safe to repeat."""
    reason = None if body is None else body.reason
    job = await context.run(jobs.cancel, job_id, reason)
    context.serving.notifier.notify([job_id])
    return document(job, 202)


async def hold_job(context: Context, job_id: str) -> Response:
    """Keep a waiting job from starting until it is released."""
    return document(await context.run(jobs.hold, job_id))


async def release_job(context: Context, job_id: str) -> Response:
    """Release a held job."""
    job = await context.run(jobs.release, job_id)
    context.serving.notifier.notify([job_id])
    return document(job)


async def retry_job(context: Context, job_id: str) -> Response:
    """Start a failed or cancelled job again, from its last checkpoint if it has one."""
    job = await context.run(jobs.retry, job_id, allowed=context.serving.allowed)
    context.serving.notifier.notify([job_id])
    return document(job)


async def cancel_jobs(context: Context, body: CancelJobsBody) -> Response:
    """Cancel several jobs. Answers with each as it is then, or with its `job_id` and `error` if it was refused."""
    return await _change_jobs(context, body, jobs.cancelling(body.reason))


async def hold_jobs(context: Context, body: JobsBody) -> Response:
    """Hold several jobs; the answer has the same form."""
    return await _change_jobs(context, body, jobs.holding)


async def release_jobs(context: Context, body: JobsBody) -> Response:
    """Release several jobs; the answer has the same form."""
    return await _change_jobs(context, body, jobs.releasing)


async def retry_jobs(context: Context, body: JobsBody) -> Response:
    """Start several failed or cancelled jobs again; the answer has the same form."""
    return await _change_jobs(context, body, jobs.retrying(context.serving.allowed))


async def _change_jobs(context: RequestContext, body: JobsBody, change: jobs.Change) -> Response:
    results = await context.run(jobs.change_many, body.jobs, change)
    # Those that were refused may not even exist.
    context.serving.notifier.notify(
        [result["job_id"] for result in results if "error" not in result]
    )
    return document(results)


async def prune_jobs(context: Context, body: PruneBody) -> Response:
    """Remove jobs that ended long ago, with logs and artefacts. Answers with their ids and the number of bytes freed."""
    folders = context.serving.folders
    result = await asyncio.to_thread(
        prune.clear_away,
        context.serving.database,
        folders.blobs,
        (folders.logs, folders.artefacts),
        context.actor,
        body.older_than,
        project=body.project,
        status=jobs.ended_statuses(body.status),
        dry_run=body.dry_run,
    )
    return document(result)


CHANGED = ("unknown_job", "job_state")
"""Refusal codes of changes to one job."""

change = partial(changes, tag=TAG, role=Role.ACT)
read = partial(reads, tag=TAG)
ROUTES = (
    change(
        "/jobs",
        submit_job,
        "idempotency_key_reused",
        takes_body=True,
        max_keys=MAX_FILES,
        status=201,
        named=True,
    ),
    change(
        "/jobs/array",
        submit_jobs,
        "idempotency_key_reused",
        answer=DOCUMENTS,
        takes_body=True,
        max_keys=MAX_FILES,
        status=201,
        named=True,
    ),
    change(
        "/jobs/plan", plan_job, role=Role.READ, works=False, takes_body=True, max_keys=MAX_FILES
    ),
    read("/jobs", list_jobs, "unknown_job", answer=DOCUMENTS),
    read("/jobs/{job_id}", show_job, "unknown_job"),
    read("/jobs/{job_id}/progress", follow_job, "unknown_job"),
    change(
        "/jobs/{job_id}/cancel",
        cancel_job,
        *CHANGED,
        takes_body=True,
        status=202,
        later="The request is stored. The status is `cancelled` once nothing of the job is left: at once if it was waiting.",
    ),
    change("/jobs/{job_id}/hold", hold_job, *CHANGED),
    change("/jobs/{job_id}/release", release_job, *CHANGED),
    change("/jobs/{job_id}/retry", retry_job, *CHANGED),
    change("/jobs/cancel", cancel_jobs, answer=DOCUMENTS, takes_body=True),
    change("/jobs/hold", hold_jobs, answer=DOCUMENTS, takes_body=True),
    change("/jobs/release", release_jobs, answer=DOCUMENTS, takes_body=True),
    change("/jobs/retry", retry_jobs, answer=DOCUMENTS, takes_body=True),
    change("/jobs/prune", prune_jobs, role=Role.ADMIN, takes_body=True, ends_with_client=False),
)
