from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from groupwise.api.schemas.training import (
    REWARDS_REQUEST,
    Body,
    CompletionsRequest,
    ResponseModel,
    RewardOfTrajectory,
    RewardsRequest,
    StartRequest,
    StepRequest,
)
from groupwise.core.settings.field_errors import field_errors

PROMPTS = "must be text, or a list of messages"
ONE_POST: dict[str, Any] = {"group_id": "g-1", "rewards": [1]}
START: list[tuple[Any, str, str]] = [
    ({"max_steps": "3"}, "max_steps", ""), ({"max_steps": 0}, "max_steps", ""), ({"max_steps": 3.0}, "max_steps", ""),
    ({"max_steps": True}, "max_steps", ""), ({"max_step": 3}, "max_step", "did you mean max_steps?"),
    ({"learning_rate": True}, "learning_rate", ""), ({"learning_rate": float("nan")}, "learning_rate", ""),
    ({"lease_seconds": float("inf")}, "lease_seconds", ""), ({"groups_per_step": 4, "training_batch_size": 1}, "groups_per_step", ""),
    ({"groups_per_step": 0}, "groups_per_step", "at most 65536) or null"), ({"adapter": "continue"}, "adapter_path", ""),
    ({"adapter_path": "x"}, "adapter_path", ""), ({"adapter": "full", "lora": {}}, "lora", ""),
    ({"lora": 3}, "lora", "must be an object, { … }"), ({"run_name": "../x"}, "run_name", "must begin with a letter"),
    ({"sampler": {"max_completion_length": 3}}, "sampler.max_completion_length", ""), ({"training": {"max_off_policy_steps": 1}},
    "training.max_off_policy_steps", ""), ({"num_generations": 3}, "num_generations", "`num_completions_per_prompt`"),
    ({"logging_steps": "x"}, "logging_steps", "a whole number (at least 1)"),
    ({"steps": "x"}, "steps", "must be one of auto, manual"), ({"replace": 1}, "replace", "must be true or false"),
    ({"algorithm": 3}, "algorithm", "must be a name, or an object"), ([1], "", "the body must be an object"),
]  # fmt: skip
COMPLETIONS: list[tuple[Any, str, str]] = [
    ({"prompt": "a", "max_tokens": 3}, "max_tokens", "its name here is max_completion_length"),
    ({"messages": []}, "messages", "a chat is given as `prompt`"),
    ({}, "prompt", ""),
    ({"prompt": "a", "prompts": ["b"]}, "prompt", ""),
    ({"prompt": ""}, "prompt", "at least 1 character"),
    ({"prompt": 3}, "prompt", ""),
    ({"prompt": []}, "prompt", ""),
    ({"prompt": [{"role": "user", "contnt": "x"}]}, "prompt.0.contnt", ""),
    ({"prompt": "\ud800"}, "prompt", ""),
    ({"prompt": "a", "draw": -1}, "draw", "greater than or equal to 0"),
    ({"prompt": "a", "draws": [1]}, "draws", ""),
    ({"prompt": "a", "temperature": 0}, "temperature", ""),
    ({"prompt": "a", "stop": [""]}, "stop.0", ""),
    ({"prompt": "a", "stop": "x"}, "stop", "must be a list"),
    ({"prompt": "a", "num_completions": 1025}, "num_completions", ""),
    ({"prompts": ["a", 5]}, "prompts.1", PROMPTS),
    ({"prompts": ["a"] * 257}, "prompts", ""),
    ({"prompts": ["a", "b"], "draws": [1]}, "draws", ""),
    ({"prompts": ["a", "b"], "draws": [1, 1]}, "draws", ""),
    ({"prompts": ["a"], "draw": 1}, "draw", ""),
    ({"prompt": "a", "max_completion_length": 2, "min_completion_length": 3}, "min_completion_length", ""),
]  # fmt: skip
REWARDS: list[tuple[Any, str, str]] = [
    ({"rewards": [1]}, "group_id", ""),
    ({"group_id": "g-1"}, "rewards", ""),
    ({**ONE_POST, "rewards": []}, "rewards", ""),
    ({**ONE_POST, "rewards": [1, "2"]}, "rewards.1", "must be a number or null"),
    ({**ONE_POST, "rewards": [True]}, "rewards.0", ""),
    ({**ONE_POST, "rewards": [float("nan")]}, "rewards.0", ""),
    ({**ONE_POST, "rewards": [-1.1e9]}, "rewards.0", ""),
    ({**ONE_POST, "group_id": "g" * 65}, "group_id", ""),
    ({**ONE_POST, "group_id": "g 1"}, "group_id", "must have only letters"),
    ({**ONE_POST, "include": "later"}, "include", ""),
    ({**ONE_POST, "timeout": 601}, "timeout", ""),
    ({**ONE_POST, "timeout": 5}, "timeout", "`wait: true`"),
    ({**ONE_POST, "completions": ["a", "b"]}, "rewards", ""),
    ({"group_id": "g-1", "groups": []}, "groups", ""),
    ({"groups": [ONE_POST] * 2}, "groups.1.group_id", ""),
    ({"groups": [{**ONE_POST, "rewards": ["x"]}]}, "groups.0.rewards.0", ""),
    ({"groups": [{"group_id": "g-1", "reward": [1]}]}, "groups.0.reward", "did you mean rewards?"),
    ({"groups": [ONE_POST], "timeout": 5}, "timeout", "`wait: true`"),
    ([], "", ""),
]
STEP: list[tuple[Any, str, str]] = [
    ({"group_ids": ["g-1", "g-1"]}, "group_ids", "g-1 is repeated"),
    ({"wait": False, "timeout": 5}, "timeout", "`wait: true`"),
]
CASES = [
    (model, *case)
    for model, cases in (
        (StartRequest, START), (CompletionsRequest, COMPLETIONS), (RewardsRequest, REWARDS), (StepRequest, STEP),
    )
    for case in cases
]  # fmt: skip


@pytest.mark.parametrize(("model", "body", "field", "told"), CASES)
def test_wrong_fields_are_named(model: Any, body: Any, field: str, told: str) -> None:
    adapter = REWARDS_REQUEST if model is RewardsRequest else TypeAdapter(model)
    with pytest.raises(ValidationError) as wrong:
        adapter.validate_python(body)
    errors = field_errors(wrong.value.errors(include_url=False), model)
    assert any(error.field == field and told in error.message for error in errors), errors


def test_validation_errors_do_not_repeat_the_given_values() -> None:
    secret = "gw-secret-7d1f"
    with pytest.raises(ValidationError) as wrong:
        StartRequest.model_validate(
            {"model_id": [secret], "steps": secret, "run_name": f" {secret}"}
        )
    errors = field_errors(wrong.value.errors(include_url=False), StartRequest)
    assert len(errors) == 3
    assert not [error for error in errors if secret in error.message]


def test_groups_of_a_step_are_given_either_way() -> None:
    parts = {"training_batch_size": 2, "gradient_accumulation_steps": 3}
    for body in (parts, {"groups_per_step": 6}, {**parts, "groups_per_step": 6}):
        assert StartRequest.model_validate(body).prompts_per_step == 6


def test_both_forms_of_rewards_come_out_alike() -> None:
    one = {"group_id": "g-1", "rewards": [1, None, 0.5]}
    echo = {"prompt": "a", "completions": ["b"], "completion_tokens": [[1]], "rewards": [1]}
    requests = [REWARDS_REQUEST.validate_python(body) for body in (one, {"groups": [one]}, echo)]
    single, batch, echoed = (
        request.all_groups[0] for request in requests if not isinstance(request, RewardOfTrajectory)
    )
    assert single.rewards == batch.rewards == [1.0, None, 0.5]
    assert echoed.group_id is None


def models(base: type[Any]) -> list[type[Any]]:
    return [model for child in base.__subclasses__() for model in (child, *models(child))]


def test_every_field_is_described_and_schemas_can_be_written() -> None:
    for model in (*models(Body), *models(ResponseModel)):
        for name, field in model.model_fields.items():
            assert field.description, (model, name)
        model.model_json_schema()
    REWARDS_REQUEST.json_schema()
