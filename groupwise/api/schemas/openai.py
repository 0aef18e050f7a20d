"""The OpenAI-compatible routes: what their clients send, and what they get.

The models have the names and shapes of OpenAI's own, so that its clients read the answers. What they ask for is read strictly: each
parameter is honoured, or changes nothing (`user`, `service_tier`), or is refused by name with what to do instead. Beside OpenAI's own
there are a few fields of vLLM, such as `top_k` and `stop_token_ids`, in requests; fields of ours, `policy_version` and `group_id`, in
answers; and what `metadata` says of a completion that is kept to be rewarded.

The chat template describes tools to the model, and their calls are read from the text of an answer, where they stand as Hermes and
Qwen write them. `tool_choice` and `response_format` constrain what can be drawn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, LiteralString, Self, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from groupwise.api.schemas.problems import FieldError
from groupwise.api.schemas.tool_choice import ToolSelection, parse_tool_choice
from groupwise.api.schemas.training import (
    MAX_ADDRESS,
    MAX_ID,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_PROMPTS,
    MAX_STOPS,
    MAX_TOKENS,
    Body,
    ModelVersion,
    Stop,
    Text,
    TokenId,
    TokenIds,
    wrong,
)

MAX_CHOICES = 128
"""Completions of one request, for each prompt."""
GROUP, SIZE, TRAJECTORY = "group", "size", "trajectory"
"""Keys of `metadata` that count where a completion is kept."""
BY_IDS = "*"
"""The value of `trajectory` for calls whose ids are listed with their reward."""
MAX_KEY, MAX_VALUE = 64, 512
"""Characters of a key of `metadata` and of its value."""

FinishReason = Literal["stop", "length", "tool_calls"]
MAX_SCHEMA = 65536
"""Characters of a JSON schema."""
MAX_TOP_LOGPROBS = 20
"""Alternatives of each token."""
MAX_BIASES = 1024
"""Tokens of `logit_bias`."""
MAX_STOP_TOKENS = 128
"""Entries of `stop_token_ids`."""
TokenKey = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,6})$")]
"""A token id as a key of a JSON object."""
Bias = Annotated[float, Field(ge=-100, le=100)]
MAX_TOOLS = 128
"""Tools of one request."""


def refuse_other_types(types: Sequence[str], message: LiteralString) -> BeforeValidator:
    """Refuse an object of another `type` by one message, instead of one for each of its fields."""

    def check(value: Any) -> Any:
        if isinstance(value, dict):
            fields = cast("dict[str, Any]", value)
            if fields.get("type", types[0]) not in types:
                raise PydanticCustomError("other_type", message)
            return fields
        return value

    return BeforeValidator(check)


FUNCTIONS_ALONE = refuse_other_types(
    ("function",), "must be a tool of type `function`: the server runs no tools by itself"
)


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"] = Field(
        description="Always `text`: the model reads neither images nor sound."
    )
    text: str = Field(description="The text.")


Part = Annotated[
    TextPart,
    refuse_other_types(
        ("text",), "must be a part of type `text`: the model reads no images, sound or files"
    ),
]


def _content_tag(content: object) -> str:
    return "(parts)" if isinstance(content, list) else "(text)"


class ChatMessage(Body):
    """One message of a chat, also as an answer had it."""

    role: str = Field(
        description="The role: system (or developer), user, assistant or tool; the chat template decides which it knows.",
        min_length=1,
        max_length=64,
    )
    content: Annotated[
        Annotated[str | None, Tag("(text)")] | Annotated[list[Part], Tag("(parts)")],
        Discriminator(_content_tag),
    ] = Field(
        default=None,
        description="The message: text, or pieces of text. null if a message only calls tools.",
    )
    name: str | None = Field(
        default=None, description="Name of the speaker or tool.", max_length=MAX_ID
    )
    tool_calls: list[dict[str, Any]] | None = Field(
        default=None,
        description="Calls of tools that the message makes, as an answer had them; arguments may be JSON text or an object.",
    )
    tool_call_id: str | None = Field(
        default=None, description="The call that a tool's message answers.", max_length=MAX_NAME
    )
    reasoning_content: str | None = Field(
        default=None,
        description="What the model thought before it answered; the chat template decides what of it is shown again.",
    )
    refusal: str | None = Field(
        default=None,
        description="Answers have it: why a model did not answer. It stands for `content` where there is none.",
    )
    annotations: list[dict[str, Any]] | None = Field(
        default=None, description="No effect; answers have it: what a text refers to."
    )
    parsed: Any = Field(
        default=None,
        description="No effect; the client of OpenAI adds it: what it has read from `content`.",
    )
    audio: None = Field(default=None, description="Nothing; answers have it.")
    function_call: None = Field(default=None, description="Nothing; answers have it.")

    def plain(self) -> dict[str, Any]:
        """The message in the form that chat templates take."""
        parts = self.content
        content = "".join(part.text for part in parts) if isinstance(parts, list) else parts
        if content is None and not self.tool_calls:
            content = self.refusal
        shown = {"name", "tool_calls", "tool_call_id", "reasoning_content"}
        fields = self.model_dump(include=shown, exclude_none=True)
        return {"role": self.role, "content": content, **fields}


class StreamOptions(Body):
    """How an answer is streamed."""

    include_usage: bool = Field(
        default=False, description="A last piece with the numbers of tokens."
    )
    include_obfuscation: bool | None = Field(
        default=None, description="No effect: the pieces are not padded."
    )


class NamedSchema(Body):
    """A JSON schema that an answer follows."""

    name: str = Field(description="Its name; no effect.", min_length=1, max_length=MAX_ID)
    description: str | None = Field(default=None, description="What it is for; no effect.")
    schema_: dict[str, Any] | None = Field(
        default=None,
        alias="schema",
        description="The schema; null: any JSON object. Keywords that cannot be enforced are refused.",
    )
    strict: bool | None = Field(default=None, description="No effect: a schema is always enforced.")


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="`text`; `json_object`, any JSON object; or `json_schema`, JSON of the given schema. Tokens that would break it "
        "cannot be drawn. The model is not shown the schema: say in the prompt what to write. Not with `store`."
    )
    json_schema: NamedSchema | None = Field(
        default=None, description="The schema of `json_schema`; only with that type."
    )


class ToolFunction(Body):
    """A function that the model may call."""

    name: str = Field(description="Its name.", min_length=1, max_length=MAX_ID)
    description: str | None = Field(default=None, description="What the function does.")
    parameters: dict[str, Any] | None = Field(
        default=None, description="JSON schema of its arguments; the model reads it."
    )
    strict: bool | None = Field(
        default=None,
        description=(
            "true: a call whose arguments do not fit the schema stays text, so that calls always fit. Only `tool_choice` forces a call."
        ),
    )


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"] = Field(description="Always `function`.")
    function: ToolFunction = Field(description="The function to call.")


ToolChoice = Annotated[
    Annotated[str | None, Tag("(word)")] | Annotated[dict[str, Any], Tag("(function)")],
    Discriminator(lambda given: "(function)" if isinstance(given, dict) else "(word)"),
]


def _prompt_tag(prompt: object) -> str:
    if not isinstance(prompt, list):
        return "(one)"
    items = cast("list[object]", prompt)
    first = items[0] if items else None
    if isinstance(first, list):
        return "(several of tokens)"
    return "(tokens)" if isinstance(first, int) else "(several)"


TokenPrompt = Annotated[TokenIds, Field(min_length=1, max_length=MAX_TOKENS)]
TextPrompt = Annotated[
    Annotated[Text, Tag("(one)")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS), Tag("(several)")]
    | Annotated[TokenPrompt, Tag("(tokens)")]
    | Annotated[
        list[TokenPrompt], Field(min_length=1, max_length=MAX_PROMPTS), Tag("(several of tokens)")
    ],
    Discriminator(_prompt_tag),
]


Stops = Annotated[
    Annotated[Stop | None, Tag("(one)")]
    | Annotated[list[Stop], Field(max_length=MAX_STOPS), Tag("(several)")],
    Discriminator(lambda given: "(several)" if isinstance(given, list) else "(one)"),
]


class CompletionFields(Body):
    """The fields that all requests for completions share."""

    model: str = Field(
        description="`latest`, or `run@step` of what is served now; GET /v1/models has both.",
        min_length=1,
        max_length=MAX_ADDRESS,
    )
    temperature: float | None = Field(
        default=None, description="null: the run's. 0 is greedy.", ge=0, le=100
    )
    top_p: float | None = Field(
        default=None,
        description="Draw from the most probable tokens that have this share; 1: from all. Not with `store`.",
        gt=0,
        le=1,
    )
    top_k: int | None = Field(
        default=None,
        description="Draw from this many of the most probable tokens; -1 or 0: from all. Not with `store`.",
        ge=-1,
        lt=2**31,
    )
    min_p: float | None = Field(
        default=None,
        description="Draw from tokens with this share of the highest probability; 0: from all. Not with `store`.",
        ge=0,
        le=1,
    )
    stop: Stops = Field(
        default=None, description="A text, or several, that end a completion; they are left out."
    )
    seed: int | None = Field(
        default=None,
        description="The same seed gives the same completions, as long as the same policy serves. Not with `store`.",
        ge=-(2**63),
        lt=2**63,
    )

    # What changes nothing here, whatever is given.
    user: str | None = Field(default=None, description="No effect.")
    safety_identifier: str | None = Field(default=None, description="No effect.")
    service_tier: str | None = Field(default=None, description="No effect: there is one.")
    prompt_cache_key: str | None = Field(default=None, description="No effect.")
    prompt_cache_retention: str | None = Field(default=None, description="No effect.")
    prompt_cache_options: dict[str, Any] | None = Field(default=None, description="No effect.")


class _Request(CompletionFields):
    """The fields that chats and plain completions share."""

    n: int | None = Field(
        default=None, description="Completions of each prompt.", ge=1, le=MAX_CHOICES
    )
    max_tokens: int | None = Field(
        default=None,
        description="Longest completion in tokens; null: the run's `max_completion_length`.",
        ge=1,
        le=MAX_TOKENS,
    )
    stream: bool | None = Field(default=None, description="Send the text as it is written.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream`.")
    store: bool | None = Field(
        default=None, description="Keep the completions as a group, to be rewarded by their id."
    )
    metadata: dict[str, str] | None = Field(
        default=None,
        description=(
            "With `store` and n = 1: `group` is the name under which calls are gathered, `size` how many make a group, and `trajectory` "
            "the name of the trajectory that the call belongs to, or `*` if its reward will list the ids of its calls. "
            "Everything else has no effect."
        ),
        max_length=16,
    )

    stop_token_ids: list[TokenId] | None = Field(
        default=None,
        description="Token ids that end a completion, besides the model's own; the token is part of `token_ids`.",
        max_length=MAX_STOP_TOKENS,
    )
    min_tokens: int | None = Field(
        default=None,
        description="Tokens before which a completion cannot end: stop tokens have probability 0 there. null: the run's.",
        ge=0,
        le=MAX_TOKENS,
    )
    ignore_eos: bool | None = Field(
        default=None, description="true: the model's own stop tokens do not end a completion."
    )
    return_token_ids: bool | None = Field(
        default=None,
        description="true: tell the prompt's tokens, too, as `prompt_token_ids`; `token_ids` are always told.",
    )
    frequency_penalty: float | None = Field(
        default=None,
        description="Lowers a token's logit by this for each time that the completion has it. Not with `store`.",
        ge=-2,
        le=2,
    )
    presence_penalty: float | None = Field(
        default=None,
        description="Lowers the logits of tokens that the completion has by this. Not with `store`.",
        ge=-2,
        le=2,
    )
    repetition_penalty: float | None = Field(
        default=None,
        description="As in vLLM: divides the logits above 0 of tokens that prompt or completion have, and multiplies the others. 1: none. "
        "Not with `store`.",
        gt=0,
        le=100,
    )
    logit_bias: dict[TokenKey, Bias] | None = Field(
        default=None,
        description="Added to the logits of these token ids, -100 to 100. Not with `store`.",
        max_length=MAX_BIASES,
    )

    @property
    def choices(self) -> int:
        """Completions of each prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...] | None:
        """None: the run's."""
        if self.stop is None:
            return None
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def longest(self) -> int | None:
        """Tokens of a completion."""
        return self.max_tokens

    @property
    def field_names(self) -> Mapping[Any, str]:
        """This protocol's names for the fields that an engine may refuse."""
        names = (
            "prompt",
            "max_tokens",
            "min_tokens",
            "temperature",
            "stop_token_ids",
            "logit_bias",
        )
        others = {
            "prompt_ids": "prompt",
            "json_schema": "response_format",
            "tool_calls": "tools",
        }
        return {**{name: name for name in names}, **others}

    @property
    def restrictions(self) -> Mapping[str, float | int]:
        """The sampling restrictions (top_k, top_p, min_p) that the request sets."""
        values = {
            "top_p": None if self.top_p == 1 else self.top_p,
            "top_k": self.top_k if self.top_k is not None and self.top_k > 0 else None,
            "min_p": self.min_p or None,
        }
        return {key: value for key, value in values.items() if value is not None}

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer has the log-probability of each token."""
        raise NotImplementedError

    @property
    def alternatives(self) -> int:
        """How many of the most probable tokens the answer has at each position."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        for problem in self._problems():
            raise problem
        return self

    def _problems(self) -> Iterator[PydanticCustomError]:
        if self.stream_options is not None and not self.stream:
            yield wrong("stream_options", "has no effect without `stream: true`")
        for key, value in (self.metadata or {}).items():
            if len(key) > MAX_KEY or len(value) > MAX_VALUE:
                yield wrong(
                    "metadata",
                    f"has a key above {MAX_KEY} characters, or a value above {MAX_VALUE}",
                )


class ChatRequest(_Request):
    """A chat to be gone on with."""

    messages: list[ChatMessage] = Field(
        description="The conversation so far; it goes through the chat template.",
        min_length=1,
        max_length=MAX_MESSAGES,
    )
    max_completion_tokens: int | None = Field(
        default=None, description="The newer name of `max_tokens`.", ge=1, le=MAX_TOKENS
    )
    logprobs: bool | None = Field(
        default=None, description="Tell the log-probability of each token that was drawn."
    )
    top_logprobs: int | None = Field(
        default=None,
        description="With `logprobs`: tell so many of the most probable tokens at each position. Not with `store`.",
        ge=0,
        le=MAX_TOP_LOGPROBS,
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None,
        description='Ours, as in vLLM: what the chat template receives beside the messages, such as {"enable_thinking": false}.',
    )
    reasoning_effort: str | None = Field(
        default=None,
        description="Passed to the chat template as its argument `reasoning_effort`; refused where the template has none.",
        max_length=MAX_NAME,
    )
    add_generation_prompt: bool | None = Field(
        default=None,
        description="No effect: a chat is gone on with where the assistant's words are to come.",
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="No effect: where the last message is the assistant's, the completion continues it.",
    )
    verbosity: str | None = Field(default=None, description="No effect.", max_length=MAX_NAME)
    response_format: ResponseFormat | None = Field(
        default=None, description="The form of the answer: text, or JSON."
    )
    modalities: list[Literal["text"]] | None = Field(default=None, description="`text` alone.")
    tools: list[Annotated[Tool, FUNCTIONS_ALONE]] | None = Field(
        default=None,
        description="Functions that the model may call: the chat template tells of them.",
        max_length=MAX_TOOLS,
    )
    tool_choice: ToolChoice = Field(
        default=None,
        description=(
            "`auto`, the default: calls are read from the text. `none`: the model is not shown the tools. `required`, or the name of a "
            "function: tokens that are no call of it cannot be drawn; not with `store`. `allowed_tools`: `auto` or `required` with some "
            "of the tools."
        ),
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="false: an answer has the first call alone."
    )
    functions: list[Any] | None = Field(default=None, description="None: give `tools`.")

    @property
    def longest(self) -> int | None:
        """Tokens of a completion."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer has the log-probability of each token."""
        return bool(self.logprobs)

    @property
    def alternatives(self) -> int:
        """How many of the most probable tokens the answer has at each position."""
        return self.top_logprobs or 0

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Arguments of the chat template besides messages and tools."""
        arguments = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            arguments["reasoning_effort"] = self.reasoning_effort
        return arguments

    @property
    def field_names(self) -> Mapping[Any, str]:
        """This protocol's names for the fields that an engine may refuse."""
        limit = "max_completion_tokens" if self.max_completion_tokens else "max_tokens"
        return {**super().field_names, "prompt": "messages", "max_tokens": limit}

    @property
    def tool_selection(self) -> ToolSelection:
        """The parsed `tool_choice`."""
        return parse_tool_choice(
            self.tool_choice, [tool.function.name for tool in self.tools or ()]
        )

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Schemas of the tools that the model is shown."""
        tools = [] if self.tool_selection.mode == "none" else self.tools or []
        return [tool.model_dump(exclude_none=True) for tool in tools]

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """Schemas of the tools that the model may call."""
        names = self.tool_selection.names
        return [
            tool
            for tool in self.offered_tools
            if names is None or tool["function"]["name"] in names
        ]

    def _problems(self) -> Iterator[PydanticCustomError]:
        yield from super()._problems()
        if self.functions:
            yield wrong("functions", "is the old name of `tools`; give them as `tools`")
        try:
            mode = self.tool_selection.mode
        except ValueError as error:
            yield wrong("tool_choice", str(error))
            return
        effort = (self.chat_template_kwargs or {}).get("reasoning_effort", self.reasoning_effort)
        if self.reasoning_effort is not None and effort != self.reasoning_effort:
            yield wrong(
                "reasoning_effort", "differs from chat_template_kwargs; give one of the two"
            )
        if self.top_logprobs and not self.logprobs:
            yield wrong("top_logprobs", "has no effect without `logprobs: true`")
        given = self.response_format
        if given is not None and (given.type == "json_schema") != (given.json_schema is not None):
            yield wrong(
                "response_format", "has json_schema exactly where its type is `json_schema`"
            )
        if given is not None and len(json.dumps(given.model_dump())) > MAX_SCHEMA:
            yield wrong("response_format", f"has a schema above {MAX_SCHEMA} characters")
        is_json = given is not None and given.type != "text"
        if mode == "required" or (is_json and self.offered_tools):
            schemas = [tool["function"].get("parameters") for tool in self.callable_tools]
            if len(json.dumps(schemas)) > MAX_SCHEMA:
                yield wrong(
                    "tools",
                    f"have schemas above {MAX_SCHEMA} characters, which is too much to enforce; shorten them, or give tool_choice `auto` "
                    "without response_format",
                )
        limits = self.max_tokens, self.max_completion_tokens
        if None not in limits and limits[0] != limits[1]:
            yield wrong("max_tokens", "differs from max_completion_tokens; give one of the two")


class TextRequest(_Request):
    """Text to be gone on with."""

    prompt: TextPrompt = Field(
        description="Text, or several, which are tokenised as they stand; or token ids, one list or several. The choices of several follow "
        "each other in their order."
    )
    max_tokens: int | None = Field(
        default=None,
        description="Longest completion in tokens; null: the run's `max_completion_length`. 0 with `echo`: the prompt alone.",
        ge=0,
        le=MAX_TOKENS,
    )
    logprobs: int | None = Field(
        default=None,
        description="Tell the log-probability of each token that was drawn, and of so many of the most probable ones. Above 0 not with "
        "`store`.",
        ge=0,
        le=MAX_TOP_LOGPROBS,
    )
    echo: bool | None = Field(
        default=None,
        description="true: the prompt stands before the completion, with `logprobs` as well. Not with `store`.",
    )
    suffix: str | None = Field(default=None, description="Empty alone.")
    best_of: int | None = Field(default=None, description="The same as n alone.")

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """One or several: texts or tokens."""
        given: Any = self.prompt
        if isinstance(given, str):
            return (given,)
        if isinstance(given[0], int):
            return (tuple(given),)
        return tuple(text if isinstance(text, str) else tuple(text) for text in given)

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer has the log-probability of each token."""
        return self.logprobs is not None

    @property
    def alternatives(self) -> int:
        """How many of the most probable tokens the answer has at each position."""
        return self.logprobs or 0

    def _problems(self) -> Iterator[PydanticCustomError]:
        yield from super()._problems()
        if self.max_tokens == 0 and not self.echo:
            yield wrong("max_tokens", "is 0, which is for `echo: true` alone; give 1 or more")
        if self.suffix:
            yield wrong("suffix", "is not supported: the model writes from left to right")
        if self.best_of is not None and self.best_of != self.choices:
            yield wrong(
                "best_of", f"is {self.best_of} and n {self.choices}: ask for n, and choose yourself"
            )


# Answers


class ResponseModel(BaseModel):
    """The base of all answers."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Usage(ResponseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AlternativeToken(ResponseModel):
    """A token that could be drawn."""

    token: str = Field(description="Its text by itself; special ones by their name.")
    logprob: float = Field(description="Log-probability in nats.")
    bytes: list[int] | None = Field(
        description="The token's text in UTF-8; null if it is not a whole character."
    )


class TokenLogprob(ResponseModel):
    """A token that was drawn."""

    token: str = Field(description="Its text by itself; special ones by their name.")
    logprob: float = Field(
        description="Log-probability in nats, under the distribution that the token was drawn from."
    )
    bytes: list[int] | None = Field(
        description="The token's text in UTF-8; null if it is not a whole character."
    )
    top_logprobs: list[AlternativeToken] = Field(
        default=[],
        description="The most probable tokens at its position, as many as were asked for.",
    )


class ChatLogprobs(ResponseModel):
    """The log-probabilities of all tokens of a completion, including the one that ended it."""

    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(ResponseModel):
    """The same in the older form."""

    tokens: list[str]
    token_logprobs: list[float | None] = Field(
        description="null for the first token of a prompt (`echo`), before which there is nothing."
    )
    text_offset: list[int]
    top_logprobs: list[dict[str, float] | None] | None = Field(
        default=None,
        description="The most probable tokens at each position and the one that stands there, where they were asked for.",
    )


class CalledFunction(ResponseModel):
    """The function that the model calls, and its arguments."""

    name: str
    arguments: str = Field(description="A JSON object as text.")


class ToolCallData(ResponseModel):
    """A call of a tool that the policy wrote."""

    id: str = Field(
        description="Id of the call, which the message with the result repeats as `tool_call_id`."
    )
    type: Literal["function"] = "function"
    function: CalledFunction


class Reply(ResponseModel):
    """The policy's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None = Field(
        description="Its text without calls of tools; null where there is nothing else."
    )
    refusal: None = None
    tool_calls: list[ToolCallData] | None = Field(
        default=None,
        description="Calls of the tools that the request gave; left out where there are none.",
        exclude_if=lambda calls: calls is None,
    )


class _Finished(ResponseModel):
    """How a choice ended."""

    index: int
    finish_reason: FinishReason
    token_ids: list[int] = Field(
        description="Ours: the tokens as they were drawn, the one that ended it included."
    )


PromptTokens = Annotated[
    list[int] | None,
    Field(
        description="As in vLLM: the prompt's tokens, with `return_token_ids`; left out without.",
        exclude_if=lambda ids: ids is None,
    ),
]


class ChatChoice(_Finished):
    """One completion of a chat."""

    message: Reply
    logprobs: ChatLogprobs | None = None


class TextChoice(_Finished):
    """One completion of a text."""

    text: str
    prompt_token_ids: PromptTokens = None
    logprobs: TextLogprobs | None = None


class _Whole(ResponseModel):
    """The fields that whole answers and pieces of a stream share."""

    id: str = Field(description="With `store`, the id by which the completion is rewarded.")
    created: int = Field(description="Seconds since 1970.")
    model: str = Field(description="`run@step` that has written it.")
    system_fingerprint: str = Field(description="Fingerprint of the weights that wrote it.")
    policy_version: ModelVersion
    group_id: str | None = Field(
        default=None,
        description="Groupwise's own field: the group, with `store`; null: it is not stored.",
    )


class ChatCompletion(_Whole):
    """Completions of a chat."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: PromptTokens = None


class TextCompletion(_Whole):
    """Completions of a text."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage


class ModelData(ResponseModel):
    """A policy that serves."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="When its run was opened, in seconds since 1970.")
    owned_by: str = Field(description="Its run.")
    fingerprint: str = Field(description="Ours: of its weights.")


class ModelList(ResponseModel):
    """The policies that serve."""

    object: Literal["list"] = "list"
    data: list[ModelData]


class ErrorData(ResponseModel):
    """Why a request was not answered."""

    message: str
    type: str
    param: str | None = None
    code: str = Field(
        description="Code of the problem, as in the other routes, but OpenAI's `context_length_exceeded` for a prompt that is too long; "
        "its meaning never changes."
    )
    errors: list[FieldError] = Field(
        default=[],
        description="Each field of the request that is wrong; `param` names the first.",
    )


class ErrorAnswer(ResponseModel):
    """The form that OpenAI's clients read."""

    error: ErrorData
