"""Requests and answers of ask/post. The server makes its OpenAPI document from these models, the
client its calls; neither has any of its own.

The client owns the loop: it asks for completions of its prompts (`CompletionsRequest`), scores them, and posts a number for each one
(`RewardsRequest`); the server owns the model and decides when a step is taken. Requests are read strictly: an unknown field, a number
written as text, NaN, and true in the place of 1 are refused, each with its field. Answers are read leniently in one respect: a field
that an older client does not know is passed over.

The nested sections of `StartRequest` (lora, sampler, algorithm, training) are those of a run's config and are validated with it, not here;
only keys that have a flat name are refused here, because a value must have one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    TypeAdapter,
    model_validator,
)
from pydantic_core import PydanticCustomError

from groupwise.api.schemas.fail_fast import IN_SLICES, FailFast
from groupwise.core.settings.field_errors import GROUP_ID_PATTERN, NAME_PATTERN
from groupwise.core.types import TINY

MAX_PROMPTS = 256
"""Maximum number of prompts, or of groups with rewards, in one request."""
MAX_COMPLETIONS = 1024
"""Maximum number of completions of one prompt."""
MAX_TOKENS = 1_000_000
"""Largest value of a length setting, in tokens; models have lower limits."""
MAX_STEPS = 100_000_000
MAX_REWARD = 1e9
"""Largest magnitude of a reward."""
MAX_ID = 64
"""Maximum length of an id."""
MAX_NAME = 128
"""Maximum length of the name of a run or checkpoint."""
MAX_ADDRESS = 1024
"""Maximum length of the address of a model, adapter or version."""
MAX_MESSAGES = 1024
"""Maximum number of messages in one prompt."""
MAX_STOPS = 16
"""Maximum number of stop strings."""
MAX_STOP = 256
"""Maximum length of a stop string."""
MAX_STALENESS = 64
MAX_DRAW = 2**53
"""Draws are below this, so that every JSON library reads them exactly."""
MIN_LEASE, MAX_LEASE = 1.0, 7 * 24 * 3600.0
"""Seconds."""
MAX_WAIT, DEFAULT_WAIT = 600.0, 60.0
"""Seconds for which a request may wait for a step."""
MAX_LEARNING_RATE = 100.0
MAX_TRAJECTORY_NAME = 512
"""Characters in the name of a trajectory, or of a group of trajectories."""
MAX_CALLS = 1024
"""Calls of one trajectory that a reward can list."""

OTHER_NAMES: Mapping[str, str] = {
    "sampler.max_completion_length": "give `max_completion_length` instead",
    "training.max_steps": "give `max_steps` instead",
    "training.num_train_epochs": "a run whose prompts come from clients has no epochs; give `max_steps`",
    "training.learning_rate": "give `learning_rate` instead",
    "training.num_generations": "give `num_completions_per_prompt` instead",
    "training.prompts_per_step": "give `groups_per_step` instead",
    "training.max_off_policy_steps": "give `staleness` instead",
    "training.schedule": "the clients decide which groups a step has; `staleness` says how old they may be",
}
"""Keys of the nested sections that have a flat name or no meaning here, and what to do instead."""
OTHER_FIELDS: Mapping[str, str] = {
    name.partition(".")[2]: instead
    for name, instead in OTHER_NAMES.items()
    if name.partition(".")[2] not in ("max_completion_length", "max_steps", "learning_rate")
}
"""The same keys as fields of POST /start, where those have other names."""
NO_TEACHER = (
    "a training server learns from rewards alone. Distil with `groupwise rl` on a machine of yours, where the teacher may be a model, an "
    "endpoint, or the policy itself; a run of this server can be that endpoint (teacher.type=endpoint teacher.engine=openai)."
)
"""Why a start has no `teacher` and not the algorithm `distillation`."""


class Body(FailFast, BaseModel):
    """The base of bodies that a client sends."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ResponseModel(BaseModel):
    """The base of all answers."""

    # Of later servers, too: a field that is not known here is passed over. What is known is read strictly.
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


def wrong(field: str, problem: str) -> PydanticCustomError:
    """An error about a field that depends on other fields; `groupwise.core.settings.field_errors` adds the field's name."""
    return PydanticCustomError("conflict", "{problem}", {"problem": problem, "field": field})


def _check_unique(values: list[Any]) -> list[Any]:
    if len(set(values)) != len(values):
        twice = next(value for value in values if values.count(value) > 1)
        raise PydanticCustomError("twice", "{value} is repeated", {"value": twice})
    return values


# A label in brackets says which form of a value was given; it is not part of a field's name.


AlgorithmGiven = Annotated[
    Annotated[str, Tag("(name)")] | Annotated[dict[str, Any], Tag("(section)")],
    Discriminator(lambda given: "(name)" if isinstance(given, str) else "(section)"),
]
"""The name of an algorithm, or the section of a config with its parameters."""


class ChatMessage(Body):
    """One message of a chat; the server writes it with the model's chat template."""

    role: str = Field(
        description="The role: system, user, assistant or tool; the template decides which it knows.",
        min_length=1,
        max_length=64,
    )
    content: str | None = Field(
        default=None, description="The text; null if a message only calls tools."
    )
    name: str | None = Field(
        default=None, description="Name of the speaker or tool.", max_length=MAX_ID
    )
    tool_calls: list[dict[str, Any]] | None = Field(
        default=None, description="Calls of tools that the message makes, as the template has them."
    )
    tool_call_id: str | None = Field(
        default=None, description="The call that a tool's message answers.", max_length=MAX_NAME
    )

    def plain(self) -> dict[str, Any]:
        """The message in the form that chat templates take: the fields that were given, and no other."""
        return self.model_dump(exclude_unset=True)


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
Text = Annotated[str, StringConstraints(min_length=1)]
PromptGiven = Annotated[
    Annotated[Text, Tag("(text)")] | Annotated[Messages, Tag("(messages)")],
    Discriminator(lambda given: "(text)" if isinstance(given, str) else "(messages)"),
]
"""Text, which is tokenised unchanged, or messages, which go through the chat template."""

PromptPlain = str | list[dict[str, Any]]
"""A prompt as the rest of the package has it, `groupwise.core.types.Prompt`."""


def plain_prompt(prompt: str | list[ChatMessage]) -> PromptPlain:
    """A prompt of a request as the rest of the package has it."""
    return prompt if isinstance(prompt, str) else [message.plain() for message in prompt]


GroupId = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_ID, pattern=GROUP_ID_PATTERN)
]
TrajectoryName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TRAJECTORY_NAME)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], IN_SLICES]
Draw = Annotated[int, Field(ge=0, lt=MAX_DRAW)]
Reward = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP)]
Temperature = Annotated[float, Field(gt=0, le=100)]
ModelVersion = Annotated[
    tuple[str, int],
    Field(description="[run id, steps done]: a version of the policy, addressed `run@steps`."),
]
Metrics = dict[str, float | None]
"""Metrics under the names of the run's record; null if a number is not finite."""
Include = Literal["next", "hold"]
Wait = Annotated[bool, Field(description="Answer when the step is done, with its metrics.")]
Timeout = Annotated[
    float,
    Field(
        gt=0,
        le=MAX_WAIT,
        description="Seconds to wait at most; then the answer is 202 and `accepted`.",
    ),
]


class _Waiting(Protocol):
    """A body that may wait for a step."""

    @property
    def wait(self) -> bool: ...
    @property
    def model_fields_set(self) -> set[str]: ...


_W = TypeVar("_W", bound=_Waiting)


def _check_timeout(body: _W) -> _W:
    if "timeout" in body.model_fields_set and not body.wait:
        raise wrong("timeout", "has no effect without `wait: true`")
    return body


# Starting and ending a run


class StartRequest(Body):
    """The settings of a training. Everything has a default: `{}` trains the model `tiny`."""

    refused: ClassVar[Mapping[str, str]] = {**OTHER_FIELDS, "teacher": NO_TEACHER}

    model_id: str = Field(
        default=TINY,
        description="The model: an alias (`tiny`, `smollm2-135m-instruct`), or what the server's settings allow.",
        min_length=1,
        max_length=MAX_ADDRESS,
    )
    max_completion_length: int = Field(
        default=64,
        description="Longest completion in tokens; a call under /v1 may give its own `max_tokens`, also a larger one.",
        ge=1,
        le=MAX_TOKENS,
    )
    num_completions_per_prompt: int = Field(
        default=8,
        description="Completions of each prompt, the size of a group: they are compared with each other.",
        ge=1,
        le=MAX_COMPLETIONS,
    )
    training_batch_size: int = Field(
        default=1, description="Prompts of each part of a step; see `groups_per_step`.", ge=1
    )
    gradient_accumulation_steps: int = Field(
        default=1, description="Parts of a step; see `groups_per_step`.", ge=1
    )
    groups_per_step: int | None = Field(
        default=None,
        description="Rewarded groups (prompts) that make a step; null: training_batch_size × gradient_accumulation_steps.",
        ge=1,
        le=65536,
    )
    learning_rate: float | None = Field(
        default=None,
        description="Peak step size of AdamW; null: 1e-5, or 5e-2 for the model `tiny`.",
        gt=0,
        le=MAX_LEARNING_RATE,
    )
    logging_steps: int = Field(
        default=1, description="Steps between lines of progress in the server's log.", ge=1
    )
    max_steps: int = Field(
        default=201, description="Steps after which the run is finished.", ge=1, le=MAX_STEPS
    )
    adapter: Literal["full", "new", "continue"] | None = Field(
        default=None,
        description=(
            "The weights to train: `new`, a new LoRA adapter on the model as it is; `continue`, the adapter at `adapter_path`; "
            "`full`, all weights of the model. null: `full` for the model `tiny`, which has too little to adapt, and `new` for "
            "others."
        ),
    )
    adapter_path: str | None = Field(
        default=None,
        description=(
            "The adapter for `adapter: continue`: a folder that the server's settings allow, a hub id that they allow, or "
            "`run@step` of a run of this server."
        ),
        min_length=1,
        max_length=MAX_ADDRESS,
    )
    lora: dict[str, Any] | None = Field(
        default=None,
        description="The section `lora` of a run's config: r, alpha, dropout, target_modules. Not with `adapter: full`.",
    )
    algorithm: AlgorithmGiven | None = Field(
        default=None,
        description="The algorithm: its name (`dr_grpo`, `grpo`, …), or the section `algorithm` of a run's config; null: dr_grpo.",
    )
    sampler: dict[str, Any] | None = Field(
        default=None,
        description="The section `sampler` of a run's config: temperature, stop, min_completion_length, max_num_seqs …",
    )
    training: dict[str, Any] | None = Field(
        default=None,
        description="The section `training` of a run's config: seed, lr_scheduler_type, warmup_steps, weight_decay, max_grad_norm, "
        "num_iterations, minibatches …",
    )
    steps: Literal["auto", "manual"] = Field(
        default="auto",
        description="When a step is taken: `auto`, as soon as `groups_per_step` rewarded groups wait; `manual`, at each POST /step.",
    )
    staleness: int = Field(
        default=1,
        description="Steps by which the policy that sampled a group may be older than the one that learns from it.",
        ge=0,
        le=MAX_STALENESS,
    )
    lease_seconds: float = Field(
        default=600.0,
        description="Seconds, of the server's running time, in which the rewards of a group must come.",
        ge=MIN_LEASE,
        le=MAX_LEASE,
    )
    max_prompt_length: int = Field(
        default=512, description="Longest prompt in tokens.", ge=1, le=MAX_TOKENS
    )
    run_name: str | None = Field(
        default=None,
        description="Name of the run and of its folder, with `-2`, `-3` … if it is taken; null: named after the model. A run that "
        "continues keeps its own.",
        pattern=NAME_PATTERN,
        max_length=MAX_NAME,
    )
    resume_from: str | None = Field(
        default=None,
        description="Continue from a checkpoint: its name, `run@step`, or the name of a run for its last one.",
        min_length=1,
        max_length=2 * MAX_NAME,
    )
    replace: bool = Field(
        default=False,
        description="true: stop an active run cleanly first, and end the sessions of Tinker clients and of loops elsewhere that have "
        "models. false: the start is refused instead.",
    )
    save_steps: int = Field(
        default=10,
        description="Steps between checkpoints; a crash costs the time of at most that many.",
        ge=1,
    )
    save_total_limit: int | None = Field(
        default=2,
        description="Number of automatic checkpoints that stay, the newest ones; null: all. Named ones always stay.",
        ge=1,
    )

    @property
    def trains_all(self) -> bool:
        """True if all weights are trained."""
        by_itself = self.adapter is None and self.model_id == TINY and self.lora is None
        return self.adapter == "full" or by_itself

    @property
    def prompts_per_step(self) -> int:
        """Groups of a step, whichever way they were given."""
        return self.groups_per_step or self.training_batch_size * self.gradient_accumulation_steps

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        product = self.training_batch_size * self.gradient_accumulation_steps
        parts = {"training_batch_size", "gradient_accumulation_steps"} & self.model_fields_set
        if self.groups_per_step is not None and parts and self.groups_per_step != product:
            raise wrong(
                "groups_per_step",
                f"is {self.groups_per_step}, but training_batch_size × gradient_accumulation_steps is {product}; give one of the two",
            )
        if self.groups_per_step is None and product > 65536:
            raise wrong("training_batch_size", f"makes steps of {product} groups; at most 65536")
        if self.adapter == "continue" and self.adapter_path is None:
            raise wrong(
                "adapter_path", "is needed with `adapter: continue`: the adapter to continue"
            )
        if self.adapter != "continue" and self.adapter_path is not None:
            raise wrong(
                "adapter_path", f"has no effect with `adapter: {self.adapter}`; give `continue`"
            )
        if self.adapter == "full" and self.lora is not None:
            raise wrong("lora", "has no effect with `adapter: full`, which trains all weights")
        for section in ("sampler", "training"):
            settings = cast("dict[str, Any]", getattr(self, section) or {})
            for key in settings:
                if advice := OTHER_NAMES.get(f"{section}.{key}"):
                    raise wrong(f"{section}.{key}", f"has no place here: {advice}")
        return self


class StartAnswer(ResponseModel):
    """A run that has begun."""

    status: Literal["started"] = Field(default="started", description="Always `started`.")
    run_id: str = Field(description="The run's name, by which it is addressed.")
    model_version: ModelVersion
    fingerprint: str = Field(description="Fingerprint of the weights that serve.")
    max_steps: int = Field(description="Steps after which the run is finished.")
    groups_per_step: int = Field(description="Rewarded groups that make a step.")
    tokenizer_hash: str = Field(description="Hash of the tokenizer, as in GET /tokenizer.")


class StopAnswer(ResponseModel):
    """A run that has ended, now or before."""

    status: Literal["stopped"] = Field(default="stopped", description="Always `stopped`.")
    run_id: str | None = Field(
        default=None, description="The run that was stopped; null where there has been none."
    )
    step: int | None = Field(default=None, description="Steps that it has done.")


# Asking


class CompletionsRequest(Body):
    """One prompt, or several, to be completed by the policy that serves."""

    refused: ClassVar[Mapping[str, str]] = {
        "max_tokens": "its name here is max_completion_length; /v1/completions, for clients of OpenAI, has max_tokens",
        "max_completion_tokens": "its name here is max_completion_length",
        "min_tokens": "its name here is min_completion_length",
        "n": "its name here is num_completions",
        "messages": "a chat is given as `prompt`, a list of messages; /v1/chat/completions, for clients of OpenAI, has messages",
    }

    prompt: PromptGiven | None = Field(
        default=None, description="Text, or messages of a chat. Either this or `prompts`."
    )
    prompts: list[PromptGiven] | None = Field(
        default=None,
        description="Several prompts; the answer then has `groups`, in the same order.",
        min_length=1,
        max_length=MAX_PROMPTS,
    )
    num_completions: int | None = Field(
        default=None,
        description="Completions of each prompt; null: `num_completions_per_prompt` of the run.",
        ge=1,
        le=MAX_COMPLETIONS,
    )
    temperature: Temperature | None = Field(
        default=None,
        description="Temperature in place of the run's; the learner takes it into account.",
    )
    max_completion_length: int | None = Field(
        default=None,
        description="Longest completion in tokens; at most the run's, which null takes.",
        ge=1,
        le=MAX_TOKENS,
    )
    min_completion_length: int | None = Field(
        default=None,
        description="Tokens before which a completion cannot end; null: the run's.",
        ge=0,
        le=MAX_TOKENS,
    )
    stop: list[Stop] | None = Field(
        default=None,
        description="Texts that end a completion; null: the run's.",
        max_length=MAX_STOPS,
    )
    draw: Draw | None = Field(
        default=None,
        description="Position in the run's order of draws, from which the seeds follow; null: the next free one. Given by all clients, "
        "the run repeats bit for bit. With `prompt`.",
    )
    draws: Annotated[list[Draw], AfterValidator(_check_unique)] | None = Field(
        default=None,
        description="The same for each of `prompts`.",
        min_length=1,
        max_length=MAX_PROMPTS,
    )
    prompt_tokens: TokenIds | None = Field(
        default=None,
        description="The prompt as the client has tokenised it; refused where the server's own tokens differ. With `prompt`.",
        min_length=1,
        max_length=MAX_TOKENS,
    )
    tools: list[dict[str, Any]] | None = Field(
        default=None,
        description="Schemas of tools that the chat template describes; their calls stand in the text of the completions.",
        max_length=MAX_MESSAGES,
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None,
        description='Further arguments of the chat template, such as {"enable_thinking": false}; they override those of the run.',
    )
    tokenizer_hash: str | None = Field(
        default=None,
        description="Hash of the client's tokenizer and template (GET /tokenizer); refused where it is not the server's.",
        min_length=1,
        max_length=MAX_NAME,
    )

    @property
    def all_prompts(self) -> tuple[PromptPlain, ...]:
        """One, or several, as the rest of the package has them."""
        prompts = [self.prompt] if self.prompt is not None else self.prompts or []
        return tuple(plain_prompt(prompt) for prompt in prompts)

    @property
    def all_draws(self) -> tuple[int | None, ...]:
        """Each prompt's draw number; None: the next free one."""
        if self.prompts is not None:
            return tuple(self.draws) if self.draws is not None else (None,) * len(self.prompts)
        return (self.draw,)

    @model_validator(mode="after")
    def _check_one_form(self) -> Self:
        if (self.prompt is None) == (self.prompts is None):
            both = "" if self.prompt is None else ", not both"
            raise wrong("prompt", f"give either `prompt`, for one, or `prompts`, for several{both}")
        if self.prompts is None and self.draws is not None:
            raise wrong("draws", "goes with `prompts`; the position of one prompt is `draw`")
        if self.prompts is not None:
            for field in ("draw", "prompt_tokens"):
                if getattr(self, field) is not None:
                    raise wrong(field, "goes with `prompt`; with `prompts` it has no meaning")
            if self.draws is not None and len(self.draws) != len(self.prompts):
                count = len(self.draws)
                raise wrong("draws", f"has {count} entries for {len(self.prompts)} prompts")
        longest, shortest = self.max_completion_length, self.min_completion_length
        if longest is not None and shortest is not None and shortest > longest:
            raise wrong(
                "min_completion_length", f"is {shortest}, above max_completion_length, {longest}"
            )
        return self


class GroupAnswer(ResponseModel):
    """The completions of one prompt, and the id under which they are rewarded."""

    group_id: str = Field(description="Id of the group, which the rewards name.")
    prompt: str | list[dict[str, Any]] = Field(description="The prompt as it was given.")
    completions: list[str] = Field(description="Texts, special tokens left out.")
    completion_tokens: list[list[int]] = Field(
        description="The tokens of each completion as they were sampled, the one that ended it included."
    )
    finish_reasons: list[Literal["stop", "length"]] = Field(
        description="`stop`: the model or a stop text ended it; `length`: it was cut off."
    )
    model_version: ModelVersion
    fingerprint: str = Field(description="Fingerprint of the weights that sampled.")
    draw: int = Field(description="Position in the run's order of draws.")
    expires_at: float = Field(
        description="When the lease ends, in seconds since 1970; later by the time that the server is down meanwhile."
    )


class CompletionsBatch(ResponseModel):
    """The completions of several prompts."""

    groups: list[GroupAnswer] = Field(description="One for each prompt, in their order.")


class GivenUpAnswer(ResponseModel):
    """A group that will not be rewarded."""

    status: Literal["given_up"] = Field(default="given_up", description="Always `given_up`.")
    group_id: str = Field(description="The group.")


# Posting


class GroupRewards(Body):
    """The rewards of one group: by its id, or by an echo of the answer in which it came."""

    group_id: GroupId | None = Field(
        default=None,
        description="The group, or the `id` of a stored answer of /v1, for which there is one reward if it was called with n = 1. "
        "null: the oldest open group that the echo matches.",
    )
    rewards: list[Reward | None] = Field(
        description="One entry for each completion, in their order: a number, or null for one that failed and does not teach.",
        min_length=1,
        max_length=MAX_COMPLETIONS,
    )
    prompt: PromptGiven | None = Field(
        default=None, description="Echo: the prompt. Needed without `group_id`, else checked."
    )
    completions: list[str] | None = Field(
        default=None,
        description="Echo: the completions. Needed without `group_id`, else checked.",
        min_length=1,
        max_length=MAX_COMPLETIONS,
    )
    completion_tokens: list[TokenIds] | None = Field(
        default=None,
        description="Echo: their tokens. Checked; the server trains its own record.",
        min_length=1,
        max_length=MAX_COMPLETIONS,
    )
    include: Include = Field(
        default="next",
        description="`next`: train it as soon as may be; `hold`: keep it until /step names it, or it is posted again with `next`.",
    )

    @property
    def echoed_prompt(self) -> PromptPlain | None:
        """The echo of the prompt as the rest of the package has it."""
        return None if self.prompt is None else plain_prompt(self.prompt)

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        if self.group_id is None and (self.prompt is None or self.completions is None):
            raise wrong(
                "group_id", "is needed, or `prompt` and `completions` as they were answered"
            )
        for field in ("completions", "completion_tokens"):
            echo = cast("list[Any] | None", getattr(self, field))
            if echo is not None and len(echo) != len(self.rewards):
                raise wrong("rewards", f"has {len(self.rewards)} entries for {len(echo)} {field}")
        return self


class RewardsOfOne(GroupRewards):
    """The rewards of one group."""

    wait: Wait = False
    timeout: Timeout = DEFAULT_WAIT

    @model_validator(mode="after")
    def _check_wait(self) -> Self:
        return _check_timeout(self)

    @property
    def all_groups(self) -> tuple[GroupRewards, ...]:
        """The one group."""
        return (self,)


class RewardsOfSeveral(Body):
    """The rewards of several groups, which are accepted all or none."""

    groups: list[GroupRewards] = Field(
        description="One entry for each group.", min_length=1, max_length=MAX_PROMPTS
    )
    wait: Wait = False
    timeout: Timeout = DEFAULT_WAIT

    @model_validator(mode="after")
    def _check_wait(self) -> Self:
        return _check_timeout(self)

    @property
    def all_groups(self) -> tuple[GroupRewards, ...]:
        """The groups in the order in which they were posted."""
        return tuple(self.groups)

    @model_validator(mode="after")
    def _check_unique_groups(self) -> Self:
        seen: set[str] = set()
        for index, group in enumerate(self.groups):
            if group.group_id is not None and group.group_id in seen:
                raise wrong(f"groups.{index}.group_id", f"{group.group_id} is repeated")
            seen |= {group.group_id} if group.group_id is not None else set()
        return self


class RewardOfTrajectory(Body):
    """The one reward of a trajectory: of several calls of an agent."""

    trajectory: TrajectoryName | None = Field(
        default=None,
        description="The name that its calls gave as `metadata.trajectory`, with the same API key. null: the calls are listed.",
    )
    completion_ids: Annotated[list[GroupId], AfterValidator(_check_unique)] | None = Field(
        default=None,
        description="Ids of the calls that it consists of, in order. With `trajectory` they choose which of its calls are trained.",
        min_length=1,
        max_length=MAX_CALLS,
    )
    reward: Reward | None = Field(
        description="A number, or null for a trajectory that failed and does not teach."
    )
    wait: Wait = False
    timeout: Timeout = DEFAULT_WAIT

    @model_validator(mode="after")
    def _check_wait(self) -> Self:
        return _check_timeout(self)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if self.trajectory is None and self.completion_ids is None:
            raise wrong("trajectory", "is needed, or `completion_ids`")
        return self


class CloseRequest(Body):
    """A group of trajectories to be closed before all its places have a reward."""

    group: TrajectoryName = Field(
        description="The name that its calls gave as `metadata.group`, with the same API key."
    )


class CloseAnswer(ResponseModel):
    """The groups that were closed."""

    closed: list[str] = Field(
        description="Ids of the groups that now wait for their step, with the rewards that came. Empty: none was open."
    )
    given_up: list[str] = Field(description="Ids of the groups that had no reward, and are gone.")


def _rewards_tag(body: object) -> str:
    if isinstance(body, Mapping):
        if "groups" in body:
            return "(several)"
        of_trajectory = "trajectory" in body or "completion_ids" in body
        return "(trajectory)" if of_trajectory else "(one)"
    if isinstance(body, RewardOfTrajectory):
        return "(trajectory)"
    return "(several)" if isinstance(body, RewardsOfSeveral) else "(one)"


RewardsRequest = Annotated[
    Annotated[RewardsOfOne, Tag("(one)")]
    | Annotated[RewardsOfSeveral, Tag("(several)")]
    | Annotated[RewardOfTrajectory, Tag("(trajectory)")],
    Discriminator(_rewards_tag),
]
"""The rewards of one group, of several under `groups`, or the one of a trajectory."""

AnyRewards = RewardsOfOne | RewardsOfSeveral | RewardOfTrajectory
REWARDS_REQUEST: TypeAdapter[AnyRewards] = TypeAdapter(RewardsRequest)


class RewardAnswer(ResponseModel):
    """The result of posting rewards for one group. The same post gets the same answer again."""

    group_id: str = Field(description="The group, also where it was found by its echo.")
    model_version: ModelVersion
    status: Literal["accepted", "held", "trained"] = Field(
        description="`accepted`: stored, to be trained as soon as possible; `held`: stored until a step names it; "
        "`trained`: after `wait`, a step has learnt from it."
    )
    step: int | None = Field(
        default=None, description="After `wait`: the step (from 0) that has learnt from it."
    )
    metrics: Metrics | None = Field(default=None, description="After `wait`: those of that step.")


class RewardsBatchAnswer(ResponseModel):
    """The results of posting rewards for several groups."""

    groups: list[RewardAnswer] = Field(description="One for each group, in the order of the post.")


class StepRequest(Body):
    """A step to be taken now."""

    group_ids: Annotated[list[GroupId], AfterValidator(_check_unique)] | None = Field(
        default=None,
        description="The rewarded or held groups to learn from; null: all that are rewarded and not held, at most `groups_per_step`.",
        min_length=1,
        max_length=65536,
    )
    learning_rate: float | None = Field(
        default=None,
        description="Learning rate of this step, in place of the schedule's.",
        gt=0,
        le=MAX_LEARNING_RATE,
    )
    wait: Wait = True
    timeout: Timeout = DEFAULT_WAIT

    @model_validator(mode="after")
    def _check_wait(self) -> Self:
        return _check_timeout(self)


class StepAnswer(ResponseModel):
    """A step that was taken, or that will be."""

    status: Literal["accepted", "trained"] = Field(
        description="`accepted`: the step's plan is stored, and it will be taken; `trained`: it is done."
    )
    step: int = Field(description="Its index, from 0.")
    group_ids: list[str] = Field(description="The groups that it learns from, in their order.")
    model_version: ModelVersion | None = Field(
        default=None, description="[run id, steps done] after it; null while it is not done."
    )
    metrics: Metrics | None = Field(default=None, description="Its metrics, once it is done.")


# How it is going


Phase = Literal[
    "idle", "starting", "running", "recovering", "stopping", "stopped", "finished", "failed"
]


class Counters(ResponseModel):
    """Groups of the run, by what has become of them."""

    served: int = Field(default=0, description="Groups whose completions were answered.")
    open: int = Field(default=0, description="Served and not rewarded yet.")
    rewarded: int = Field(default=0, description="Rewarded and waiting for a step.")
    held: int = Field(default=0, description="Rewarded and waiting to be named.")
    planned: int = Field(default=0, description="Part of a step that is not done.")
    trained: int = Field(default=0, description="Part of a step that is done.")
    expired: int = Field(default=0, description="Not rewarded within their lease.")
    given_up: int = Field(default=0, description="Deleted by their client.")
    stale: int = Field(default=0, description="Too old when a step could have taken them.")
    quarantined: int = Field(default=0, description="Left out because a step with them failed.")
    refused: dict[str, int] = Field(
        default={}, description="Requests that were refused, by the code of the problem."
    )


class Throughput(ResponseModel):
    """Speed of sampling and training."""

    sampled_tokens: int = Field(default=0, description="Tokens sampled since the engine began.")
    sampled_tokens_per_second: float | None = Field(
        default=None, description="Recent rate; null if nothing was sampled."
    )
    trained_tokens_per_second: float | None = Field(
        default=None, description="Rate of the last step; null before it."
    )
    seconds_per_step: float | None = Field(
        default=None, description="Recent seconds from step to step; null before the second."
    )


class Memory(ResponseModel):
    """Memory that the processes hold."""

    server_bytes: int | None = Field(default=None, description="Most bytes of the HTTP process.")
    engine_bytes: int | None = Field(
        default=None, description="Most bytes of the engine and its workers."
    )


class Quarantined(ResponseModel):
    """A step that ended the engine twice and was left out."""

    step: int = Field(description="Its index, from 0.")
    group_ids: list[str] = Field(description="Its groups, which are stored and not trained.")
    reason: str = Field(description="The reason why the engine ended.")


class TinkerStatus(ResponseModel):
    """Models that clients train through the Tinker API, with or without a run."""

    sessions: int = Field(default=0, description="Clients that have not ended their session.")
    models: list[str] = Field(default=[], description="Their models, by the ids that they have.")
    waiting: int = Field(default=0, description="Their calls that wait or are under way.")


class StatusAnswer(ResponseModel):
    """The state of the server and its run."""

    training_settings: dict[str, Any] | None = Field(
        default=None, description="The body of POST /start as it was posted; null before the first."
    )
    completion_requests_served: int = Field(
        default=0, description="Successful requests for completions of the run."
    )
    reward_requests_served: int = Field(
        default=0, description="Successful posts of rewards of the run."
    )
    phase: Phase = Field(
        description="`idle`: nothing was started yet; `recovering`: the engine is being started again; `failed`: see `last_error`."
    )
    run_id: str | None = Field(default=None, description="The run; null before the first.")
    step: int | None = Field(default=None, description="Steps done.")
    max_steps: int | None = Field(default=None, description="Steps after which it is finished.")
    groups_per_step: int | None = Field(default=None, description="Groups that make a step.")
    model_version: ModelVersion | None = Field(
        default=None, description="[run id, steps done] of the policy that serves."
    )
    fingerprint: str | None = Field(
        default=None, description="Fingerprint of the weights that serve."
    )
    incarnation: int = Field(
        default=0,
        description="Rises where steps had to be repeated and may differ in their last bits from the ones before.",
    )
    not_repeatable: str | None = Field(
        default=None,
        description="Why the same requests, from more clients or in another order, may give another run; null: they give the same run.",
    )
    engine_restarts: int = Field(
        default=0, description="How often the engine has restarted since the server began."
    )
    counters: Counters = Field(default=Counters(), description="Groups by their state.")
    queue_depth: int = Field(default=0, description="Requests for completions that wait.")
    last_error: str | None = Field(default=None, description="The last failure, in words.")
    throughput: Throughput = Field(
        default=Throughput(), description="Speed of sampling and training."
    )
    memory: Memory = Field(default=Memory(), description="Memory that the processes hold.")
    versions: list[ModelVersion] = Field(
        default=[], description="Versions that GET /model has, the newest last."
    )
    quarantined: list[Quarantined] = Field(default=[], description="Steps that were left out.")
    metrics: Metrics | None = Field(default=None, description="Metrics of the last step.")
    tinker: TinkerStatus = Field(
        default=TinkerStatus(), description="Models that clients train through the Tinker API."
    )
    loop_elsewhere: str | None = Field(
        default=None,
        description="The run whose loop drives sampler and learner from elsewhere (`run.server`), with a mark of where it is.",
    )
    last_event_id: int | None = Field(
        default=None,
        description=(
            "Id of the newest event. With it as `Last-Event-ID` of GET /events, a client misses nothing that comes after this "
            "answer."
        ),
    )


class EventKind(StrEnum):
    """The kinds of events of GET /events; the value is the event's name."""

    STARTED = "started"
    """A run begins, or continues."""
    STEP = "step"
    """A step is done; `metrics` has its numbers."""
    CHECKPOINT = "checkpoint"
    """A checkpoint stands, an automatic one or one with a name; `data` has its `address`, which `resume_from` takes."""
    GROUPS = "groups"
    """Groups have expired or become stale; `data` says which."""
    ENGINE_LOST = "engine_lost"
    """The engine ended; it is being started again."""
    RECOVERED = "recovered"
    """The engine is back, and everything is as it was."""
    RECOVERED_INEXACT = "recovered_inexact"
    """The engine is back; steps were repeated that may differ in their last bits."""
    QUARANTINED = "quarantined"
    """A step was left out, because it ended the engine twice."""
    FAILED = "failed"
    """The engine is not started again."""
    STOPPED = "stopped"
    """The run was stopped."""
    FINISHED = "finished"
    """The run has done max_steps."""
    WARNING = "warning"
    """Something that the reader should know; `message` says it."""


class EventData(ResponseModel):
    """One event of GET /events: the `data` of a server-sent event, whose `id` and `event` are `id` and `kind`."""

    id: int = Field(description="Rises with each event; `Last-Event-ID` resumes after it.")
    kind: str = Field(description="The kind of event: " + ", ".join(EventKind) + ".")
    at: float = Field(description="Seconds since 1970.")
    run_id: str | None = Field(default=None, description="The run that it is about.")
    step: int | None = Field(
        default=None,
        description="For `step`, its index, from 0; for other events the number of steps done.",
    )
    metrics: Metrics | None = Field(default=None, description="Metrics of a `step`.")
    message: str | None = Field(default=None, description="The event in words.")
    data: dict[str, Any] = Field(default={}, description="Further facts about the event.")


# Models, checkpoints, tokenizer


class ModelRequest(Body):
    """The version whose files the client wants."""

    version: str | None = Field(
        default=None,
        description="`run@step`, a number of steps of the present run, the name of a checkpoint, or `latest`, which null means too.",
        min_length=1,
        max_length=MAX_ADDRESS,
    )


class CheckpointRequest(Body):
    """A checkpoint to be written now."""

    name: str = Field(
        description="Name of the checkpoint, which `resume_from` takes; it is kept until it is deleted.",
        pattern=NAME_PATTERN,
        min_length=1,
        max_length=MAX_NAME,
    )


class CheckpointAnswer(ResponseModel):
    """A checkpoint."""

    name: str | None = Field(
        default=None, description="Name under which it was saved; null for an automatic one."
    )
    run_id: str = Field(description="The run that it is of.")
    step: int = Field(description="Steps done.")
    address: str = Field(description="Address that `resume_from` takes: the name, or `run@step`.")


class CheckpointsAnswer(ResponseModel):
    """All checkpoints that a run can continue from."""

    checkpoints: list[CheckpointAnswer] = Field(description="The oldest first.")


class TokenizerAnswer(ResponseModel):
    """The tokenizer's files and chat template, so that a client renders and tokenises as the server does."""

    hash: str = Field(description="Hash of tokenizer and template; `tokenizer_hash` of a request.")
    chat_template: str | None = Field(
        default=None, description="The Jinja text; null where the model has none."
    )
    tokenizer_json: str | None = Field(
        default=None,
        description="The text of tokenizer.json, as the library `tokenizers` reads it; null for a tokenizer of another kind, whose files "
        "GET /model has.",
    )
    special_tokens: dict[str, str] = Field(
        default={},
        description="Special tokens by their role: bos_token, eos_token, pad_token, unk_token.",
    )
    stop_token_ids: list[int] = Field(default=[], description="Tokens that end a completion.")


class HealthAnswer(ResponseModel):
    """The answer of /healthz and /readyz."""

    status: Literal["ok", "not_ready"] = Field(description="`ok` while requests are answered.")
    detail: str | None = Field(default=None, description="The reason if they are not.")
