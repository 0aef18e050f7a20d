"""What the verbs ask of an engine: several trained adapters over shared bases, each driven step by step by a client.

The engine holds models, decides nothing about their order, and remembers what was saved. Whoever drives it (`training.py`, `sampling.py`)
calls the verbs of one model one after another, in the order of the client's sequence; those of different models, and samples, are under way
at once. What is saved (`Stored`) belongs to the model that saved it, outlives that model, and is found again after a restart of the engine.
A call may come again where nobody knows whether it was done: `call` is its number, by which what it has saved already is recognised as its
own.

Errors: `UsageError` for what was asked wrongly (nothing was done; the client is told that it is its own fault), any other
`GroupwiseError` for what failed on its way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from groupwise.core.types import (
    Completion,
    LossSpec,
    OptimiserParams,
    Row,
    SamplingParams,
    UpdateResult,
)

StoredKind = Literal["weights", "sampler_weights"]
"""`weights`: adapter and optimiser, to train on. `sampler_weights`: what a sampler needs, no more."""


@dataclass(frozen=True, slots=True)
class Base:
    """A base model that this engine serves."""

    name: str
    longest: int
    """Tokens of prompt and completion together."""
    stop_token_ids: tuple[int, ...]
    """What ends a completion where the client names nothing."""
    architecture: str
    tokenizer: str
    """Where the client's own library finds the tokenizer: a hub id, or a folder that both see."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A new LoRA adapter on a base."""

    base: str
    rank: int
    seed: int
    """Of the numbers that the adapter begins with."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class Stored:
    """Weights that a model saved under a name of its own."""

    model: str
    kind: StoredKind
    name: str


@dataclass(frozen=True, slots=True)
class Computed:
    """What a forward pass made of some rows."""

    logprobs: tuple[tuple[float, ...], ...]
    """Of each row, the log-probability (nats) of every completion token, also where the mask is 0; those before the update, without
    dropout's noise where there is any."""
    sums: Mapping[str, float]
    """As `Learner.forward_backward` returns them: `loss/<component>` undivided, and the statistics of the loss."""


@dataclass(frozen=True, slots=True)
class VerbSample:
    """A prompt to be completed once for each seed."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    params: SamplingParams
    prompt_logprobs: bool = False
    """Whether to tell the log-probability of each token of the prompt, too."""


@dataclass(frozen=True, slots=True)
class VerbSampled:
    """The completions in the order of the seeds."""

    completions: tuple[Completion, ...]
    prompt_logprobs: tuple[float, ...] | None = None
    """At temperature 1, of the second token of the prompt and all after it; one fewer than the prompt has."""


class VerbEngine(Protocol):
    """See the module."""

    def names(self) -> tuple[str, ...]:
        """Of the base models that may be asked for now."""
        ...

    def admit(self, base: str) -> None:
        """UsageError where a base model may not be asked for now."""
        ...

    async def base(self, name: str) -> Base:
        """A base model that may be asked for; it is loaded where it is not in memory yet."""
        ...

    async def create_model(self, model: str, spec: ModelSpec) -> None:
        """A new adapter, named by the caller. UsageError where there are as many as the engine holds, or no such base."""
        ...

    async def drop(self, model: str) -> None:
        """Let go of a model; what it saved stays. One that is not there is no error."""
        ...

    async def forward(self, model: str, rows: Sequence[Row], loss: LossSpec) -> Computed:
        """Log-probabilities, and the sums of the loss, without a gradient."""
        ...

    async def forward_backward(self, model: str, rows: Sequence[Row], loss: LossSpec) -> Computed:
        """Add the gradient of the undivided loss (denominators 1) to what is there already."""
        ...

    async def optim_step(
        self, model: str, params: OptimiserParams, keep_as: int | None = None
    ) -> UpdateResult:
        """Clip, update, and clear the gradient. Counts as one step of the model's record.

        With `keep_as`, the number of this call, the model can be made again as it is then.
        """
        ...

    async def save_state(self, model: str, name: str, *, overwrite: bool, call: int) -> None:
        """Keep adapter and optimiser as `Stored(model, "weights", name)`. UsageError where the name is taken, unless `overwrite`."""
        ...

    async def load_state(
        self, model: str, stored: Stored, *, with_optimiser: bool, keep_as: int
    ) -> None:
        """Take these weights; a pending gradient is discarded, and the optimiser begins anew unless it is loaded, too.

        UsageError where there are none, where they are for samplers alone, or do not fit the model.
        """
        ...

    async def save_for_sampler(self, model: str, name: str, call: int) -> None:
        """Keep the adapter as it is now as `Stored(model, "sampler_weights", name)`; UsageError where the name is taken."""
        ...

    async def drop_sampler(self, stored: Stored) -> None:
        """Forget sampler weights that nobody can name any more; ones that are not there are no error."""
        ...

    async def saved(self, stored: Stored) -> ModelSpec:
        """What kind of model saved it; UsageError where it is not there, with what is."""
        ...

    async def sample(self, weights: Stored | str, order: VerbSample) -> VerbSampled:
        """Complete a prompt with stored weights of either kind, or with the base of that name. Cancelling frees its slots.

        UsageError: no such weights, a prompt that is empty or too long, parameters that cannot be.
        """
        ...
