"""The records: sampling produces them, learning consumes them, the store keeps them, and a resume restores them.

A task yields an `Example`. The sampler completes its prompt several times (`GroupRequest`); the results are `Completion`s. They
become a `Group` of `Rollout`s, one attempt each. A rollout consists of `Segment`s, which record who wrote each token, under which
policy and with which seed. Scoring adds reward parts and an outcome. An algorithm turns groups into `RolloutCredit`s, and each
scored rollout with its weight becomes a `Row`, the only record that the learner sees.

Everything here is plain data (no torch, nothing that cannot be written as JSON), because it crosses processes and HTTP and
is stored. `to_json` and `from_json` do all of this conversion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

from pydantic import ConfigDict, TypeAdapter, with_config

TINY = "tiny"
"""Name of the built-in model: a few thousand random parameters over single characters. It shows whether a task or a client works."""

Message = dict[str, Any]
"""One chat message, `{"role": "user", "content": "..."}`."""

Prompt = str | list[Message]
"""A prompt as a task gives it: text, which is tokenised unchanged, or messages, which go through the chat template."""

Source = Literal["policy", "environment", "inserted", "teacher"]
"""The author of a segment. Only `policy` tokens (and, in SFT, `teacher` tokens) are trained on."""

FinishReason = Literal["stop", "length"]
"""`stop`: a stop token or stop string ended the completion. `length`: the limit cut it off (a truncated rollout)."""

Outcome = Literal["pending", "scored", "failed", "timed_out"]
"""`pending` until the rewards are known. Only `scored` rollouts are trained on: a failure is never a low reward."""

EndedBy = Literal["environment", "turns", "tokens"]
"""The reason why a multi-turn rollout ended: its environment ended it, or a limit (on turns or tokens) cut it off."""

PolicyRole = Literal["policy", "reference", "teacher"]

Origin = Literal["fresh", "easy", "replay"]
"""The source of a group's example: the order of the data, the easy pool, or the replay buffer."""

TASK_COLUMN = "task"
"""The column with the label by which the router finds a row's rewards."""

DATASET_COLUMN = "dataset_name"
"""The column with the name of the dataset, in a mixture, that a row is from. It is the label of rows that have no `task` column."""


class NumberedRow(dict[str, Any]):
    """A row that knows its index in the user's data, from 0. Rows before it that were left out count too."""

    def __init__(self, columns: Mapping[str, Any], number: int | None) -> None:
        super().__init__(columns)
        self.number = number


def with_number_of(row: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """A row with new columns that keeps the number of `row`."""
    return NumberedRow(columns, getattr(row, "number", None))


def number_of(row: Mapping[str, Any], index: int) -> int:
    """The number of a row in its user's data; `index` if the row has no number."""
    number = getattr(row, "number", None)
    return index if number is None else number


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a task: the prompt and every other column of its dataset, which the rewards receive."""

    index: int
    """Position in the dataset, from 0."""
    prompt: Prompt
    columns: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def row_number(self) -> int:
        """See `number_of`. Only for messages: rows of several sources may have the same number."""
        return number_of(self.columns, self.index)


TopLogprobs = tuple[tuple[int, float], ...]
"""The most probable tokens at one position with their log-probabilities (nats), the most probable first."""


CallFormat = Literal["hermes", "llama3_json", "mistral"]
"""How a family of models writes tool calls; see `groupwise.tasks.openai.tools`."""


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """A completion that consists of tool calls."""

    tools: tuple[tuple[str, str], ...]
    """The tools that can be called: name, and the JSON schema of the arguments as text."""
    call_format: CallFormat = "hermes"
    is_single: bool = False
    """True: exactly one call. False: one or more."""


@dataclass(frozen=True, slots=True)
class LogitsProcessing:
    """Changes of the logits, for completions that are not trained on, because the learner computes none of them.

    The fields are applied in vLLM's order: `json_schema` and `tool_calls`, `logit_bias`, `repetition_penalty`,
    `frequency_penalty`, `presence_penalty`; then the temperature, and `SamplingParams.top_k` and its like.
    """

    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the completion already has."""
    frequency_penalty: float = 0.0
    """Subtracted as many times as the completion has the token."""
    repetition_penalty: float = 1.0
    """Divides the logit of each token of prompt and completion if it is above 0, and multiplies it otherwise."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to their logits; each id once, all of them within the vocabulary."""
    json_schema: str | None = None
    """JSON text of a schema: only tokens are drawn with which the completion can become such a value. It may end only there."""
    tool_calls: CallGrammar | None = None
    """Only tokens are drawn with which the completion can become these calls; with `json_schema`, one or the other."""

    @property
    def is_constrained(self) -> bool:
        """True if the completion can end only where it is whole."""
        return self.json_schema is not None or self.tool_calls is not None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a completion is drawn. Log-probabilities are those of the distribution that is sampled from, at this temperature."""

    max_tokens: int
    """Longest completion in tokens, stop token included."""
    temperature: float = 1.0
    """0: greedy decoding; log-probabilities are then those at temperature 1."""
    stop_token_ids: tuple[int, ...] = ()
    """Any of these ends the completion and is its last token."""
    stop: tuple[str, ...] = ()
    """Any of these texts ends the completion at the token that completes it; it may span tokens."""
    min_tokens: int = 0
    """The first `min_tokens` tokens cannot be stop tokens, and a stop text cannot end the completion before the last of them.
    The sampler computes log-probabilities there without the stop tokens; `Row.withheld` records these stretches."""
    top_k: int | None = None
    """Draw from this many of the most probable tokens; None (also for the next two fields): no such limit."""
    top_p: float | None = None
    """Draw from the most probable tokens whose probabilities sum to at least this (nucleus sampling)."""
    min_p: float | None = None
    """Draw from the tokens whose probability is at least this share of the highest one."""
    processing: LogitsProcessing | None = None
    """None: the logits are the model's own."""

    @property
    def truncates(self) -> bool:
        """True if improbable tokens are never drawn. The learner's log-probabilities do not take this into account."""
        return (self.top_k, self.top_p, self.min_p) != (None, None, None)


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One prompt to be completed `len(seeds)` times."""

    draw: int
    """Position in the order of draws of the run, from 0; identifies the group."""
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """One 64-bit seed for each member, distinct; see `groupwise.tasks.rollouts.seeds`."""
    params: SamplingParams
    top_logprobs: int = 0
    """Also return so many of the most probable tokens at each position."""


@dataclass(frozen=True, slots=True)
class RouterShape:
    """What a choice of experts must look like for a model with a mixture of experts."""

    layers: int
    """All layers of the model, also those without experts."""
    with_experts: tuple[int, ...]
    """The indices of the layers that have experts."""
    experts: int
    """Experts of a layer."""
    top_k: int
    """Experts that a token uses in each of these layers."""


@with_config(ConfigDict(ser_json_bytes="base64", val_json_bytes="base64"))
@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts that a sampler chose for consecutive tokens of a row, whose prompt is part of it."""

    first: int
    """Index of the first of these tokens, from 0 at the start of the prompt."""
    shape: tuple[int, int, int]
    """Tokens, layers of the model, and experts of a token in a layer. What stands in layers without experts means nothing."""
    indices: bytes = field(repr=False)
    """The indices of the experts in that order, as uint8, or as little-endian uint16 if a layer has more than 256 experts."""

    @property
    def end(self) -> int:
        """Index after the last of these tokens."""
        return self.first + self.shape[0]

    def part(self, first: int, end: int) -> RoutedExperts:
        """Those of the tokens from `first` to before `end`, both of which are within these tokens."""
        size = len(self.indices) // self.shape[0]
        indices = self.indices[(first - self.first) * size : (end - self.first) * size]
        return RoutedExperts(first, (end - first, *self.shape[1:]), indices)


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion, with its tokens and log-probabilities."""

    token_ids: tuple[int, ...]
    """The sampled tokens verbatim; a stop token that was drawn is the last of them."""
    logprobs: tuple[float, ...]
    """Log-probability (nats) of each token under the distribution that was sampled; as long as `token_ids`."""
    finish_reason: FinishReason
    seed: int
    policy_version: int
    fingerprint: str
    """Fingerprint of the weights that served this completion; see `Policy.fingerprint`."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """The most probable tokens at each position if `GroupRequest.top_logprobs` is set, under the distribution that was sampled. Tokens that
    could not be drawn are left out."""
    routed_experts: RoutedExperts | None = None
    """The experts of all tokens of prompt and completion but the last, which was never an input; None if the sampler returned none."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's own tokens at temperature 1, each given the tokens before it."""

    logprobs: tuple[float, ...]
    """Log-probabilities (nats) from the prompt's second token on; one fewer than the prompt has tokens."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """The most probable tokens at the same positions; empty if none were asked for."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens from one source within a rollout, after the prompt."""

    source: Source
    token_ids: tuple[int, ...]
    sampling_logprobs: tuple[float, ...] | None = None
    """Like `Completion.logprobs`; None for tokens that were not sampled."""
    policy_version: int | None = None
    fingerprint: str | None = None
    params: SamplingParams | None = None
    seed: int | None = None
    finish_reason: FinishReason | None = None
    prompt_ids: tuple[int, ...] | None = None
    """Set if a new row starts with this segment, because the chat template rendered earlier turns differently: all tokens that the
    policy saw before the segment. None: the segment continues the row of the segment before it."""
    learner_logprobs: tuple[float, ...] | None = None
    """The learner's log-probabilities (nats, float32) in the first pass that trained on these tokens, before that pass's update, as
    `Learner.trained_logprobs` returns them. `learner_logprobs - sampling_logprobs` is the logarithm of the importance ratio. None if
    the tokens were not trained on, or if the log-probabilities were not kept."""
    teacher_logprobs: tuple[float, ...] | None = None
    """Log-probabilities (nats) of these tokens as the endpoint of the teacher gave them; None without one."""
    teacher_top: tuple[TopLogprobs, ...] = ()
    """The teacher's most probable tokens at each of these places, if they were asked for."""
    routed_experts: RoutedExperts | None = None
    """The experts that the sampler chose, as in `Completion.routed_experts`. The record leaves them out."""


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One reward function's value for one rollout."""

    name: str
    value: float | None
    """None: this reward does not apply to this rollout."""
    weight: float = 1.0
    turn: int | None = None
    """The turn it belongs to in a multi-turn rollout; None: it belongs to the whole rollout."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One attempt at one example."""

    draw: int
    member: int
    """Position in its group, from 0."""
    attempt: int
    """0, or the number of the retry after an infrastructure failure."""
    prompt_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    completion: str
    """The text that the rewards saw, without special tokens; of a multi-turn rollout, all text after the prompt."""
    outcome: Outcome = "pending"
    reason: str | None = None
    """Why it failed or timed out, for people."""
    reward: float | None = None
    """The weighted total of the parts, the number that is trained on and logged; None unless scored."""
    parts: tuple[RewardPart, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    """Notes that reward functions recorded with `log_extra`."""
    advantage: float | None = None
    """The advantage that the algorithm computed; separate from `reward`."""
    messages: tuple[Message, ...] | None = None
    """The messages of a multi-turn chat after the prompt, the environment's included; None for other rollouts."""
    ended_by: EndedBy | None = None
    """The reason why a multi-turn rollout ended; None if it failed, and for single-turn rollouts."""
    teacher_prompt_ids: tuple[int, ...] | None = None
    """The prompt that the teacher sees in place of `prompt_ids`, with what only it knows; None: the same one."""

    @property
    def completion_ids(self) -> tuple[int, ...]:
        """All tokens after the prompt, of every source, in order."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def written_ids(self) -> tuple[int, ...]:
        """The tokens that the policy wrote; `completion_ids` also has those of the environment and inserted ones."""
        policy_segments = (segment for segment in self.segments if segment.source == "policy")
        return tuple(token for segment in policy_segments for token in segment.token_ids)

    @property
    def written(self) -> int:
        """Number of tokens that the policy wrote."""
        return len(self.written_ids)

    @property
    def truncated(self) -> bool:
        """True if a limit ended it: the multi-turn rollout as a whole, or else the policy's last segment."""
        if self.ended_by is not None:
            return self.ended_by != "environment"
        return self.finish_reason == "length"

    @property
    def finish_reason(self) -> FinishReason | None:
        """How the policy's last segment ended; None if the policy wrote nothing."""
        policy_segments = [segment for segment in self.segments if segment.source == "policy"]
        return policy_segments[-1].finish_reason if policy_segments else None

    @property
    def part_values(self) -> dict[str, float | None]:
        """The reward parts by name. Values of several turns are summed; None if the part applies to no turn."""
        values: dict[str, float | None] = {}
        for part in self.parts:
            earlier_sum = values.get(part.name)
            total = earlier_sum if part.value is None else (earlier_sum or 0.0) + part.value
            values[part.name] = total
        return values


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one example that are compared with each other."""

    draw: int
    example: Example
    rollouts: tuple[Rollout, ...]
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Metrics that reward functions recorded with `log_metric`, averaged over the group."""
    prompt_seen: str | None = None
    """The text of a chat prompt as the model saw it, with the chat template's own text and the tools; for people. If the members had
    different prompts, the first member's. None: the example's prompt is already all that the model saw."""
    origin: Origin = "fresh"
    again: int | None = None
    """The draw whose recorded completions are trained on again here (replay); None: they were sampled for this draw."""

    @property
    def scored(self) -> tuple[Rollout, ...]:
        """The members that are trained on."""
        return tuple(rollout for rollout in self.rollouts if rollout.outcome == "scored")


@dataclass(frozen=True, slots=True)
class RolloutCredit:
    """The credit that an algorithm gives a scored rollout."""

    advantage: float
    scale: float
    """The per-sequence normaliser: 1, or 1 / number of trained tokens for a per-sequence mean."""
    token_advantages: tuple[float, ...] | None = None
    """The advantage of each token that the policy wrote, in order, where they may differ; `advantage` is then for the record."""

    @property
    def is_zero(self) -> bool:
        """True if no token has an advantage."""
        return not any(self.token_advantages or (self.advantage,))


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """A range of tokens in a row where certain ids could not be drawn: sampler and learner give those ids probability 0 there."""

    start: int
    """Index of the first token, in `Row.completion_ids`."""
    end: int
    """Index after the last token."""
    token_ids: tuple[int, ...]


_NAN_AS_TEXT = with_config(ConfigDict(ser_json_inf_nan="strings"))
"""Writes "NaN", "Infinity" and "-Infinity" instead of null: the record then shows why a number is not finite."""


@_NAN_AS_TEXT
@dataclass(frozen=True, slots=True)
class SiblingRowStats:
    """Sums over the trained tokens in the other rows of a rollout. Needed for terms that are computed per rollout, not per row."""

    tokens: int
    log_weight: float = 0.0
    """Sum of proximal minus sampling log-probabilities (nats); 0 without proximal ones."""
    log_ratio: float = 0.0
    """Sum of the policy's log-probabilities at this update minus the old ones: the proximal ones, or the sampler's if there are none."""


@_NAN_AS_TEXT
@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to train on, unpadded. Rows with the same prompt share its computation in the learner.

    `mask`, `sampling_logprobs` and, if present, `reference_logprobs` and `proximal_logprobs` are as long as
    `completion_ids`. Tokens with mask 0 (observations, inserted text) are context only and are not trained on.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[int, ...]
    sampling_logprobs: tuple[float, ...]
    advantage: float
    scale: float
    temperature: float = 1.0
    """The temperature it was sampled at; the learner computes log-probabilities at the same one."""
    reference_logprobs: tuple[float, ...] | None = None
    proximal_logprobs: tuple[float, ...] | None = None
    """Computed by the learner at the start of the step. None in the step's first update, which computes them itself."""
    rollout: tuple[int, int] | None = None
    """Draw and member of its rollout; the rollout's other rows have the same pair."""
    others: SiblingRowStats | None = None
    """None: the rollout has no other rows."""
    withheld: tuple[MaskedTokens, ...] = ()
    """Ranges where the policy could not draw every token, because of `SamplingParams.min_tokens`; they do not overlap."""
    credits: tuple[float, ...] | None = None
    """The advantage of each token, as long as `completion_ids`, in place of `advantage`; None: all tokens have the same. The loss `given`
    ignores `scale` too."""
    targets: tuple[int, ...] | None = None
    """Ids whose log-probabilities are computed, in place of the completion's own: K of them for each token of the completion, those of one
    token after those of the one before it. The completion remains the context. What is said to be as long as `completion_ids` is then as
    long as `targets`, in the row and in what a learner returns for it. None: the completion's own ids."""

    teacher_prompt_ids: tuple[int, ...] | None = None
    """What the teacher sees in place of `prompt_ids`; None: the same."""
    teacher_logprobs: tuple[float, ...] | None = None
    """Log-probabilities (nats) under the teacher, as long as `target_ids`; None if the learner computes its distributions itself."""
    routed_experts: tuple[RoutedExperts, ...] = ()
    """The experts that the policy's pass replays, in the order of their tokens. Other tokens get those that the learner chooses."""

    @property
    def as_seen_by_teacher(self) -> Row:
        """The row as the teacher sees it."""
        if self.teacher_prompt_ids is None:
            return self
        return replace(self, prompt_ids=self.teacher_prompt_ids, routed_experts=())

    @property
    def target_ids(self) -> tuple[int, ...]:
        """The ids whose log-probabilities are computed."""
        return self.completion_ids if self.targets is None else self.targets

    @property
    def targets_per_token(self) -> int:
        """The number K of targets for each token of the completion."""
        return len(self.target_ids) // max(1, len(self.completion_ids))


@dataclass(frozen=True, slots=True)
class Prediction:
    """A learner's numbers for a row; both as long as its `completion_ids`."""

    logprobs: tuple[float, ...]
    """Log-probability (nats) of each token, at the row's temperature."""
    right: tuple[bool, ...] | None
    """True for each token that the learner considers the most likely. None: this learner does not provide it."""


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The k most likely tokens at each of some places, the most likely first: k entries for one place after those for the one before it."""

    count: int
    """k, at least 1."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability (nats) of each of these tokens."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A published version of the weights, addressed `run@step`. Publication always goes through files."""

    run: str
    version: int
    """+1 for each publication of the run; 0 is the policy that the run started from."""
    fingerprint: str
    """SHA-256 (hex, 16 digits) of the published tensors: names, shapes and bytes, as a tree (`groupwise.engine.models.fingerprint`)."""
    kind: Literal["adapter", "full"]
    path: str
    """Folder of the tensors, in peft's format (adapter) or transformers' (full)."""


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The name of a registered loss and its knobs; the learner looks it up in `groupwise.algorithms.registry`."""

    name: str
    knobs: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class OptimiserParams:
    """One optimiser call: AdamW with decoupled weight decay, gradient clipped to a global norm first."""

    learning_rate: float
    max_grad_norm: float | None = 1.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of `Learner.update`."""

    grad_norm: float
    """Global norm of the gradient before clipping."""
    applied: bool
    """False if the gradient was not finite, in which case the update was skipped."""


class Sampler(Protocol):
    """Produces completions: torch in this process, worker processes, HTTP engines, fakes."""

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        """Complete one prompt once for each seed, in the order of the seeds.

        May be awaited for many groups at once. The sampler batches them freely, and the result of a
        group does not depend on the others. Cancelling the call frees its slots.
        """
        ...

    async def load(self, policy: Policy) -> None:
        """Serve these weights from now on. Raises `PolicyMismatchError` if the files do not match `policy`."""
        ...

    def fingerprint(self) -> str:
        """Fingerprint of the weights that serve now, computed from the tensors in memory."""
        ...


@runtime_checkable
class SharesDevice(Protocol):
    """A sampler that can release its memory on the device that it shares with the learner."""

    async def release_memory(self) -> None:
        """Release the memory that only sampling needs, until the next weights or request; do nothing while completions are in progress."""
        ...


class Learner(Protocol):
    """Computes the loss and updates one adapter (or full model). Knows rows and sums only, no algorithms or tasks."""

    async def forward_backward(
        self, rows: Sequence[Row], loss: LossSpec, denominators: Mapping[str, float]
    ) -> dict[str, float]:
        """Add the gradient of `Σ component sums / denominators` over the rows to the accumulated gradient.

        Returns sums over the rows: `loss/<component>`, not divided by the denominators, and the loss's statistics by name. May be
        called several times before `update`: the total does not depend on how the rows were split over the calls. Cancelling a
        call leaves a partial gradient, which `discard` clears.
        """
        ...

    async def trained_logprobs(self) -> list[tuple[float, ...]] | None:
        """Log-probabilities (nats) of the completion tokens of the rows last given to `forward_backward`, as that call computed them.

        For inspection, without another forward pass. They are float32, at the row's temperature, and include that pass's
        dropout, if any. Values of tokens with mask 0 are meaningless. Call it before `update` or `discard`. None: this learner
        does not provide them.
        """
        ...

    async def update(self, params: OptimiserParams) -> UpdateResult:
        """Clip, step the optimiser, and clear the gradient."""
        ...

    def discard(self) -> None:
        """Clear the gradient without an update."""
        ...

    async def publish(self, version: int) -> Policy:
        """Write the current weights to files that the sampler can load."""
        ...

    async def logprobs(
        self, rows: Sequence[Row], role: PolicyRole = "policy"
    ) -> list[tuple[float, ...]]:
        """Log-probabilities (nats) of each row's completion tokens, at the row's temperature, without the ids in `Row.withheld`."""
        ...

    async def predictions(self, rows: Sequence[Row]) -> list[Prediction]:
        """The policy's log-probabilities, as `logprobs` returns them, and for each token whether it is the most likely one."""
        ...

    async def save(self, folder: str) -> None:
        """Write weights and optimiser state into an existing folder (safetensors and JSON only)."""
        ...

    def load(self, folder: str) -> None:
        """Restore exactly what `save` wrote."""
        ...


T = TypeVar("T")


@cache
def _type_adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def to_json(value: Any) -> bytes:
    """Any record of this module as JSON. Floats keep every bit. Only `Row` may hold NaN or infinities; other code rejects them earlier."""
    return _type_adapter(cast("type[Any]", type(value))).dump_json(value)


def from_json(kind: type[T], data: bytes | str) -> T:
    """The inverse of `to_json` for a record of type `kind`; raises pydantic's ValidationError."""
    return _type_adapter(kind).validate_json(data)
