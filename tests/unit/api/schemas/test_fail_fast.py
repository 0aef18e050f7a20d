"""A list in a body is refused at its first error, wherever that is and however many follow."""

from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from groupwise.api.schemas.fail_fast import SLICE
from groupwise.api.schemas.fleet import JobsBody
from groupwise.api.schemas.openai import ChatRequest
from groupwise.api.schemas.parts import CallRequest
from groupwise.api.schemas.training import CompletionsRequest, StepRequest
from groupwise.jobs.fleet.queue.request import JobRequest
from groupwise.server.tinker.requests import CreateSession

WRONG = [None] * 10_000
GENERATE = {"verb": "generate", "request": {"prompt_ids": WRONG, "seeds": WRONG}}


@pytest.mark.parametrize(("model", "body"), [
    (StepRequest, {"group_ids": WRONG}), (ChatRequest, {"messages": WRONG, "stop": WRONG}), (CreateSession, {"tags": WRONG}),
    (CallRequest, {"do": GENERATE}), (JobsBody, {"job_ids": WRONG}),
    (JobRequest, {"arguments": WRONG, "labels": dict.fromkeys(map(str, range(9_999)), 1)}),
])  # fmt: skip
def test_a_body_with_many_mistakes_gives_few_errors(
    model: type[BaseModel], body: dict[str, Any]
) -> None:
    optional: Any = model | None
    within = TypeAdapter[Any](optional)
    for read in (model.model_validate, TypeAdapter(model).validate_python, within.validate_python):
        with pytest.raises(ValidationError) as refused:
            read(body)
        assert refused.value.error_count() < 20


def test_a_long_list_is_validated_in_slices_and_a_mistake_keeps_its_place() -> None:
    tokens = [*range(3 * SLICE + 1)]
    body = {"prompt": "a", "prompt_tokens": tokens}
    assert CompletionsRequest.model_validate(body).prompt_tokens == tokens
    tokens[2 * SLICE + 5] = -1
    with pytest.raises(ValidationError) as refused:
        CompletionsRequest.model_validate(body)
    assert [error["loc"] for error in refused.value.errors()] == [("prompt_tokens", 2 * SLICE + 5)]
