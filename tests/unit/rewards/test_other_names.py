"""Names that rewards have elsewhere: each leads to one of ours that there is, or says that there is none."""

from __future__ import annotations

import importlib.metadata
import re

import pytest

from groupwise.errors import TaskError
from groupwise.rewards.other_names import OTHER_NAMES, meant_by
from groupwise.rewards.registry import get_reward_funcs, registered

OURS = registered()


def refused(name: str) -> str:
    with pytest.raises(TaskError) as caught:
        get_reward_funcs([name])
    return str(caught.value)


def test_the_table_names_rewards_that_there_are_and_none_of_ours_as_foreign() -> None:
    for name, meant in OTHER_NAMES.items():
        assert name not in OURS
        assert set(meant.rewards) <= set(OURS), name
        assert not meant.remark.endswith("."), name


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        # open-r1's names and functions
        ("accuracy", "math_answer"),
        ("accuracy_reward", "math_answer"),
        ("format", "strict_format"),
        ("format_reward", "strict_format"),
        ("tag_count", "xml_count"),
        ("cosine", "length"),
        ("get_cosine_scaled_reward", "length"),
        ("repetition_penalty", "repetition"),
        ("get_repetition_penalty_reward", "repetition"),
        ("len_reward", "length"),
        ("length_reward", "length"),
        ("code", "python_tests"),
        ("code_reward", "python_tests"),
        ("code_format", "python_tests"),
        ("soft_overlong_punishment", "overlong"),
        # TRL's
        ("think_format_reward", "strict_format"),
        ("get_soft_overlong_punishment", "overlong"),
        ("trl.rewards.accuracy_reward", "math_answer"),
        ("open_r1.rewards:tag_count_reward", "xml_count"),
        # those of a well-known notebook
        ("correctness_reward_func", "correctness_xml"),
        ("int_reward_func", "int_reward"),
        ("strict_format_reward_func", "strict_format"),
        ("xmlcount_reward_func", "xml_count"),
        # modules of Python
        ("keyword", "keyword_match"),
    ],
)
def test_names_that_people_know(name: str, ours: str) -> None:
    assert f"Did you mean `{ours}`" in refused(name)


def test_a_module_of_python_is_no_reward() -> None:
    assert refused("code").startswith(
        "get_reward_funcs: There is no reward `code`. Did you mean `python_tests`? It runs"
    )
    message = refused("json")
    assert "There is no reward `json`, which is a module of Python itself." in message
    assert re.search("Built-in: .*correctness, ", message)
    assert "path/to/file.py:function" in message


def test_where_there_is_none_of_the_kind_that_is_said() -> None:
    message = refused("reasoning_steps_reward")
    assert "There is no reward `reasoning_steps_reward`. None here counts steps" in message
    assert "Did you mean" not in message


def test_a_name_that_says_nothing_is_looked_for_as_usual() -> None:
    assert meant_by("no_such_thing", OURS) is None
    message = refused("no_such_thing")
    assert "No reward `no_such_thing` was found. Tried in this order" in message
    assert re.search(r"Did you mean `length`\?$", refused("lenght").split("\nBuilt-in")[0])


def test_what_a_package_announces_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        importlib.metadata.EntryPoint(name, "groupwise.rewards.shaping:Repetition", group)
        for name, group in (("code", "groupwise.rewards"), ("accuracy", "groupwise.rewards"))
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: points)
    assert len(get_reward_funcs(["code", "accuracy"])) == 2
