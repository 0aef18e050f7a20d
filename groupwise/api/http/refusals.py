"""How a refusal is answered, and how the OpenAPI document names those of a route. The table is `groupwise.api.schemas.problems`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from groupwise.api.schemas.problems import KINDS, MEDIA_TYPE, Problem, Refusal

SCHEMA = "#/components/schemas/Problem"


def body_of(refusal: Refusal, instance: str) -> bytes:
    """The problem+json."""
    return refusal.problem(instance).model_dump_json().encode()


def documented(codes: Iterable[str]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses: for each status the problems that a route answers with it, with an example of each."""
    by_status: dict[int | str, list[str]] = {}
    for code in sorted(set(codes)):
        by_status.setdefault(KINDS[code].status, []).append(code)
    return {status: _response(by_status[status]) for status in sorted(by_status, key=str)}


def _response(codes: list[str]) -> dict[str, Any]:
    return {
        "description": "\n\n".join(f"`{code}`: {KINDS[code].meaning}" for code in codes),
        "content": {
            MEDIA_TYPE: {
                "schema": {"$ref": SCHEMA},
                "examples": {code: {"value": _example(code)} for code in codes},
            }
        },
    }


def _example(code: str) -> dict[str, Any]:
    return Refusal(code).problem("urn:groupwise:request:0123456789abcdef").model_dump(mode="json")


def problem_schema() -> dict[str, Any]:
    """Schemas of `Problem` and the models in it, by name."""
    whole = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    inner = whole.pop("$defs", {})
    return {"Problem": whole, **inner}
