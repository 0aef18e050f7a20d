"""Which rewards a notebook has: those of its config, and others instead of or in addition to them."""

from __future__ import annotations

from typing import Any

import pytest

from groupwise.core.errors import TaskError
from groupwise.core.reward_call.tags import Tags
from groupwise.notebook import Criterion, Rubric
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.rewards import (
    create_reward_functions,
    grades,
    register_reward,
    rewards_of,
    with_marks,
)
from groupwise.notebook.task import RIGHT, NotebookTask
from groupwise.tasks.rewards.rubric import Rubric as Rewards

NUMERIC = [{"question": "1 + 1?", "answer": "2"}]
RUBRIC = [{"question": "Why?", "rubric": "names the cause", "reference": "because of rain"}]


def values(function, completions, **columns):
    given = {name: [value] * len(completions) for name, value in columns.items()}
    return function(prompts=["?"] * len(completions), completions=completions, **given)


def test_numeric_data_have_layout_and_answer():
    layout, answer = create_reward_functions(TrainingConfig(dataset="arithmetic"))
    said = ["<reasoning>1 and 1</reasoning><answer>2</answer>", "<answer>2", "2"]
    assert values(layout, said) == [2.0, 0.5, -1.0]
    assert values(answer, [*said, "<answer>3</answer>"], answer="2") == [3.0, -0.5, -0.5, -1.0]


def constant_reward(completions, **columns):
    return [1.0 for _ in completions]


def test_own_reward_functions_replace_or_extend_the_defaults():
    config = TrainingConfig(dataset="arithmetic")
    assert rewards_of(config, NUMERIC).names == ("match_format", "math_answer", "accuracy")
    assert rewards_of(config, NUMERIC).weights == (1.0, 1.0, 0.0)
    beside = rewards_of(config, NUMERIC, extra_reward_functions=[(constant_reward, 0.5)])
    assert dict(zip(beside.names, beside.weights, strict=True))["constant_reward"] == 0.5
    assert len(beside.names) == 4
    instead = rewards_of(config, RUBRIC, reward_functions=[constant_reward])
    assert instead.names == ("constant_reward",)


def test_functions_of_a_notebook_are_given_texts():
    seen = {}

    def mine(prompts, completions, answer, log_metric=None, **columns):
        seen.update(prompts=prompts, completions=completions, answer=answer, columns=columns)
        return [1.0]

    config = TrainingConfig(dataset="arithmetic")
    rewards = rewards_of(config, NUMERIC, reward_functions=[(mine, 2.0)])
    assert (rewards.names, rewards.weights) == (("mine", "accuracy"), (2.0, 0.0))
    chat, said = [{"role": "user", "content": "?"}], [{"role": "assistant", "content": "2"}]
    for prompt, completion in ((chat, said), ("?", "2")):
        rewards.functions[0](prompts=[prompt], completions=[completion], answer=["2"], hint=["h"])
        told = (seen["prompts"], seen["completions"], seen["answer"], seen["columns"])
        assert told == (["?"], ["2"], ["2"], {"hint": ["h"]})


def test_rewards_by_name_have_the_marks_of_the_config_and_get_texts():
    config = TrainingConfig(dataset="arithmetic", solution_start="[", solution_end="]")
    told: list[object] = []

    def seen(prompts, completions, **columns):
        told.extend([*prompts, *completions])
        return [1.0] * len(completions)

    register_reward("seen_by_a_test", seen)
    register_reward("seen_by_a_test", seen)  # its cell was run again
    steps = Rubric(
        name="steps", criteria=[Criterion(name="order", description="d", keywords=["first"])]
    )
    given = ["seen_by_a_test", ("match_format", 0.5), {"name": "math_answer", "weight": 2.0}, steps]
    rewards = rewards_of(config, NUMERIC, given)
    assert rewards.names == ("seen_by_a_test", "match_format", "math_answer", "steps", "accuracy")
    assert rewards.weights == (1.0, 0.5, 2.0, 1.0, 0.0)
    own, layout, answer, rubric, _ = rewards.functions
    assert values(own, [[{"role": "assistant", "content": "4"}]]) == [1.0]
    assert told == ["?", "4"]
    marked = ["<reasoning>1 and 1</reasoning>[2]", "<answer>2</answer>"]
    assert values(layout, marked) == [2.0, -1.0]
    right, wrong = values(answer, marked, answer="2")
    assert right > wrong
    assert values(rubric, ["first", "x"]) == [1.0, 0.0]


@pytest.mark.parametrize(("given", "told"), [
    (["matchformat"], "extra_reward_functions.*`matchformat`"), ([{"name": "length", "most": 3}], "extra_reward_functions.*`most`"),
    ("length", r"extra_reward_functions.*=\['length'\]"), ([("length", 1.0, 2.0)], "a pair with its weight"),
])  # fmt: skip
def test_errors_of_a_reward_name_the_argument_that_gave_it(given, told):
    with pytest.raises(TaskError, match=told):
        rewards_of(TrainingConfig(dataset="arithmetic"), NUMERIC, None, given)


def test_the_answer() -> None:
    for said, measured in (
        ("<answer>7</answer> and not 8", None), ("3 + 4 is 7.", "<answer>7</answer>"), ("it is 1,234.5", "<answer>1,234.5</answer>"),
        ("20 - 27 = -7", "<answer>-7</answer>"), ("5-3", "<answer>3</answer>"), (r"so \boxed{7}, in 2 steps", None), ("<answer>", None),
        ("none", None), ("", None),
    ):  # fmt: skip
        expected = said if measured is None else measured
        assert with_marks(Tags(), said, ["7"]) == expected
        assert with_marks(Tags(), [{"role": "assistant", "content": said}], ["7"]) == expected


@pytest.mark.parametrize(("gold", "said", "right"), [
    ("1/2", "1/2", True), ("6", "about 1e6", False), ("1000000", "it is 1e6.", True), ("0.5", "so .5", True), ("5", "0.25 or .5", False),
    ("Tokyo", "The capital is Tokyo.", True), ("Tokyo", "Hm.\nIt is **Tokyo**!\n", True), ("Tokyo", "<answer>It is Tokyo</answer>", True),
    ("Tokyo", "<answer>Kyoto</answer> and not Tokyo", False), ("Tokyo", "Tokyo, or Kyoto", False), ("New York", "It is New\nYork", False),
    ("St. Louis", "It is St. Louis.", True), ("Apollo 11", "It was Apollo 11", True), ("Apollo 11", "It was 11", False),
    ("x+1", "<answer>x + 1</answer>", True), ("x+1", "1 + x", True), (["Tokyo", "Edo"], "It was Edo.", True), (7, "It is 7", True),
])  # fmt: skip
def test_answers_are_graded_right_or_wrong(gold: Any, said: str, right: bool) -> None:
    assert grades(Tags(), [said], tolerant=False, answer=[gold]) == [right]
    assert (grades(Tags(), [said], tolerant=True, answer=[gold])[0] >= RIGHT) == right


def none(completions: list[str], **columns: object) -> list[float]:
    return [0.0] * len(completions)


def test_a_model_that_writes_no_marks_is_measured_all_the_same() -> None:
    config, rewards = TrainingConfig(dataset="arithmetic"), Rewards([none], where="test")
    task = NotebookTask(config, "arithmetic", [], [], rewards)
    rows = [{"question": "3 + 4?", "answer": "7"}] * 4
    said = ["3 + 4 = 7", "7.5", "<reasoning>4 and 3</reasoning><answer>7</answer>", "no idea"]
    found = task.compute_metrics(["?"] * 4, said, rows, {}, None)["metrics"]
    assert found == {"accuracy": 0.5, "within_10_percent": 0.75, "format_rate": 0.25}
    words = [{"question": "Capital of Japan?", "answer": "Tokyo"}] * 4
    said = ["It is Tokyo.", "Kyoto", "<reasoning>so</reasoning><answer>Tokyo</answer>", "?"]
    found = task.compute_metrics(["?"] * 4, said, words, {}, None)["metrics"]
    assert found == {"accuracy": 0.5, "format_rate": 0.25}
    found = task.compute_metrics(["?"] * 4, said, [*words[1:], *rows[:1]], {}, None)["metrics"]
    assert found["within_10_percent"] == 0.5
