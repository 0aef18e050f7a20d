"""Our losses as Tinker computes them, and our statistics of what it computed.

The service knows four losses by name, each a sum over tokens with a number for each of them:

    cross_entropy         −Σ weight · log-probability                                     sft
    importance_sampling   −Σ advantage · ratio                                            given (ratio)
    ppo                   −Σ min(ratio · advantage, clip(ratio) · advantage)              grpo, dr_grpo, dapo, reinforce_pp
    cispo                 −Σ sg[clip(ratio)] · advantage · log-probability                cispo

A row's scale and the step's denominator are factors of that number, so the service's sum is our loss. Any other loss is computed here from
the service's log-probabilities (`forward_backward_custom`): a KL penalty, an importance correction, a ratio of a whole rollout, a two-sided
clip. That costs a second forward pass at the service.

A service that averages (`groupwise.engine.backends.tinker.capabilities`) divides a datum's loss by its number of targets, and the gradient
by the number of datums. Numbers are multiplied by both, so that its mean is our sum. The weights of its cross_entropy cancel in the mean,
so that `cispo` with the ratio clipped to 1 takes its place, or `importance_sampling` after a pass whose log-probabilities make each ratio
1.

A row of P prompt and C completion tokens is a datum of P + C − 1 inputs and as many targets, the next tokens. Prompt positions have the
number 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from groupwise.algorithms.base import Loss, LossResult
from groupwise.algorithms.cispo import Cispo
from groupwise.algorithms.clipped import Clipped
from groupwise.algorithms.given import Given
from groupwise.algorithms.sft import Sft
from groupwise.core.errors import EndpointError
from groupwise.core.types import Row
from groupwise.engine.backends.tinker.capabilities import LOSSES, Capabilities
from groupwise.engine.learner.layout import longest_completion
from groupwise.engine.learner.targets import ForwardResult
from groupwise.engine.learner.torch_learner import token_batch

TINKER = Capabilities()
"""The losses that Tinker's documentation names."""
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
"""Settings of `ppo` and `cispo`: bounds of the ratio itself, such as 0.8 and 1.2."""


@dataclass(frozen=True, slots=True)
class NamedLoss:
    """A loss that the service computes itself."""

    name: str
    settings: dict[str, float]
    """The argument `loss_fn_config`."""

    @property
    def sampled(self) -> bool:
        """True if it takes the sampler's log-probabilities, and calls a token's number its advantage."""
        return self.name != "cross_entropy"


WEIGHTED = NamedLoss("cispo", {LOW: 1.0, HIGH: 1.0})
"""−Σ advantage · log-probability, which is what cross_entropy computes, with advantages in place of weights."""
RATIO = NamedLoss("importance_sampling", {})


def named_loss(loss: Loss, capabilities: Capabilities = TINKER) -> NamedLoss | None:
    """The service's loss that is this one; None if it has none."""
    named = _documented_loss(loss)
    if named is not None and capabilities.averages and named.name == "cross_entropy":
        named = WEIGHTED
    return (
        named if named is not None and capabilities.computes(named.name, named.settings) else None
    )


def _documented_loss(loss: Loss) -> NamedLoss | None:
    if isinstance(loss, Sft):
        return NamedLoss("cross_entropy", {})
    if isinstance(loss, Given):
        clips = loss.surrogate in ("clipped_ratio", "clipped_weight")
        settings = {LOW: loss.clip_low, HIGH: loss.clip_high} if clips else {}
        return NamedLoss(LOSSES[loss.surrogate], settings)
    if loss.needs_reference or loss.needs_entropy_gradient or loss.needs_proximal:
        return None
    if isinstance(loss, Cispo):
        return NamedLoss("cispo", {LOW: 0.0, HIGH: 1 + loss.epsilon_high})
    if not isinstance(loss, Clipped) or loss.delta is not None:
        return None
    # Subclasses that clip the ratio of a whole rollout override one of the two.
    overrides = (type(loss).surrogate, type(loss).own_log_ratio)
    if overrides != (Clipped.surrogate, Clipped.own_log_ratio):
        return None
    low, high = loss.clip
    return NamedLoss("ppo", {LOW: max(low, 0.0), HIGH: high})


def token_numbers(row: Row, loss: Loss, denominators: Mapping[str, float]) -> tuple[float, ...]:
    """The number of each completion token for the service's loss: its weight or advantage, times scale, over the denominator."""
    component = Sft.name if isinstance(loss, Sft) else "policy"
    denominator = denominators[component]
    if isinstance(loss, Given):
        assert row.credits is not None, "the loss `given` needs the credit of each token"
        values: Sequence[float] = row.credits
    elif isinstance(loss, Sft):
        values = (row.scale,) * len(row.completion_ids)
    else:
        advantages = row.credits or (row.advantage,) * len(row.completion_ids)
        values = [advantage * row.scale for advantage in advantages]
    pairs = zip(values, row.mask, strict=True)
    return tuple(
        value / denominator if denominator and trained else 0.0 for value, trained in pairs
    )


def undo_averages(
    numbers: Sequence[float], row: Row, datums: int, capabilities: Capabilities = TINKER
) -> tuple[float, ...]:
    """A row's numbers, multiplied by what the service will divide by; `datums` counts the rows of the update."""
    if not capabilities.averages:
        return tuple(numbers)
    divided_by = (len(row.prompt_ids) + len(row.completion_ids) - 1) * datums
    return tuple(number * divided_by for number in numbers)


def datum(package: Any, row: Row, loss: NamedLoss | None, numbers: Sequence[float] | None) -> Any:
    """A row as `tinker.Datum`. `numbers` of the completion's tokens; None: all 0. Without a loss: as `cross_entropy` takes it."""
    assert row.prompt_ids, "the first token of a datum has no log-probability"
    assert row.temperature == 1.0, "the service computes log-probabilities at temperature 1"
    assert not row.withheld, "the service cannot leave out ids"
    tokens = [*row.prompt_ids, *row.completion_ids]
    before = [0.0] * (len(row.prompt_ids) - 1)
    values = [*before, *(numbers or [0.0] * len(row.completion_ids))]
    inputs: dict[str, list[Any]] = {"target_tokens": tokens[1:]}
    if loss is not None and loss.sampled:
        # A token without number has no ratio either: its own log-probability may be anything, but must be finite.
        pairs = zip(row.sampling_logprobs, row.mask, strict=True)
        sampled = [value if trained else 0.0 for value, trained in pairs]
        inputs |= {"logprobs": [*before, *sampled], "advantages": values}
    else:
        inputs["weights"] = values
    return package.Datum(
        model_input=package.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs
    )


def completion_logprobs(rows: Sequence[Row], output: Any) -> list[tuple[float, ...]]:
    """Log-probabilities of each row's completion tokens from the service's output. Raises EndpointError if some are missing."""
    logprobs: list[tuple[float, ...]] = []
    all_outputs: list[Mapping[str, Any]] = list(output.loss_fn_outputs)
    for index, row in enumerate(rows):
        length = len(row.prompt_ids) + len(row.completion_ids) - 1
        outputs: Mapping[str, Any] = all_outputs[index] if index < len(all_outputs) else {}
        values = tuple(map(float, outputs["logprobs"].data)) if "logprobs" in outputs else ()
        if len(values) != length:
            raise EndpointError(
                f"The Tinker service returned {len(values)} log-probabilities for datum {index} of {len(rows)}, which has {length} targets."
            )
        logprobs.append(values[len(row.prompt_ids) - 1 :])
    return logprobs


@dataclass(frozen=True, slots=True)
class _AllRows:
    """All rows as one batch (`groupwise.engine.learner.layout.Batch`): only numbers per token are computed here, no model."""

    rows: tuple[Row, ...]

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(range(len(self.rows)))

    @property
    def width(self) -> int:
        return longest_completion(self.rows)


def loss_of(rows: Sequence[Row], logprobs: Sequence[Tensor], loss: Loss) -> LossResult:
    """Our loss and its statistics; `logprobs` of each row's completion tokens, and the loss has a gradient with respect to them."""
    logprobs_BT = torch.nn.utils.rnn.pad_sequence(list(logprobs), batch_first=True)
    no_entropies_BT = torch.zeros_like(logprobs_BT)
    batch = token_batch(_AllRows(tuple(rows)), ForwardResult(logprobs_BT, no_entropies_BT))
    return loss.loss(replace(batch, entropies_BT=None))


def sums_of(result: LossResult) -> dict[str, float]:
    """The sums that `groupwise.core.types.Learner.forward_backward` returns."""
    components = {f"loss/{name}": value for name, value in result.components.items()}
    sums = {**components, **result.stats}
    return {name: float(value.detach()) for name, value in sums.items()}


def total_of(result: LossResult, denominators: Mapping[str, float]) -> Tensor:
    """The scalar to minimise: `Σ component / denominator`."""
    parts = [
        value / denominators[name] if denominators[name] else value * 0.0
        for name, value in result.components.items()
    ]
    return torch.stack(parts).sum()


def descent(total: Tensor, logprobs: Sequence[Tensor]) -> list[list[float]]:
    """Minus the slope of the total loss in each log-probability: a positive number raises it."""
    slopes = torch.autograd.grad(total, [*logprobs], allow_unused=True, materialize_grads=True)
    return [[*map(float, -slope)] for slope in slopes]
