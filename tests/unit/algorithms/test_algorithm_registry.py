"""Algorithms by name: what exists can be made, sent and made again; what does not is refused with advice."""

from __future__ import annotations

from dataclasses import fields

import pytest

from groupwise.algorithms.registry import ALGORITHMS, from_spec, make
from groupwise.core.types import LossSpec, from_json, to_json

KNOBS = {
    "beta": 0.04, "kl_estimator": "k2", "epsilon_high": 0.28, "mask_truncated_completions": True,
}  # fmt: skip


@pytest.mark.parametrize("name", ALGORITHMS)
def test_spec_survives_the_wire(name: str) -> None:
    known = {knob.name for knob in fields(ALGORITHMS[name])}
    algorithm = make(name, {knob: value for knob, value in KNOBS.items() if knob in known})
    spec = from_json(LossSpec, to_json(algorithm.loss_spec()))
    assert spec.name == name
    assert spec.knobs.keys() == known
    assert from_spec(spec) == algorithm


def test_unknown_name_lists_what_exists() -> None:
    with pytest.raises(ValueError, match=r"'drgrpo'.* 'dr_grpo'\?.*: cispo, "):
        make("drgrpo", {})
    with pytest.raises(ValueError, match=r"'xyz'.*: cispo, "):
        from_spec(LossSpec("xyz"))


def test_all_unknown_knobs_are_named_at_once() -> None:
    with pytest.raises(ValueError, match="no knob") as caught:
        make("dr_grpo", {"epsilon_hi": 0.3, "scale_rewards": "none", "epsilon": 0.2})
    first, second = str(caught.value).splitlines()
    assert first.startswith("dr_grpo has no knob 'epsilon_hi'; did you mean 'epsilon_high'?")
    assert second.startswith("dr_grpo has no knob 'scale_rewards'")
    assert "beta, delta, dynamic_sampling, " in second
