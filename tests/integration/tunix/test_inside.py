"""Parts of the worker by themselves, in Tunix's own Python: small steps act, logits are exact, and nothing without weight is drawn."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from groupwise.engine.backends.tunix import environment
from tests.tunix_models import model_of

pytestmark = pytest.mark.timeout(540)
CHECKS = Path(__file__).parent / "inside" / "checks.py"
SOAK = pytest.mark.soak(suite="tunix")
STEPS = ("1e-5", "1e-4", "1e-3")


def run_checks(*checks: tuple[Any, ...]) -> list[Any]:
    """What each check tells, by one process."""
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    own |= environment._compilation_cache()
    words = [str(environment.python()), "-s", str(CHECKS), json.dumps(checks)]
    done = subprocess.run(words, capture_output=True, text=True, env=own, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def check_results() -> dict[str, Any]:
    """What is told of Llama, with two devices too, and of Gemma where that is told fast."""
    llama, gemma = (str(model_of(each, layers=1)) for each in ("llama", "gemma3"))
    checks = (
        ("slopes", llama, *STEPS), ("logits", llama), ("draws",), ("precision", gemma),
        ("shapes", llama), ("recomputed", str(model_of("llama", layers=3)), 1, 2),
    )  # fmt: skip
    return {check[0]: found for check, found in zip(checks, run_checks(*checks), strict=True)}


def test_a_small_step_acts_in_full_on_a_base_in_bfloat16(check_results: dict[str, Any]) -> None:
    act_in_full(check_results["slopes"])


def act_in_full(slopes: dict[str, dict[str, float]]) -> None:
    """The smaller a step is, the fewer outputs it moves to the next number of bfloat16, and the more chance there is in the slope."""
    for step, chance in zip(STEPS, (0.15, 0.08, 0.02), strict=True):
        assert mean(each[step] for each in slopes.values()) == pytest.approx(1, abs=chance), step
    assert all(each["1e-3"] == pytest.approx(1, abs=0.03) for each in slopes.values())


def test_logits_are_not_rounded_to_bfloat16(check_results: dict[str, Any]) -> None:
    are_not_rounded(check_results["logits"])


def are_not_rounded(logits: dict[str, list[float]]) -> None:
    """With a head of its own and with that of the embedding, for prompts, for each token, and in learning."""
    assert len(logits["sampler"]) == 4
    assert logits["learner"]
    assert all(share < 0.02 for shares in logits.values() for share in shares)


def test_a_token_without_weight_is_never_drawn(check_results: dict[str, Any]) -> None:
    assert check_results["draws"] == {"drawn": 256, "without weight": 0}


def test_float32_is_multiplied_as_float32(check_results: dict[str, Any]) -> None:
    assert check_results["precision"] == {"float32": True, "bfloat16": False}


def test_turns_with_ever_less_room_share_what_is_compiled(check_results: dict[str, Any]) -> None:
    shapes = check_results["shapes"]
    assert shapes["compiled"] == 1
    first = shapes["drawn"][0]
    assert shapes["drawn"] == [first[:room] for room in (20, 19, 18, 17)]
    assert shapes["full"] == 17


def test_layers_that_are_computed_again_give_the_same_gradient_in_less_memory(
    check_results: dict[str, Any],
) -> None:
    give_the_same_in_less_memory(check_results["recomputed"])


def give_the_same_in_less_memory(recomputed: dict[str, dict[str, float]]) -> None:
    for each in recomputed.values():
        assert each["difference"] < 1e-6 * max(1, each["norm"])
        assert each["apart"] < 1e-5 * max(1, each["norm"])
        assert each["again"] < 0.6 * each["kept"]


@SOAK
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma3-all-heads", "qwen2", "qwen3"])
def test_all_families_recompute_equally_and_on_two_devices(family: str) -> None:
    checks: list[tuple[Any, ...]] = [("recomputed", str(model_of(family, layers=3)), 1, 2)]
    if family == "gemma3":
        folder = str(model_of(family, layers=1))
        checks += [("slopes", folder, *STEPS), ("logits", folder)]
    again, *others = run_checks(*checks)
    give_the_same_in_less_memory(again)
    if others:
        act_in_full(others[0])
        are_not_rounded(others[1])
