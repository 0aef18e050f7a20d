"""The training server's interface to an engine. All arguments and results are plain data, because they cross a socket.

An engine holds one model and at most one run at a time. It samples groups, takes steps with groups that clients have rewarded, and writes
the run's folder; it makes no decisions. Its driver (the HTTP process) has every request on disk before it calls the engine, so an engine
may end at any moment: its successor opens the run at its last checkpoint, and the driver repeats the later steps.

Errors: `UsageError` if the call itself is wrong (nothing was done; `InvalidSampleRequest` names the field of a
`GroupSampleRequest`), `RunError` if it failed while running, `EngineLost` if the engine ended or was killed before it answered.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from groupwise.api.schemas.parts import PartsKind
from groupwise.core.errors import RunError, UsageError
from groupwise.core.types import (
    Group,
    Policy,
    Prompt,
    PromptLogprobs,
    RewardPart,
    Rollout,
    TopLogprobs,
)
from groupwise.runs.records import StepRecord
from groupwise.tasks.openai.sampling import OrderField, Sampling


class EngineLost(RunError):
    """The engine ended before it answered. The call may or may not have been carried out; the state of the reopened run shows which."""

    code = "engine_lost"


class InvalidSampleRequest(UsageError):
    """A prompt that cannot be completed with these settings."""

    def __init__(self, message: str, field: OrderField, code: str = UsageError.code) -> None:
        """`code`: the problem code for the client, if this error has one of its own."""
        super().__init__(message)
        self.field: OrderField = field
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return InvalidSampleRequest, (self.message, self.field, self.code)


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run to start, or to resume."""

    config: Mapping[str, Any]
    """Config for `groupwise.training.config.load_config`: model, lora, sampler, algorithm, training, run."""
    longest_prompt: int
    """Longest prompt in tokens; together with the longest completion it determines the decode shape."""
    run: str | None = None
    """The name of the run to resume. None starts a new one, named by `config["run"]["name"]` (with `-2`, `-3` … if finished runs have that
    name).
    """
    start_from: str | None = None
    """Folder of a checkpoint whose weights and optimiser state a new run starts with."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A run that is ready."""

    run: str
    folder: str
    step: int
    """Completed steps: those of the checkpoint that the run resumes from; 0 for a new run."""
    max_steps: int
    policy: Policy
    """The policy now served by the sampler."""
    manifests: tuple[StepRecord, ...]
    """Records of all steps committed so far. Those after the checkpoint are undone and must be taken again."""
    longest_prompt: int
    longest_completion: int
    tokenizer_hash: str
    longest_prompt_characters: int = sys.maxsize
    """Upper bound on the characters of a prompt that has at most `longest_prompt` tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Any of these ends a completion."""
    inexact: str | None = None
    """Why steps that are taken again may differ in their last bits (a GPU, another layout); None if they repeat exactly."""
    chat_template: str = ""
    """The model's chat template for conversations with tools; empty if there is none."""


@dataclass(frozen=True, slots=True)
class GroupSampleRequest:
    """One prompt to complete. With `Sampling.max_tokens` 0 nothing is drawn: for `prompt_logprobs` alone."""

    draw: int
    """Position in the order of draws; the seeds are derived from it. Identifies the request among those in progress."""
    prompt: Prompt | tuple[int, ...]
    """Text, messages, or the tokens themselves."""
    members: int | None = None
    """Number of completions. None: the run's group size."""
    sampling: Sampling = field(default_factory=Sampling)
    prompt_ids: tuple[int, ...] | None = None
    """The prompt as the client tokenised it; refused with UsageError if the engine's own ids for `prompt` differ."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values passed to the chat template in addition to the messages, by column; see `groupwise.api.schemas.template_columns`."""
    trains: bool = True
    """True if the group may be trained on; restricted sampling (top_p, top_k, min_p, processing) is then refused with UsageError."""
    top_logprobs: int = 0
    """Also return so many of the most probable tokens at each position of the completions."""
    prompt_logprobs: int | None = None
    """Also return the log-probabilities of the prompt's tokens, with so many of the most probable ones; None: neither."""
    policy_step: int | None = None
    """Sample with the policy after this many steps, or with the nearest one that is kept: the newest, and `staleness` ones before it. None:
    the newest.
    """


@dataclass(frozen=True, slots=True)
class Sampled:
    """A group whose rollouts are not yet scored, and the policy that sampled it."""

    group: Group
    step: int
    """Number of completed steps of the policy that sampled it."""
    version: int
    fingerprint: str
    top_logprobs: tuple[tuple[TopLogprobs, ...], ...] = ()
    """One entry for each member; empty if the request did not ask."""
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The next step to take."""

    step: int
    groups: tuple[Group, ...]
    """Groups in training order; every rollout is scored, or failed with a reason."""
    learning_rate: float | None = None
    """None: the value of the run's schedule at this step."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A committed step."""

    record: StepRecord
    metrics: Mapping[str, float]
    policy: Policy
    """The policy served from now on."""
    oldest_checkpoint: int = 0
    """Step count of the oldest checkpoint that is kept, 0 if there is none. No step before it ever has to be taken again."""
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
    """Peak memory of all its processes in bytes; None if the system does not report it."""
    sampling: int
    """Number of requests being sampled."""
    sampled_tokens: int
    """Tokens sampled since the engine started."""


@dataclass(frozen=True, slots=True)
class OpenModels:
    """A base model over which clients train adapters through the Tinker API (`groupwise.server.tinker`), alongside a run or without one."""

    base: str
    """Model to load, as in `model.name` of a config."""
    folder: str
    """Folder that the models save to."""
    most: int
    """Maximum number of models in memory at once, including a run."""
    longest: int
    """Longest sample in tokens, prompt and completion together, if the base is loaded only for these models."""


@dataclass(frozen=True, slots=True)
class OpenParts:
    """Sampler and learner for a training loop in another process; see `groupwise.server.engine.hosted_parts`."""

    kind: PartsKind
    config: Mapping[str, Any]
    """The sections of a run's config that the parts are built from, adapted to this machine."""
    run: str
    """Run name used in the policies."""
    folder: str
    """The parts' folder: holds published, uploaded and saved weights."""
    longest_prompt: int | None
    """Tokens; None if there is no sampler."""
    weights: str | None = None
    """Folder of the weights that parts of kind `serving` serve; None: the base, with the config's adapter if it has one."""
    base: str | None = None
    """Fingerprint of the base model that the loop expects; None: any."""


@dataclass(frozen=True, slots=True)
class PartsOpened:
    """Parts that are ready."""

    stop_token_ids: tuple[int, ...]
    layout: Mapping[str, Any]
    """Fields of `groupwise.training.placement.Layout`."""
    fingerprint: str
    """Fingerprint of the weights that the sampler serves; empty if there are none."""
    tells_trained_logprobs: bool = True
    """Signals that this server supports `trained_logprobs`; earlier versions do not."""


@runtime_checkable
class CallableEngine(Protocol):
    """An engine whose parts can be called by name."""

    @property
    def reason(self) -> str | None:
        """How the engine ended; None: it has not."""
        ...

    async def call(self, method: str, *arguments: Any) -> Any: ...


class Engine(Protocol):
    """The engine's interface; see the module. Calls may run concurrently, except that `step`, `open`, `save` and `close_run` run one at a
    time.
    """

    async def open(self, request: OpenRun) -> Opened:
        """Start or resume a run. Raises UsageError if config, model or checkpoint are wrong; nothing remains of the run then."""
        ...

    async def sample(self, request: GroupSampleRequest) -> Sampled:
        """Complete a prompt with the current policy. Cancelling the call frees its slots.

        UsageError: the prompt is too long or empty, or the parameters are impossible.
        """
        ...

    async def partial(self, draw: int) -> tuple[str, ...]:
        """The text that each member of a request in progress has written so far, without special tokens and without an incomplete last
        character. Empty if the request is unknown.
        """
        ...

    async def token_texts(self, token_ids: tuple[int, ...]) -> tuple[str, ...]:
        """Each token as text on its own, special tokens by their names; U+FFFD if it is not a whole character."""
        ...

    async def step(self, plan: Plan) -> StepDone:
        """Learn from the groups, publish the new weights and commit the step. RunError if the plan is not for the next step."""
        ...

    async def metrics_of(self, step: int) -> Mapping[str, float]:
        """Metrics of a committed step, including steps undone by opening; empty if the step is unknown."""
        ...

    async def save(self) -> Saved:
        """Save a checkpoint of the current step."""
        ...

    async def tokens_of(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's tokens as the model sees them."""
        ...

    async def tokenizer_files(self) -> Mapping[str, bytes]:
        """The files of the tokenizer and its chat template, by name; their hash is `Opened.tokenizer_hash`."""
        ...

    async def close_run(self, finished: bool) -> str:
        """Save a checkpoint, and the final weights if the run is finished; returns the run's folder. Sampling stays possible until another
        run is opened.
        """
        ...

    async def probe(self) -> Probe:
        """The state of the engine."""
        ...

    async def lost(self) -> EngineLost:
        """Wait until the engine ends by itself, and return how it ended."""
        ...

    async def close(self) -> None:
        """End the engine with all its processes; an open run stays as it is on disk."""
        ...


PART = "reward"
"""The name of the one reward that a client gives a completion."""
NO_REWARD = "its client gave it no reward (null)"


def scored_group(group: Group, rewards: Sequence[float | None]) -> Group:
    """Each rollout with its reward. A rollout without one is marked as failed and is not trained on."""

    def score(rollout: Rollout, reward: float | None) -> Rollout:
        if reward is None:
            return replace(rollout, outcome="failed", reason=NO_REWARD)
        return replace(rollout, outcome="scored", reward=reward, parts=(RewardPart(PART, reward),))

    return replace(
        group, rollouts=tuple(score(*pair) for pair in zip(group.rollouts, rewards, strict=True))
    )
