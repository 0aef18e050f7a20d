"""Names of rewards in other projects: each leads to an existing reward, or the message says that there is none."""

from __future__ import annotations

import importlib.metadata
import re

import pytest

from groupwise.core.errors import TaskError
from groupwise.tasks.rewards.other_names import meaning_of, other_names
from groupwise.tasks.rewards.registry import get_reward_funcs, registered_rewards

OUR_REWARDS = registered_rewards()


def refused(name: str) -> str:
    with pytest.raises(TaskError) as caught:
        get_reward_funcs([name])
    return str(caught.value)


def test_the_table_names_rewards_that_there_are_and_none_of_ours_as_foreign() -> None:
    for name, meant in other_names().items():
        assert name not in OUR_REWARDS
        assert set(meant.rewards) <= set(OUR_REWARDS), name
        assert not meant.remark.endswith("."), name


KNOWN = {
    "accuracy": "math_answer", "format_reward": "strict_format",
    "get_cosine_scaled_reward": "length", "code_format": "python_tests",
    "trl.rewards.accuracy_reward": "math_answer", "open_r1.rewards:tag_count_reward": "xml_count",
    "correctness_reward_func": "correctness_xml", "keyword": "keyword_match",
}  # fmt: skip


@pytest.mark.parametrize(("name", "ours"), KNOWN.items())
def test_names_that_people_know(name: str, ours: str) -> None:
    assert f"Did you mean `{ours}`" in refused(name)


def test_a_module_of_python_is_no_reward_and_a_slip_is_looked_for_as_usual() -> None:
    message = refused("json")
    assert "`json`, which is a module" in message
    assert re.search("Built-in: .*correctness, ", message)
    assert "path/to/file.py:function" in message
    assert "Did you mean" not in refused("reasoning_steps_reward")
    assert meaning_of("no_such_thing", OUR_REWARDS) is None
    assert re.search(r"Did you mean `length`\?$", refused("lenght").split("\nBuilt-in")[0])


def test_names_of_rewards_announced_by_a_package_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = [
        importlib.metadata.EntryPoint(name, "groupwise.tasks.rewards.shaping:Repetition", group)
        for name, group in (
            ("code", "groupwise.tasks.rewards"),
            ("accuracy", "groupwise.tasks.rewards"),
        )
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: points)
    assert len(get_reward_funcs(["code", "accuracy"])) == 2
