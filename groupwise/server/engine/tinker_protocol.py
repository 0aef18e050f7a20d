"""The engine's interface for the Tinker API: several trained adapters over shared bases, each driven step by step by a client.

The engine holds the models, does not decide the order of their calls, and remembers the saved weights. Its drivers (`training.py`,
`sampling.py`) call the methods of one model one at a time, in the order of the client's sequence numbers; calls of different models, and
samples, run concurrently. Saved weights (`Stored`) belong to the model that saved them, outlive that model, and are found again after a
restart of the engine. A call may be repeated if it is unknown whether it was done: by its number, `call`, the engine recognises what it has
already saved.

Errors: `UsageError` if the call itself is wrong (nothing was done, and the client receives the message), any other `GroupwiseError` if it
failed while running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from groupwise.core.errors import UsageError
from groupwise.core.types import (
    Completion,
    LossSpec,
    OptimiserParams,
    Row,
    SamplingParams,
    TopTokens,
    UpdateResult,
)

StoredKind = Literal["weights", "sampler_weights"]
"""`weights`: adapter and optimiser state, to train on. `sampler_weights`: only what a sampler needs."""


class NoRoom(UsageError):
    """Models of other clients take the room; it becomes free when their sessions end."""


@dataclass(frozen=True, slots=True)
class Base:
    """A base model that this engine serves."""

    name: str
    longest: int
    """Longest sample in tokens, prompt and completion together."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a completion if the client names none."""
    architecture: str
    tokenizer: str
    """A hub id from which clients load the tokenizer; for a model that is not from a hub, the folder with its files on this machine."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A new LoRA adapter on a base."""

    base: str
    rank: int
    seed: int
    """Seed for the adapter's initial weights."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class Stored:
    """Weights that a model saved under a name."""

    model: str
    kind: StoredKind
    name: str


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a forward pass over some rows."""

    logprobs: tuple[tuple[float, ...], ...]
    """Log-probability (nats) of every target of each row (`Row.target_ids`), even if its mask is 0; computed before the update, without
    dropout."""
    sums: Mapping[str, float]
    """Sums from `Learner.forward_backward`: `loss/<component>` undivided, and the statistics of the loss."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A prompt to complete once for each seed."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    params: SamplingParams
    prompt_logprobs: bool = False
    """Also return the log-probability of each prompt token."""
    prompt_top: int = 0
    """Also return so many most likely tokens in place of each prompt token; 0: none."""
    completion_top: int = 0
    """Also return so many most likely tokens in place of each drawn one; 0: none."""
    prompt_targets: tuple[int, ...] = ()
    """Also return the log-probabilities of these ids: K in place of each prompt token from the second on, those for one token after those
    for the one before it. -1: none."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The completions in the order of the seeds."""

    completions: tuple[Completion, ...]
    prompt_logprobs: tuple[float, ...] | None = None
    """Log-probabilities at temperature 1, from the prompt's second token on; one fewer than the prompt has tokens."""
    prompt_top: TopTokens | None = None
    """Log-probabilities at temperature 1, from the prompt's second token on."""
    completion_tops: tuple[TopTokens, ...] | None = None
    """The most probable tokens of completions, at the temperature of the sample (1 for 0), before `top_k`, `top_p` and `min_p` apply."""
    target_logprobs: tuple[float, ...] | None = None
    """Log-probabilities at temperature 1, as many as `SampleRequest.prompt_targets`; 0 for -1."""


class TinkerEngine(Protocol):
    """See the module."""

    def names(self) -> tuple[str, ...]:
        """Names of the base models currently available."""
        ...

    def admit(self, base: str) -> None:
        """Raise UsageError if this base model cannot be loaded now, and NoRoom while other clients' models take up the memory."""
        ...

    async def base(self, name: str) -> Base:
        """A base model that may be used; it is loaded if it is not yet in memory."""
        ...

    def context_length(self, name: str) -> int | None:
        """Longest sample of a base in tokens, prompt and completion together; None if only an engine could tell."""
        ...

    async def tokenizer_folder(self, name: str) -> Path:
        """Folder with the tokenizer's files of a base; it is loaded if need be. UsageError if its files are on the hub alone."""
        ...

    async def create_model(self, model: str, spec: ModelSpec) -> None:
        """Create an adapter, named by the caller. NoRoom if the engine already holds the maximum number; UsageError if it has no such
        base.
        """
        ...

    async def drop(self, model: str) -> None:
        """Release a model; its saved weights stay. A missing model is not an error."""
        ...

    async def forward(self, model: str, rows: Sequence[Row], loss: LossSpec) -> Computed:
        """Compute log-probabilities and the sums of the loss, without a gradient."""
        ...

    async def forward_backward(self, model: str, rows: Sequence[Row], loss: LossSpec) -> Computed:
        """Add the gradient of the undivided loss (denominators 1) to the accumulated one."""
        ...

    async def optim_step(
        self, model: str, params: OptimiserParams, keep_as: int | None = None
    ) -> UpdateResult:
        """Clip, update, and clear the gradient. Counts as one step of the model's record.

        With `keep_as`, the number of this call, the state after the update is kept, and the model can be recreated from it.
        """
        ...

    async def save_state(self, model: str, name: str, *, overwrite: bool, call: int) -> None:
        """Save adapter and optimiser as `Stored(model, "weights", name)`. UsageError if the name is taken, unless `overwrite`."""
        ...

    async def load_state(
        self, model: str, stored: Stored, *, with_optimiser: bool, keep_as: int
    ) -> None:
        """Load these weights and discard a pending gradient. The optimiser is reset unless it is loaded as well.

        UsageError if the weights are missing, are for samplers only, or do not fit the model.
        """
        ...

    async def save_for_sampler(self, model: str, name: str, call: int) -> None:
        """Save the current adapter as `Stored(model, "sampler_weights", name)`; UsageError if the name is taken."""
        ...

    async def drop_sampler(self, stored: Stored) -> None:
        """Delete sampler weights that can no longer be named; missing ones are not an error."""
        ...

    async def saved(self, stored: Stored) -> ModelSpec:
        """The spec of the model that saved these weights. If they are missing, raises UsageError with a list of the existing ones."""
        ...

    async def sample(self, weights: Stored | str, request: SampleRequest) -> SampleResult:
        """Complete a prompt with stored weights of either kind, or with the base of that name. Cancelling frees its slots.

        UsageError: the weights are missing, the prompt is empty or too long, or the parameters are impossible.
        """
        ...
