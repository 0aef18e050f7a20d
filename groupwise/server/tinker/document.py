"""The Tinker routes in the server's OpenAPI document: bodies, answers, and every refusal."""

from __future__ import annotations

import inspect
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from groupwise.api.schemas.keys import Role
from groupwise.server.tinker import responses
from groupwise.server.tinker.refusals import CODES
from groupwise.server.tinker.routes import PREFIX, ROUTES, TinkerRoute

TAG = "tinker"
DESCRIPTION = (
    "The protocol of the `tinker` client: single calls of models that a client trains. Calls that take time are answered with an id, by "
    "which `retrieve_future` has what they came to. Whatever else the client knows below this address is refused as `unsupported` (400), "
    "and the rest as `not_there` (404)."
)
NAMES = "#/components/schemas/Tinker.{model}"
_JSON = "application/json"
_PROTOBUF = "application/x-protobuf"
_BYTES = {"type": "string", "format": "binary"}


def document() -> dict[str, Any]:
    """Additions to the document: `tags`, `paths` and `components`."""
    healthz = {
        "tags": [TAG],
        "summary": "healthz",
        "operationId": "tinker_healthz",
        "x-role": None,
        "security": [],
        "responses": {"200": _json_content(responses.HealthResponse)},
    }
    return {
        "tags": [{"name": TAG, "description": DESCRIPTION}],
        "paths": {
            **{f"{PREFIX}{route.path}": _operation(route) for route in ROUTES},
            f"{PREFIX}/healthz": {"get": healthz},
        },
        "components": {"schemas": _schemas()},
    }


def _operation(route: TinkerRoute) -> dict[str, Any]:
    role = Role.READ if route.method == "GET" else Role.TRAIN
    if route.answer is not None:
        success = _json_content(route.answer)
    elif route.gives:
        success = {"description": route.gives, "content": {"application/zip": {"schema": _BYTES}}}
    else:
        success = {
            "description": "What the call came to: for passes and samples the client's protobuf message `ForwardBackwardOutput` or "
            "`SampleResponse`; a call that came to nothing says why.",
            "content": {
                _JSON: {"schema": {"$ref": NAMES.format(model="Result")}},
                _PROTOBUF: {"schema": _BYTES},
            },
        }
    operation: dict[str, Any] = {
        "tags": [TAG],
        "summary": route.path.removeprefix("/"),
        "description": inspect.getdoc(route.handler),
        "operationId": f"tinker_{route.handler.__name__}",
        "x-role": role.word,
        "parameters": _parameters(route),
        "responses": {"200": success, **_refusals(route.all_codes)},
    }
    if route.answer is None and not route.gives:
        operation["responses"]["408"] = _json_content(responses.TryAgainResponse)
    if route.reads is not None:
        content = {_JSON: {"schema": _schema_ref(route.reads)}}
        operation["requestBody"] = {"required": True, "content": content}
    elif route.bytes:
        content = {_PROTOBUF: {"schema": _BYTES}}
        operation["requestBody"] = {
            "required": True,
            "description": route.bytes,
            "content": content,
        }
    return {route.method.lower(): operation}


def _parameters(route: TinkerRoute) -> list[dict[str, Any]]:
    """Path and query parameters, and the idempotency header of `create_session`."""
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    if route.query is not None:
        query = route.query.model_json_schema()
        for name, schema in query.get("properties", {}).items():
            required = name in query.get("required", ())
            parameters.append({"name": name, "in": "query", "required": required, "schema": schema})
    if route.path == "/create_session":
        parameters.append(
            {
                "name": "X-Idempotency-Key",
                "in": "header",
                "required": False,
                "description": "Names the request: sent again it gets the same session. Also Idempotency-Key.",
                "schema": {"type": "string"},
            }
        )
    return parameters


def _refusals(codes: tuple[str, ...]) -> dict[str, Any]:
    by_status: dict[str, list[str]] = {}
    for code in sorted(codes):
        by_status.setdefault(str(CODES[code].status), []).append(code)
    return {
        status: {
            "description": "\n\n".join(
                f"`{code}`: {CODES[code].meaning}" for code in codes_of_status
            ),
            "content": {
                _JSON: {
                    "schema": _schema_ref(responses.RefusedResponse),
                    "examples": {
                        code: {"value": {"code": code, "message": CODES[code].meaning}}
                        for code in codes_of_status
                    },
                }
            },
        }
        for status, codes_of_status in sorted(by_status.items())
    }


def _json_content(model: type[BaseModel]) -> dict[str, Any]:
    return {
        "description": inspect.getdoc(model) or "",
        "content": {_JSON: {"schema": _schema_ref(model)}},
    }


def _schema_ref(model: type[Any]) -> dict[str, str]:
    return {"$ref": NAMES.format(model=model.__name__)}


def _schemas() -> dict[str, Any]:
    """Schemas of all request bodies and responses. In the document their names begin with `Tinker.`."""
    bodies = [route.reads for route in ROUTES if route.reads is not None]
    response_models = [route.answer for route in ROUTES if route.answer is not None]
    all_models: list[type[BaseModel]] = [
        *bodies,
        *response_models,
        responses.HealthResponse,
        responses.TryAgainResponse,
        responses.RefusedResponse,
    ]
    models: list[tuple[Any, JsonSchemaMode]] = [
        (model, "validation") for model in dict.fromkeys(all_models)
    ]
    _, generated = models_json_schema(models, ref_template=NAMES)
    result = TypeAdapter[Any](responses.Result).json_schema(ref_template=NAMES)
    schemas = {**generated["$defs"], **result.pop("$defs"), "Result": result}
    return {f"Tinker.{name}": schema for name, schema in schemas.items()}
