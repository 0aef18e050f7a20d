"""Base of the group-relative algorithms: the common part of their loss, and the knobs that belong to it.

    policy  = −Σ_rows scale · Σ_tokens w · surrogate
    kl      =  beta · Σ_rows scale · Σ_tokens k(policy, reference), see `kl.py`
    entropy = −entropy_coef · Σ_rows Σ_tokens H(policy)
    ratio   = exp(policy log-probability − old log-probability)

The old log-probabilities are those that the sampler reported when it drew the token, and w is 1. The ratio then also corrects for the
small differences between sampler and learner. With `importance_sampling_correction` the old ones are the learner's own at the start of
the step, and w corrects for the sampler (`correction.py`), also in the exact gradient of the KL. The entropy is a mean over the tokens of
the step for every algorithm, so that its coefficient means the same everywhere.

Two more knobs act on single tokens by their entropy H, as it is at the update, without gradient:

    top_entropy_quantile   only the tokens of high entropy have a policy gradient (https://arxiv.org/abs/2506.01939). The
                           quantile is that of the row; the paper's and TRL's is that of a batch, on whose cut it would depend
    entropy_advantage      A becomes A + min(entropy_advantage · H, |A| / entropy_advantage_cap)
                           (https://arxiv.org/abs/2506.14758, equation 5)

A subclass adds what distinguishes its algorithm: how rewards become advantages, and the surrogate of a token. The sums are a mean over
the tokens of the step, unless it has another scale of a row or another divisor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Self

from groupwise.algorithms import kl, ops
from groupwise.algorithms.advantages import (
    Advantages,
    all_equal,
    group_relative,
    scored_members,
    trained_tokens,
)
from groupwise.algorithms.base import LossDefaults, LossResult, Tensor, TokenBatch
from groupwise.algorithms.correction import Correction, importance_weights
from groupwise.algorithms.kl import KlEstimator, KlGradient
from groupwise.algorithms.knobs import (
    ConflictingKnobs,
    KnobConflict,
    ScaleRewards,
    check_knobs,
)
from groupwise.algorithms.overlong import reward_of_the_task
from groupwise.core.types import Group, LossSpec, Rollout, RolloutCredit


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelative(LossDefaults, ABC):
    """Knobs and loss that all algorithms share."""

    name: ClassVar[str]

    beta: float = field(
        default=0.0,
        metadata={
            "description": "Weight of the KL penalty to the reference policy. 0: no penalty and no "
            "reference to compute, usual where rewards can be verified.",
            "ge": 0.0,
        },
    )
    kl_estimator: KlEstimator = field(
        default="k3",
        metadata={
            "description": "Schulman's estimator of the KL divergence. k3 is never negative and has "
            "little variance.",
            "needs": "beta",
        },
    )
    kl_gradient: KlGradient = field(
        default="exact",
        metadata={
            "description": "exact: the penalty's gradient is that of KL(policy ‖ reference). "
            "estimator: that of the estimator, as first published; for k3 this is the gradient of "
            "KL(reference ‖ policy), for k1 it would be noise.",
            "needs": "beta",
        },
    )
    kl_target: float | None = field(
        default=None,
        metadata={
            "description": "Adaptive KL: after each step beta moves so that the mean KL (nats per "
            "token) nears this target. null: beta stays.",
            "gt": 0.0,
            "needs": "beta",
        },
    )
    kl_horizon: float = field(
        default=10_000.0,
        metadata={
            "description": "Adaptive KL: number of rollouts in which beta moves by up to a fifth; larger is "
            "slower.",
            "gt": 0.0,
            "needs": "kl_target",
        },
    )
    entropy_coef: float = field(
        default=0.0,
        metadata={
            "description": "Weight of a bonus for the policy's entropy, mean nats per token, against "
            "collapse to one answer. 0: no bonus, and entropies are only measured.",
            "ge": 0.0,
        },
    )
    mask_truncated_completions: bool = field(
        default=False,
        metadata={
            "description": "Leave rollouts that the length limit cut off out of the loss. Their "
            "rewards still count in mean and spread, and they still count as rollouts.",
        },
    )
    importance_sampling_correction: Correction = field(
        default="none",
        metadata={
            "description": "Correct for differences between sampler and learner by a weight for each "
            "token or rollout, truncated or masked above the cap. Costs another forward pass if a step makes several updates. none: "
            "the clipped ratio itself compares the policy with the sampler. Default token_truncate for gspo, "
            "luspo and rloo, whose ratios of whole rollouts add up the differences.",
        },
    )
    importance_sampling_cap: float = field(
        default=3.0,
        metadata={
            "description": "Largest weight of the importance sampling correction.",
            "gt": 0.0,
            "needs": "importance_sampling_correction",
        },
    )
    importance_sampling_floor: float = field(
        default=0.0,
        metadata={
            "description": "Smallest weight of the importance sampling correction: smaller ones become this with *_truncate, and 0 with "
            "*_mask. 0: no bound.",
            "ge": 0.0,
            "needs": "importance_sampling_correction",
        },
    )
    top_entropy_quantile: float = field(
        default=1.0,
        metadata={
            "description": "Share of each row's trained tokens, those of the highest entropy, that have a gradient of the policy loss. "
            "1: all.",
            "gt": 0.0,
            "le": 1.0,
        },
    )
    entropy_advantage: float = field(
        default=0.0,
        metadata={
            "description": "Entropy-based advantage shaping: what is added to a token's advantage for each nat of its entropy, at most "
            "the advantage's absolute value divided by entropy_advantage_cap. 0: nothing.",
            "ge": 0.0,
        },
    )
    entropy_advantage_cap: float = field(
        default=2.0,
        metadata={
            "description": "Entropy-based advantage shaping: an advantage grows by at most its own size divided by this; above 1, "
            "so that none changes its sign.",
            "gt": 1.0,
            "needs": "entropy_advantage",
        },
    )
    dynamic_sampling: bool = field(
        default=False,
        metadata={
            "description": "Draw another example in place of a group whose rollouts all got the same "
            "reward, since it teaches nothing. Default true for dapo.",
        },
    )
    max_resample_rounds: int = field(
        default=10,
        metadata={
            "description": "Dynamic sampling: maximum rounds in which a step draws groups again; after that it continues with the "
            "groups that it has.",
            "ge": 1,
            "needs": "dynamic_sampling",
        },
    )

    def __post_init__(self) -> None:
        check_knobs(self)
        if conflicts := tuple(self.conflicts()):
            raise ConflictingKnobs(conflicts)

    def conflicts(self) -> Iterator[KnobConflict]:
        """Yield values that are incompatible with each other."""
        if self.kl_target is not None and self.beta == 0:
            yield KnobConflict(
                f"{self.name}.kl_target is {self.kl_target}, but beta is 0 and would stay 0; give "
                f"beta a value to start from, for example {kl.FIRST_BETA}.",
                ("kl_target", "beta"),
            )
        if self.importance_sampling_floor >= self.importance_sampling_cap:
            yield KnobConflict(
                f"{self.name}.importance_sampling_floor is {self.importance_sampling_floor:g}; it must be below importance_sampling_cap, "
                f"which is {self.importance_sampling_cap:g}.",
                ("importance_sampling_floor", "importance_sampling_cap"),
            )
        if self.beta > 0 and (self.kl_estimator, self.kl_gradient) == ("k1", "estimator"):
            yield KnobConflict(
                f"{self.name}.kl_estimator k1 has no use with kl_gradient estimator: that gradient "
                "does not know the reference. Take kl_gradient exact, or k2 or k3.",
                ("beta", "kl_estimator", "kl_gradient"),
            )

    @abstractmethod
    def advantages(self, groups: Sequence[Group]) -> Advantages:
        """The advantages of the rollouts of a step."""

    @abstractmethod
    def surrogate(
        self, batch: TokenBatch, log_ratio_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The value to maximise, and statistics, both per token. Outside the mask the log-ratio is 0."""

    def scale(self, rollout: Rollout) -> float:
        """Factor for the sums of a rollout that has trained tokens. 1 (all tokens count the same), unless a subclass overrides this."""
        return 1.0

    def denominator(self, groups: Sequence[Group], max_completion_length: int) -> float:
        """The divisor of a step's policy and KL sums. The number of trained tokens in the step, unless a subclass overrides this."""
        return float(self.tokens(groups))

    @property
    def needs_reference(self) -> bool:
        """Only the KL penalty needs the reference."""
        return self.beta > 0

    @property
    def needs_proximal(self) -> bool:
        """Only the importance sampling correction needs the log-probabilities at the start of the step."""
        return self.importance_sampling_correction != "none"

    @property
    def needs_entropy_gradient(self) -> bool:
        """Only the entropy bonus needs that gradient."""
        return self.entropy_coef > 0

    @property
    def needs_teacher(self) -> bool:
        """False: rewards teach, unless a subclass overrides this."""
        return False

    @property
    def compares_members(self) -> bool:
        """True if a rollout's advantage is relative to others of its group, so that a group needs at least two."""
        return True

    @property
    def ratio_of_rollout(self) -> bool:
        """False: each token has its own ratio, unless a subclass overrides this."""
        return False

    def log_ratio_bounds(self, advantage: float) -> tuple[float, float]:
        """The bounds of a token's log-ratio (nats) before those of a rollout are added up; none, unless a subclass overrides this."""
        return -math.inf, math.inf

    @property
    def resample_rounds(self) -> int:
        """`max_resample_rounds` with dynamic sampling, else 0."""
        return self.max_resample_rounds if self.dynamic_sampling else 0

    def shaped(self, group: Group, max_completion_length: int) -> Group:
        """Return the group unchanged; a subclass may override this."""
        return group

    def check(self, max_length: int, rewards: Sequence[str]) -> None:
        """Check nothing: these knobs fit every run."""

    def accepts(self, group: Group) -> bool:
        """With dynamic sampling, accept only a group whose rewards, without the algorithm's own parts, differ."""
        if not self.dynamic_sampling:
            return True
        return not all_equal([reward_of_the_task(rollout) for rollout in group.scored])

    def credits(self, groups: Sequence[Group]) -> tuple[tuple[RolloutCredit | None, ...], ...]:
        """Advantage and scale of each trained rollout; None for the others."""
        return tuple(
            tuple(
                RolloutCredit(advantage, self.scale(rollout))
                if advantage is not None and self.trains(rollout)
                else None
                for rollout, advantage in zip(group.rollouts, advantages, strict=True)
            )
            for group, advantages in zip(groups, self._checked_advantages(groups), strict=True)
        )

    def _checked_advantages(self, groups: Sequence[Group]) -> Advantages:
        """The advantages of a step. Raises ValueError for those of a user's class that are not one number or None for each rollout."""
        advantages = self.advantages(groups)
        expected, found = [len(group.rollouts) for group in groups], [*map(len, advantages)]
        if found != expected:
            raise ValueError(
                f"{self.name}: `advantages` returned tuples of {found} values for groups of {expected} rollouts; return a tuple for each "
                "group, with a value for each of its rollouts, None for those that were not scored."
            )
        given: list[Any] = [value for values in advantages for value in values if value is not None]
        for value in given:
            if not isinstance(value, float | int) or not math.isfinite(value):
                raise ValueError(
                    f"{self.name}: `advantages` returned {value!r}; expected a finite float, or None for a rollout that was not scored."
                )
        return advantages

    def denominators(self, groups: Sequence[Group], max_completion_length: int) -> dict[str, float]:
        """The algorithm's denominator for policy and KL; the number of trained tokens for the entropy."""
        denominator = self.denominator(groups, max_completion_length)
        denominators = {"policy": denominator}
        if self.needs_reference:
            denominators["kl"] = denominator
        if self.needs_entropy_gradient:
            denominators["entropy"] = float(self.tokens(groups))
        return denominators

    def trains(self, rollout: Rollout) -> bool:
        """True if a scored rollout has trained tokens; it counts as a rollout in any case."""
        is_masked = self.mask_truncated_completions and rollout.truncated
        return not is_masked and trained_tokens(rollout) > 0

    def tokens(self, groups: Sequence[Group]) -> int:
        """Number of trained tokens in a step: the tokens that the sums cover."""
        return sum(
            trained_tokens(rollout)
            for group in groups
            for rollout in group.scored
            if self.trains(rollout)
        )

    def teaches(self, credits: Sequence[RolloutCredit | None]) -> bool:
        """True if an advantage is not 0; with a KL penalty or an entropy bonus, if there is any row."""
        always = self.needs_reference or self.needs_entropy_gradient
        return any(always or not credit.is_zero for credit in credits if credit is not None)

    def adapted(self, kl: float, rollouts: int) -> Self:
        """The algorithm with a beta moved towards `kl_target`; unchanged without a target."""
        return self if self.kl_target is None else replace(self, beta=self._next_beta(kl, rollouts))

    def _next_beta(self, kl_value: float, rollouts: int) -> float:
        assert self.kl_target is not None
        return kl.adapted_beta(self.beta, kl_value, self.kl_target, self.kl_horizon, rollouts)

    def loss_spec(self) -> LossSpec:
        """Name and every knob, including defaults, so that the other side does not use its own."""
        return LossSpec(self.name, asdict(self))

    def loss(self, batch: TokenBatch) -> LossResult:
        """The sums at the top of this module. Raises ValueError if the batch lacks a needed tensor."""
        self._check_complete(batch)
        batch, mask = self._with_entropy_advantage(batch), batch.mask_BT
        sampled = batch.sampling_logprobs_BT.detach()
        old = batch.proximal_logprobs if self.needs_proximal else sampled
        log_ratio = ops.masked_difference(batch.policy_logprobs_BT, old.detach(), mask)
        surrogate, stats = self.surrogate(batch, log_ratio)
        if surrogate.shape != mask.shape:
            raise ValueError(
                f"{self.name}: `surrogate` returned a tensor of shape {tuple(surrogate.shape)} for a batch of shape {tuple(mask.shape)} "
                "(rows, tokens); return one value for each token."
            )
        gap = ops.masked_difference(batch.policy_logprobs_BT, sampled, mask)
        stats |= {**ops.token_stats(batch), "logprob_gap": gap.detach().abs()}
        weights: Tensor = 1.0
        if self.needs_proximal:
            weights, weighted = self._importance(batch)
            stats |= weighted
        weighted_surrogate = surrogate * weights
        if self.top_entropy_quantile < 1:
            weighted_surrogate = weighted_surrogate.masked_fill(self._low_entropy(batch), 0.0)
        components = {"policy": -ops.scaled_sum(weighted_surrogate, batch.scales_B, mask)}
        components |= self._penalties(batch, log_ratio, weights)
        if batch.reference_logprobs_BT is not None:
            stats["kl"] = self._kl(batch).detach()
        return LossResult(components, ops.sum_stats(stats, surrogate))

    def _importance(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The correction's weight of each token, detached, and its statistics."""
        weights, is_clipped = importance_weights(
            batch.proximal_logprobs,
            batch.sampling_logprobs_BT,
            batch.mask_BT,
            self.importance_sampling_correction,
            (self.importance_sampling_floor, self.importance_sampling_cap),
            batch.others,
        )
        masked_weights = weights.masked_fill(batch.mask_BT == 0, 0.0)
        return weights, {
            "importance_sampling_ratio": masked_weights,
            "importance_sampling_clipped": is_clipped,
        }

    def _with_entropy_advantage(self, batch: TokenBatch) -> TokenBatch:
        """The batch with advantages A + min(entropy_advantage · H, |A| / entropy_advantage_cap), H without gradient."""
        if self.entropy_advantage == 0:
            return batch
        assert batch.entropies_BT is not None
        entropies = batch.entropies_BT.detach().masked_fill(batch.mask_BT == 0, 0.0)
        largest = batch.advantages.abs() * (1 / self.entropy_advantage_cap)
        addition = (entropies * self.entropy_advantage).minimum(largest)
        return replace(batch, credits_BT=batch.advantages + addition)

    def _low_entropy(self, batch: TokenBatch) -> Tensor:
        """True for the tokens of a row that are not among the share of the highest entropy; equal entropies rank by their place."""
        assert batch.entropies_BT is not None
        outside_mask = batch.mask_BT == 0
        entropies = batch.entropies_BT.detach().masked_fill(outside_mask, -math.inf)
        order = entropies.argsort(dim=-1, descending=True, stable=True)
        ranks = order.argsort(dim=-1, descending=False, stable=True)
        # As many tokens are at or above the quantile of the n of a row, interpolated between two of them as usual.
        last = (ops.token_counts(batch.mask_BT, entropies) - 1) * self.top_entropy_quantile
        return ranks > last

    def _penalties(
        self, batch: TokenBatch, log_ratio: Tensor, weights: Tensor
    ) -> dict[str, Tensor]:
        """The loss components other than `policy`."""
        penalties: dict[str, Tensor] = {}
        if self.needs_reference:
            penalty = kl.penalty(
                batch.policy_logprobs_BT,
                batch.reference_logprobs_BT,
                log_ratio,
                batch.mask_BT,
                self.kl_estimator,
                self.kl_gradient,
                weights,
            )
            penalties["kl"] = self.beta * ops.scaled_sum(penalty, batch.scales_B, batch.mask_BT)
        if self.needs_entropy_gradient:
            assert batch.entropies_BT is not None
            bonus = batch.entropies_BT.masked_fill(batch.mask_BT == 0, 0.0).sum()
            penalties["entropy"] = -self.entropy_coef * bonus
        return penalties

    def _kl(self, batch: TokenBatch) -> Tensor:
        return kl.estimate(
            batch.policy_logprobs_BT, batch.reference_logprobs_BT, batch.mask_BT, self.kl_estimator
        )

    def _check_complete(self, batch: TokenBatch) -> None:
        requirements = {
            f"beta {self.beta}": (self.needs_reference, "reference_logprobs_BT"),
            f"entropy_coef {self.entropy_coef}": (self.needs_entropy_gradient, "entropies_BT"),
            f"entropy_advantage {self.entropy_advantage}": (
                self.entropy_advantage > 0,
                "entropies_BT",
            ),
            f"top_entropy_quantile {self.top_entropy_quantile}": (
                self.top_entropy_quantile < 1,
                "entropies_BT",
            ),
        }
        for reason, (is_needed, tensor) in requirements.items():
            if is_needed and getattr(batch, tensor) is None:
                raise ValueError(
                    f"{self.name} with {reason} needs {tensor}, but the batch has none. Fill it, or "
                    f"leave {reason.split()[0]} out."
                )


class ScaledRewards:
    """The advantages of algorithms that have the knob `scale_rewards`."""

    __slots__ = ()

    scale_rewards: ScaleRewards

    def advantages(self, groups: Sequence[Group]) -> Advantages:
        """Centred within the group, and scaled as the knob says."""
        return group_relative(groups, self.scale_rewards)


def per_rollout(groups: Sequence[Group]) -> float:
    """The denominator of algorithms in which each scored rollout counts the same: the number of scored rollouts."""
    return float(scored_members(groups))
