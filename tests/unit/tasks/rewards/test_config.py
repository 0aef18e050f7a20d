"""The section `rewards`: which rewards there are, and which keys conflict."""

import pytest

from groupwise.core.errors import ConfigError
from groupwise.training.config import load_config


@pytest.fixture(autouse=True)
def no_default_label(monkeypatch):
    monkeypatch.delenv("GROUPWISE_TASK", raising=False)


def rewards(**section):
    return load_config({"model": {"name": "tiny"}, "rewards": section}).config.rewards


def refused(**section) -> str:
    with pytest.raises(ConfigError) as caught:
        rewards(**section)
    return str(caught.value)


@pytest.mark.parametrize(("section", "part"), [
    ({"reward_funcs": []}, "the list is empty"), ({"reward_funcs": "correctness"}, "reward_funcs"),
    ({"reward_funcs": [{"weight": 1}]}, '{"weight": 1} does not say which reward it is'),
    ({"reward_funcs": [""]}, "does not say which reward it is"),
    ({"reward_funcs": [{"name": "a", "weight": "1"}]}, 'the weight of a is "1"'), ({"router": {}}, "router"),
    ({"router": {"x": []}}, "the list is empty"), ({"router": {"x": ["a"]}, "reward_funcs": ["a"]}, "both say which rewards there are"),
    ({"router": {"x": ["a"]}, "reward_weights": [1.0]}, "`weight:`"),
    ({"reward_funcs": ["a"], "reward_weights": [1.0, 2.0]}, "has 2, but reward_funcs 1"),
    ({"reward_funcs": [{"name": "a", "weight": 1}], "reward_weights": [1.0]}, "both give a"),
    ({"reward_funcs": [{"name": "judge", "api_key": "sk-1"}]}, "looks like a secret"),
])  # fmt: skip
def test_invalid_reward_sections_are_refused(section, part):
    assert part in refused(**section)


def test_the_environment_gives_a_router_its_default(monkeypatch):
    monkeypatch.setenv("GROUPWISE_TASK", "x")
    assert rewards(router={"x": ["a"], "y": ["a"]}).default_task == "x"
    assert rewards(router={"x": ["a"], "y": ["a"]}, default_task="y").default_task == "y"
    assert rewards(reward_funcs=["a"]).default_task is None
    assert rewards().default_task is None
