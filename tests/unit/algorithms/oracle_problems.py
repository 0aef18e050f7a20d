"""Random steps of training, for the tests that ask other implementations for a second opinion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from groupwise.algorithms.base import Algorithm, TokenBatch
from groupwise.core.types import Example, Group, Rollout, RolloutCredit, Segment

MEMBERS = 4
MAX_TOKENS = 12
"""max_completion_length."""
LOSS_TYPES = {
    "grpo": "grpo", "dr_grpo": "dr_grpo", "dapo": "dapo", "reinforce_pp": "dapo", "gspo": "grpo",
    "cispo": "cispo", "sapo": "sapo", "gmpo": "grpo", "luspo": "luspo", "vespo": "vespo",
}  # fmt: skip
"""What TRL and Liger call the loss of each algorithm."""


@dataclass(frozen=True)
class Problem:
    """A step of two groups: rollouts of different lengths, and log-probabilities by everybody, in float64."""

    groups: tuple[Group, ...]
    policy_BT: torch.Tensor
    entropies_BT: torch.Tensor
    proximal_BT: torch.Tensor
    sampling_BT: torch.Tensor
    reference_BT: torch.Tensor
    mask_BT: torch.Tensor

    def weights(self, algorithm: Algorithm) -> list[RolloutCredit | None]:
        """Those of all rollouts in their order, which is that of the rows."""
        return [weight for of_group in algorithm.credits(self.groups) for weight in of_group]

    def batch(self, algorithm: Algorithm) -> TokenBatch:
        """The rows that train."""
        weights = self.weights(algorithm)
        rows = [row for row, weight in enumerate(weights) if weight is not None]
        present = [weight for weight in weights if weight is not None]

        def of_rows(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64)

        return TokenBatch(
            policy_logprobs_BT=self.policy_BT[rows],
            sampling_logprobs_BT=self.sampling_BT[rows],
            proximal_logprobs_BT=self.proximal_BT[rows],
            reference_logprobs_BT=self.reference_BT[rows],
            entropies_BT=self.entropies_BT[rows],
            mask_BT=self.mask_BT[rows],
            advantages_B=of_rows([weight.advantage for weight in present]),
            scales_B=of_rows([weight.scale for weight in present]),
        )

    def loss(self, algorithm: Algorithm) -> tuple[torch.Tensor, dict[str, float]]:
        """What our learner minimises, and the statistics as means over tokens."""
        result = algorithm.loss(self.batch(algorithm))
        denominators = algorithm.denominators(self.groups, MAX_TOKENS)
        total = torch.stack(
            [value / denominators[name] for name, value in result.components.items()]
        ).sum()
        stats = {name: value.item() for name, value in result.stats.items()}
        return total, {name: value / stats["tokens"] for name, value in stats.items()}

    def gradients(self, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """For the policy's log-probabilities and the entropies."""
        return torch.autograd.grad(
            loss, (self.policy_BT, self.entropies_BT), allow_unused=True, materialize_grads=True
        )


def correction(steps: Problem, mask_BT: torch.Tensor, knobs: dict[str, Any]) -> torch.Tensor:
    """TRL's weights, written down once more from `_generate_and_score_completions`; Liger takes them as they are given."""
    mode, cap = knobs["importance_sampling_correction"], knobs["importance_sampling_cap"]
    floor = knobs["importance_sampling_floor"]
    difference = (steps.proximal_BT - steps.sampling_BT) * mask_BT
    if "sequence" in mode:
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    if "truncate" in mode:
        return ratio.clamp(floor, cap)
    return ratio.masked_fill((ratio < floor) | (ratio > cap), 0.0)


def problem(seed: int, *, truncated: bool = False, spread: float = 0.3) -> Problem:
    """`truncated`: the last member of each group was cut off. `spread`: of the log-ratios (nats)."""
    rng = torch.Generator().manual_seed(seed)
    rows = 2 * MEMBERS
    lengths = torch.randint(1, MAX_TOKENS + 1, (rows,), generator=rng).tolist()
    rewards = torch.rand(rows, generator=rng).tolist()

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(rows, MAX_TOKENS, dtype=torch.float64, generator=rng)

    policy_BT = -normal(1.5).abs()
    return Problem(
        groups=tuple(_group(number, lengths, rewards, truncated=truncated) for number in range(2)),
        policy_BT=policy_BT.clone().requires_grad_(),
        entropies_BT=normal(2.0).abs().requires_grad_(),
        proximal_BT=policy_BT + normal(spread),
        sampling_BT=policy_BT + normal(spread),
        reference_BT=policy_BT + normal(0.7),
        mask_BT=torch.arange(MAX_TOKENS) < torch.tensor(lengths)[:, None],
    )


def _group(number: int, lengths: list[int], rewards: list[float], *, truncated: bool) -> Group:
    return Group(
        number,
        Example(number, "?"),
        tuple(
            scored(
                number,
                member,
                lengths[number * MEMBERS + member],
                rewards[number * MEMBERS + member],
                truncated=truncated and member == MEMBERS - 1,
            )
            for member in range(MEMBERS)
        ),
    )


def scored(
    draw: int, member: int, length: int, reward: float, *, truncated: bool = False
) -> Rollout:
    """A member of a group with `length` tokens."""
    written = Segment(
        "policy",
        (5,) * length,
        sampling_logprobs=(-1.0,) * length,
        finish_reason="length" if truncated else "stop",
    )
    some: Any = {"prompt_ids": (1,), "segments": (written,), "completion": ""}
    return Rollout(draw, member, 0, outcome="scored", reward=reward, **some)
