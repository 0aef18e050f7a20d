"""Parts of the worker by themselves, in Tunix's own Python: small steps act, logits are exact, and nothing without weight is drawn."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from groupwise.tunix import environment
from tests.tunix_models import model_of

CHECKS = Path(__file__).parent / "inside" / "checks.py"


def found(check: str, *arguments: str) -> Any:
    """What a check tells."""
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    own |= environment._compiled()
    words = [str(environment.python()), "-s", str(CHECKS), check, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, env=own, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "family", ["llama", pytest.param("gemma3", marks=pytest.mark.soak(suite="tunix"))]
)
def test_a_small_step_acts_in_full_on_a_base_in_bfloat16(family: str) -> None:
    """The smaller it is, the fewer outputs it moves to the next number of bfloat16, and the more chance there is in the slope."""
    slopes = found("slopes", str(model_of(family, layers=1)), "1e-5", "1e-4", "1e-3").values()
    for step, chance in (("1e-5", 0.15), ("1e-4", 0.08), ("1e-3", 0.02)):
        assert mean(each[step] for each in slopes) == pytest.approx(1, abs=chance), step
    assert all(each["1e-3"] == pytest.approx(1, abs=0.03) for each in slopes)


@pytest.mark.parametrize(
    "family", ["llama", pytest.param("gemma3", marks=pytest.mark.soak(suite="tunix"))]
)
def test_logits_are_not_rounded_to_bfloat16(family: str) -> None:
    """With a head of its own and with that of the embedding, for prompts, for each token, and in learning."""
    told = found("logits", str(model_of(family, layers=1)))
    assert len(told["sampler"]) == 4
    assert told["learner"]
    assert all(share < 0.02 for shares in told.values() for share in shares)


def test_a_token_without_weight_is_never_drawn() -> None:
    assert found("draws") == {"drawn": 256, "without weight": 0}


def test_float32_is_multiplied_as_float32() -> None:
    told = found("precision", str(model_of("gemma3", layers=1)))
    assert told == {"float32": True, "bfloat16": False}


def test_turns_with_ever_less_room_share_what_is_compiled() -> None:
    told = found("shapes", str(model_of("llama", layers=1)))
    assert told["compiled"] == 1
    first = told["drawn"][0]
    assert told["drawn"] == [first[:room] for room in (20, 19, 18, 17)]
    assert told["full"] == 17


OTHERS = ("gemma3", "gemma3-all-heads", "qwen2", "qwen3")


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(each, marks=pytest.mark.soak(suite="tunix")) for each in OTHERS)],
)
def test_layers_that_are_computed_again_give_the_same_gradient_in_less_memory(family: str) -> None:
    """On one device and on two that divide what they compute."""
    for told in found("recomputed", str(model_of(family, layers=3))).values():
        assert told["difference"] < 1e-6 * max(1, told["norm"])
        assert told["again"] < 0.6 * told["kept"]


def test_want_of_memory_is_told_with_what_lowers_it() -> None:
    """By what was being done; nothing is told that would change nothing."""
    told = found("memory", str(model_of("gemma3", layers=1)))
    assert {error["kind"] for error in told.values()} == {"OutOfMemoryError"}
    assert all(error["message"].endswith("7 GiB are too many.") for error in told.values())
    keys = {doing: set(re.findall(r"[a-z]+\.[a-z_]+", error["message"])) for doing, error in told.items()}  # fmt: skip
    assert keys == {
        "opening": {"model.dtype", "model.mesh"},
        "generating": {"sampler.slots", "sampler.max_completion_length"},
        "learning": {"training.max_tokens_per_microbatch", "training.gradient_checkpointing"},
    }
