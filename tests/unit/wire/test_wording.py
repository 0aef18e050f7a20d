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
NAMES = "must begin with a letter (A to Z) or digit, and have only these, `.`, `_` and `-`"
CASES: list[tuple[Any, Any, dict[str, str]]] = [
    (StartRequest, {"max_step": 3}, {"max_step": "is not a field; did you mean max_steps?"}),
    (
        StartRequest,
        {"num_generations": 3},
        {"num_generations": "is not a field; give `num_completions_per_prompt` instead"},
    ),
    (CheckpointRequest, {"name": "a", "zzz": 1}, {"zzz": "is not a field; there are name"}),
    (StartRequest, {"run_name": "a b"}, {"run_name": NAMES}),
    (
        StartRequest,
        {"logging_steps": "x"},
        {"logging_steps": "must be a whole number (at least 1)"},
    ),
    (
        StartRequest,
        {"groups_per_step": 0},
        {"groups_per_step": "must be a whole number (at least 1, at most 65536) or null"},
    ),
    (StartRequest, {"steps": "x"}, {"steps": "must be one of auto, manual"}),
    (StartRequest, {"replace": 1}, {"replace": "must be true or false"}),
    (StartRequest, {"lora": 3}, {"lora": "must be an object, { … }"}),
    (
        StartRequest,
        {"algorithm": 3},
        {"algorithm": "must be a name, or an object, { … }, with parameters"},
    ),
    (StartRequest, [1], {"": "the body must be an object, { … }"}),
    (CompletionsRequest, {"prompt": 5}, {"prompt": PROMPTS}),
    (CompletionsRequest, {"prompts": ["a", 5]}, {"prompts.1": PROMPTS}),
    (CompletionsRequest, {"prompt": ""}, {"prompt": "must have at least 1 character"}),
    (CompletionsRequest, {"prompt": []}, {"prompt": "must have at least 1 item"}),
    (
        CompletionsRequest,
        {"prompt": [{"role": "user", "contnt": "a"}]},
        {"prompt.0.contnt": "is not a field; did you mean content?"},
    ),
    (
        CompletionsRequest,
        {"prompt": "a", "draw": -1},
        {"draw": "must be greater than or equal to 0"},
    ),
    (CompletionsRequest, {"prompt": "a", "stop": "x"}, {"stop": "must be a list"}),
    (
        RewardsRequest,
        {"group_id": "g-1", "rewards": ["a"]},
        {"rewards.0": "must be a number or null"},
    ),
    (
        RewardsRequest,
        {"groups": [{"group_id": "g-1", "reward": [1]}]},
        {
            "groups.0.rewards": "is required",
            "groups.0.reward": "is not a field; did you mean rewards?",
        },
    ),
    (
        RewardsRequest,
        {"group_id": "g 1", "rewards": [1]},
        {"group_id": "must have only letters (A to Z), digits and `-`"},
    ),
    (
        RewardsRequest,
        {"group_id": "g-1", "rewards": [1], "timeout": 5},
        {"timeout": "has no effect without `wait: true`"},
    ),
    (
        RewardsRequest,
        {"groups": [{"group_id": "g-1", "rewards": [1]}], "timeout": 5},
        {"timeout": "has no effect without `wait: true`"},
    ),
    (StepRequest, {"wait": False, "timeout": 5}, {"timeout": "has no effect without `wait: true`"}),
    (StepRequest, {"group_ids": ["a", "a"]}, {"group_ids": "a stands twice"}),
]


@pytest.mark.parametrize(("model", "body", "told"), CASES)
def test_what_is_wrong_is_said_in_words_for_people(
    model: Any, body: Any, told: dict[str, str]
) -> None:
    with pytest.raises(ValidationError) as wrong:
        TypeAdapter(model).validate_python(body)
    errors = field_errors(wrong.value.errors(include_url=False), model)
    assert {error.field: error.message for error in errors} == told


def test_without_the_model_there_are_words_too() -> None:
    def said(kind: str, *location: str | int) -> tuple[str, str]:
        (error,) = field_errors([{"type": kind, "loc": location, "msg": "Input should be odd"}])
        return error.field, error.message

    assert said("missing", "body") == ("", "the body is empty: send a JSON object, at least {}")
    assert said("extra_forbidden", "body", "a") == ("a", "is not known here")
    assert said("float_type", "query", "a") == ("a", "must be a number")
    assert said("strange", "a", 3) == ("a.3", "must be odd")


def test_what_was_given_is_not_repeated() -> None:
    secret = "gw-secret-7d1f"
    with pytest.raises(ValidationError) as wrong:
        StartRequest.model_validate(
            {"model_id": [secret], "steps": secret, "run_name": f" {secret}"}
        )
    errors = field_errors(wrong.value.errors(include_url=False), StartRequest)
    assert len(errors) == 3
    assert not [error for error in errors if secret in error.message]
