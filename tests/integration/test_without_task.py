"""Commands without a task file: the config names the data and the rewards, of one set or of several tasks in one run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import groupwise
from groupwise.cli.main import main
from groupwise.core.errors import ResumeMismatchError
from groupwise.runs.store import Store

REWARD_FILE = """
def letters(completions, **columns):
    return [sum(letter in "abcdefghijklm" for letter in text[-1]["content"]) / 6 for text in completions]

def short(completions, **columns):
    return [1.0 - len(text[-1]["content"]) / 100 for text in completions]
"""


def rows(name: str, words: list[str]) -> str:
    lines = [json.dumps({"question": f"{word}?", "id": n}) for n, word in enumerate(words)]
    Path(name).write_text("\n".join([*lines, '{"question": " ", "id": -1}']) + "\n")
    return name


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_rewards.py").write_text(REWARD_FILE)
    rows("one.jsonl", ["one", "two", "three", "four"])
    rows("two.jsonl", ["five", "six", "seven", "eight"])


def config(**data: Any) -> dict[str, Any]:
    return {
        "model": {"name": "tiny"},
        "lora": {"r": 4, "alpha": 8},
        "sampler": {"max_completion_length": 6, "max_num_seqs": 8},
        "training": {
            "max_steps": 4, "prompts_per_step": 3, "num_generations": 2, "learning_rate": 0.01,
        },
        "data": {"prompt_column": "question", "prompt_format": "chat", **data},
        "eval": {"max_prompts": 6},
        "run": {"name": "toy", "save_steps": 2, "threads": 1},
    }  # fmt: skip


def three_tasks() -> dict[str, Any]:
    """Two sources with rewards of their own, and a whole task."""
    given = config(
        dataset_mixture=[
            {"source": "one.jsonl", "label": "one"}, {"source": "two.jsonl", "label": "two"},
            {"task": "sort_words", "label": "sorting", "config": {"train_size": 4, "eval_size": 4}},
        ],
        test_split_size=0.25,
    )  # fmt: skip
    router = {"one": ["own_rewards.py:letters"], "two": ["own_rewards.py:short"]}
    return {**given, "rewards": {"router": router}}


def test_one_run_trains_on_three_tasks_and_records_each_part_by_task() -> None:
    result = groupwise.rl(three_tasks())
    assert result.exit_code == 0
    with Store.open(result.folder / "run.db", readonly=True) as store:
        groups = [group for step in range(4) for group in store.groups(step)]
        meta = store.get_meta()
        names = store.metric_names()
    parts: dict[str, set[str]] = {}
    for group in groups:
        for rollout in group.rollouts:
            applied = {part.name for part in rollout.parts if part.value is not None}
            parts.setdefault(group.example.columns["task"], set()).update(applied)
            assert rollout.outcome == "scored"
    assert parts == {
        "one": {"one/letters"},
        "two": {"two/short"},
        "sorting": {"sorting/right_words", "sorting/right_positions"},
    }
    counts = Counter(group.example.columns["task"] for group in groups)
    assert set(counts) == {"one", "two", "sorting"}
    assert {"rewards/one/letters/mean", "rewards/two/short/mean"} <= set(names)
    left_out = meta["rows_left_out"]["get_rl_dataset"]
    assert left_out == {
        f"data.dataset_mixture, set {n} ({name}.jsonl): the prompt is empty": 1
        for n, name in enumerate(("one", "two"))
    }
    assert result.before is not None
    assert {"sorting/accuracy", "total_samples"} <= set(result.before.metrics)
    again = groupwise.evaluate(three_tasks(), policy="toy@4", overrides=["rewards.in_process=true"])
    assert again.rewards == result.after.rewards


def test_a_reward_for_length_counts_the_tokens_that_the_policy_wrote() -> None:
    """The tokens that the second stage inserts do not count; with them each completion would be over the limit."""
    given = {**config(dataset_name="one.jsonl"), "sampler": {}}
    given["rollout"] = {
        "type": "two_stage", "max_reasoning_length": 4, "max_answer_length": 4, "reasoning_end": "</think>", "answer_start": "<answer>",
    }  # fmt: skip
    given["rewards"] = {"reward_funcs": [{"name": "overlong", "max_length": 9, "cache": 1}]}
    result = groupwise.rl(given, overrides=["training.max_steps=1"])
    with Store.open(result.folder / "run.db", readonly=True) as store:
        rollouts = [rollout for group in store.groups(0) for rollout in group.rollouts]
    assert all(len(rollout.completion_ids) > 9 for rollout in rollouts)
    assert [rollout.reward for rollout in rollouts] == [0.0] * 6


def test_resume_says_that_the_code_of_rewards_or_of_a_mixed_task_was_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = "from groupwise.tasks.builtin.sort_words import *\n"
    Path("sorting.py").write_text(source)
    task = {"task": "sorting.py", "config": {"train_size": 4, "eval_size": 4}}
    given = config(dataset_mixture=[{"source": "one.jsonl", "label": "one"}, task])
    given["rewards"] = {"router": {"one": ["own_rewards.py:letters"]}, "in_process": True}
    said = "the code of the task or of its rewards was changed"
    groupwise.rl(given, overrides=["training.max_steps=1"])
    for steps, file, text in (
        (2, None, ""),
        (3, "own_rewards.py", REWARD_FILE + "# another\n"),
        (4, "sorting.py", source + "# another\n"),
    ):
        if file:
            Path(file).write_text(text)
        caplog.clear()
        groupwise.rl(given, overrides=[f"training.max_steps={steps}"], resume_from="toy")
        assert (said in caplog.text) == bool(file), steps


def test_an_algorithm_in_a_file_trains_and_a_resume_refuses_another_one() -> None:
    source = """
from dataclasses import dataclass, field
from groupwise.algorithms.grpo import Grpo

@dataclass(frozen=True, kw_only=True)
class Mine(Grpo):
    power: float = field(default=0.5, metadata={"description": "of the length", "ge": 0.0})

    def scale(self, rollout):
        return rollout.written**-self.power
"""
    Path("own.py").write_text(source)
    given = config(dataset_name="one.jsonl")
    given["rewards"] = {"reward_funcs": ["own_rewards.py:letters"], "in_process": True}
    given["algorithm"] = {"type": "own.py:Mine", "power": 0.7}
    begun = groupwise.rl(given, overrides=["training.max_steps=1"])
    with Store.open(begun.folder / "run.db", readonly=True) as store:
        assert len(store.get_meta()["algorithm_file"]) == 16
    more = ["training.max_steps=2"]
    with pytest.raises(ResumeMismatchError, match=r"algorithm\.power: 0\.7 then, 0\.9 now"):
        groupwise.rl(given, overrides=[*more, "algorithm.power=0.9"], resume_from="toy")
    Path("own.py").write_text(source + "# another\n")
    with pytest.raises(ResumeMismatchError, match=r"the file of algorithm\.type"):
        groupwise.rl(given, overrides=more, resume_from="toy")
    Path("own.py").write_text(source)
    assert groupwise.rl(given, overrides=more, resume_from="toy").exit_code == 0


def test_held_out_prompts_that_are_trained_on_are_warned_of() -> None:
    given = config(dataset_name="one.jsonl", dataset_test_split="train[:2]")
    given["rewards"] = {"reward_funcs": ["own_rewards.py:letters"], "in_process": True}
    (warning,) = groupwise.rl(given, dry_run=True).summary["plan"]["warnings"]
    assert warning.startswith("2 of 2 held-out prompts are also trained on")
    begun = groupwise.rl(given, overrides=["training.max_steps=1"])
    assert warning in (begun.folder / "log.txt").read_text()


def test_supervised_run_needs_no_task_either() -> None:
    Path("pairs.jsonl").write_text(
        "".join(json.dumps({"q": f"say {n}", "a": str(n)}) + "\n" for n in range(8)) + "{}\n"
    )
    result = groupwise.sft(
        {
            "model": {"name": "tiny"},
            "data": {"dataset_name": "pairs.jsonl", "prompt_column": "q", "answer_column": "a", "test_split_size": 0.25},
            "training": {"max_steps": 2, "examples_per_step": 2}, "run": {"name": "taught", "threads": 1},
        }
    )  # fmt: skip
    assert result.exit_code == 0
    with Store.open(result.folder / "run.db", readonly=True) as store:
        assert store.get_meta()["examples"] == 6
        assert sum(store.get_meta()["rows_left_out"]["get_sft_dataset"].values()) == 1


def test_command_line_says_what_to_give_instead_of_a_task(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("c.yaml").write_text("model: {name: tiny}\n")
    for verb in ("rl", "sft", "eval", "check"):
        assert main([verb, "--config", "c.yaml"]) == 2
        said = capsys.readouterr().err
        assert "task with --task-module" in said
        assert "data.dataset_name" in said


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "1+1", "completion": "2"}, {"prompt": "1+2", "completion": "3"}],
        [{"text": "a whole text"}, {"text": "another"}],
    ],
)
def test_lessons_that_are_held_out_and_taught_are_warned_of(rows: Any) -> None:
    class Lessons:
        taught = rows

        @classmethod
        def get_sft_dataset(cls, config: Any, tokenizer: Any) -> Any:
            return cls.taught

        @classmethod
        def get_sft_eval_dataset(cls, config: Any, tokenizer: Any) -> Any:
            return rows[:1]

    given = {"model": {"name": "tiny"}, "run": {"name": "taught", "threads": 1}}
    (warning,) = groupwise.sft(given, Lessons, dry_run=True).summary["plan"]["warnings"]
    assert warning.startswith("1 of 1 held-out prompts are also trained on")
    Lessons.taught = rows[1:]
    assert groupwise.sft(given, Lessons, dry_run=True).summary["plan"]["warnings"] == []
