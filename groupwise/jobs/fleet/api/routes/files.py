"""Bytes: files that jobs take along, their logs as they grow, and what they left.

A file is sent as a blob, named by its sha256, in pieces; what has arrived stays, so that whoever was cut off asks how much there is and
sends the rest. Where somebody else is just sending the same, nobody waits here: that is refused (`file_busy`), and may be asked again. A
log is read by position: the epoch of an attempt and an offset in it, and the answer says where the next piece begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import FileResponse, Response
from pydantic import Field
from starlette.convertors import PathConvertor, register_url_convertor

from groupwise.api.http.declared import Route
from groupwise.api.schemas.fleet import (
    ENDED_HEADER,
    EPOCH_HEADER,
    MOST_INTEGER,
    MOST_LINES,
    MOST_SERIAL,
    OFFSET_HEADER,
    FleetBody,
)
from groupwise.api.schemas.keys import Role
from groupwise.api.schemas.problems import Refusal
from groupwise.jobs.fleet.api.serving import AskedHere, RequestContext, document
from groupwise.jobs.fleet.disk_full import no_room
from groupwise.jobs.fleet.files.logs import LOOK_AGAIN, Follower, LogPiece, follower_at
from groupwise.jobs.fleet.states import FINAL
from groupwise.jobs.fleet.store import rights
from groupwise.jobs.fleet.verbs import jobs, outputs
from groupwise.jobs.hosts.files import LARGEST_BLOB, BlobBusy, BlobError
from groupwise.jobs.hosts.spec import SHA256

TAG = "files"
LONGEST_WAIT = 30.0
"""Seconds for which a request for more of a log waits."""
BUSY_SECONDS = 1.0
"""After which more of a file that somebody else sends may be here."""

Size = Annotated[int, Query(ge=0, le=LARGEST_BLOB, description="Bytes of the whole file.")]
Rank = Annotated[int, Query(ge=0, le=MOST_INTEGER, description="Of the member of a gang.")]
Epoch = Annotated[
    int | None,
    Query(
        ge=0, le=MOST_SERIAL, description="Of the attempt; without it: the newest that left any."
    ),
]


class _FilePath(PathConvertor):
    """A path as a disk has it: a name may hold ends of lines, which the framework's own convertor does not take."""

    regex = "(?s:.*)"


register_url_convertor("file", _FilePath())


class MissingBody(FleetBody):
    """Blobs of which somebody wants to know whether they are there."""

    sha256: list[Annotated[str, Field(pattern=f"^{SHA256.pattern}$")]] = Field(max_length=10_000)


# Files that travel with jobs


async def missing_blobs(asked: AskedHere, body: MissingBody) -> Response:
    """Which of these are to be sent. The others are kept for a day, in which a job may name them."""
    return document({"missing": await asyncio.to_thread(_missing, asked, body.sha256)})


async def blob_received(asked: AskedHere, sha256: str, size: Size) -> Response:
    """How many bytes of a blob are here already."""
    return document({"received": await asyncio.to_thread(_received, asked, sha256, size)})


async def put_blob(
    asked: AskedHere,
    request: Request,
    sha256: str,
    size: Size,
    offset: Annotated[
        int, Query(ge=0, le=LARGEST_BLOB, description="Where this piece belongs.")
    ] = 0,
) -> Response:
    """A piece of a file, or all of it. `stored` is true once all of it is on disk and is what its name says."""
    data = await request.body()
    return document(await asyncio.to_thread(_put, asked, sha256, size, offset, data))


def _missing(asked: RequestContext, hashes: Sequence[str]) -> list[str]:
    lacking = _lacking(asked, hashes)
    known = [sha256 for sha256 in hashes if sha256 not in lacking]
    missing = lacking.union(asked.serving.folders.blobs.missing(known))
    return [sha256 for sha256 in dict.fromkeys(hashes) if sha256 in missing]


def _lacking(asked: RequestContext, hashes: Iterable[str]) -> frozenset[str]:
    """Those that the caller has to send whether they are here or not: only other projects have."""
    projects = asked.actor.projects
    if projects is None:
        return frozenset()
    return asked.serving.database.read(lambda session: rights.lacking(session, projects, hashes))


def _is_here(asked: RequestContext, sha256: str) -> bool:
    """Then it is kept for the next day, in which the caller may name it."""
    return not (_lacking(asked, [sha256]) or asked.serving.folders.blobs.missing([sha256]))


def _received(asked: RequestContext, sha256: str, size: int) -> int:
    _check_hash(sha256)
    received = asked.serving.folders.blobs.received(sha256, _sender(asked))
    return size if _is_here(asked, sha256) else received


def _put(asked: RequestContext, sha256: str, size: int, offset: int, data: bytes) -> dict[str, Any]:
    _check_hash(sha256)
    if _is_here(asked, sha256):
        return {"received": size, "stored": True}
    try:
        with asked.serving.folders.blobs.incoming(sha256, size, _sender(asked)) as incoming:
            if offset != incoming.received:
                return {"received": incoming.received, "stored": False}
            if (problem := no_room(asked.serving.folders.blobs.root, len(data))) is not None:
                raise Refusal("disk_full", f"The file cannot be taken: {problem}.")
            incoming.add(data)
            if incoming.received < size:
                return {"received": incoming.received, "stored": False}
            incoming.finish()
    except BlobBusy as error:
        raise Refusal("file_busy", retry_after=BUSY_SECONDS) from error
    except BlobError as error:
        raise Refusal("invalid_request", error.message) from error
    sent = {(sha256, project) for project in asked.actor.projects or ()}
    if sent:
        asked.serving.database.run(lambda session: rights.record(session, sent))
    return {"received": size, "stored": True}


def _sender(asked: RequestContext) -> str:
    return rights.sender(asked.actor.projects)


def _check_hash(sha256: str) -> None:
    if not SHA256.fullmatch(sha256):
        raise Refusal("invalid_request", "sha256: 64 lower-case hex digits are wanted.")


# Logs


async def read_log(
    asked: AskedHere,
    job_id: str,
    epoch: Annotated[
        int | None,
        Query(
            ge=0,
            le=MOST_SERIAL,
            description="Of the attempt; without it: the newest, from its beginning.",
        ),
    ] = None,
    offset: Annotated[int, Query(ge=0, le=MOST_SERIAL)] = 0,
    rank: Rank = 0,
    tail: Annotated[
        int | None,
        Query(
            ge=0,
            le=MOST_LINES,
            description="Begin so many lines before its present end, in place of `offset`.",
        ),
    ] = None,
    wait: Annotated[
        float,
        Query(ge=0, le=LONGEST_WAIT, description="Seconds to wait for more, if there is none yet."),
    ] = 0.0,
) -> Response:
    """The next piece of a job's log, as bytes; empty where nothing has come within `wait` seconds."""
    found, over = await _look(asked, job_id), False
    logs = asked.serving.folders.logs
    follower = await asyncio.to_thread(
        follower_at, logs, job_id, epoch=epoch, offset=offset, rank=rank, tail=tail
    )
    ends = asyncio.get_running_loop().time() + wait
    while True:
        over = found["status"] in FINAL
        piece = await asyncio.to_thread(follower.read)
        late = asyncio.get_running_loop().time() >= ends
        if piece is not None or over or late or asked.serving.ending.is_set():
            return _log_answer(follower, piece, over)
        await asyncio.sleep(LOOK_AGAIN)
        found = await _look(asked, job_id)


async def _look(asked: RequestContext, job_id: str) -> dict[str, Any]:
    return await asked.read(lambda session: jobs.progress(session, asked.actor, job_id))


def _log_answer(follower: Follower, piece: LogPiece | None, over: bool) -> Response:
    headers = {ENDED_HEADER: "true" if over and piece is None else "false"}
    if follower.position is not None:
        headers[EPOCH_HEADER] = str(follower.position.epoch)
        headers[OFFSET_HEADER] = str(follower.position.offset)
    return Response(
        b"" if piece is None else piece.data,
        headers=headers,
        media_type="application/octet-stream",
    )


# What jobs left


async def list_artefacts(
    asked: AskedHere, job_id: str, epoch: Epoch = None, rank: Rank = 0
) -> Response:
    """What an attempt left: path, sha256, mode and bytes of each file; and what was left out, with the reason."""
    job = await _job(asked, job_id)
    folder = asked.serving.folders.artefacts
    return document(await asyncio.to_thread(outputs.artefacts, folder, job, epoch, rank))


async def read_artefact(
    asked: AskedHere, job_id: str, path: str, epoch: Epoch = None, rank: Rank = 0
) -> Response:
    """One of these files, or the `Range` of it that is asked for."""
    job = await _job(asked, job_id)
    folder = asked.serving.folders.artefacts
    found = await asyncio.to_thread(outputs.artefact, folder, job, path, epoch, rank)
    return FileResponse(found, media_type="application/octet-stream")


async def _job(asked: RequestContext, job_id: str) -> dict[str, Any]:
    return await asked.read(lambda session: outputs.job_that_left(session, asked.actor, job_id))


async def list_checkpoints(asked: AskedHere, job_id: str) -> Response:
    """Its mirrored checkpoints, the newest first, also while it runs: step, and its files as those of artefacts."""
    return document(
        await asked.read(lambda session: outputs.checkpoints(session, asked.actor, job_id))
    )


async def read_checkpoint_file(asked: AskedHere, job_id: str, sha256: str) -> Response:
    """A file of one of these, by its sha256, or the `Range` of it that is asked for."""
    named = await asked.read(
        lambda session: outputs.checkpoint_file(session, asked.actor, job_id, sha256)
    )
    store = asked.serving.folders.blobs
    if not await asyncio.to_thread(store.missing, [named], marked=True):
        return FileResponse(store.path(named), media_type="application/octet-stream")
    raise Refusal("unknown_file", f"that file of {job_id} is not on the fleet's disk any more.")


ROUTES = (
    Route(
        method="POST",
        path="/blobs/missing",
        handler=missing_blobs,
        role=Role.ACT,
        tag=TAG,
        answer=dict[str, Any],
        takes_body=True,
    ),
    Route(
        method="GET",
        path="/blobs/{sha256}",
        handler=blob_received,
        role=Role.ACT,
        tag=TAG,
        answer=dict[str, Any],
    ),
    Route(
        method="PUT",
        path="/blobs/{sha256}",
        handler=put_blob,
        role=Role.ACT,
        tag=TAG,
        answer=dict[str, Any],
        takes_body=True,
        takes_bytes=True,
        works=True,
        codes=("file_busy", "disk_full"),
    ),
    Route(
        method="GET",
        path="/jobs/{job_id}/log",
        handler=read_log,
        role=Role.READ,
        tag=TAG,
        media_type="application/octet-stream",
        codes=("unknown_job",),
    ),
    Route(
        method="GET",
        path="/jobs/{job_id}/artefacts",
        handler=list_artefacts,
        role=Role.READ,
        tag=TAG,
        answer=dict[str, Any],
        codes=("unknown_job", "unknown_file"),
    ),
    Route(
        method="GET",
        path="/jobs/{job_id}/artefacts/{path:file}",
        handler=read_artefact,
        role=Role.READ,
        tag=TAG,
        media_type="application/octet-stream",
        codes=("unknown_job", "unknown_file"),
    ),
    Route(
        method="GET",
        path="/jobs/{job_id}/checkpoints",
        handler=list_checkpoints,
        role=Role.READ,
        tag=TAG,
        answer=list[dict[str, Any]],
        codes=("unknown_job",),
    ),
    Route(
        method="GET",
        path="/jobs/{job_id}/checkpoints/{sha256}",
        handler=read_checkpoint_file,
        role=Role.READ,
        tag=TAG,
        media_type="application/octet-stream",
        codes=("unknown_job", "unknown_file"),
    ),
)
