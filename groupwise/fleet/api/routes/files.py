"""Bytes: files that jobs take along, their logs as they grow, and what they left.

A file is sent as a blob, named by its sha256, in pieces; what has arrived stays, so that whoever was cut off asks how much there is and
sends the rest. A log is read by position: the epoch of an attempt and an offset in it, and the answer says where the next piece begins.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import FileResponse, Response
from pydantic import Field
from sqlalchemy.orm import Session

from groupwise.fleet.api.serving import Asked, AskedHere, document
from groupwise.fleet.files.artefacts import record_of
from groupwise.fleet.files.logs import LOOK_AGAIN, Follower, LogPiece, Position
from groupwise.fleet.states import FINAL, JobStatus
from groupwise.fleet.verbs import find, jobs
from groupwise.hosts.files import LARGEST_BLOB, BlobError
from groupwise.hosts.spec import SHA256
from groupwise.http.declared import Route
from groupwise.wire.fleet import FleetBody
from groupwise.wire.keys import Role
from groupwise.wire.problems import Refusal

TAG = "files"
LONGEST_WAIT = 30.0
"""Seconds for which a request for more of a log waits."""
EPOCH_HEADER = "X-Log-Epoch"
OFFSET_HEADER = "X-Log-Offset"
"""Where the next piece begins."""
ENDED_HEADER = "X-Log-Ended"
"""`true`: the job has ended, and this was the last of its log."""


Size = Annotated[int, Query(ge=0, le=LARGEST_BLOB, description="Bytes of the whole file.")]


class MissingBody(FleetBody):
    """Blobs of which somebody wants to know whether they are there."""

    sha256: list[Annotated[str, Field(pattern=f"^{SHA256.pattern}$")]] = Field(max_length=10_000)


# Files that travel with jobs


async def missing_blobs(asked: AskedHere, body: MissingBody) -> Response:
    """Which of these are to be sent. The others are kept for an hour, in which a job may name them."""
    store = asked.serving.folders.blobs
    return document({"missing": await asyncio.to_thread(store.missing, body.sha256)})


async def blob_received(asked: AskedHere, sha256: str, size: Size) -> Response:
    """How many bytes of a blob are here already."""
    return document({"received": await asyncio.to_thread(_received, asked, sha256, size)})


async def put_blob(
    asked: AskedHere,
    request: Request,
    sha256: str,
    size: Size,
    offset: Annotated[int, Query(ge=0, description="Where this piece belongs.")] = 0,
) -> Response:
    """A piece of a file, or all of it. `stored` is true once all of it is on disk and is what its name says."""
    data = await request.body()
    return document(await asyncio.to_thread(_put, asked, sha256, size, offset, data))


def _received(asked: Asked, sha256: str, size: int) -> int:
    _check_hash(sha256)
    store = asked.serving.folders.blobs
    if sha256 in store:
        return size
    with _incoming(asked, sha256, size) as incoming:
        return incoming.received


def _put(asked: Asked, sha256: str, size: int, offset: int, data: bytes) -> dict[str, Any]:
    _check_hash(sha256)
    if sha256 in asked.serving.folders.blobs:
        return {"received": size, "stored": True}
    try:
        with _incoming(asked, sha256, size) as incoming:
            if offset != incoming.received:
                return {"received": incoming.received, "stored": False}
            incoming.add(data)
            if incoming.received < size:
                return {"received": incoming.received, "stored": False}
            incoming.finish()
    except BlobError as error:
        raise Refusal("invalid_request", error.message) from error
    return {"received": size, "stored": True}


def _incoming(asked: Asked, sha256: str, size: int) -> Any:
    return asked.serving.folders.blobs.incoming(sha256, size)


def _check_hash(sha256: str) -> None:
    if not SHA256.fullmatch(sha256):
        raise Refusal("invalid_request", "sha256: 64 lower-case hex digits are wanted.")


# Logs


async def read_log(
    asked: AskedHere,
    job_id: str,
    epoch: Annotated[
        int | None,
        Query(ge=0, description="Of the attempt; without it: the newest, from its beginning."),
    ] = None,
    offset: Annotated[int, Query(ge=0)] = 0,
    rank: Annotated[int, Query(ge=0, description="Of the member of a gang.")] = 0,
    wait: Annotated[
        float,
        Query(ge=0, le=LONGEST_WAIT, description="Seconds to wait for more, if there is none yet."),
    ] = 0.0,
) -> Response:
    """The next piece of a job's log, as bytes; empty where nothing has come within `wait` seconds."""
    position = None if epoch is None else Position(epoch, offset)
    follower = Follower(asked.serving.folders.logs, job_id, position=position, rank=rank)
    found, over = await _look(asked, job_id), False
    ends = asyncio.get_running_loop().time() + wait
    while True:
        over = found["status"] in FINAL
        piece = await asyncio.to_thread(follower.read)
        late = asyncio.get_running_loop().time() >= ends
        if piece is not None or over or late or asked.serving.ending.is_set():
            return _log_answer(follower, piece, over)
        await asyncio.sleep(LOOK_AGAIN)
        found = await _look(asked, job_id)


async def _look(asked: Asked, job_id: str) -> dict[str, Any]:
    return await asked.read(lambda session: jobs.log_paths(session, asked.actor, job_id))


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


async def list_artefacts(asked: AskedHere, job_id: str) -> Response:
    """What the newest attempt left that has anything here: path, sha256, mode and bytes of each file."""
    folder = await _artefacts(asked, job_id)
    return document(await asyncio.to_thread(_listed, folder))


async def read_artefact(asked: AskedHere, job_id: str, path: str) -> Response:
    """One of these files."""
    folder = await _artefacts(asked, job_id)
    found = await asyncio.to_thread(_file_in, folder, path)
    if found is None:
        raise Refusal(
            "unknown_file",
            f"{job_id} left no file {path!r}; GET /jobs/{job_id}/artefacts lists them.",
        )
    return FileResponse(found, media_type="application/octet-stream")


async def _artefacts(asked: Asked, job_id: str) -> Path:
    def known(session: Session) -> JobStatus:
        return JobStatus(find.job(session, asked.actor, job_id).status)

    status = await asked.read(known)
    folder = asked.serving.folders.artefacts / job_id / "current"
    if not await asyncio.to_thread(folder.is_dir):
        raise Refusal("unknown_file", f"{job_id} is {status} and has left nothing here.")
    return folder


def _listed(folder: Path) -> dict[str, Any]:
    """What its manifest says, which was written before the folder got its name."""
    return json.loads(record_of(folder.resolve()).read_text())


def _file_in(folder: Path, path: str) -> Path | None:
    """Only what the manifest names is read: no other path leads anywhere."""
    whole = folder.resolve()
    return whole / path if path in _listed(folder)["files"] else None


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
        path="/jobs/{job_id}/artefacts/{path:path}",
        handler=read_artefact,
        role=Role.READ,
        tag=TAG,
        media_type="application/octet-stream",
        codes=("unknown_job", "unknown_file"),
    ),
)
