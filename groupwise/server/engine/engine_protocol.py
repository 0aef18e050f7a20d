"""The training server's interface to an engine: plain data, which crosses a socket.

An engine holds one model and at most one run at a time. It samples groups, takes steps with groups that clients have rewarded, and
writes the run's folder; it decides nothing. Its driver (the HTTP process) has every request on disk before it asks, so that an
engine may end at any instant: its successor opens the run at its last checkpoint and is asked for the later steps again.

Errors: `UsageError` if the call itself is wrong (nothing was done; `WrongOrder` names the field of a `SampleOrder`), `RunError` if it
failed on its way, `EngineLost` if the engine ended or was ended before it answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from groupwise.api.schemas.parts import PartsKind
from groupwise.core.errors import RunError, UsageError
from groupwise.core.types import Group, Policy, Prompt
from groupwise.runs.records import StepRecord


class EngineLost(RunError):
    """The engine ended before it answered. The call may or may not have been carried out; the successor knows."""

    code = "engine_lost"


OrderField = Literal["prompt", "prompt_ids", "max_tokens", "min_tokens", "temperature"]
"""Fields of a `SampleOrder`, or of its `Sampling`, that a client may have got wrong."""


class WrongOrder(UsageError):
    """A prompt that cannot be completed with these settings."""

    def __init__(self, message: str, field: OrderField, code: str = UsageError.code) -> None:
        """`code`: the code of the client's problem, if it has one of its own."""
        super().__init__(message)
        self.field: OrderField = field
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return WrongOrder, (self.message, self.field, self.code)


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run to begin, or to continue."""

    config: Mapping[str, Any]
    """Config for `groupwise.training.config.load_config`: model, lora, sampler, algorithm, training, run."""
    longest_prompt: int
    """Tokens that a prompt may have; with the longest completion it decides the decode shape."""
    run: str | None = None
    """The name of the run to continue; None: a new one, named by `config["run"]["name"]` (with `-2`, `-3` … where finished runs
    have it)."""
    start_from: str | None = None
    """The folder of a checkpoint with whose weights and optimiser a new run begins."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A run that is ready."""

    run: str
    folder: str
    step: int
    """Steps that are done: those of the checkpoint from which it continues; 0 for a new one."""
    max_steps: int
    policy: Policy
    """The policy that serves now."""
    manifests: tuple[StepRecord, ...]
    """Records of all steps committed before. Those after the checkpoint are undone and must be taken again."""
    longest_prompt: int
    longest_completion: int
    tokenizer_hash: str
    stop_token_ids: tuple[int, ...] = ()
    """Any of these ends a completion."""
    inexact: str | None = None
    """Why retrained steps may differ in their last bits (a GPU, another layout); None if they repeat exactly."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of one request; None: the run's own."""

    temperature: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    top_p: float | None = None
    """Like the next two, allowed only if nothing is learnt from the group."""
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    """Replaces the seeds that follow from the draw: the same seed gives the same completions, whatever the draw."""


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """One prompt to complete."""

    draw: int
    """Position in the order of draws; the seeds follow from it. Identifies the request among those under way."""
    prompt: Prompt
    members: int | None = None
    """None: as many as the run's groups have."""
    sampling: Sampling = field(default_factory=Sampling)
    prompt_ids: tuple[int, ...] | None = None
    """The prompt as the client has tokenised it; refused with UsageError if the engine's own ids for `prompt` differ."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values for the chat template beside the messages, by column; see `groupwise.api.schemas.template_columns`."""
    trains: bool = True
    """True if the group may be trained on; then restricted sampling (top_p, top_k, min_p) is refused with UsageError."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A group whose rollouts are pending, and the policy that drew it."""

    group: Group
    step: int
    """Steps done when it was sampled."""
    version: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The next step to take."""

    step: int
    groups: tuple[Group, ...]
    """Groups in training order; every rollout is scored, or failed with a reason."""
    learning_rate: float | None = None
    """None: as the run's schedule has it at this step."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A committed step."""

    record: StepRecord
    metrics: Mapping[str, float]
    policy: Policy
    """The policy that serves from now on."""
    oldest_checkpoint: int = 0
    """The steps of the oldest checkpoint that is kept, 0 if there is none: no step before it will ever have to be taken again."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of the run."""

    step: int
    path: str


@dataclass(frozen=True, slots=True)
class Probe:
    """The state of the engine."""

    phase: str
    memory: int | None
    """Peak memory of all its processes in bytes; None if the system does not say."""
    sampling: int
    """Requests that are being sampled."""
    sampled_tokens: int
    """Since it began."""


@dataclass(frozen=True, slots=True)
class OpenModels:
    """A base over which verbs (`groupwise.server.tinker`) train models, beside a run or without one."""

    base: str
    """Model to load, as in `model.name` of a config."""
    folder: str
    """Folder in which the models save."""
    most: int
    """Models in memory at once, a run among them."""
    longest: int
    """Tokens of prompt and completion that can be sampled, if the base is loaded for the models alone."""


@dataclass(frozen=True, slots=True)
class OpenParts:
    """Sampler and learner for a loop that runs elsewhere; see `groupwise.server.engine.hosted_parts`."""

    kind: PartsKind
    config: Mapping[str, Any]
    """The sections of a run's config that its parts are made by, for this machine."""
    run: str
    """Name given to policies."""
    folder: str
    """The parts' folder: published, sent and saved weights."""
    longest_prompt: int | None
    """Tokens; None if nothing is sampled."""
    weights: str | None = None
    """Folder served by `serving`; None: the base, with the config's adapter if it has one."""
    base: str | None = None
    """The fingerprint of the model that the loop means; None: any."""


@dataclass(frozen=True, slots=True)
class PartsOpened:
    """Parts that are ready."""

    stop_token_ids: tuple[int, ...]
    layout: Mapping[str, Any]
    """Fields of `groupwise.training.placement.Layout`."""
    fingerprint: str
    """Fingerprint of the weights that the sampler serves; empty if there are none."""
    tells_trained_logprobs: bool = True
    """Tells clients that this server can, because earlier versions cannot."""


class Engine(Protocol):
    """See the module. All calls may be under way at once, but `step`, `open`, `save` and `close_run` are taken one after another."""

    async def open(self, order: OpenRun) -> Opened:
        """Begin a run or continue one. Raises UsageError if config, model or checkpoint are wrong, and leaves nothing behind."""
        ...

    async def sample(self, order: SampleOrder) -> Sampled:
        """Complete a prompt by the policy that serves. Cancelling the call frees its slots.

        UsageError: a prompt that is too long or empty, parameters that cannot be.
        """
        ...

    async def partial(self, draw: int) -> tuple[str, ...]:
        """The text that each member of a request under way has written so far: its beginning, without special tokens and without a
        character that is not whole yet; none if the request is unknown.
        """
        ...

    async def token_texts(self, token_ids: tuple[int, ...]) -> tuple[str, ...]:
        """Each token as text by itself, special ones by their name; U+FFFD where it is not a whole character."""
        ...

    async def step(self, plan: Plan) -> StepDone:
        """Learn, publish and commit. RunError if the plan is not that of the next step."""
        ...

    async def metrics_of(self, step: int) -> Mapping[str, float]:
        """Metrics of a committed step, also of one that the opening has undone; empty if it is unknown."""
        ...

    async def save(self) -> Saved:
        """Write a checkpoint of the steps done."""
        ...

    async def tokens_of(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's tokens as the model sees them."""
        ...

    async def tokenizer_files(self) -> Mapping[str, bytes]:
        """The files of the tokenizer and its chat template, by name; their hash is `Opened.tokenizer_hash`."""
        ...

    async def close_run(self, finished: bool) -> str:
        """Save a checkpoint, and the final weights of a finished run; returns the run's folder. Sampling goes on until another run is
        opened."""
        ...

    async def probe(self) -> Probe:
        """The state of the engine."""
        ...

    async def lost(self) -> EngineLost:
        """Wait until the engine ends by itself, and return how."""
        ...

    async def close(self) -> None:
        """End the engine with all of its processes; an open run is left as it is."""
        ...
