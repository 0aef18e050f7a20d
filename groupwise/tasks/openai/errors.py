"""Refusals in the format that OpenAI's clients read, for every response of the routes under /v1.

They are the problems of the table (`groupwise.api.schemas.problems`), converted just before they leave the server, so refusals of the
framework, of the key check and of the service all look the same. The statuses are those of the table, except that an invalid request is
400, as with OpenAI. The codes are those of the table, too, except that of a prompt that is too long: langchain and litellm raise an
exception of a type of its own for it, which agents catch to shorten their history. OpenAI's clients repeat a request after 408, 409, 429
and 5xx, unless `x-should-retry` says otherwise; the header is set from the table.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from groupwise.api.schemas.openai import ErrorAnswer, ErrorData
from groupwise.api.schemas.problems import KINDS, MEDIA_TYPE, Problem, Refusal

PREFIX = "/v1/"
WITHOUT_PREFIX = ("/chat/completions", "/responses", "/completions", "/models")
"""Addresses that OpenAI's clients call if `/v1` is missing in their `base_url`. The server has a route /completions of its own."""
AS_OPENAI = {422: 400}
"""Statuses that OpenAI's API replaces by others."""
TOO_LONG = "prompt_too_long"
CODE_OF_TOO_LONG = "context_length_exceeded"
"""OpenAI's code for `TOO_LONG`. langchain and litellm know such an error by its words `prompt is too long`, so its title goes before it."""
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""OpenAI's error types by status; for other statuses the type depends on whether the request or the server is at fault."""
SHOULD_RETRY = "x-should-retry"


def status_of(status: int) -> int:
    """OpenAI's status for the status of a problem."""
    return AS_OPENAI.get(status, status)


def error_of(problem: Problem) -> ErrorAnswer:
    """Convert a problem to OpenAI's error format."""
    status = status_of(problem.status)
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    param = problem.errors[0].field or None if problem.errors else None
    message, code = problem.detail, problem.code
    if code == TOO_LONG:
        message, code = f"{problem.title}. {message}", CODE_OF_TOO_LONG
    return ErrorAnswer(
        error=ErrorData(message=message, type=kind, param=param, code=code, errors=problem.errors)
    )


def error_of_refusal(refusal: Refusal) -> ErrorAnswer:
    """Convert a refusal within a stream that has already started, so that no status can be sent."""
    return error_of(refusal.problem())


class OpenAIErrors:
    """Outermost middleware: converts the problems of the /v1 routes to OpenAI's errors, and those of clients whose `base_url` lacks `/v1`.
    All other responses pass unchanged.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; a problem response is held back and converted."""
        if scope["type"] != "http" or not scope["path"].startswith((PREFIX, *WITHOUT_PREFIX)):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        """The start of a problem response, held back until its body is complete."""
        body = b""

        async def translate(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                media_type = dict(message["headers"]).get(b"content-type", b"")
                start = message if media_type.decode("latin-1") == MEDIA_TYPE else None
            if start is None:
                await send(message)
            elif message is not start:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    problem = Problem.model_validate_json(body)
                    if scope["path"].startswith(PREFIX):
                        await _send_error(send, start, problem)
                    elif _lacks_prefix(problem):
                        detail = f"{problem.detail} Did you mean /v1{scope['path'][:200]}? Then base_url has to end with /v1."
                        problem = problem.model_copy(update={"detail": detail})
                        await _send_error(send, start, problem)
                    else:
                        await send(start)
                        await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, translate)


def _lacks_prefix(problem: Problem) -> bool:
    """True if the problem of a request to `WITHOUT_PREFIX` is that of a client of OpenAI: all of its requests name a model."""
    return problem.code == "not_found" or any(error.field == "model" for error in problem.errors)


async def _send_error(send: Send, start: Message, problem: Problem) -> None:
    body = error_of(problem).model_dump_json().encode()
    headers = MutableHeaders(raw=list(start["headers"]))
    headers["content-type"] = "application/json"
    headers["content-length"] = str(len(body))
    headers[SHOULD_RETRY] = json.dumps(KINDS[problem.code].retry)
    status = status_of(problem.status)
    await send({**start, "status": status, "headers": headers.raw})
    await send({"type": "http.response.body", "body": body})


def document_errors(document: dict[str, Any]) -> None:
    """Replace the problem responses of the /v1 routes in an OpenAPI document by OpenAI's errors."""
    schemas = ErrorAnswer.model_json_schema(ref_template="#/components/schemas/{model}")
    document["components"]["schemas"].update(schemas.pop("$defs"))
    document["components"]["schemas"]["ErrorAnswer"] = schemas
    for path, operations in document["paths"].items():
        if path.startswith(PREFIX):
            for operation in operations.values():
                responses = operation["responses"]
                errors: dict[str, Any] = {}
                for status, response in responses.items():
                    if MEDIA_TYPE not in response.get("content", {}):
                        errors[status] = response
                        continue
                    code = str(status_of(int(status)))
                    description = errors.get(code, {}).get("description", "")
                    errors[code] = {
                        "description": f"{description}\n\n{response['description']}".strip(),
                        "content": {
                            "application/json": {
                                "schema": {"$ref": "#/components/schemas/ErrorAnswer"}
                            }
                        },
                    }
                operation["responses"] = errors
