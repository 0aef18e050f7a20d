from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import TaskError
from groupwise.training.generation.config import read_options
from groupwise.training.generation.prompts import Prompts, read_prompts

SHAPES = {"model": "m", "temperature": 1.0}


@pytest.fixture
def rows(tmp_path: Path) -> Any:
    def read(rows: list[dict[str, Any]], shapes: Any = SHAPES, **options: Any) -> Prompts:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_prompts(read_options({"dataset": str(file), "output": "o", **options}), shapes)

    return read


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_text_becomes_a_users_message_or_is_continued(rows: Any) -> None:
    """And a system message comes where there is none."""
    assert rows([{"prompt": "hi", "a": 1}]).items[0].prompt == [user("hi")]
    item = rows([{"prompt": "hi", "a": 1}], api="completions").items[0]
    assert (item.prompt, item.columns, item.index) == ("hi", {"prompt": "hi", "a": 1}, 0)
    own = {"role": "system", "content": "own"}
    read = rows([{"prompt": "hi"}, {"prompt": [own, user("hi")]}], system_prompt="be kind")
    assert read.items[0].prompt == [{"role": "system", "content": "be kind"}, user("hi")]
    assert read.items[1].prompt == [own, user("hi")]


def test_words_of_the_assistant_at_the_end_are_continued_or_left_out(rows: Any) -> None:
    begun = [user("hi"), {"role": "assistant", "content": "ho"}]
    read = rows([{"messages": begun}], prompt_column="messages", system_prompt="s")
    assert read.items[0].prompt == [{"role": "system", "content": "s"}, *begun]
    assert read.ending_with_assistant == 1
    dropped = rows([{"messages": begun}], prompt_column="messages", prefill="drop")
    assert dropped.items[0].prompt == begun[:1]
    assert rows([{"messages": begun[:1]}], prompt_column="messages").ending_with_assistant == 0


def test_template_arguments_are_part_of_the_key_of_a_prompt(rows: Any) -> None:
    same, other = {"prompt": "hi", "chat_template_kwargs": {"a": 1}}, {"prompt": "hi", "tools": []}
    keyed = [item.key for item in rows([{"prompt": "hi"}, same, other]).items]
    assert len(set(keyed)) == 3
    assert keyed[1] != rows([{"prompt": "hi"}]).items[0].key == keyed[0]


def keys(read: Prompts) -> list[str]:
    return [item.key for item in read.items]


def test_a_key_is_the_rows_and_no_others(rows: Any) -> None:
    one, two = {"prompt": "a", "x": 1}, {"prompt": "a", "x": 2}
    read = keys(rows([one, two, one]))
    assert len(set(read)) == 3, "rows that ask the same are rows of their own"
    assert keys(rows([{"prompt": "new"}, two]))[1] == read[0], "its place does not matter"
    for changed in ({"api": "completions"}, {"system_prompt": "s"}):
        assert set(keys(rows([one, two, one], **changed))).isdisjoint(read)
    assert set(keys(rows([one, two], {**SHAPES, "temperature": 0.5}))).isdisjoint(read)


def test_a_key_is_that_of_the_request_whatever_else_a_row_holds(rows: Any) -> None:
    before = keys(rows([{"prompt": "a"}, {"prompt": "b"}]))
    read = rows([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}])
    assert keys(read) == before
    assert [item.columns["answer"] for item in read.items] == ["1", "2"]
    moved = rows([{"q": "a"}, {"q": "b"}], prompt_template="{q}")
    assert keys(moved) == before, "the same is asked"


def test_shards_divide_the_rows(rows: Any) -> None:
    given = [{"prompt": p} for p in "aabcde"]
    whole = rows(given)
    parts = [rows(given, shard=f"{i}/3") for i in (1, 2, 3)]
    assert [[item.index for item in part.items] for part in parts] == [[0, 3], [1, 4], [2, 5]]
    together = {item.index: item.key for part in parts for item in part.items}
    assert together == {item.index: item.key for item in whole.items}


def test_a_tasks_prompts_are_as_in_training(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(
        "def get_rl_dataset(config):\n"
        "    return [{'prompt': 'continue', 'answer': config['task']['answer']}]\n"
    )
    config = tmp_path / "c.yaml"
    config.write_text("model: {name: tiny}\ntask: {answer: 4}\n")
    given = {"task_module": str(task), "config": str(config), "output": "o"}
    item = read_prompts(read_options(given), SHAPES).items[0]
    assert (item.prompt, item.columns) == ("continue", {"prompt": "continue", "answer": 4})
    item = read_prompts(read_options({**given, "api": "chat"}), SHAPES).items[0]
    assert item.prompt == [user("continue")]


def test_a_task_that_answers_in_turns_is_refused() -> None:
    for task in ("wordle_game", "examples/04_calculator_tool/task.py"):
        with pytest.raises(TaskError, match="has get_environment") as caught:
            read_prompts(read_options({"task_module": task, "output": "o"}), SHAPES)
        assert f"groupwise rl --task-module {task}" in str(caught.value)
        has_a_teacher = task == "wordle_game"
        assert ("groupwise sft" in str(caught.value)) == has_a_teacher
