from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from groupwise.cli import generate as command
from groupwise.cli.main import main
from groupwise.errors import UsageError
from groupwise.generation import generate as room
from groupwise.generation.config import GenerateConfig, read_options

GIVEN: dict[str, Any] = {"dataset": "rows.jsonl", "output": "out"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"output": "out"}, "one of dataset and task_module"),
        ({**GIVEN, "task_module": "t.py"}, "one of dataset and task_module"),
        ({"dataset": "rows.jsonl"}, "where to"),
        ({**GIVEN, "prompt_column": "a", "prompt_template": "{a}"}, "takes the place"),
        (
            {"task_module": "t.py", "output": "o", "prompt_column": "a"},
            "prompt_column has no effect",
        ),
        (
            {"task_module": "t.py", "output": "o", "prompt_template": "{{ instruction }}"},
            "prompt_template has no effect",
        ),
        ({"task_module": "t.py", "output": "o", "split": "test"}, "no splits"),
        ({**GIVEN, "config": "c.yaml"}, "there is no task_module"),
        ({**GIVEN, "min_reward": 1.0}, "min_reward needs rewards"),
        ({**GIVEN, "answer_column": "a"}, "answer_column has no effect"),
        ({**GIVEN, "keep": "all"}, "keep has no effect"),
        ({"task_module": "t.py", "output": "o", "rewards": ["length"]}, "brings its own"),
        ({**GIVEN, "api": "completions", "system_prompt": "s"}, "no system message"),
        ({**GIVEN, "private": False}, "private has no effect"),
        ({**GIVEN, "hub": "me"}, "write OWNER/NAME"),
        ({**GIVEN, "hub": "me/it", "shard": "1/2"}, "a shard is not uploaded"),
        ({**GIVEN, "shard": "0/4"}, "1/8 for the first"),
        ({**GIVEN, "shard": "5/4"}, "1/8 for the first"),
        ({**GIVEN, "shards": 4}, "--shard 1/N"),
        ({**GIVEN, "api_key": "sk-1"}, "api_key_env"),
        (
            {**GIVEN, "extra": {"user_token": 1, "api_key": "sk-1"}},
            "extra.api_key looks like a secret",
        ),
        ({**GIVEN, "temprature": 1.0}, "temperature"),
        ({**GIVEN, "num_generations": 0}, "num_generations"),
        ({**GIVEN, "temperature": -1.0}, "temperature"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        read_options(options)
    assert "sk-1" not in str(caught.value)


def test_the_command_has_every_option_and_no_other() -> None:
    here = set(inspect.signature(command.generate).parameters)
    words_for_others = {"input_batch_size", "client_replicas", "shards", "dry_run", "as_json"}
    assert here - words_for_others - {"reward"} == set(GenerateConfig.model_fields) - {"rewards"}


def options_of(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def note(**options: Any) -> room.GenerateResult:
        seen.update(options)
        return room.GenerateResult({}, Path(), 7)

    monkeypatch.setattr(room, "generate", note)
    assert main(["generate", *arguments]) == 7
    return seen


def test_names_that_scripts_have_mean_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (
        "--hf-dataset d --hf-dataset-config c --hf-dataset-split s --vllm-server-url u --private "
        "--hf-output-dataset o/n --input-batch-size 8 --client-replicas 3"
    )
    assert options_of(arguments.split(), monkeypatch) == {
        "dry_run": False,
        "dataset": "d",
        "dataset_config": "c",
        "split": "s",
        "base_url": "u",
        "private": True,
        "hub": "o/n",
        "concurrency": 24,
    }


def test_options_reach_the_function_as_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--reward", "a", "--reward", "b", "--extra", '{"min_p": 0.1}', "--stop", "x"]
    assert options_of([*arguments, "--dry-run", "--public"], monkeypatch) == {
        "dry_run": True,
        "rewards": ["a", "b"],
        "extra": {"min_p": 0.1},
        "stop": ["x"],
        "private": False,
    }
