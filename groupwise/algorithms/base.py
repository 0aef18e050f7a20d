"""What an algorithm is: two pieces of maths that meet in the learner, and know nothing of machines.

The loop calls the first half, on plain records: `shaped` may add to the rewards of a group and
`accepts` may turn it down, `weights` turns the rewards of a step into credit for each rollout, and
`denominators` says what the sums of the whole step are divided by. The learner calls the second
half, on tensors: `loss` turns a batch of log-probabilities into undivided sums. Because sums add up
and the denominators are those of the whole step, the gradient does not depend on how the rows were
cut into batches or spread over machines.

An algorithm is a frozen dataclass whose fields are its knobs (`knobs.py`). Tensors are used through
their methods only, so that nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeAlias

from groupwise.core.types import Group, LossSpec, RolloutCredit

Tensor: TypeAlias = Any
"""A torch tensor, float32 or wider; the name ends with its axes (B rows, T completion tokens)."""


@dataclass(frozen=True, slots=True)
class Others:
    """Of each row, sums over the other rows of its rollout; see `groupwise.core.types.SiblingRowStats`."""

    tokens_B: Tensor
    log_weights_B: Tensor
    log_ratios_B: Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows as tensors, padded to one length. Where the mask is 0 nothing has an effect, even NaN."""

    policy_logprobs_BT: Tensor
    """By the learner now; carries the gradient."""
    sampling_logprobs_BT: Tensor
    """By the sampler when it sampled."""
    mask_BT: Tensor
    """1 (or True) for tokens that teach, 0 for all others."""
    advantages_B: Tensor
    """`Weight.advantage` of each row."""
    scales_B: Tensor
    """`Weight.scale` of each row."""
    entropies_BT: Tensor | None = None
    """Entropy (nats) of the policy at each token; with gradient where `Loss.needs_entropy_gradient`,
    otherwise only reported."""
    right_BT: Tensor | None = None
    """Whether each token is the one that the policy finds likeliest; there where `Loss.needs_accuracy`."""
    reference_logprobs_BT: Tensor | None = None
    """By the reference policy; needed where `Loss.needs_reference`."""
    proximal_logprobs_BT: Tensor | None = None
    """By the learner at the start of the batch; None: this is its first update, so they are the policy's own."""
    others: Others | None = None
    """None: each row is a whole rollout."""
    credits_BT: Tensor | None = None
    """`Row.credits` of each row; needed by the loss `given` alone."""

    @property
    def proximal_logprobs(self) -> Tensor:
        """[B, T], without gradient."""
        found = self.proximal_logprobs_BT
        return (self.policy_logprobs_BT if found is None else found).detach()

    def __post_init__(self) -> None:
        per_token = (
            self.policy_logprobs_BT,
            self.sampling_logprobs_BT,
            self.entropies_BT,
            self.right_BT,
            self.reference_logprobs_BT,
            self.proximal_logprobs_BT,
            self.credits_BT,
        )
        shape = tuple(self.mask_BT.shape)
        assert len(shape) == 2, f"the mask is {shape}, it should be (rows, tokens)"
        for values in per_token:
            assert values is None or tuple(values.shape) == shape, (tuple(values.shape), shape)
        for values in (self.advantages_B, self.scales_B):
            assert tuple(values.shape) == shape[:1], (tuple(values.shape), shape[:1])


@dataclass(frozen=True, slots=True)
class LossResult:
    """Sums over a batch, as scalar tensors; those of several batches add up to those of the whole."""

    components: dict[str, Tensor]
    """With gradient. The learner minimises `Σ components[name] / denominators[name]`."""
    stats: dict[str, Tensor]
    """Without gradient, over tokens that teach.

    `tokens` counts them; divided by it, these are means, each there where it makes sense: `ratio`;
    `clip_low`, `clip_high` and `clip_delta` (tokens whose gradient that bound removed; in `cispo`,
    whose weight it capped); `logprob_gap` (|policy - sampling|, nats); `kl` (nats, before beta);
    `entropy` (nats); `right` (tokens that are the likeliest ones); `importance_sampling_ratio` (the weight between sampler and learner) and
    `importance_sampling_clipped` (tokens whose weight was truncated or masked).
    """


class Loss(Protocol):
    """Log-probabilities to loss: all that a learner knows of."""

    name: ClassVar[str]
    """As in configs and in `LossSpec.name`."""

    @property
    def needs_reference(self) -> bool:
        """Whether rows must carry the reference's log-probabilities."""
        ...

    @property
    def needs_proximal(self) -> bool:
        """Whether the learner's log-probabilities at the start of the batch matter: rows carry them, but in its first update need not."""
        ...

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the batch must have entropies, and with gradient."""
        ...

    @property
    def needs_accuracy(self) -> bool:
        """Whether the batch must say which tokens are the likeliest ones."""
        ...

    def loss_spec(self) -> LossSpec:
        """This loss as plain data; `registry.from_spec` is the inverse."""
        ...

    def loss(self, batch: TokenBatch) -> LossResult:
        """The undivided sums of a batch. Raises ValueError if the batch lacks what is needed."""
        ...


class Algorithm(Loss, Protocol):
    """Groups to weights, log-probabilities to loss."""

    @property
    def ratio_of_rollout(self) -> bool:
        """Whether the ratio is one for a rollout, so that a row must know those of its other rows."""
        ...

    @property
    def resample_rounds(self) -> int:
        """How often groups that are not accepted are drawn anew in a step; 0: never."""
        ...

    def shaped(self, group: Group, max_completion_length: int) -> Group:
        """The scored group with what the algorithm adds to its rewards, as a part of its own.

        To be called once, before the group is stored: the logged total is the trained one.
        """
        ...

    def accepts(self, group: Group) -> bool:
        """Whether a shaped group is worth training; otherwise another is drawn in its place."""
        ...

    def check(self, longest: int, rewards: Sequence[str]) -> None:
        """Raise ValueError where a knob does not go with the length (tokens) of a run's rollouts, and
        TaskError where a reward does not go with the algorithm.

        `longest` is what the policy may write in one rollout, `rewards` the names of those known.
        """
        ...

    def weights(self, groups: Sequence[Group]) -> tuple[tuple[RolloutCredit | None, ...], ...]:
        """Credit for the rollouts of a step: for each group a tuple in the order of its rollouts.

        None for rollouts that do not teach.
        """
        ...

    def denominators(self, groups: Sequence[Group], max_completion_length: int) -> dict[str, float]:
        """What each loss component of a step is divided by; 0 where none of its groups was scored."""
        ...

    def teaches(self, weights: Sequence[RolloutCredit | None]) -> bool:
        """Whether rows with these weights can have a gradient; otherwise they need no computing."""
        ...

    def adapted(self, kl: float, rollouts: int) -> Self:
        """The algorithm for the next step, given the mean KL (nats per token) of this one."""
        ...
