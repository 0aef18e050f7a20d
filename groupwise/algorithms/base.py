"""The protocol of an algorithm: two pieces of maths that meet in the learner and are independent of machines.

The loop calls the first half, on plain records: `shaped` may add to the rewards of a group, `accepts` may reject the group, `credits`
turns the rewards of a step into credit for each rollout, and `denominators` gives the divisors for the sums of the whole step. The
learner calls the second half, on tensors: `loss` turns a batch of log-probabilities into undivided sums. Because sums add up and the
denominators are those of the whole step, the gradient does not depend on how the rows were cut into batches or spread over machines.

An algorithm is a frozen dataclass whose fields are its knobs (`knobs.py`). Tensors are used only through their methods, so nothing here
imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeAlias

from groupwise.core.types import Group, LossSpec, RolloutCredit

Tensor: TypeAlias = Any
"""A torch tensor, float32 or wider; the name ends with its axes (B rows, T completion tokens)."""


@dataclass(frozen=True, slots=True)
class SiblingSums:
    """For each row, sums over the other rows of its rollout; see `groupwise.core.types.SiblingRowStats`."""

    tokens_B: Tensor
    log_weights_B: Tensor
    log_ratios_B: Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows as tensors, padded to one length. Values at places where the mask is 0 have no effect, not even NaN."""

    policy_logprobs_BT: Tensor
    """Log-probabilities under the learner's current weights; they carry the gradient."""
    sampling_logprobs_BT: Tensor
    """Log-probabilities that the sampler reported for the tokens."""
    mask_BT: Tensor
    """1 (or True) for tokens that are trained, 0 for all others."""
    advantages_B: Tensor
    """`RolloutCredit.advantage` of each row."""
    scales_B: Tensor
    """`RolloutCredit.scale` of each row."""
    entropies_BT: Tensor | None = None
    """Entropy (nats) of the policy at each token; with gradient if `Loss.needs_entropy_gradient`, otherwise only for statistics."""
    right_BT: Tensor | None = None
    """True where a token is the policy's most likely one; present if `Loss.needs_accuracy`."""
    reference_logprobs_BT: Tensor | None = None
    """Log-probabilities under the reference policy; required if `Loss.needs_reference`."""
    proximal_logprobs_BT: Tensor | None = None
    """Log-probabilities under the learner's weights at the start of the step; None in its first update, where they are the policy's own."""
    others: SiblingSums | None = None
    """Sums over the other rows of each rollout; None if each row is a whole rollout."""
    credits_BT: Tensor | None = None
    """`Row.credits` of each row: the advantage of each token. None: each row has one for all its tokens."""
    teacher_logprobs_BT: Tensor | None = None
    """Log-probabilities under the teacher; required by forms of `distillation` that compare single tokens."""
    teacher_kl_BT: Tensor | None = None
    """KL(policy ‖ teacher) over the vocabulary at each token, with the policy's gradient; present if `Loss.needs_teacher_kl`."""

    @property
    def advantages(self) -> Tensor:
        """The advantages as [B, T], or as [B, 1] if those of a row's tokens are equal. 0 outside the mask in the first case."""
        if self.credits_BT is None:
            return self.advantages_B.unsqueeze(-1)
        return self.credits_BT.masked_fill(self.mask_BT == 0, 0.0)

    @property
    def proximal_logprobs(self) -> Tensor:
        """Log-probabilities [B, T] under the weights at the start of the step, without gradient."""
        logprobs = self.proximal_logprobs_BT
        return (self.policy_logprobs_BT if logprobs is None else logprobs).detach()

    def __post_init__(self) -> None:
        per_token = (
            self.policy_logprobs_BT,
            self.sampling_logprobs_BT,
            self.entropies_BT,
            self.right_BT,
            self.reference_logprobs_BT,
            self.proximal_logprobs_BT,
            self.credits_BT,
            self.teacher_logprobs_BT,
            self.teacher_kl_BT,
        )
        shape = tuple(self.mask_BT.shape)
        assert len(shape) == 2, f"the mask is {shape}, it should be (rows, tokens)"
        for values in per_token:
            assert values is None or tuple(values.shape) == shape, (tuple(values.shape), shape)
        for values in (self.advantages_B, self.scales_B):
            assert tuple(values.shape) == shape[:1], (tuple(values.shape), shape[:1])


@dataclass(frozen=True, slots=True)
class LossResult:
    """Sums over a batch, as scalar tensors; the sums of several batches add up to those of the whole step."""

    components: dict[str, Tensor]
    """Sums with gradient. The learner minimises `Σ components[name] / denominators[name]`."""
    stats: dict[str, Tensor]
    """Sums without gradient, over the trained tokens.

    `tokens` counts them; divided by it, the others are means, if present: `ratio`; `clip_low`, `clip_high` and `clip_delta` (tokens whose
    gradient that bound removed; in `cispo`, whose weight it capped); `logprob_gap` (|policy - sampling|, nats); `kl` (nats, before beta);
    `entropy` (nats); `distillation_kl` (nats, to the teacher, before its weight); `right` (tokens that are the most likely ones);
    `importance_sampling_ratio` (the weight between sampler and learner)
    and `importance_sampling_clipped` (tokens whose weight was truncated or masked).
    """


class Loss(Protocol):
    """Turns log-probabilities into a loss: the only part of an algorithm that a learner uses."""

    name: ClassVar[str]
    """The name in configs and in `LossSpec.name`."""

    @property
    def needs_reference(self) -> bool:
        """True if rows must carry the reference's log-probabilities."""
        ...

    @property
    def needs_proximal(self) -> bool:
        """True if the loss needs the learner's log-probabilities at the start of the step; rows carry them, except in its first update."""
        ...

    @property
    def needs_entropy_gradient(self) -> bool:
        """True if the batch must have entropies with gradient."""
        ...

    @property
    def needs_accuracy(self) -> bool:
        """True if the batch must mark the tokens that are the most likely ones."""
        ...

    @property
    def needs_teacher_kl(self) -> bool:
        """True if the batch must have the KL to the teacher's whole distributions, which the learner computes."""
        ...

    def loss_spec(self) -> LossSpec:
        """This loss as plain data; `registry.from_spec` is the inverse."""
        ...

    def loss(self, batch: TokenBatch) -> LossResult:
        """The undivided sums of a batch. Raises ValueError if the batch lacks a needed tensor."""
        ...


class LossDefaults:
    """The `needs_*` of a loss for which the log-probabilities of policy and sampler are enough; each loss overrides what it does need."""

    __slots__ = ()

    @property
    def needs_reference(self) -> bool:
        """False: there is no KL penalty."""
        return False

    @property
    def needs_proximal(self) -> bool:
        """False: the ratio, if there is one, is taken against the sampler."""
        return False

    @property
    def needs_entropy_gradient(self) -> bool:
        """False: the entropy is only reported."""
        return False

    @property
    def needs_accuracy(self) -> bool:
        """False: sampled tokens are not meant to be the most likely ones."""
        return False

    @property
    def needs_teacher_kl(self) -> bool:
        """False: no whole distributions are compared."""
        return False


class Algorithm(Loss, Protocol):
    """Turns groups into credits, and log-probabilities into a loss."""

    @property
    def ratio_of_rollout(self) -> bool:
        """True if a whole rollout has one ratio. A row then needs the sums of its rollout's other rows (`TokenBatch.others`)."""
        ...

    def log_ratio_bounds(self, advantage: float) -> tuple[float, float]:
        """The bounds (nats) of the log-ratio of each token in the sums of its rollout's other rows; only asked if `ratio_of_rollout`."""
        ...

    @property
    def needs_teacher(self) -> bool:
        """True if it learns from a teacher, whose numbers rows must carry unless the learner computes them (`needs_teacher_kl`)."""
        ...

    @property
    def resample_rounds(self) -> int:
        """Most rounds in a step in which groups that were not accepted are drawn again; 0: none."""
        ...

    def shaped(self, group: Group, max_completion_length: int) -> Group:
        """The scored group with the algorithm's own additions to its rewards, each as a separate reward part.

        Call it once, before the group is stored, so that the logged total is the trained one.
        """
        ...

    def accepts(self, group: Group) -> bool:
        """True if a shaped group is worth training; otherwise another group is drawn in its place."""
        ...

    def check(self, max_length: int, rewards: Sequence[str]) -> None:
        """Raise ValueError for a knob that does not fit the length (tokens) of a run's rollouts, TaskError for a reward that does not fit.

        `max_length` is the most tokens that the policy may write in one rollout; `rewards` are the known reward names.
        """
        ...

    def credits(self, groups: Sequence[Group]) -> tuple[tuple[RolloutCredit | None, ...], ...]:
        """Credit for the rollouts of a step: for each group a tuple in the order of its rollouts.

        None for rollouts that are not trained.
        """
        ...

    def denominators(self, groups: Sequence[Group], max_completion_length: int) -> dict[str, float]:
        """The divisor of each loss component of a step; 0 if none of its groups was scored."""
        ...

    def teaches(self, credits: Sequence[RolloutCredit | None]) -> bool:
        """True if rows with these credits can have a gradient; otherwise they need not be computed."""
        ...

    def adapted(self, kl: float, rollouts: int) -> Self:
        """The algorithm for the next step, given this step's mean KL (nats per token) and number of rollouts."""
        ...
