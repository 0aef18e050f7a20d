"""On-policy distillation: the policy writes, and a teacher says how probable it finds each token.

    loss = 1/T · Σ_rollouts Σ_tokens [ teacher_weight · KL_t + reward_weight · (−min(ratio · A, clip(ratio) · A)) ]
    KL_t = Σ_v π(v) · (log π(v) − log π_T(v)),   the reverse KL between the distributions of policy π and teacher π_T at token t
    A    = r − mean(r),   T = trained tokens of the step

`form` says how KL_t is computed:

    sampled          only at the token that was sampled. Its estimate log π − log π_T has no useful gradient by itself, so it is a reward:
                     the token's advantage is reward_weight · A − teacher_weight · (log π_old − log π_T), and the clipped surrogate is that
                     of PPO. Needs one number per token. Thinking Machines, https://thinkingmachines.ai/blog/on-policy-distillation/
    top_k            over the teacher's k most probable tokens, and one bucket for the rest, as in SDPO (https://arxiv.org/abs/2601.20802).
                     A lower bound of KL_t, with its exact gradient.
    full_vocabulary  over all tokens. The learner computes it chunk by chunk. MiniLLM (https://arxiv.org/abs/2306.08543), and GKD
                     (https://arxiv.org/abs/2306.13649) with λ = 1 and β = 1.

As in these papers the gradient treats each token by itself: a token's effect on what the teacher says of later tokens is ignored.

With a teacher that is the policy itself and sees more (the solution, a hint, feedback), this is self-distillation: SDFT
(https://arxiv.org/abs/2601.19897), SDPO, OPSD (https://arxiv.org/abs/2601.18734). The loss is the same; see `teacher` in the config.

Assumes that policy and teacher have the same tokens, and that both distributions are at the same temperature.

Degenerate cases: where the teacher gives the token probability 0, the log-ratio is bounded to ± 20 nats in the form sampled. A rollout that
was not scored, or for which there are no numbers of the teacher, has no gradient and counts in no denominator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias

from groupwise.algorithms import ops
from groupwise.algorithms.advantages import Advantages, group_relative
from groupwise.algorithms.base import LossResult, Tensor, TokenBatch
from groupwise.algorithms.clipped import Clipped
from groupwise.algorithms.knobs import SCALE_REWARDS, KnobConflict, ScaleRewards
from groupwise.core.types import Group, RolloutCredit

Form: TypeAlias = Literal["sampled", "top_k", "full_vocabulary"]

MIN_TAIL = 1e-7
"""Smallest probability of the bucket for the rest: below it float32 cannot tell the k tokens from the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation(Clipped):
    """Reverse KL per token against a teacher, on the policy's own samples, mixed with rewards."""

    name: ClassVar[str] = "distillation"

    form: Form = field(
        default="sampled",
        metadata={
            "description": "What is compared with the teacher at each token: sampled: the probability of the token that was drawn, which "
            "any teacher can give. top_k: the teacher's top_k most probable tokens and the rest as one; for endpoints of vLLM and SGLang. "
            "full_vocabulary: all tokens, exactly, with the least variance; for a teacher in this process."
        },
    )
    top_k: int | None = field(
        default=None,
        metadata={
            "description": "Number of the teacher's most probable tokens, with form top_k. vLLM gives up to 20 unless it is started with "
            "--max-logprobs.",
            "ge": 1,
        },
    )
    teacher_weight: float = field(
        default=1.0,
        metadata={"description": "Weight of the reverse KL to the teacher.", "gt": 0.0},
    )
    reward_weight: float = field(
        default=0.0,
        metadata={
            "description": "Weight of the rewards' advantages relative to the teacher. 0: rewards are only measured.",
            "ge": 0.0,
        },
    )
    scale_rewards: ScaleRewards = field(
        default="none", metadata={**SCALE_REWARDS, "needs": "reward_weight"}
    )

    def conflicts(self) -> Iterator[KnobConflict]:
        """Also yield a `top_k` that does not fit the form, and what needs rewards without any."""
        yield from Clipped.conflicts(self)
        if (self.form == "top_k") != (self.top_k is not None):
            yield KnobConflict(
                f"{self.name}.form is {self.form}, but top_k is {'null' if self.top_k is None else self.top_k}. top_k is the number of "
                "tokens of the form top_k, for example 16; leave it out with the other forms.",
                ("form", "top_k"),
            )
        if self.dynamic_sampling and self.reward_weight == 0:
            yield KnobConflict(
                f"{self.name}.dynamic_sampling is true, but reward_weight is 0: groups with equal rewards teach as much as others. Leave "
                "it out, or set reward_weight.",
                ("dynamic_sampling", "reward_weight"),
            )
        if self.entropy_advantage > 0 and self.reward_weight == 0:
            yield KnobConflict(
                f"{self.name}.entropy_advantage is {self.entropy_advantage:g}, but reward_weight is 0, so that there is no advantage that "
                "it could enlarge. Leave it out, or set reward_weight.",
                ("entropy_advantage", "reward_weight"),
            )
        if self.form == "top_k" and self.importance_sampling_correction.startswith("sequence"):
            yield KnobConflict(
                f"{self.name}.importance_sampling_correction is {self.importance_sampling_correction}, which adds up the tokens of a "
                "rollout, but with form top_k a row has several for each. Take token_truncate or token_mask.",
                ("importance_sampling_correction", "form"),
            )

    @property
    def needs_teacher(self) -> bool:
        """True: this is what is learnt from."""
        return True

    @property
    def needs_teacher_kl(self) -> bool:
        """True with the form full_vocabulary, for which the learner compares whole distributions."""
        return self.form == "full_vocabulary"

    @property
    def compares_members(self) -> bool:
        """Only rewards are compared within a group."""
        return self.reward_weight > 0

    def advantages(self, groups: Sequence[Group]) -> Advantages:
        """Centred rewards, times their weight."""
        return [
            tuple(None if value is None else self.reward_weight * value for value in values)
            for values in group_relative(groups, self.scale_rewards)
        ]

    def denominators(self, groups: Sequence[Group], max_completion_length: int) -> dict[str, float]:
        """Also that of the component `distillation`, which the form sampled does not have."""
        denominators = Clipped.denominators(self, groups, max_completion_length)
        if self.form != "sampled":
            denominators["distillation"] = denominators["policy"]
        return denominators

    def teaches(self, credits: Sequence[RolloutCredit | None]) -> bool:
        """True if there is any row: the teacher has something to say of each."""
        return any(credit is not None for credit in credits)

    def loss(self, batch: TokenBatch) -> LossResult:
        """The sums at the top of this module. Raises ValueError if the batch lacks the teacher's numbers."""
        if self.form == "full_vocabulary":
            kl_BT = _required(batch.teacher_kl_BT, "teacher_kl_BT", self.form)
        else:
            teacher_BT = _required(batch.teacher_logprobs_BT, "teacher_logprobs_BT", self.form)
            if self.form == "sampled":
                return Clipped.loss(self, batch)
            assert self.top_k is not None
            batch, kl_BT = _from_top_k(batch, teacher_BT, self.top_k)
        result = Clipped.loss(self, batch)
        kl_BT = kl_BT.masked_fill(batch.mask_BT == 0, 0.0)
        weights: Tensor = self._importance(batch)[0] if self.needs_proximal else 1.0
        divergence = ops.scaled_sum(kl_BT * weights, batch.scales_B, batch.mask_BT)
        return LossResult(
            {**result.components, "distillation": self.teacher_weight * divergence},
            {**result.stats, "distillation_kl": kl_BT.detach().sum()},
        )

    def surrogate(
        self, batch: TokenBatch, log_ratio_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """PPO's clipped surrogate; with the form sampled each token has its own advantage."""
        if self.form != "sampled":
            return Clipped.surrogate(self, batch, log_ratio_BT)
        policy_BT = batch.policy_logprobs_BT.detach()
        teacher_BT = _required(batch.teacher_logprobs_BT, "teacher_logprobs_BT", self.form).detach()
        gap_BT = ops.masked_difference(policy_BT, teacher_BT, batch.mask_BT)
        old_gap_BT = ops.bound_log_ratio(gap_BT - log_ratio_BT.detach())
        advantages_BT = batch.advantages - self.teacher_weight * old_gap_BT
        surrogate, stats = Clipped.surrogate(
            self, replace(batch, credits_BT=advantages_BT), log_ratio_BT
        )
        return surrogate, {**stats, "distillation_kl": gap_BT}


def _required(values: Tensor | None, name: str, form: Form) -> Tensor:
    if values is None:
        raise ValueError(
            f"distillation with form {form} needs {name}, but the batch has none. Fill it from the teacher, or take another algorithm."
        )
    return values


def _from_top_k(batch: TokenBatch, teacher_BT: Tensor, top_k: int) -> tuple[TokenBatch, Tensor]:
    """The batch of the sampled tokens alone, and the KL [B, T] at each of them.

    Each token of a row has 1 + k targets: itself, then the teacher's k most probable ones.
    """
    rows, width = batch.mask_BT.shape
    targets = 1 + top_k
    assert width % targets == 0, f"{width} targets, which is not a multiple of {targets}"

    def by_token(values_BT: Tensor) -> Tensor:
        return values_BT.reshape(rows, width // targets, targets)

    def sampled(values_BT: Tensor | None) -> Tensor | None:
        return None if values_BT is None else by_token(values_BT)[..., 0]

    outside_BT1 = by_token(batch.mask_BT)[..., :1] == 0
    policy_BTK = by_token(batch.policy_logprobs_BT)[..., 1:].masked_fill(outside_BT1, -top_k - 9.0)
    teacher_BTK = by_token(teacher_BT)[..., 1:].masked_fill(outside_BT1, -top_k - 9.0).detach()
    kl_BT = _bucketed_kl(policy_BTK, teacher_BTK)
    single = replace(
        batch,
        policy_logprobs_BT=sampled(batch.policy_logprobs_BT),
        sampling_logprobs_BT=sampled(batch.sampling_logprobs_BT),
        mask_BT=sampled(batch.mask_BT),
        entropies_BT=sampled(batch.entropies_BT),
        right_BT=sampled(batch.right_BT),
        reference_logprobs_BT=sampled(batch.reference_logprobs_BT),
        proximal_logprobs_BT=sampled(batch.proximal_logprobs_BT),
        teacher_logprobs_BT=None,
    )
    return single, kl_BT


def _bucketed_kl(policy_BTK: Tensor, teacher_BTK: Tensor) -> Tensor:
    """KL(policy ‖ teacher) over K tokens and one bucket with the remaining probability of each."""
    within_BT = (policy_BTK.exp() * (policy_BTK - teacher_BTK)).sum(-1)
    policy_tail_BT = (1 - policy_BTK.exp().sum(-1)).clamp(min=MIN_TAIL)
    teacher_tail_BT = (1 - teacher_BTK.exp().sum(-1)).clamp(min=MIN_TAIL)
    return within_BT + policy_tail_BT * (policy_tail_BT.log() - teacher_tail_BT.log())
