"""Sampler and learner for a training loop in another process: `groupwise rl` with `run.server`, or a custom loop.

The client chooses all names (the id of the parts, the number of a call, the path and offset of a piece of a file), so a repeated request is
done only once. A call answers 202 while it is in progress; the client then asks for it again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fastapi import Path as PathOf
from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import ValidationError
from pydantic_core import to_json

from groupwise.api.http.bodies import read_body
from groupwise.api.http.route import SMALL_BODY, Route, json_response
from groupwise.api.http.strict_json import NotStrict, parse
from groupwise.api.schemas.keys import Role
from groupwise.api.schemas.parts import (
    DEFAULT_CALL_WAIT,
    ID_PATTERN,
    MAX_CALL_WAIT,
    MAX_CALLS,
    MAX_PATH,
    CallAnswer,
    CallRequest,
    EndedAnswer,
    FolderAnswer,
    PartsAnswer,
    PartsRequest,
    PlanAnswer,
    PlanRequest,
)
from groupwise.api.schemas.problems import Refusal
from groupwise.server.parts.service import PartsService
from groupwise.server.routes.context import Context

TAG = "parts"
MAX_SIZE = 2**53

Id = Annotated[str, PathOf(description="Chosen by the client, at random.", pattern=ID_PATTERN)]
Number = Annotated[int, PathOf(description="Of the call.", ge=1, lt=MAX_CALLS)]
Wait = Annotated[
    float, Query(description="Seconds for which the answer is waited for.", ge=0, le=MAX_CALL_WAIT)
]
FolderPath = Annotated[
    str, PathOf(description="Within the folder of the parts.", min_length=1, max_length=MAX_PATH)
]
Offset = Annotated[int, Query(description="Where the piece begins in the file.", ge=0, lt=MAX_SIZE)]


@dataclass(frozen=True, slots=True)
class _Handlers:
    """The handlers of one service's routes."""

    service: PartsService

    async def plan_parts(self, body: PlanRequest, context: Context) -> Response:
        """How the work of a loop would be laid out on this machine: device, number format, processes, slots."""
        return json_response(await self.service.plan(body))

    async def open_parts(self, id: Id, body: PartsRequest, context: Context) -> Response:
        """Take sampler and learner of this server for a loop. Repeating it is harmless. They are ended by DELETE, or after a silence."""
        return json_response(await self.service.open(id, body))

    async def look_at_parts(self, id: Id, context: Context) -> Response:
        """Sign of life of the loop; answers whether its parts are still there."""
        return json_response(self.service.look(id))

    async def close_parts(self, id: Id, context: Context) -> Response:
        """End the parts, and delete all of their files. Repeating it is harmless."""
        await self.service.close(id)
        return json_response(EndedAnswer(id=id))

    async def make_call(
        self,
        id: Id,
        number: Number,
        request: Request,
        context: Context,
        wait: Wait = DEFAULT_CALL_WAIT,
    ) -> Response:
        """Call the sampler or the learner. A call that is sent again with the same content is done once, and gets the same answer."""
        content = await request.body()
        try:
            call = await read_body(content, lambda text: CallRequest.model_validate(parse(text)))
        except NotStrict as error:
            raise Refusal(
                "invalid_request", f"the body is not JSON as it is taken here: {error.msg}"
            ) from None
        except ValidationError as error:
            raise Refusal.of_fields(error) from None
        return _call_response(await self.service.call(id, number, call, content, wait))

    async def look_at_call(
        self, id: Id, number: Number, context: Context, wait: Wait = DEFAULT_CALL_WAIT
    ) -> Response:
        """The state of a call."""
        return _call_response(await self.service.answer(id, number, wait))

    async def give_up_call(self, id: Id, number: Number, context: Context) -> Response:
        """Give a call up. Sampling ends; a call that changes the learner continues to its end; one that has not begun is not done."""
        return _call_response(await self.service.give_up(id, number))

    async def look_into_folder(self, id: Id, path: FolderPath, context: Context) -> Response:
        """The files of a folder, with their sizes."""
        return json_response(await asyncio.to_thread(self.service.files(id).list, path))

    async def delete_folder(self, id: Id, path: FolderPath, context: Context) -> Response:
        """Delete a folder that is needed no longer. Repeating it is harmless."""
        await asyncio.to_thread(self.service.files(id).delete, path)
        return json_response(EndedAnswer(id=id))

    async def get_file(
        self, id: Id, path: FolderPath, context: Context, offset: Offset = 0
    ) -> Response:
        """A piece of a file, of at most 8 MiB."""
        return Response(
            await asyncio.to_thread(self.service.files(id).read, path, offset),
            media_type="application/octet-stream",
        )

    async def put_file(
        self, id: Id, path: FolderPath, request: Request, context: Context, offset: Offset = 0
    ) -> Response:
        """Write a piece of a file, which then ends with this piece."""
        content = await request.body()
        files = self.service.files(id)
        return json_response(await asyncio.to_thread(files.write, path, offset, content))


def _call_response(answer: CallAnswer) -> Response:
    """The answer as JSON, with non-finite numbers as text; see `groupwise.api.schemas.parts`."""
    status = 202 if answer.state == "working" else 200
    plain = {
        "number": answer.number,
        "state": answer.state,
        "result": answer.result,
        "error": answer.error,
    }
    return Response(to_json(plain, inf_nan_mode="strings"), status, media_type="application/json")


OF_PARTS = ("unknown_parts", "parts_gone", "parts_taken", "invalid_request")
OF_CALLS = (
    *("unknown_call", "call_taken", "model_not_allowed", "unknown_file", "engine_failed"),
    *OF_PARTS,
)
OF_FILES = (*OF_PARTS, "unknown_file")
PARTS, CALLS, FILES = "/parts/{id}", "/parts/{id}/calls/{number}", "/parts/{id}/files/{path:path}"
FOLDERS = "/parts/{id}/folders/{path:path}"
LATER = "The call is under way; GET the same address for its answer."

get_route = partial(Route, method="GET", role=Role.TRAIN, tag=TAG)
put_route = partial(Route, method="PUT", role=Role.TRAIN, tag=TAG, takes_body=True, works=True)
delete_route = partial(
    Route, method="DELETE", role=Role.TRAIN, tag=TAG, answer=EndedAnswer, codes=OF_PARTS
)


def parts_routes(service: PartsService) -> tuple[Route, ...]:
    """All routes of parts."""
    do = _Handlers(service)
    return (
        put_route(
            method="POST",
            path="/parts/plan",
            handler=do.plan_parts,
            answer=PlanAnswer,
            codes=(
                *("run_active", "settings_conflict", "model_not_allowed", "invalid_request"),
                *("engine_recovering", "engine_failed"),
            ),
            example={"kind": "supervised", "config": {"model": {"name": "tiny"}}},
        ),
        put_route(
            path=PARTS,
            handler=do.open_parts,
            answer=PartsAnswer,
            max_body_bytes=SMALL_BODY,
            ends_with_client=False,
            codes=("run_active", "parts_gone", "parts_taken", "engine_failed", "engine_recovering"),
            example={"owner": "sorting on laptop"},
        ),
        get_route(path=PARTS, handler=do.look_at_parts, answer=PartsAnswer, codes=OF_PARTS),
        delete_route(path=PARTS, handler=do.close_parts, ends_with_client=False),
        put_route(
            path=CALLS,
            handler=do.make_call,
            answer=CallAnswer,
            reads=CallRequest,
            codes=(*OF_CALLS, "too_busy"),
            later=LATER,
            example={"after": 0, "do": {"verb": "discard"}},
        ),
        get_route(
            path=CALLS, handler=do.look_at_call, answer=CallAnswer, codes=OF_CALLS, later=LATER
        ),
        delete_route(
            path=CALLS,
            handler=do.give_up_call,
            answer=CallAnswer,
            codes=(*OF_CALLS, "too_busy"),
            later="The call continues, because it changes something.",
        ),
        get_route(path=FOLDERS, handler=do.look_into_folder, answer=FolderAnswer, codes=OF_FILES),
        delete_route(path=FOLDERS, handler=do.delete_folder),
        get_route(
            path=FILES, handler=do.get_file, media_type="application/octet-stream", codes=OF_FILES
        ),
        put_route(
            path=FILES,
            handler=do.put_file,
            answer=FolderAnswer,
            takes_bytes=True,
            codes=(*OF_PARTS, "disk_full"),
        ),
    )
