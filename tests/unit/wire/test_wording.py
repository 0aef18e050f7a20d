"""What people are told of the fields of a request."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from groupwise.wire.problems import field_errors
from groupwise.wire.training import (
    CheckpointRequest,
    CompletionsRequest,
    RewardsRequest,
    StartRequest,
    StepRequest,
)

PROMPTS = "must be text, or a list of messages"
ONE = {"group_id": "g-1", "rewards": [1]}
WAIT = "`wait: true`"
CASES: list[tuple[Any, Any, dict[str, str]]] = [
    (StartRequest, {"max_step": 3}, {"max_step": "did you mean max_steps?"}),
    (StartRequest, {"num_generations": 3}, {"num_generations": "`num_completions_per_prompt`"}),
    (CheckpointRequest, {"name": "a", "zzz": 1}, {"zzz": "there are name"}),
    (StartRequest, {"run_name": "a b"}, {"run_name": "must begin with a letter"}),
    (StartRequest, {"logging_steps": "x"}, {"logging_steps": "a whole number (at least 1)"}),
    (StartRequest, {"groups_per_step": 0}, {"groups_per_step": "at most 65536) or null"}),
    (StartRequest, {"steps": "x"}, {"steps": "must be one of auto, manual"}),
    (StartRequest, {"replace": 1}, {"replace": "must be true or false"}),
    (StartRequest, {"lora": 3}, {"lora": "must be an object, { … }"}),
    (StartRequest, {"algorithm": 3}, {"algorithm": "must be a name, or an object"}),
    (StartRequest, [1], {"": "the body must be an object"}),
    (CompletionsRequest, {"prompts": ["a", 5]}, {"prompts.1": PROMPTS}),
    (CompletionsRequest, {"prompt": ""}, {"prompt": "at least 1 character"}),
    (CompletionsRequest, {"prompt": "a", "draw": -1}, {"draw": "greater than or equal to 0"}),
    (CompletionsRequest, {"prompt": "a", "stop": "x"}, {"stop": "must be a list"}),
    (RewardsRequest, {**ONE, "rewards": ["a"]}, {"rewards.0": "must be a number or null"}),
    (
        RewardsRequest,
        {"groups": [{"group_id": "g-1", "reward": [1]}]},
        {"groups.0.rewards": "is required", "groups.0.reward": "did you mean rewards?"},
    ),
    (RewardsRequest, {**ONE, "group_id": "g 1"}, {"group_id": "must have only letters"}),
    (RewardsRequest, {**ONE, "timeout": 5}, {"timeout": WAIT}),
    (RewardsRequest, {"groups": [ONE], "timeout": 5}, {"timeout": WAIT}),
    (StepRequest, {"wait": False, "timeout": 5}, {"timeout": WAIT}),
    (StepRequest, {"group_ids": ["a", "a"]}, {"group_ids": "a stands twice"}),
]


@pytest.mark.parametrize(("model", "body", "told"), CASES)
def test_what_is_wrong_is_said_in_words_for_people(
    model: Any, body: Any, told: dict[str, str]
) -> None:
    with pytest.raises(ValidationError) as wrong:
        TypeAdapter(model).validate_python(body)
    errors = field_errors(wrong.value.errors(include_url=False), model)
    assert [error.field for error in errors] == [*told]
    assert all(told[error.field] in error.message for error in errors), errors


def test_what_was_given_is_not_repeated() -> None:
    secret = "gw-secret-7d1f"
    given = {"model_id": [secret], "steps": secret, "run_name": f" {secret}"}
    with pytest.raises(ValidationError) as wrong:
        StartRequest.model_validate(given)
    errors = field_errors(wrong.value.errors(include_url=False), StartRequest)
    assert len(errors) == 3
    assert not [error for error in errors if secret in error.message]
