"""The model itself: a version as a zip file, its tokenizer, and the checkpoints from which a run can continue."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from typing import Annotated

from fastapi import Body as BodyOf
from fastapi import Query
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from groupwise.api.http.bodies import ClientGone
from groupwise.api.http.route import SMALL_BODY, Route, json_response
from groupwise.api.schemas.keys import Role
from groupwise.api.schemas.training import (
    MAX_ADDRESS,
    CheckpointAnswer,
    CheckpointRequest,
    CheckpointsAnswer,
    ModelRequest,
    TokenizerAnswer,
)
from groupwise.server.ledger.idempotency import StoredResponse
from groupwise.server.routes.context import Context
from groupwise.server.routes.training import OF_ENGINE
from groupwise.server.run.downloads import OpenVersion, zip_pieces
from groupwise.server.run.responses import answer_of

TAG = "models"
VERSION_HEADER = "X-Model-Version"
"""The version of the files, as `run@step`."""
FINGERPRINT_HEADER = "X-Model-Fingerprint"
KIND_HEADER = "X-Model-Kind"
"""`adapter` or `full`."""
STALLED = 120.0
"""Seconds after which a client that reads nothing of its download is disconnected."""


class ZipResponse(Response):
    """A version as a zip file. Its files are closed in every case: sent, refused, or the client disconnected."""

    media_type = "application/zip"

    def __init__(self, version: OpenVersion) -> None:
        super().__init__(
            headers={
                "Content-Disposition": f'attachment; filename="{version.address}.zip"',
                VERSION_HEADER: version.address,
                FINGERPRINT_HEADER: version.fingerprint,
                KIND_HEADER: version.kind,
                "Cache-Control": "no-store",
            }
        )
        del self.headers["content-length"]  # unknown before the end
        self._version = version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            async with aclosing(zip_pieces(self._version)) as chunks:
                async for chunk in chunks:
                    async with asyncio.timeout(STALLED):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            raise ClientGone from None
        finally:
            self._version.close()


VersionInQuery = Annotated[
    str | None,
    Query(
        description="`run@step`, a number of steps of the present run, the name of a checkpoint, or `latest`, which is meant without it.",
        min_length=1,
        max_length=MAX_ADDRESS,
    ),
]


async def get_model(context: Context, version: VersionInQuery = None) -> Response:
    """The files of one version, as a zip file: adapter or all weights, tokenizer, model card."""
    return ZipResponse(await context.service.open_version(version))


async def post_model(
    context: Context, body: Annotated[ModelRequest | None, BodyOf()] = None
) -> Response:
    """The same as GET."""
    version = None if body is None else body.version
    return ZipResponse(await context.service.open_version(version))


async def tokenizer(context: Context) -> Response:
    """Tokenizer and chat template of the run, with the hash that requests may give."""
    return json_response(await context.service.tokenizer())


async def checkpoints(context: Context) -> Response:
    """All checkpoints from which a run can continue."""
    return json_response(await context.service.checkpoints())


async def save_checkpoint(body: CheckpointRequest, context: Context) -> Response:
    """Write a checkpoint now, under a name. It is kept until it is deleted, so only an admin may do this."""

    async def work() -> StoredResponse:
        return answer_of(await context.service.save_checkpoint(body.name, context.caller))

    return await context.run_idempotent(work)


OF_VERSIONS = ("not_started", "unknown_version", "version_gone", "unknown_run", *OF_ENGINE)

get_route = partial(Route, method="GET", role=Role.READ, tag=TAG)
post_route = partial(Route, method="POST", tag=TAG, takes_body=True, max_body_bytes=SMALL_BODY)
ROUTES = (
    get_route(
        path="/model",
        handler=get_model,
        media_type="application/zip",
        codes=(*OF_VERSIONS, "invalid_request"),
    ),
    post_route(
        path="/model",
        handler=post_model,
        role=Role.READ,
        media_type="application/zip",
        codes=OF_VERSIONS,
        example={"version": "latest"},
    ),
    get_route(
        path="/tokenizer",
        handler=tokenizer,
        answer=TokenizerAnswer,
        codes=("not_started", *OF_ENGINE),
    ),
    get_route(path="/checkpoints", handler=checkpoints, answer=CheckpointsAnswer),
    post_route(
        path="/checkpoints",
        handler=save_checkpoint,
        role=Role.ADMIN,
        answer=CheckpointAnswer,
        works=True,
        ends_with_client=False,
        named=True,
        codes=("not_started", "finished", "checkpoint_exists", "disk_full", *OF_ENGINE),
        example={"name": "before-the-change"},
    ),
)
