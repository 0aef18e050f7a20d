"""The task that a config describes: its rows, its rewards, mixtures with whole tasks, and the messages if something is missing."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import ConfigError, TaskError
from groupwise.core.settings.view import View
from groupwise.tasks.configured import ConfiguredTask, find_task
from groupwise.tasks.contract import Task, require
from groupwise.tasks.data.order import Order
from groupwise.tasks.rewards.router import Router
from groupwise.training import rollout_builder
from groupwise.training.config import load_config, resolved_values, view
from groupwise.training.sft_config import load_sft_config

SUMS = [{"question": f"{a}+{b}?", "solution": str(a + b)} for a in range(5) for b in range(4)]
NAMED = {"dataset_name": "sums.jsonl", "prompt_column": "question", "answer_column": "solution"}
REWARDS = {"reward_funcs": ["rewards.py:right"]}
SORTING = {"task": "sort_words", "config": {"words": 2, "train_size": 8, "eval_size": 4}}
COLUMNS = {"prompt": "question", "answer": "solution"}
SUMS_SET = {"source": "sums.jsonl", "label": "sums", "columns": COLUMNS}

REWARD_FILE = """
def right(completions, answer, **columns):
    return [float(text == gold) for text, gold in zip(completions, answer)]
"""
TASK_FILE = """
from groupwise.tasks.data.chat import Account, Rows

def get_rl_dataset(config):
    assert config["task"] == {"word": "a"}, config["task"]
    return Rows([{"prompt": "say a", "wanted": "a"}], Account({"too odd": 2}))

def wanted(completions, wanted, **columns):
    return [float(text == word) for text, word in zip(completions, wanted)]

def get_reward_funcs(config, tokenizer):
    return [wanted]

def get_rl_callbacks(config, tokenizer, output_dir):
    return [config["task"]["word"]]

def compute_metrics(prompts, completions, dataset_rows, config, tokenizer):
    return {"metrics": {"said": sum(c == r["wanted"] for c, r in zip(completions, dataset_rows))}}

def get_sft_dataset(config, tokenizer):
    return [{"say": config["task"]["word"]}]

def get_sft_formatting_func(config, tokenizer):
    return lambda row: "say " + row["say"]
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    Path("rewards.py").write_text(REWARD_FILE)
    Path("say.py").write_text(TASK_FILE)


def config_of(data: dict[str, Any], **sections: Any) -> View:
    given = {"model": {"name": "tiny"}, "data": data, **sections}
    return view(load_config(given).config)


def sft_config_of(data: dict[str, Any]) -> View:
    return View(resolved_values(load_sft_config({"model": {"name": "tiny"}, "data": data}).config))


def configured(data: dict[str, Any], **sections: Any) -> tuple[Task, View]:
    config = config_of(data, **sections)
    return find_task(None, config), config


def mixed(*entries: dict[str, Any], **data: Any) -> dict[str, Any]:
    return {"dataset_mixture": list(entries), **data}


# One source


def test_rows_of_the_config_are_examples_of_chats() -> None:
    task, config = configured({**NAMED, "system_prompt": "Answer."}, rewards=REWARDS)
    examples = task.rl_examples(config)
    assert len(examples) == len(SUMS)
    assert examples[0].prompt == [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": "0+0?"},
    ]
    columns = {"question": "0+0?", "answer": "0", "solution": "0", "dataset_name": "sums.jsonl"}
    assert examples[0].columns == columns
    require(task, "rl")


def test_held_out_share_is_never_trained_on() -> None:
    task, config = configured({**NAMED, "test_split_size": 0.25}, rewards=REWARDS)
    train, test = task.rl_examples(config), task.eval_examples(config)
    assert (len(train), len(test)) == (15, 5)
    trained = [example.prompt for example in train]
    assert not any(example.prompt in trained for example in test)
    require(task, "eval")


def test_split_of_its_own_is_held_out() -> None:
    Path("set").mkdir()
    for split, rows in (("train", SUMS[:4]), ("test", SUMS[4:6])):
        Path(f"set/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {**NAMED, "dataset_name": "set", "dataset_test_split": "test"}
    task, config = configured(data, rewards=REWARDS)
    assert len(task.rl_examples(config)) == 4
    assert [e.columns["answer"] for e in task.eval_examples(config)] == ["1", "2"]


def test_rows_that_are_left_out_are_counted_by_reason() -> None:
    with Path("sums.jsonl").open("a") as file:
        file.write('{"question": "", "solution": "1"}\n{"solution": "1"}\n')
    task, config = configured({**NAMED, "test_split_size": 0.25}, rewards=REWARDS)
    task.rl_examples(config)
    task.eval_examples(config)
    assert task.accounts["get_rl_dataset"].left_out == {
        "the prompt is empty": 1,
        "there is no prompt": 1,
    }
    assert task.accounts["get_eval_dataset"].left_out == {}
    strict, config = configured({**NAMED, "strict": True}, rewards=REWARDS)
    with pytest.raises(TaskError, match="2 of 22 rows"):
        strict.rl_examples(config)


# Mixtures


def test_whole_tasks_stand_beside_sources() -> None:
    entries = {**SUMS_SET, "weight": 0.5}, {**SORTING, "weight": 2.0}
    task, config = configured(mixed(*entries), rewards=REWARDS)
    examples = task.rl_examples(config)
    assert Counter(e.columns["task"] for e in examples) == {"sums": 20, "sort_words": 8}
    shares = {share.name: share for share in task.shares["get_rl_dataset"]}
    order = Order(28, 0, shares=tuple(shares.values()))
    epoch = [examples[order.example(turn)].columns["task"] for turn in range(order.length)]
    assert Counter(epoch) == {"sums": 10, "sort_words": 16}
    assert len({frozenset(example.columns) for example in examples}) == 1, "all have all columns"
    assert task.has("get_eval_dataset")
    assert {e.columns["task"] for e in task.eval_examples(config)} == {"sort_words"}
    rubric = task.rubric(config, None)
    assert isinstance(rubric, Router)
    assert rubric.names == ("sums/right", "sort_words/right_words", "sort_words/right_positions")
    rubric.check_rows({example.index: example.columns for example in examples})


def test_held_out_rows_come_in_turn() -> None:
    task, config = configured(mixed(SUMS_SET, SORTING, test_split_size=0.5), rewards=REWARDS)
    labels = [example.columns["task"] for example in task.eval_examples(config)]
    assert labels[:8] == ["sums", "sort_words"] * 4
    assert Counter(labels) == {"sums": 10, "sort_words": 4}


def test_sources_may_have_rewards_by_label() -> None:
    sources = [
        {"source": "sums.jsonl", "label": label, "columns": COLUMNS} for label in ("one", "two")
    ]
    router = {"one": ["rewards.py:right"], "two": ["rewards.py:right"]}
    task, config = configured(mixed(*sources, SORTING), rewards={"router": router})
    assert task.rubric(config, None).names == (
        "one/right", "two/right", "sort_words/right_words", "sort_words/right_positions",
    )  # fmt: skip


def test_a_router_may_replace_the_rewards_of_a_task() -> None:
    router = {"sort_words": [{"name": "int_reward", "weight": 2.0}]}
    task, config = configured(mixed(SORTING), rewards={"router": router})
    rubric = task.rubric(config, None)
    assert (rubric.names, rubric.weights) == (("sort_words/int_reward",), (2.0,))


def test_weights_and_default_of_the_config_beside_tasks() -> None:
    rewards = {**REWARDS, "reward_weights": [3.0], "default_task": "sort_words"}
    given = {"model": {"name": "tiny"}, "data": mixed(SUMS_SET, SORTING), "rewards": rewards}
    config = load_config(given).config
    rubric = rollout_builder.task_rubric(config, find_task(None, view(config)), None)
    assert isinstance(rubric, Router)
    assert rubric.names[0] == "sums/right"
    assert rubric.weights[0] == 3.0
    assert rubric.weights[1:] == ConfiguredTask(view(config)).rubric(view(config), None).weights[1:]
    assert rubric.default == "sort_words"


def test_a_task_of_a_mixture_sees_its_own_section_and_keeps_its_hooks() -> None:
    say = {"task": "say.py", "label": "a", "config": {"word": "a"}}
    task, config = configured(mixed(say, SORTING))
    examples = [e for e in task.rl_examples(config) if e.columns["task"] == "a"]
    assert examples[0].columns["wanted"] == "a"
    assert task.accounts["get_rl_dataset"].left_out == {
        "data.dataset_mixture, set 0 (say.py): too odd": 2
    }
    assert task.rl_callbacks(config, None, "") == ["a"]
    rows = [{"task": "a", "wanted": "a"}, {"task": "b"}, {"task": "a", "wanted": "b"}]
    found = task.compute_metrics(["p"] * 3, ["a", "a", "a"], rows, config, None)
    assert found["metrics"] == {"total_samples": 3, "a/said": 1}


# A teacher's rows


def test_teacher_of_the_config_has_prompts_and_completions() -> None:
    config = sft_config_of({**NAMED, "test_split_size": 0.25})
    task = find_task(None, config)
    require(task, "sft")
    rows = task.sft_rows("get_sft_dataset", config, None)
    assert (rows[0]["prompt"], rows[0]["completion"]) == ("0+1?", "1")
    chats = sft_config_of({**NAMED, "prompt_format": "chat"})
    rows = find_task(None, chats).sft_rows("get_sft_dataset", chats, None)
    assert rows[1]["prompt"] == [{"role": "user", "content": "0+1?"}]
    rows = task.sft_rows("get_sft_dataset", config, None)
    held_out = task.sft_rows("get_sft_eval_dataset", config, None)
    assert (len(rows), len(held_out)) == (15, 5)
    Path("a.jsonl").write_text("".join(json.dumps({"words": f"w{n}"}) + "\n" for n in range(8)))
    texts = sft_config_of({"dataset_name": "a.jsonl", "test_split_size": 0.25})
    assert len(find_task(None, texts).sft_rows("get_sft_dataset", texts, None)) == 6


def test_tasks_of_a_mixture_format_their_own_rows() -> None:
    source = {
        "source": "sums.jsonl",
        "columns": {"prompt": "question", "completion": "solution"},
        "weight": 0.05,
    }
    say = {"task": "say.py", "label": "a", "config": {"word": "a"}}
    config = sft_config_of(mixed(source, say))
    rows = find_task(None, config).sft_rows("get_sft_dataset", config, None)
    by_label = {row["task"]: row for row in rows}
    assert by_label["a"]["text"] == "say a"
    assert by_label["a"]["prompt"] is None
    assert by_label[None]["completion"] is not None


# What lacks

BESIDE = {"source": "sums.jsonl", "label": "sort_words", "columns": COLUMNS}


@pytest.mark.parametrize(("data", "more", "said"), [
    ({}, {}, "data.dataset_name or data.dataset_mixture"), (NAMED, {"task": {"words": 2}}, "section `task`, but no task to read it"),
    (mixed(SORTING), {"rewards": REWARDS}, "rewards.reward_funcs would have no effect"),
    (mixed(SORTING), {"rewards": {"reward_weights": [1.0]}}, "no effect"),
    (mixed({**SORTING, "config": {"wrds": 2}}), {}, "set 0 (sort_words): config.wrds is not"),
    (mixed(BESIDE, SORTING), {}, "another set has the label 'sort_words'"),
    (mixed(SORTING, SORTING), {}, "another set has the label 'sort_words'"),
    (mixed({"task": "wordle_game"}), {}, "has get_environment, which a mixture"),
    (mixed({"task": "half.py"}), {}, "has no get_rl_dataset, which `rl` needs"),
])  # fmt: skip
def test_conflicting_data_sections_are_refused(
    data: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    Path("half.py").write_text("def get_reward_funcs(config, tokenizer):\n    return []\n")
    with pytest.raises((TaskError, ConfigError)) as caught:
        find_task(None, config_of(data, **more))
    assert said in str(caught.value)
    configured(mixed(SORTING, {**SORTING, "label": "again"}))


def test_unknown_label_is_an_error_that_names_those_there_are() -> None:
    router = {"sums": ["rewards.py:right"]}
    data = mixed({**SUMS_SET, "label": "smus"}, SORTING)
    task, config = configured(data, rewards={"router": router})
    rubric = task.rubric(config, None)
    examples = task.rl_examples(config)
    with pytest.raises(TaskError, match=r"label `smus`\..* sums"):
        rubric.check_rows({example.index: example.columns for example in examples})


# What the rewards cannot score


def test_rows_that_the_rewards_cannot_score_are_left_out_with_their_reason() -> None:
    with Path("sums.jsonl").open("a") as file:
        file.write('{"question": "1+?", "solution": ""}\n{"question": "2+?", "solution": null}\n')
    rewards = {"reward_funcs": ["correctness"]}
    task, config = configured(NAMED, rewards=rewards)
    assert len(task.rl_examples(config)) == len(SUMS)
    ((reason, count),) = task.accounts["get_rl_dataset"].left_out.items()
    assert reason.startswith("there is no gold answer in answer, reference")
    assert count == 2
    strict, config = configured({**NAMED, "strict": True}, rewards=rewards)
    with pytest.raises(TaskError, match=r"2 of 22 .*\n.*no gold .*rows 20, 21\)"):
        strict.rl_examples(config)
    Path("sums.jsonl").write_text('{"question": "1+?", "solution": ""}\n')
    with pytest.raises(TaskError, match=r"none of 1 .*\n.*no gold"):
        configured(NAMED, rewards=rewards)[0].rl_examples(config)


def test_held_out_rows_without_a_gold_answer_are_left_out_too() -> None:
    Path("test.jsonl").write_text('{"q": "a", "answer": "b"}\n{"q": "c", "answer": null}\n')
    Path("train.jsonl").write_text('{"q": "d", "answer": "e"}\n')
    data = {"dataset_name": ".", "prompt_column": "q", "dataset_test_split": "test"}
    task, config = configured(data, rewards={"reward_funcs": ["correctness"]})
    assert [example.columns["answer"] for example in task.eval_examples(config)] == ["b"]
    assert list(task.accounts["get_eval_dataset"].left_out.values()) == [1]


def test_each_source_is_scored_by_the_rewards_of_its_label() -> None:
    Path("sums.jsonl").write_text('{"question": "1+?"}\n{"question": "1+1?", "solution": "2"}\n')
    Path("free.jsonl").write_text('{"question": "say a"}\n')
    columns = {"prompt": "question"}
    free = {"source": "free.jsonl", "label": "free", "columns": columns}
    router = {"sums": ["correctness"], "free": ["rewards.py:right"]}
    data = mixed(SUMS_SET, free, SORTING, mixture_columns="all")
    task, config = configured(data, rewards={"router": router})
    examples = task.rl_examples(config)
    assert Counter(e.columns["task"] for e in examples) == {"sums": 1, "free": 1, "sort_words": 8}
    assert task.rubric(config, None).names[:2] == ("sums/correctness", "free/right")


# Streams


def test_a_resumed_mixture_reads_its_streams_as_far_as_it_began() -> None:
    Path("say.py").write_text(
        TASK_FILE.replace(
            'return Rows([{"prompt": "say a", "wanted": "a"}], Account({"too odd": 2}))',
            'return ({"prompt": f"say {n}", "wanted": "a"} for n in itertools.count())',
        ).replace(
            'return [{"say": config["task"]["word"]}]',
            'return ({"say": str(n)} for n in itertools.count())',
        )
        + "\nimport itertools\n"
    )
    data = mixed({"task": "say.py", "config": {"word": "a"}})
    training = {"max_steps": 9, "prompts_per_step": 2}
    task, config = configured(data, training=training)
    assert len(task.rl_examples(config, limit=4)) == 4
    supervised = sft_config_of(data)
    rows = find_task(None, supervised).sft_rows("get_sft_dataset", supervised, None, 3)
    assert sorted(row["text"] for row in rows) == ["say 0", "say 1", "say 2"]
