"""What is sampled is what is trained, seen on real runs:

1. in a synchronous run every step begins at a ratio of 1, and sampler and learner differ by rounding alone, also where stop
   tokens are withheld at the beginning of completions; the record says so of each token that taught, also where further updates
   are made on it;
2. a run stops where the sampler serves other weights than the learner published, and learns nothing from them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise
from groupwise.algorithms.registry import ALGORITHMS
from groupwise.core.errors import PolicyMismatchError
from groupwise.engine.sampler.torch_sampler import TorchSampler
from groupwise.runs.store import Store
from tests.integration.toy_run import STEPS, TOY, config, ratios_of


def settings(runs: Path, **sections: Any) -> dict[str, Any]:
    return {**config(runs), "eval": {"before_and_after": False}, **sections}


def curve(folder: Path, name: str) -> list[float]:
    with Store.open(folder / "run.db", readonly=True) as store:
        return [value for _, value in store.metrics([name])[name]]


SOAK = pytest.mark.soak(suite="engine")


@pytest.mark.parametrize(
    ("algorithm", "temperature"),
    [
        pytest.param(algorithm, temperature, marks=SOAK if number % 2 != turn else ())
        for number, algorithm in enumerate(each for each in ALGORITHMS if each != "distillation")
        for turn, temperature in enumerate((0.6, 1.3))
    ],
)
def test_every_step_begins_at_a_ratio_of_1(tmp_path, algorithm, temperature):
    torch.set_num_threads(1)
    knobs = {"k": 2} if algorithm == "pass_at_k" else {}
    made = settings(tmp_path, algorithm={"type": algorithm, **knobs})
    made["model"]["dtype"] = "float32"
    made["sampler"]["temperature"] = temperature
    made["training"]["max_steps"] = 3
    folder = groupwise.rl(made, TOY).folder
    assert folder
    assert curve(folder, "sampling/ratio_mean") == pytest.approx([1.0] * 3, abs=1e-5)
    assert max(curve(folder, "sampling/logprob_gap")) < 1e-5
    assert 0 < max(map(abs, ratios_of(folder))) < 1e-4
    if algorithm not in ("sapo", "kl_cov", "vespo"):  # which clip nothing
        assert max(curve(folder, "clip_ratio/region_mean")) == 0.0
    assert max(map(abs, curve(folder, "grad_norm"))) > 0
    assert "sampler and learner differ" not in (folder / "log.txt").read_text()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"fingerprint": "0" * 16}, "Group 5 was sampled by version 2 with fingerprint 0000000000"),
        ({"policy_version": 1}, "Group 5 was sampled by version 1 with fingerprint"),
    ],
)
def test_completions_of_other_weights_stop_the_run(tmp_path, monkeypatch, wrong, said):
    """As a server does that was not told of the new weights, or that somebody else gave others."""
    generate = TorchSampler.generate

    async def of_others(self, request):
        found = await generate(self, request)
        return tuple(replace(each, **wrong) for each in found) if request.draw == 4 else found

    monkeypatch.setattr(TorchSampler, "generate", of_others)
    with pytest.raises(PolicyMismatchError, match=said):
        groupwise.rl(settings(tmp_path), TOY)
    with Store.open(tmp_path / "toy" / "run.db", readonly=True) as store:
        assert store.last_step() == 1


def test_a_sampler_that_keeps_its_old_weights_stops_the_run(tmp_path, monkeypatch):
    load, loads = TorchSampler.load, []

    async def lazy(self, policy):
        loads.append(policy.version)
        if policy.version < 2:
            await load(self, policy)

    monkeypatch.setattr(TorchSampler, "load", lazy)
    with pytest.raises(PolicyMismatchError, match="Version 2 was published"):
        groupwise.rl(settings(tmp_path), TOY)
    assert loads[-1] == 2


@pytest.mark.parametrize(
    "algorithm", ["grpo", *(pytest.param(each, marks=SOAK) for each in ("gspo", "reinforce_pp"))]
)
def test_every_step_begins_at_a_ratio_of_1_with_a_least_length(tmp_path, algorithm):
    """With the reference at a divergence of 0 in the first step, because it knows of the withheld tokens as well."""
    torch.set_num_threads(1)
    made = settings(tmp_path, algorithm={"type": algorithm, "beta": 0.1})
    made["model"]["dtype"] = "float32"
    made["sampler"]["min_completion_length"] = 4
    folder = groupwise.rl(made, TOY).folder
    assert folder
    assert curve(folder, "sampling/ratio_mean") == pytest.approx([1.0] * STEPS, abs=1e-5)
    assert max(curve(folder, "sampling/logprob_gap")) < 1e-5
    assert curve(folder, "kl")[0] == pytest.approx(0.0, abs=1e-6)
    assert curve(folder, "kl")[-1] > 0
    assert min(map(abs, curve(folder, "grad_norm"))) > 0
    with Store.open(folder / "run.db", readonly=True) as store:
        groups = [group for step in range(STEPS) for group in store.groups(step)]
    segments = [
        segment for group in groups for rollout in group.rollouts for segment in rollout.segments
    ]
    assert {segment.params and segment.params.min_tokens for segment in segments} == {4}
    assert min(len(segment.token_ids) for segment in segments) >= 4
    assert any(segment.finish_reason == "stop" for segment in segments)
