"""Losses and gradients against Liger 0.8.5: `LigerFusedLinearGRPOLoss`, uncompiled, from hidden states and a language head.

Liger computes log-probabilities itself, in float32, and hands back the gradient of the hidden states; ours goes there through
torch. Losses agree to 1e-5, gradients to 1e-6 (they are about 1e-2). What TRL does differently by design, Liger does
as well; `test_oracles_trl.py` states those relations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from groupwise.algorithms.base import Algorithm
from groupwise.algorithms.registry import make
from tests.unit.algorithms.oracle_problems import (
    LOSS_TYPES,
    MAX_TOKENS,
    Problem,
    correction,
    problem,
)

WIDTH, VOCABULARY = 8, 11
KNOBS: list[dict[str, Any]] = [
    {},
    {"beta": 0.1, "kl_gradient": "estimator"},
    {"beta": 0.1, "kl_gradient": "exact"},
    {"importance_sampling_correction": "token_truncate", "importance_sampling_cap": 1.2},
    {"importance_sampling_correction": "sequence_mask", "importance_sampling_cap": 1.5},
    {"mask_truncated_completions": True, "epsilon_high": 0.5},
]


@pytest.fixture(scope="module")
def liger() -> Any:
    """The class; imported here, since it takes seconds."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    return LigerFusedLinearGRPOLoss


def _head(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states with gradient, the head, and the tokens that were drawn."""
    rng = torch.Generator().manual_seed(seed + 100)
    hidden_BTH = torch.randn(8, MAX_TOKENS, WIDTH, generator=rng).requires_grad_()
    head_VH = torch.randn(VOCABULARY, WIDTH, generator=rng)
    return hidden_BTH, head_VH, torch.randint(VOCABULARY, (8, MAX_TOKENS), generator=rng)


def _moved(steps: Problem, policy_BT: torch.Tensor) -> Problem:
    """The problem around other log-probabilities of the policy, in float32."""
    shift = policy_BT.detach() - steps.policy_BT.detach().float()
    others = {
        name: getattr(steps, name).detach().float() + shift
        for name in ("proximal_BT", "sampling_BT", "reference_BT")
    }
    return replace(steps, policy_BT=policy_BT, **others)


def _liger_loss(
    liger: Any, steps: Problem, algorithm: Algorithm, head: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    knobs = algorithm.loss_spec().knobs
    weights = steps.weights(algorithm)
    mask = steps.mask_BT & torch.tensor([[weight is not None] for weight in weights])
    low = knobs.get("epsilon", 0.2)
    high = low if knobs["epsilon_high"] is None else knobs["epsilon_high"]
    module = liger(
        beta=knobs["beta"],
        compiled=False,
        use_ref_model=knobs["beta"] > 0,
        epsilon_low=low,
        epsilon_high=1 + high if algorithm.name == "cispo" else high,
        loss_type=LOSS_TYPES[algorithm.name],
        max_completion_length=MAX_TOKENS,
        importance_sampling_level="sequence" if algorithm.name == "gspo" else "token",
        delta=knobs.get("delta"),
        use_bias_correction_kl=knobs["kl_gradient"] == "exact",
    )
    hidden_BTH, head_VH, tokens_BT = head
    loss, _ = module(
        hidden_BTH,
        head_VH,
        tokens_BT,
        mask.float(),
        torch.tensor([weight.advantage if weight else 0.0 for weight in weights]),
        ref_per_token_logps=steps.reference_BT if knobs["beta"] > 0 else None,
        old_per_token_logps=steps.proximal_BT if algorithm.needs_proximal else steps.sampling_BT,
        vllm_is_ratio=correction(steps, mask, knobs) if algorithm.needs_proximal else None,
    )
    return loss


def _compare(liger: Any, algorithm: Algorithm, seed: int) -> None:
    hidden_BTH, head_VH, tokens_BT = head = _head(seed)
    logprobs_BTV = (hidden_BTH @ head_VH.T).log_softmax(-1)
    policy_BT = logprobs_BTV.gather(-1, tokens_BT.unsqueeze(-1)).squeeze(-1)
    steps = _moved(problem(seed, truncated=True), policy_BT)
    ours, _ = steps.loss(algorithm)
    theirs = _liger_loss(liger, steps, algorithm, head)
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-5, atol=1e-5)
    (found,) = torch.autograd.grad(ours, hidden_BTH)
    (expected,) = torch.autograd.grad(theirs, hidden_BTH)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "reinforce_pp", "cispo"])
def test_token_level_algorithms(liger, name: str, knobs: dict[str, Any], seed: int) -> None:
    if name == "cispo":
        knobs = {"epsilon_high": 0.2, **knobs}
    _compare(liger, make(name, knobs), seed)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
def test_two_sided_clip(liger, name: str) -> None:
    _compare(liger, make(name, {"epsilon": 0.1, "delta": 1.3}), 0)


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize(
    "knobs",
    [
        {"importance_sampling_correction": "none", "epsilon": 0.05, "epsilon_high": 0.1},
        {"importance_sampling_correction": "sequence_truncate", "epsilon": 0.05},
        {"importance_sampling_correction": "none", "beta": 0.1, "kl_gradient": "estimator"},
    ],
    ids=str,
)
def test_gspo(liger, knobs: dict[str, Any], seed: int) -> None:
    _compare(liger, make("gspo", knobs), seed)
