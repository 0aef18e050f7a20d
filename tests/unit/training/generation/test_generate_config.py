from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from groupwise.cli import generate as command
from groupwise.core.errors import UsageError
from groupwise.training.generation.config import GenerateConfig, read_options

GIVEN: dict[str, Any] = {"dataset": "rows.jsonl", "output": "out"}
TASK: dict[str, Any] = {"task_module": "t.py", "output": "o"}


@pytest.mark.parametrize(("options", "said"), [
    ({"output": "out"}, "one of dataset and task_module"), ({**GIVEN, "task_module": "t.py"}, "one of dataset and task_module"),
    ({"dataset": "rows.jsonl"}, "where to"), ({**GIVEN, "prompt_column": "a", "prompt_template": "{a}"}, "takes the place"),
    ({**TASK, "prompt_column": "a"}, "prompt_column has no effect"),
    ({**TASK, "prompt_template": "{{ instruction }}"}, "prompt_template has no effect"), ({**TASK, "split": "test"}, "no splits"),
    ({**GIVEN, "config": "c.yaml"}, "there is no task_module"), ({**GIVEN, "min_reward": 1.0}, "min_reward needs rewards"),
    ({**GIVEN, "answer_column": "a"}, "answer_column has no effect"), ({**GIVEN, "keep": "all"}, "keep has no effect"),
    ({**TASK, "rewards": ["length"]}, "brings its own"), ({**GIVEN, "api": "completions", "system_prompt": "s"}, "no system message"),
    ({**GIVEN, "private": False}, "private has no effect"), ({**GIVEN, "hub": "me"}, "write OWNER/NAME"),
    ({**GIVEN, "hub": "me/it", "shard": "1/2"}, "a shard is not uploaded"), ({**GIVEN, "shard": "0/4"}, "1/8 for the first"),
    ({**GIVEN, "shard": "5/4"}, "1/8 for the first"), ({**GIVEN, "shards": 4}, "--shard 1/N"),
    ({**GIVEN, "api_key": "sk-1"}, "api_key_env"), ({**GIVEN, "extra": {"user_token": 1, "api_key": "sk-1"}}, "extra.api_key looks"),
    ({**GIVEN, "temprature": 1.0}, "temperature"), ({**GIVEN, "num_generations": 0}, "num_generations"),
    ({**GIVEN, "temperature": -1.0}, "temperature"),
])  # fmt: skip
def test_conflicting_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        read_options(options)
    assert "sk-1" not in str(caught.value)


def test_the_command_has_every_option_and_no_other() -> None:
    options = {field.name for field in fields(command.GenerateOptions)}
    assert options - {"shards"} == set(GenerateConfig.model_fields)
