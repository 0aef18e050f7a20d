"""Losses and gradients against TRL 1.16: `GRPOTrainer._compute_loss` and `RLOOTrainer._compute_loss`, called with a stub for the trainer.

Both sides get the same log-probabilities, entropies, advantages and masks, in float64, and agree to 1e-12. Where the two
differ by design, a test states the exact relation and why:

1. `epsilon_high` of CISPO is the cap itself in TRL, 1 + epsilon_high here, as in all other algorithms and in the paper.
2. A sequence's ratio multiplies the KL of each token in TRL; here each token has its own, which is the exact gradient.
3. A token's importance weight multiplies the gradient of the whole sequence in TRL's GSPO; here that of its token.
4. Members without a reward count in TRL's mean over rollouts, and not here.
5. In TRL the mean over rollouts is that of each micro-batch; here that of the step.
6. The importance weight is on the surrogate alone in TRL; here on the KL too, whose gradient is exact only with it.
7. RLOO's KL is a part of the reward in TRL, so that all tokens of a rollout answer for its sum; here each for its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import accelerate.utils
import pytest
import torch
import transformers.integrations

from groupwise.algorithms.base import Algorithm
from groupwise.algorithms.registry import make
from groupwise.core.types import Example, Group, Rollout
from tests.unit.algorithms.oracle_problems import (
    LOSS_TYPES,
    MAX_TOKENS,
    Problem,
    correction,
    problem,
    scored,
)

CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}

NO_CORRECTION = {"importance_sampling_correction": "none"}
KNOBS: list[dict[str, Any]] = [
    {},
    {"epsilon_high": 0.28},
    {"entropy_coef": 0.05},
    {"beta": 0.1, "kl_gradient": "estimator"},
    {"beta": 0.1, "kl_gradient": "exact"},
    {"mask_truncated_completions": True},
    {"importance_sampling_correction": "token_truncate", "importance_sampling_cap": 1.2},
    {"importance_sampling_correction": "token_mask", "importance_sampling_cap": 1.2},
    {
        "importance_sampling_correction": "token_mask",
        "importance_sampling_cap": 1.2,
        "importance_sampling_floor": 0.9,
    },
    {
        "importance_sampling_correction": "token_truncate",
        "importance_sampling_cap": 1.2,
        "importance_sampling_floor": 0.9,
    },
    {"importance_sampling_correction": "sequence_truncate", "importance_sampling_cap": 1.2},
    {
        "importance_sampling_correction": "sequence_mask",
        "importance_sampling_cap": 1.5,
        "beta": 0.04,
        "kl_gradient": "estimator",
        "entropy_coef": 0.01,
        "mask_truncated_completions": True,
        "epsilon_high": 0.5,
    },
]
CLIPPED: list[dict[str, Any]] = [{"epsilon": 0.1, "delta": 1.3}, {"epsilon": 5.0}]


@pytest.fixture(scope="module")
def trl() -> Any:
    """The trainers; imported here, since it takes seconds, and without the trackers of experiments that would take most of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        for module in (transformers, transformers.integrations, accelerate.utils):
            for tracker in ("mlflow", "trackio", "wandb"):
                patch.setattr(module, f"is_{tracker}_available", lambda: False, raising=False)
        from trl.experimental.gmpo import gmpo_trainer
        from trl.trainer import grpo_trainer, rloo_trainer

    def with_gamma_weights(trainer: Any, model: Any, inputs: dict[str, Any]) -> Any:
        """Without weights for vLLM, which this loss reads even where there is none."""
        trainer.get_gamma_weights = grpo_trainer.GRPOTrainer.get_gamma_weights
        inputs = {**inputs, "importance_sampling_ratio": None}
        return grpo_trainer.GRPOTrainer._compute_loss(trainer, model, inputs)

    return SimpleNamespace(
        grpo=grpo_trainer.GRPOTrainer._compute_loss,
        gmpo=gmpo_trainer.GMPOTrainer._compute_loss,
        vespo=with_gamma_weights,
        high_entropy_mask=grpo_trainer.GRPOTrainer.get_high_entropy_mask,
        rloo=rloo_trainer.RLOOTrainer._compute_loss,
    )


@pytest.fixture
def doubles() -> Iterator[None]:
    """TRL makes tensors of numbers in torch's default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _trainer(steps: Problem, algorithm: Algorithm, **settings: Any) -> Any:
    """As much of a trainer as `_compute_loss` looks at."""
    knobs = algorithm.loss_spec().knobs
    loss_type = LOSS_TYPES.get(algorithm.name, "")
    low = knobs.get("epsilon", 0.0)
    high = low if knobs.get("epsilon_high") is None else knobs["epsilon_high"]
    values = {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (
            steps.policy_BT,
            steps.entropies_BT,
            None,
        ),
        "_metrics": {"train": defaultdict(list)},
        "_entropy_bonus_enabled": knobs["entropy_coef"] > 0,
        "accelerator": SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
        ),
        "args": SimpleNamespace(
            delta=knobs.get("delta"),
            sapo_temperature_neg=knobs.get("temperature_negative"),
            sapo_temperature_pos=knobs.get("temperature_positive"),
            vespo_k_pos=knobs.get("k_positive"),
            vespo_k_neg=knobs.get("k_negative"),
            vespo_lambda_pos=knobs.get("lambda_positive"),
            vespo_lambda_neg=knobs.get("lambda_negative"),
            use_bias_correction_kl=knobs["kl_gradient"] == "exact",
            steps_per_generation=1,
        ),
        "aux_loss_enabled": False,
        "beta": knobs["beta"],
        "current_gradient_accumulation_steps": 1,
        "entropy_coef": knobs["entropy_coef"],
        "epsilon_low": low,
        "epsilon_high": 1 + high if algorithm.name == "cispo" else high,
        "importance_sampling_level": "sequence" if algorithm.name in ("gspo", "luspo") else "token",
        "loss_type": loss_type,
        "max_completion_length": MAX_TOKENS,
        "model": SimpleNamespace(training=True),
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "use_adaptive_entropy": False,
        "use_vllm": algorithm.needs_proximal,
        "vllm_importance_sampling_correction": True,
    }
    return SimpleNamespace(**values | settings)


def _inputs(steps: Problem, algorithm: Algorithm) -> dict[str, torch.Tensor]:
    """A batch as TRL has it: rows that are masked out are there, with an empty mask."""
    weights = steps.weights(algorithm)
    mask = steps.mask_BT & torch.tensor([[weight is not None] for weight in weights])
    ids = torch.zeros(mask.shape, dtype=torch.long)
    advantages = [weight.advantage if weight else 0.0 for weight in weights]
    old = steps.proximal_BT if algorithm.needs_proximal else steps.sampling_BT
    return {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask.long(),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "old_per_token_logps": old,
        "old_logps": (old * mask).sum(1),
        "ref_per_token_logps": steps.reference_BT,
        "importance_sampling_ratio": correction(steps, mask, algorithm.loss_spec().knobs),
        "num_items_in_batch": mask.sum(),
    }


def _compare(compute: Callable[..., Any], steps: Problem, algorithm: Algorithm) -> Any:
    trainer = _trainer(steps, algorithm)
    theirs = compute(trainer, None, _inputs(steps, algorithm))
    ours, stats = steps.loss(algorithm)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    for found, expected in zip(steps.gradients(ours), steps.gradients(theirs), strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)
    return {name: values[0] for name, values in trainer._metrics["train"].items()}, stats


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("knobs", [*KNOBS, *CLIPPED], ids=str)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "reinforce_pp"])
def test_token_level_algorithms(trl, name: str, knobs: dict[str, Any], seed: int) -> None:
    metrics, stats = _compare(trl.grpo, problem(seed, truncated=True), make(name, knobs))
    assert stats["entropy"] == pytest.approx(metrics["entropy"])
    if "delta" not in knobs:  # TRL counts after it has held the ratio at delta
        assert stats["clip_low"] == pytest.approx(metrics["clip_ratio/low_mean"])
        assert stats["clip_high"] == pytest.approx(metrics["clip_ratio/high_mean"])
    if knobs.get("kl_gradient") == "estimator":
        assert stats["kl"] == pytest.approx(metrics["kl"])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("knobs", [*KNOBS, {"temperature_positive": 2.0}], ids=str)
def test_sapo(trl, doubles, knobs: dict[str, Any], seed: int) -> None:
    knobs = {name: value for name, value in knobs.items() if name != "epsilon_high"}
    _compare(trl.grpo, problem(seed, truncated=True, spread=0.8), make("sapo", knobs))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"k_positive": 1.0, "lambda_positive": 0.5, "scale_rewards": "batch"},
        {"k_negative": 0.0, "lambda_negative": 0.1, "mask_truncated_completions": True},
        {"beta": 0.1, "kl_gradient": "exact", "entropy_coef": 0.05},
    ],
    ids=str,
)
def test_vespo(trl, knobs: dict[str, Any], seed: int) -> None:
    _compare(trl.vespo, problem(seed, truncated=True), make("vespo", knobs))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"epsilon": 0.1, "epsilon_high": 0.2, "scale_rewards": "none"},
        {"beta": 0.1, "kl_gradient": "estimator"},
    ],
    ids=str,
)
def test_gmpo(trl, knobs: dict[str, Any], seed: int) -> None:
    metrics, stats = _compare(trl.gmpo, problem(seed, spread=0.8), make("gmpo", knobs))
    assert stats["clip_low"] == pytest.approx(metrics["clip_ratio/low_mean"])
    assert stats["clip_high"] == pytest.approx(metrics["clip_ratio/high_mean"])


@pytest.mark.parametrize("share", [0.23, 0.47, 0.81])
@pytest.mark.parametrize("name", ["grpo", "cispo", "sapo"])
def test_high_entropy_tokens_of_each_row(trl, doubles, name: str, share: float) -> None:
    """TRL, given one row at a time, takes the quantile of that row, as it is here.

    TRL computes it in float32. So entropies are rounded to that, and no quantile of two or more falls on one of them.
    """
    steps = problem(3)
    rounded_BT = steps.entropies_BT.detach().float().double().requires_grad_()
    steps = replace(steps, entropies_BT=rounded_BT)
    algorithm = make(name, {"top_entropy_quantile": share})
    trainer = _trainer(steps, algorithm)
    gather = SimpleNamespace(pad_across_processes=lambda x, dim, pad_index: x, gather=lambda x: x)
    stub = SimpleNamespace(accelerator=gather)
    trainer.top_entropy_quantile = share
    trainer.get_high_entropy_mask = lambda entropies, mask, threshold: torch.cat(
        [
            trl.high_entropy_mask(stub, entropies[row : row + 1], mask[row : row + 1], threshold)
            for row in range(len(mask))
        ]
    )
    theirs = trl.grpo(trainer, None, _inputs(steps, algorithm))
    ours, _ = steps.loss(algorithm)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(steps.gradients(ours)[0], steps.gradients(theirs)[0], **CLOSE)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_cispo(trl, knobs: dict[str, Any], seed: int) -> None:
    """With the cap written as TRL writes it: epsilon_high + 1."""
    knobs = {"epsilon_high": 0.2, **knobs}
    _compare(trl.grpo, problem(seed, truncated=True), make("cispo", knobs))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "knobs",
    [
        {"epsilon": 0.05, "epsilon_high": 0.1},
        {"mask_truncated_completions": True, "entropy_coef": 0.1, "scale_rewards": "batch"},
        {"beta": 0.1, "kl_gradient": "estimator"},
        {"epsilon": 5.0, "epsilon_high": 5.0, "delta": 7.0},
        {"importance_sampling_correction": "sequence_truncate", "importance_sampling_cap": 1.2},
        {"importance_sampling_correction": "sequence_mask", "epsilon": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gspo", "luspo"])
def test_gspo_and_luspo(trl, name: str, knobs: dict[str, Any], seed: int) -> None:
    algorithm = make(name, NO_CORRECTION | knobs)
    _compare(trl.grpo, problem(seed, truncated=True), algorithm)


def test_gspo_gives_a_tokens_weight_to_its_own_gradient(trl) -> None:
    """TRL: s · mean(w) · mean(∇ log p) of a rollout; here s · mean(w · ∇ log p). Value and sum of the slopes are the same."""
    algorithm = make("gspo", {"epsilon": 5.0, "epsilon_high": 5.0})
    steps = problem(0)
    theirs = trl.grpo(_trainer(steps, algorithm), None, _inputs(steps, algorithm))
    ours, _ = steps.loss(algorithm)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    found, _ = steps.gradients(ours)
    expected, _ = steps.gradients(theirs)
    torch.testing.assert_close(found.sum(-1), expected.sum(-1), **CLOSE)
    weights = correction(steps, steps.mask_BT, algorithm.loss_spec().knobs) * steps.mask_BT
    mean = weights.sum(-1, keepdim=True) / steps.mask_BT.sum(-1, keepdim=True)
    torch.testing.assert_close(found, expected * weights / mean, **CLOSE)


def test_gspo_gives_each_token_its_own_ratio_in_the_kl(trl) -> None:
    """TRL multiplies the KL of a token with the ratio s of its sequence; on policy the two are the same again."""
    algorithm = make("gspo", {**NO_CORRECTION, "beta": 0.1})
    steps = problem(0)
    on_policy = replace(steps, sampling_BT=steps.policy_BT.detach())
    theirs = trl.grpo(_trainer(on_policy, algorithm), None, _inputs(on_policy, algorithm))
    torch.testing.assert_close(on_policy.loss(algorithm)[0], theirs, **CLOSE)
    theirs = trl.grpo(_trainer(steps, algorithm), None, _inputs(steps, algorithm))
    penalty = algorithm.loss(steps.batch(algorithm)).components["kl"] / 8
    gap = (steps.policy_BT - steps.sampling_BT).detach()
    ahead = (steps.policy_BT - steps.reference_BT).detach()
    counts = steps.mask_BT.sum(-1)
    sequence = ((gap * steps.mask_BT).sum(-1) / counts).exp()
    k3 = ((-ahead).expm1() + ahead) * steps.mask_BT
    of_trl = 0.1 * (sequence * k3.sum(-1) / counts).mean()
    ours = steps.loss(algorithm)[0] - penalty
    torch.testing.assert_close(ours + of_trl, theirs, **CLOSE)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate"])
def test_importance_weight_is_on_the_kl_too(trl, mode: str) -> None:
    """Without it, the KL is TRL's: that of a sampler which is the proximal policy."""
    knobs = {"importance_sampling_correction": mode, "importance_sampling_cap": 1.2, "beta": 0.1}
    algorithm, steps = make("grpo", knobs), problem(0)
    theirs = trl.grpo(_trainer(steps, algorithm), None, _inputs(steps, algorithm))
    unweighted = replace(steps, sampling_BT=steps.proximal_BT)
    ours, plain = (
        algorithm.loss(each.batch(algorithm)).components["kl"] / 8 for each in (steps, unweighted)
    )
    assert not torch.isclose(ours, plain)
    torch.testing.assert_close(steps.loss(algorithm)[0] - ours + plain, theirs, **CLOSE)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "knobs",
    [{}, {"epsilon": 0.4, "epsilon_high": 0.8}, {"mask_truncated_completions": True}],
    ids=str,
)
def test_rloo(trl, knobs: dict[str, Any], seed: int) -> None:
    steps = problem(seed, truncated="mask_truncated_completions" in knobs, spread=0.1)
    algorithm = make("rloo", NO_CORRECTION | knobs)
    steps_of_trl = _trainer(steps, algorithm)
    theirs = trl.rloo(steps_of_trl, None, _inputs(steps, algorithm))
    ours, _ = steps.loss(algorithm)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    found, expected = steps.gradients(ours)[0], steps.gradients(theirs)[0]
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("seed", range(2))
def test_a_kl_in_the_reward_is_trls_rloo(trl, seed: int) -> None:
    """A task that takes beta · KL of the whole rollout off its rewards has what TRL does with its beta."""
    steps = problem(seed, spread=0.1)
    algorithm = make("rloo", NO_CORRECTION)
    beyond = ((steps.sampling_BT - steps.reference_BT) * steps.mask_BT).sum(-1).tolist()
    theirs = trl.rloo(
        _trainer(steps, algorithm),
        None,
        _inputs(steps, algorithm) | {"advantages": _leave_one_out_with_kl(steps, 0.1)},
    )
    ours, _ = replace(steps, groups=_charged(steps.groups, 0.1, beyond)).loss(algorithm)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    found, expected = steps.gradients(ours)[0], steps.gradients(theirs)[0]
    torch.testing.assert_close(found, expected, **CLOSE)


def test_rloo_pulls_to_the_reference_as_trl_does_in_the_mean(trl) -> None:
    """One token, each of V equally likely ones drawn once, so that the sample's mean is the expectation.

    TRL's advantages compare a rollout with the V − 1 others, among which it is not: V / (V − 1) of the same gradient.
    """
    words, beta = 7, 0.1
    logits = torch.zeros(words, dtype=torch.float64, requires_grad=True)
    steps = _every_word_once(logits)
    theirs = trl.rloo(
        _trainer(steps, make("rloo", NO_CORRECTION)),
        None,
        _inputs(steps, make("rloo", NO_CORRECTION))
        | {"advantages": _leave_one_out_with_kl(steps, beta)},
    )
    ours, _ = steps.loss(make("rloo", NO_CORRECTION | {"beta": beta, "kl_estimator": "k1"}))
    exact = beta * torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=logits),
        torch.distributions.Categorical(logits=steps.reference_BT[:, 0]),
    )
    found, expected, gradient = (
        torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (ours, theirs, exact)
    )
    torch.testing.assert_close(found, gradient, **CLOSE)
    torch.testing.assert_close(found * words / (words - 1), expected, **CLOSE)


def _leave_one_out_with_kl(steps: Problem, beta: float) -> torch.Tensor:
    """TRL's advantages with a beta, written down once more from `RLOOTrainer._generate_and_score_completions`."""
    rewards = torch.tensor(
        [[rollout.reward for rollout in group.rollouts] for group in steps.groups],
        dtype=torch.float64,
    )
    beyond = ((steps.sampling_BT - steps.reference_BT) * steps.mask_BT).sum(-1).detach()
    rewards = rewards - beta * beyond.view_as(rewards)
    others = rewards.shape[1] - 1
    return (rewards - (rewards.sum(1, keepdim=True) - rewards) / others).flatten()


def _charged(groups: tuple[Group, ...], beta: float, beyond: Sequence[float]) -> tuple[Group, ...]:
    """The groups with beta · KL taken off each reward."""
    left = iter(beyond)

    def charged(rollout: Rollout) -> Rollout:
        assert rollout.reward is not None
        return replace(rollout, reward=rollout.reward - beta * next(left))

    return tuple(replace(group, rollouts=tuple(map(charged, group.rollouts))) for group in groups)


def _every_word_once(logits_V: torch.Tensor) -> Problem:
    """One group: each word as a completion of one token, all with the reward 0."""
    words = len(logits_V)
    policy_V1 = logits_V.log_softmax(-1)[:, None]
    members = tuple(scored(0, member, 1, 0.0) for member in range(words))
    reference_V = torch.linspace(-2, 1, words, dtype=torch.float64).log_softmax(-1)
    return Problem(
        groups=(Group(0, Example(0, "?"), members),),
        policy_BT=policy_V1,
        entropies_BT=torch.zeros_like(policy_V1),
        proximal_BT=policy_V1.detach(),
        sampling_BT=policy_V1.detach(),
        reference_BT=reference_V[:, None],
        mask_BT=torch.ones_like(policy_V1, dtype=torch.bool),
    )


def test_members_without_a_reward_count_in_their_mean_only(trl) -> None:
    steps = problem(0)
    first, second = steps.groups
    failed = replace(first.rollouts[0], outcome="failed", reward=None)
    holed = Group(0, first.example, (failed, *first.rollouts[1:]))
    steps = replace(steps, groups=(holed, second))
    algorithm = make("grpo", {})
    theirs = trl.grpo(_trainer(steps, algorithm), None, _inputs(steps, algorithm))
    torch.testing.assert_close(steps.loss(algorithm)[0] * 7 / 8, theirs, **CLOSE)


def test_mean_over_rollouts_is_that_of_the_step(trl) -> None:
    """TRL's two accumulated micro-batches of 2 and 6 rows weigh the same; the step weighs them 2 : 6."""
    steps = problem(0)
    algorithm = make("grpo", {})
    inputs = _inputs(steps, algorithm)
    parts = []
    for rows in (slice(0, 2), slice(2, 8)):
        part = replace(
            steps, policy_BT=steps.policy_BT[rows], entropies_BT=steps.entropies_BT[rows]
        )
        trainer = _trainer(part, algorithm, current_gradient_accumulation_steps=2)
        cut = {name: value[rows] if value.dim() else value for name, value in inputs.items()}
        parts.append(trl.grpo(trainer, None, cut))
    first, second = parts
    torch.testing.assert_close(
        steps.loss(algorithm)[0], (first * 2 * 2 + second * 2 * 6) / 8, **CLOSE
    )


@pytest.mark.parametrize("length", [1, 15, 16, 17, 19, 20])
def test_over_long_shaping(length: int, rollout, group) -> None:
    from trl.rewards import get_soft_overlong_punishment

    (expected,) = get_soft_overlong_punishment(20, 4)([[5] * length])
    (shaped,) = make("dapo", {}).shaped(group(rollout(0, 0.0, tokens=length)), 20).rollouts
    assert shaped.reward == pytest.approx(expected)
