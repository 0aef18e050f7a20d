from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from groupwise.wire.problems import field_errors
from groupwise.wire.training import (
    REWARDS_REQUEST,
    Answer,
    Body,
    CompletionsRequest,
    StartRequest,
    StepRequest,
)


def wrong_fields(model: Any, body: Any) -> list[str]:
    adapter = TypeAdapter(model) if isinstance(model, type) else model
    with pytest.raises(ValidationError) as caught:
        adapter.validate_python(body)
    return [error.field for error in field_errors(caught.value.errors())]


START = [
    ({"max_steps": "3"}, "max_steps"),
    ({"max_steps": 0}, "max_steps"),
    ({"max_steps": 3.0}, "max_steps"),
    ({"max_steps": True}, "max_steps"),
    ({"learning_rate": True}, "learning_rate"),
    ({"learning_rate": float("nan")}, "learning_rate"),
    ({"lease_seconds": float("inf")}, "lease_seconds"),
    ({"stalenes": 1}, "stalenes"),
    ({"groups_per_step": 4, "training_batch_size": 1}, "groups_per_step"),
    ({"adapter": "continue"}, "adapter_path"),
    ({"adapter_path": "x"}, "adapter_path"),
    ({"adapter": "full", "lora": {}}, "lora"),
    ({"run_name": "../x"}, "run_name"),
    ({"sampler": {"max_completion_length": 3}}, "sampler.max_completion_length"),
    ({"training": {"lag": 1}}, "training.lag"),
]
COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": "a", "prompts": ["b"]}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [{"role": "user", "contnt": "x"}]}, "prompt.0.contnt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": "a", "draw": -1}, "draw"),
    ({"prompt": "a", "draws": [1]}, "draws"),
    ({"prompt": "a", "temperature": 0}, "temperature"),
    ({"prompt": "a", "stop": [""]}, "stop.0"),
    ({"prompt": "a", "num_completions": 1025}, "num_completions"),
    ({"prompts": ["a"] * 257}, "prompts"),
    ({"prompts": ["a", "b"], "draws": [1]}, "draws"),
    ({"prompts": ["a", "b"], "draws": [1, 1]}, "draws"),
    ({"prompts": ["a"], "draw": 1}, "draw"),
    (
        {"prompt": "a", "max_completion_length": 2, "min_completion_length": 3},
        "min_completion_length",
    ),
]
REWARDS = [
    ({"rewards": [1]}, "group_id"),
    ({"group_id": "g-1"}, "rewards"),
    ({"group_id": "g-1", "rewards": []}, "rewards"),
    ({"group_id": "g-1", "rewards": [1, "2"]}, "rewards.1"),
    ({"group_id": "g-1", "rewards": [True]}, "rewards.0"),
    ({"group_id": "g-1", "rewards": [float("nan")]}, "rewards.0"),
    ({"group_id": "g-1", "rewards": [-1.1e9]}, "rewards.0"),
    ({"group_id": "g" * 65, "rewards": [1]}, "group_id"),
    ({"group_id": "g-1", "rewards": [1], "include": "later"}, "include"),
    ({"group_id": "g-1", "rewards": [1], "timeout": 601}, "timeout"),
    ({"group_id": "g-1", "rewards": [1], "completions": ["a", "b"]}, "rewards"),
    ({"group_id": "g-1", "groups": []}, "groups"),
    ({"groups": [{"group_id": "g-1", "rewards": [1]}] * 2}, "groups.1.group_id"),
    ({"groups": [{"group_id": "g-1", "rewards": ["x"]}]}, "groups.0.rewards.0"),
    ([], ""),
]


def test_groups_of_a_step_are_given_either_way() -> None:
    parts = {"training_batch_size": 2, "gradient_accumulation_steps": 3}
    for body in (parts, {"groups_per_step": 6}, {**parts, "groups_per_step": 6}):
        assert StartRequest.model_validate(body).prompts_per_step == 6


def test_both_forms_of_rewards_come_out_alike() -> None:
    one = {"group_id": "g-1", "rewards": [1, None, 0.5]}
    single = REWARDS_REQUEST.validate_python(one).all_groups[0]
    batch = REWARDS_REQUEST.validate_python({"groups": [one]}).all_groups[0]
    assert single.rewards == batch.rewards == [1.0, None, 0.5]
    echo = {"prompt": "a", "completions": ["b"], "completion_tokens": [[1]], "rewards": [1]}
    assert REWARDS_REQUEST.validate_python(echo).all_groups[0].group_id is None


def models(base: type[Any]) -> list[type[Any]]:
    return [model for child in base.__subclasses__() for model in (child, *models(child))]


CASES = [
    *((StartRequest, body, field) for body, field in START),
    *((CompletionsRequest, body, field) for body, field in COMPLETIONS),
    *((REWARDS_REQUEST, body, field) for body, field in REWARDS),
    (StepRequest, {"group_ids": ["g-1", "g-1"]}, "group_ids"),
]


@pytest.mark.parametrize(("model", "body", "field"), CASES)
def test_what_is_wrong_is_refused_with_the_field(model: Any, body: Any, field: str) -> None:
    assert field in wrong_fields(model, body)


def test_every_field_is_described_and_schemas_can_be_written() -> None:
    for model in (*models(Body), *models(Answer)):
        for name, field in model.model_fields.items():
            assert field.description, (model, name)
        model.model_json_schema()
    REWARDS_REQUEST.json_schema()
