"""What an algorithm is: two pieces of maths that meet in the learner, and know nothing of machines.

The loop calls the first half, on plain records: `weights` turns the rewards of a group into credit
for each rollout, and `denominators` says what the sums of the whole step are divided by. The
learner calls the second half, on tensors: `loss` turns a batch of log-probabilities into undivided
sums. Because sums add up and the denominators are those of the whole step, the gradient does not
depend on how the rows were cut into batches or spread over machines.

An algorithm is a frozen dataclass whose fields are its knobs. Each knob describes itself in its
field's metadata: `description`, and where it has a range `ge`, `gt` or `le`. Tensors are used
through their methods only, so that nothing here imports torch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, get_args, get_origin, get_type_hints

from groupwise.types import Group, LossSpec, Weight

Tensor: TypeAlias = Any
"""A torch tensor, float32 or wider; the name ends with its axes (B rows, T completion tokens)."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows as tensors, padded to one length. Where the mask is 0 nothing has an effect, even NaN."""

    policy_logprobs_BT: Tensor
    """By the learner now; the only tensor that carries a gradient."""
    sampling_logprobs_BT: Tensor
    """By the sampler when it sampled."""
    mask_BT: Tensor
    """1 (or True) for tokens that teach, 0 for all others."""
    advantages_B: Tensor
    """`Weight.advantage` of each row."""
    scales_B: Tensor
    """`Weight.scale` of each row."""
    entropies_BT: Tensor | None = None
    """Entropy (nats) of the policy at each token; only reported."""
    reference_logprobs_BT: Tensor | None = None
    """By the reference policy; needed where `Algorithm.needs_reference`."""

    def __post_init__(self) -> None:
        per_token = (
            self.policy_logprobs_BT,
            self.sampling_logprobs_BT,
            self.entropies_BT,
            self.reference_logprobs_BT,
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

    `tokens` counts them; divided by it, these are means: `ratio`, `clip_low` and `clip_high` (tokens
    whose gradient the clip removed), `logprob_gap` (|policy - sampling|, nats), and where the batch
    has what they need, `kl` (nats, before beta) and `entropy` (nats).
    """


class Algorithm(Protocol):
    """Groups to weights, log-probabilities to loss."""

    name: ClassVar[str]
    """As in configs and in `LossSpec.name`."""

    @property
    def needs_reference(self) -> bool:
        """Whether rows must carry the reference's log-probabilities."""
        ...

    def weights(self, group: Group) -> tuple[Weight | None, ...]:
        """Credit for each of `group.rollouts`, in their order; None for those that do not teach."""
        ...

    def denominators(self, groups: Sequence[Group], max_completion_length: int) -> dict[str, float]:
        """What each loss component of a step is divided by; 0 where none of its groups was scored."""
        ...

    def teaches(self, weights: Sequence[Weight | None]) -> bool:
        """Whether rows with these weights can have a gradient; otherwise they need no computing."""
        ...

    def loss_spec(self) -> LossSpec:
        """This algorithm as plain data; `registry.from_spec` is the inverse."""
        ...

    def loss(self, batch: TokenBatch) -> LossResult:
        """The undivided sums of a batch."""
        ...


_RANGES: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "ge": ("at least", operator.ge),
    "gt": ("greater than", operator.gt),
    "le": ("at most", operator.le),
}


def check_knobs(algorithm: Any) -> None:
    """Raise ValueError, naming the knob, for a value of the wrong type or out of range."""
    hints = get_type_hints(algorithm.__class__)
    for knob in fields(algorithm):
        value = getattr(algorithm, knob.name)
        expected = _unmet(value, hints[knob.name], knob.metadata)
        if expected is not None:
            raise ValueError(f"{algorithm.name}.{knob.name} is {value!r}; it must be {expected}.")


def _unmet(value: Any, hint: Any, limits: Mapping[str, Any]) -> str | None:
    """What `value` should have been, or None if it is that."""
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return None if value in options else "one of " + ", ".join(map(repr, options))
    if hint is bool:
        return None if isinstance(value, bool) else "true or false"
    if value is None and type(None) in options:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "a finite number" + (" or null" if type(None) in options else "")
    return _out_of_range(value, limits)


def _out_of_range(value: float, limits: Mapping[str, Any]) -> str | None:
    for key, (words, holds) in _RANGES.items():
        if key in limits and not holds(value, limits[key]):
            return f"{words} {limits[key]}"
    return None
