"""Files: those sent with jobs, their logs as they grow, and their outputs.

A file is sent as a blob, named by its sha256, in pieces. Received bytes stay, so a client that was cut off asks how many there are and
sends the rest. If another client is sending the same blob, the request is refused at once (`file_busy`), and may be tried again. A log is
read by position: the epoch of an attempt and an offset in it, and the response states where the next piece starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import FileResponse, Response
from pydantic import Field
from starlette.convertors import PathConvertor, register_url_convertor

from groupwise.api.schemas.fleet import (
    ENDED_HEADER,
    EPOCH_HEADER,
    MAX_INTEGER,
    MAX_LINES,
    MAX_SERIAL,
    OFFSET_HEADER,
    FleetBody,
)
from groupwise.api.schemas.keys import Role
from groupwise.api.schemas.problems import Refusal
from groupwise.jobs.fleet.api.serving import (
    DOCUMENTS,
    Context,
    RequestContext,
    changes,
    document,
    reads,
)
from groupwise.jobs.fleet.disk_full import no_room
from groupwise.jobs.fleet.files.logs import LOOK_AGAIN, follower_at
from groupwise.jobs.fleet.operations import jobs, outputs
from groupwise.jobs.fleet.states import FINAL
from groupwise.jobs.fleet.store import rights
from groupwise.jobs.hosts.files import LARGEST_BLOB, BlobBusy, BlobError
from groupwise.jobs.hosts.spec import SHA256

TAG = "files"
LONGEST_WAIT = 30.0
"""Maximum time in seconds for which a request for more of a log waits."""
BUSY_SECONDS = 1.0
"""Seconds after which to try again if another client is sending the same file."""

Size = Annotated[int, Query(ge=0, le=LARGEST_BLOB, description="Bytes of the whole file.")]
Rank = Annotated[int, Query(ge=0, le=MAX_INTEGER, description="Of the member of a gang.")]
Epoch = Annotated[
    int | None,
    Query(ge=0, le=MAX_SERIAL, description="Of the attempt; without it: the newest that left any."),
]


class _FilePath(PathConvertor):
    """A path as file systems allow it: a name may contain newlines, which the framework's own converter rejects."""

    regex = "(?s:.*)"


register_url_convertor("file", _FilePath())


class MissingBody(FleetBody):
    """Blobs that a client asks about before it sends them."""

    sha256: list[Annotated[str, Field(pattern=f"^{SHA256.pattern}$")]] = Field(max_length=10_000)


# Files sent with jobs


async def missing_blobs(context: Context, body: MissingBody) -> Response:
    """The blobs that the client must send. The others are stored for another day, so that a job can name them."""

    def missing() -> list[str]:
        hashes = body.sha256
        lacking = _hashes_without_right(context, hashes)
        stored_hashes = [sha256 for sha256 in hashes if sha256 not in lacking]
        missing_hashes = lacking.union(context.serving.folders.blobs.missing(stored_hashes))
        return [sha256 for sha256 in dict.fromkeys(hashes) if sha256 in missing_hashes]

    return document({"missing": await asyncio.to_thread(missing)})


async def blob_received(context: Context, sha256: str, size: Size) -> Response:
    """The number of bytes of a blob that the fleet has already."""

    def received() -> int:
        _check_hash(sha256)
        so_far = context.serving.folders.blobs.received(
            sha256, rights.sender(context.actor.projects)
        )
        return size if _is_stored(context, sha256) else so_far

    return document({"received": await asyncio.to_thread(received)})


async def put_blob(
    context: Context,
    request: Request,
    sha256: str,
    size: Size,
    offset: Annotated[
        int, Query(ge=0, le=LARGEST_BLOB, description="Where this piece belongs.")
    ] = 0,
) -> Response:
    """Send a file, or a piece of it. `stored` is true once the whole file is on disk and its hash is right."""
    data = await request.body()
    return document(await asyncio.to_thread(_store_piece, context, sha256, size, offset, data))


def _hashes_without_right(context: RequestContext, hashes: Iterable[str]) -> frozenset[str]:
    """Hashes that the caller must send even if the blobs are here, because only other projects have them."""
    projects = context.actor.projects
    if projects is None:
        return frozenset()
    return context.serving.database.read(lambda session: rights.lacking(session, projects, hashes))


def _is_stored(context: RequestContext, sha256: str) -> bool:
    """True if the blob need not be sent; it is then kept for a day, in which the caller may name it."""
    return not (
        _hashes_without_right(context, [sha256]) or context.serving.folders.blobs.missing([sha256])
    )


def _store_piece(
    context: RequestContext, sha256: str, size: int, offset: int, data: bytes
) -> dict[str, Any]:
    _check_hash(sha256)
    if _is_stored(context, sha256):
        return {"received": size, "stored": True}
    sender = rights.sender(context.actor.projects)
    try:
        with context.serving.folders.blobs.incoming(sha256, size, sender) as incoming:
            if offset != incoming.received:
                return {"received": incoming.received, "stored": False}
            if (problem := no_room(context.serving.folders.blobs.root, len(data))) is not None:
                raise Refusal("disk_full", f"The file cannot be taken: {problem}.")
            incoming.add(data)
            if incoming.received < size:
                return {"received": incoming.received, "stored": False}
            incoming.finish()
    except BlobBusy as error:
        raise Refusal("file_busy", retry_after=BUSY_SECONDS) from error
    except BlobError as error:
        raise Refusal("invalid_request", error.message) from error
    rights_given = {(sha256, project) for project in context.actor.projects or ()}
    if rights_given:
        context.serving.database.run(lambda session: rights.record(session, rights_given))
    return {"received": size, "stored": True}


def _check_hash(sha256: str) -> None:
    if not SHA256.fullmatch(sha256):
        raise Refusal("invalid_request", "sha256: 64 lower-case hex digits are wanted.")


# Logs


async def read_log(
    context: Context,
    job_id: str,
    epoch: Annotated[
        int | None,
        Query(
            ge=0,
            le=MAX_SERIAL,
            description="Of the attempt; without it: the newest, from its beginning.",
        ),
    ] = None,
    offset: Annotated[int, Query(ge=0, le=MAX_SERIAL)] = 0,
    rank: Rank = 0,
    tail: Annotated[
        int | None,
        Query(
            ge=0,
            le=MAX_LINES,
            description="Begin so many lines before its present end, in place of `offset`.",
        ),
    ] = None,
    wait: Annotated[
        float,
        Query(ge=0, le=LONGEST_WAIT, description="Seconds to wait for more, if there is none yet."),
    ] = 0.0,
) -> Response:
    """The next piece of a job's log, as bytes; empty if nothing new came within `wait` seconds."""
    job = await context.read(jobs.progress, job_id)
    logs = context.serving.folders.logs
    follower = await asyncio.to_thread(
        follower_at, logs, job_id, epoch=epoch, offset=offset, rank=rank, tail=tail
    )
    deadline = asyncio.get_running_loop().time() + wait
    while True:
        is_over = job["status"] in FINAL
        piece = await asyncio.to_thread(follower.read)
        is_late = asyncio.get_running_loop().time() >= deadline
        if piece is not None or is_over or is_late or context.serving.ending.is_set():
            break
        await asyncio.sleep(LOOK_AGAIN)
        job = await context.read(jobs.progress, job_id)
    headers = {ENDED_HEADER: "true" if is_over and piece is None else "false"}
    if follower.position is not None:
        headers[EPOCH_HEADER] = str(follower.position.epoch)
        headers[OFFSET_HEADER] = str(follower.position.offset)
    return Response(
        b"" if piece is None else piece.data, headers=headers, media_type="application/octet-stream"
    )


# Outputs of jobs


async def list_artefacts(
    context: Context, job_id: str, epoch: Epoch = None, rank: Rank = 0
) -> Response:
    """The outputs of an attempt: path, sha256, mode and bytes of each file; and what was left out, with the reason."""
    job = await context.read(outputs.job_that_left, job_id)
    folder = context.serving.folders.artefacts
    return document(await asyncio.to_thread(outputs.artefacts, folder, job, epoch, rank))


async def read_artefact(
    context: Context, job_id: str, path: str, epoch: Epoch = None, rank: Rank = 0
) -> Response:
    """One of these files, or the requested `Range` of it."""
    job = await context.read(outputs.job_that_left, job_id)
    folder = context.serving.folders.artefacts
    file = await asyncio.to_thread(outputs.artefact, folder, job, path, epoch, rank)
    return FileResponse(file, media_type="application/octet-stream")


async def list_checkpoints(context: Context, job_id: str) -> Response:
    """Its mirrored checkpoints, the newest first, also while it runs: step, and its files as those of artefacts."""
    return document(await context.read(outputs.checkpoints, job_id))


async def read_checkpoint_file(context: Context, job_id: str, sha256: str) -> Response:
    """A file of one of these, by its sha256, or the requested `Range` of it."""
    path = await context.read(outputs.checkpoint_file, job_id, sha256)
    store = context.serving.folders.blobs
    if not await asyncio.to_thread(store.missing, [path], marked=True):
        return FileResponse(store.path(path), media_type="application/octet-stream")
    raise Refusal("unknown_file", f"that file of {job_id} is not on the fleet's disk any more.")


change = partial(changes, tag=TAG, role=Role.ACT)
read = partial(reads, tag=TAG)
read_bytes = partial(read, answer=None, media_type="application/octet-stream")
ROUTES = (
    change("/blobs/missing", missing_blobs, works=False, takes_body=True),
    read("/blobs/{sha256}", blob_received, role=Role.ACT),
    change(
        "/blobs/{sha256}",
        put_blob,
        "file_busy",
        "disk_full",
        method="PUT",
        takes_body=True,
        takes_bytes=True,
    ),
    read_bytes("/jobs/{job_id}/log", read_log, "unknown_job"),
    read("/jobs/{job_id}/artefacts", list_artefacts, "unknown_job", "unknown_file"),
    read_bytes(
        "/jobs/{job_id}/artefacts/{path:file}", read_artefact, "unknown_job", "unknown_file"
    ),
    read("/jobs/{job_id}/checkpoints", list_checkpoints, "unknown_job", answer=DOCUMENTS),
    read_bytes(
        "/jobs/{job_id}/checkpoints/{sha256}", read_checkpoint_file, "unknown_job", "unknown_file"
    ),
)
