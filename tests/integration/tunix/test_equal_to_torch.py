"""What a worker of Tunix computes is what torch computes: logits of each family, losses and gradients of each algorithm, draws, files."""

from __future__ import annotations

import asyncio
import random
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from groupwise.algorithms.kl import KlEstimator, KlGradient
from groupwise.algorithms.registry import ALGORITHMS, make
from groupwise.core.types import (
    Completion,
    GroupRequest,
    MaskedTokens,
    Row,
    SamplingParams,
    SiblingRowStats,
)
from groupwise.engine.models.files import read_tensors
from groupwise.engine.models.lora import fingerprint
from groupwise.engine.models.lora_config import WEIGHTS
from groupwise.training.assembly.parts import Parts
from tests.integration.tunix.conftest import Pairs
from tests.integration.tunix.running import (
    LAYERS,
    STEP,
    as_one,
    config_of,
    flat,
    parts_of,
    rows_of,
    stirred,
)
from tests.tunix_models import model_of

OTHERS = ("gemma3-all-heads", "qwen2", "qwen3")
FAMILIES = (
    "gemma3",
    "llama",
    *(pytest.param(each, marks=pytest.mark.soak(suite="tunix")) for each in OTHERS),
)


@pytest.fixture(params=FAMILIES)
def both(request: pytest.FixtureRequest, pairs: Pairs) -> tuple[Parts, Parts]:
    """Parts of Tunix, and those of torch with the same adapter, which is not zero."""
    return pairs(request.param)


def test_log_probabilities(both: tuple[Parts, Parts]) -> None:
    rows = rows_of(random.Random(0), 12)
    rows[3] = replace(rows[3], withheld=(MaskedTokens(0, 1, (1, 7)),))
    for role in ("policy", "reference"):
        tunix, by_torch = (flat(asyncio.run(each.learner.logprobs(rows, role))) for each in both)
        np.testing.assert_allclose(tunix, by_torch, atol=2e-4)
    told = [asyncio.run(each.learner.predictions(rows)) for each in both]
    assert [each.right for each in told[0]] == [each.right for each in told[1]]


LOSSES = {
    "grpo": make("grpo", {"beta": 0.1}), "grpo, clipped": make("grpo", {"epsilon": 0.05, "epsilon_high": 0.1, "delta": 1.5}),
    "dr_grpo, entropy": make("dr_grpo", {"entropy_coef": 0.01}),
    "dapo, as published": make("dapo", {"beta": 0.2, "kl_gradient": "estimator"}), "gspo": make("gspo", {}),
    "cispo, k2": make("cispo", {"beta": 0.2, "kl_estimator": "k2"}),
    "reinforce_pp, k2 as published": make("reinforce_pp", {"beta": 0.2, "kl_estimator": "k2", "kl_gradient": "estimator"} ),
    "k1, corrected": make("rloo", {"beta": 0.2, "kl_estimator": "k1", "importance_sampling_correction": "token_truncate"}),
    "max_rl": make("max_rl", {}), "gmpo": make("gmpo", {"epsilon": 0.05}), "sapo": make("sapo", {}), "gdpo": make("gdpo", {}),
    "pass_at_k": make("pass_at_k", {}), "gigpo": make("gigpo", {}), "clip_cov": make("clip_cov", {}), "kl_cov": make("kl_cov", {}),
    "luspo": make("luspo", {}), "vespo": make("vespo", {}),
    "tokens by their entropy": make("dapo", {"top_entropy_quantile": 0.4, "entropy_advantage": 0.4}),
    "corrected by rollout": make("grpo", {"importance_sampling_correction": "sequence_mask"}),
}  # fmt: skip


def test_every_algorithm_and_penalty_is_among_them() -> None:
    specs = [loss.loss_spec() for loss in LOSSES.values()]
    assert {spec.name for spec in specs} == ALGORITHMS.keys() - {
        "distillation"
    }  # its teacher is a model of torch
    knobs = [spec.knobs for spec in specs if spec.knobs["beta"]]
    penalties = {(each["kl_estimator"], each["kl_gradient"]) for each in knobs}
    every = set(product(get_args(KlEstimator), get_args(KlGradient)))
    assert penalties == every - {("k1", "estimator")}  # which is refused


@pytest.mark.parametrize("name", LOSSES)
def test_losses_gradients_and_updates(both: tuple[Parts, Parts], name: str, tmp_path: Path) -> None:
    """All sums, the norm of the gradient, and the weights after two updates with clipping and decay."""
    loss = LOSSES[name]
    rows = rows_of(random.Random(1), 9, reference=True)
    rows[0] = replace(rows[0], others=SiblingRowStats(3, 0.1, -0.2))
    denominators = {"policy": 9.0, "kl": 9.0, "entropy": 50.0}
    sums, norms, logprobs = [], [], []
    for number, each in enumerate(both):
        state = tmp_path / str(number)
        state.mkdir()
        asyncio.run(each.learner.save(str(state)))
        sums.append(
            asyncio.run(each.learner.forward_backward(rows, loss.loss_spec(), denominators))
        )
        norms.append(updated(each))
        asyncio.run(each.learner.forward_backward(rows[:4], loss.loss_spec(), denominators))
        updated(each)
        logprobs.append(flat(asyncio.run(each.learner.logprobs(rows))))
        each.learner.load(str(state))
    assert sums[0].keys() == sums[1].keys()
    for key, value in sums[1].items():
        assert sums[0][key] == pytest.approx(value, rel=2e-3, abs=2e-3), key
    assert norms[0] == pytest.approx(norms[1], rel=2e-3)
    np.testing.assert_allclose(logprobs[0], logprobs[1], atol=5e-3)


def updated(parts: Parts) -> float:
    """Update, and tell the norm of the gradient: by torch as if layers that are one weight in Tunix had one A there, too."""
    if parts.trained is None or parts.trained.model.config.model_type != "gemma3_text":
        return asyncio.run(parts.learner.update(STEP)).grad_norm
    config = parts.trained.model.config
    all_heads = config.num_attention_heads == config.num_key_value_heads
    family = "gemma3-all-heads" if all_heads else "gemma3"
    tied: dict[str, list[torch.Tensor]] = {}
    for name, parameter in parts.trained.parameters().items():
        tied.setdefault(as_one(name, family), []).append(parameter.grad)
    totals = {name: torch.stack(each).sum(0) for name, each in tied.items()}
    norm = float(torch.nn.utils.get_total_norm(totals.values()))
    assert STEP.max_grad_norm is not None
    for name, gradients in tied.items():
        for each in gradients:
            each.copy_(totals[name] * min(1, STEP.max_grad_norm / norm))
    asyncio.run(parts.learner.update(replace(STEP, max_grad_norm=None)))
    return norm


def test_the_same_numbers_draw_the_same_tokens(both: tuple[Parts, Parts]) -> None:
    """At the temperature of the request, also where improbable tokens are left out, and greedily."""
    rng = random.Random(2)
    kinds = (
        SamplingParams(20, 1.0, (1,)),
        SamplingParams(20, 0.0, (1,)),
        SamplingParams(20, 0.8, (1,), min_tokens=5),
        SamplingParams(20, 0.7, (1,), top_k=20, top_p=0.9, min_p=0.02),
    )
    for params in kinds:
        same = total = 0
        for draw in range(3):
            prompt = tuple(rng.randrange(2, 100) for _ in range(rng.randint(1, 40)))
            seeds = tuple(rng.getrandbits(63) for _ in range(8))
            tunix, by_torch = (
                asyncio.run(each.sampler.generate(GroupRequest(draw, prompt, seeds, params)))
                for each in both
            )
            for ours, theirs in zip(tunix, by_torch, strict=True):
                total += 1
                if ours.token_ids == theirs.token_ids:
                    same += 1
                    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=3e-4)
        assert same >= total - 2, params  # a number may fall beside a boundary that rounding moves


def test_prompts_of_all_widths_draw_the_same_tokens(tmp_path: Path) -> None:
    """They are computed in shapes of 256 tokens, of about half of the longest, and of the longest."""
    rng = random.Random(4)
    params, seeds = SamplingParams(6, 1.0, (1,)), (1, 2)
    prompts = [tuple(rng.randrange(2, 100) for _ in range(length)) for length in (3, 300, 700)]
    requests = [GroupRequest(draw, ids, seeds, params) for draw, ids in enumerate(prompts)]

    async def drawn(parts: Parts) -> list[Completion]:
        groups = await asyncio.gather(*map(parts.sampler.generate, requests))
        return [completion for group in groups for completion in group]

    given = [config_of("llama", backend) for backend in ("tunix", "transformers")]
    tunix, by_torch = (parts_of(each, tmp_path / each.model.backend, 700) for each in given)
    with closing(tunix), closing(by_torch):
        ours, theirs = (asyncio.run(drawn(each)) for each in (tunix, by_torch))
    assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
    logprobs, others = (flat(each.logprobs for each in group) for group in (ours, theirs))
    np.testing.assert_allclose(logprobs, others, atol=1e-5)


def test_files_and_fingerprints(both: tuple[Parts, Parts]) -> None:
    tunix, by_torch = both
    policy = asyncio.run(tunix.learner.publish(3))
    assert policy.fingerprint == fingerprint(read_tensors(Path(policy.path) / WEIGHTS))
    asyncio.run(by_torch.sampler.load(policy))
    assert by_torch.sampler.fingerprint() == policy.fingerprint


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft 0.21 asks
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_what_is_published_with_equal_logits(pairs: Pairs, family: str) -> None:
    equal_by_peft(pairs(family)[0], family)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.soak(suite="tunix")
def test_the_text_part_of_a_vision_model_equals_torch(tmp_path: Path) -> None:
    with closing(parts_of(config_of("gemma3-pictures", "tunix"), tmp_path)) as parts:
        asyncio.run(stirred(parts))
        equal_by_peft(parts, "gemma3-pictures")


def equal_by_peft(parts: Parts, family: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = asyncio.run(parts.learner.publish(4))
    (row,) = rows_of(random.Random(3), 1)
    row = replace(row, temperature=1.0)
    (ours,) = asyncio.run(parts.learner.logprobs([row]))
    base = AutoModelForCausalLM.from_pretrained(model_of(family, LAYERS.get(family)))
    bare = logprobs_by(base, row)
    np.testing.assert_allclose(
        ours, logprobs_by(PeftModel.from_pretrained(base, policy.path), row), atol=2e-4
    )
    assert max(abs(one - other) for one, other in zip(ours, bare, strict=True)) > 0.01


def logprobs_by(model: Any, row: Row) -> list[float]:
    """By transformers or peft."""
    ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0, len(row.prompt_ids) - 1 : -1]
    return logprobs.gather(1, torch.tensor(row.completion_ids)[:, None])[:, 0].tolist()
