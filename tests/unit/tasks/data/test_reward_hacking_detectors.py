"""The section `signals` of a config."""

from __future__ import annotations

import pytest

from groupwise.core.errors import ConfigError
from groupwise.training.config import load_config

MODEL = {"model": {"name": "tiny"}}


@pytest.mark.parametrize("name", [
    "reward", "rewards/math/accuracy/mean", "pass@4", "avg@2", "maj@16",
])  # fmt: skip
def test_metrics_that_each_prompt_has_may_be_held_out(name):
    config = load_config({**MODEL, "signals": {"held_out_metric": name}}).config
    assert config.signals is not None
    assert config.signals.held_out_metric == name


@pytest.mark.parametrize("name", ["accuracy", "completions/mean_length", "pass@k", ""])
def test_other_metrics_are_refused(name):
    with pytest.raises(ConfigError, match="not a metric"):
        load_config({**MODEL, "signals": {"held_out_metric": name}})


def test_a_metric_needs_an_evaluation():
    given = {"signals": {"held_out_metric": "pass@1"}, "eval": {"before_and_after": False}}
    with pytest.raises(ConfigError, match="no effect"):
        load_config({**MODEL, **given})


def test_it_is_on_by_default_and_null_turns_it_off():
    assert load_config(MODEL).config.signals is not None
    assert load_config({**MODEL, "signals": None}).config.signals is None
    assert load_config(MODEL, ["signals=null"]).config.signals is None
