"""OpenAI's newer protocol, /v1/responses: text and function tools, with conversations that the server keeps.

A request is converted to one of /v1/chat/completions (`groupwise.tasks.openai.responses`), so both have the same meaning, and the same
refusals. Fields that OpenAI's own client sends without a meaning here are accepted; everything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from groupwise.api.schemas.openai import (
    FUNCTIONS_ALONE,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    CompletionFields,
    ToolChoice,
    refuse_other_types,
)
from groupwise.api.schemas.training import (
    MAX_ID,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_TOKENS,
    Body,
    ModelVersion,
    wrong,
)

Status = Literal["in_progress", "completed", "incomplete"]
NO_EFFECT = "No effect."


class InputText(Body):
    """A piece of a message."""

    type: Literal["input_text", "output_text", "text"] = Field(
        description="`input_text`, or `output_text` in a message of the assistant: the model reads neither images nor files."
    )
    text: str = Field(description="The text.")
    annotations: list[dict[str, Any]] | None = Field(default=None, description=NO_EFFECT)
    logprobs: list[dict[str, Any]] | None = Field(default=None, description=NO_EFFECT)


class InputRefusal(Body):
    """A model's words on why it does not answer."""

    type: Literal["refusal"] = Field(description="Always `refusal`.")
    refusal: str = Field(description="The words; the model reads them as text.")


def _type_of(value: Any, otherwise: str) -> Any:
    """The field `type` of a JSON object, or of the model that it was read as."""
    if isinstance(value, dict):
        return cast("dict[str, Any]", value).get("type", otherwise)
    return getattr(value, "type", otherwise)


def _part_tag(part: Any) -> str:
    kind = _type_of(part, "input_text")
    return "(refusal)" if kind == "refusal" else "(text)"


PARTS = ("input_text", "output_text", "text", "refusal")


Content = Annotated[
    Annotated[str, Tag("(text)")]
    | Annotated[
        list[
            Annotated[
                Annotated[InputText, Tag("(text)")] | Annotated[InputRefusal, Tag("(refusal)")],
                Discriminator(_part_tag),
                refuse_other_types(
                    PARTS,
                    "must be a part of type `input_text`: the model reads no images, sound or files",
                ),
            ]
        ],
        Tag("(parts)"),
    ],
    Discriminator(lambda given: "(parts)" if isinstance(given, list) else "(text)"),
]


def text_of(content: str | list[Any]) -> str:
    """The text of a message or of a tool's output."""
    if isinstance(content, str):
        return content
    return "".join(
        part.refusal if isinstance(part, InputRefusal) else part.text for part in content
    )


class MessageItem(Body):
    """A message of the conversation."""

    type: Literal["message"] = Field(default="message", description="`message`, or left out.")
    role: Literal["system", "developer", "user", "assistant"] = Field(description="Who speaks.")
    content: Content = Field(description="Text, or pieces of text.")
    id: str | None = Field(default=None, description=NO_EFFECT, max_length=MAX_NAME)
    status: Status | None = Field(default=None, description=NO_EFFECT)
    phase: str | None = Field(default=None, description=NO_EFFECT, max_length=MAX_NAME)


class FunctionCallItem(Body):
    """A call of a tool, as a response had it."""

    type: Literal["function_call"] = Field(description="Always `function_call`.")
    call_id: str = Field(description="The id that its output repeats.", max_length=MAX_NAME)
    name: str = Field(description="The tool.", min_length=1, max_length=MAX_ID)
    arguments: str = Field(description="A JSON object as text.")
    id: str | None = Field(default=None, description=NO_EFFECT, max_length=MAX_NAME)
    status: Status | None = Field(default=None, description=NO_EFFECT)
    namespace: None = Field(default=None, description="null alone.")
    caller: None = Field(default=None, description="null alone.")


class FunctionOutputItem(Body):
    """What a tool gave back."""

    type: Literal["function_call_output"] = Field(description="Always `function_call_output`.")
    call_id: str = Field(description="The call that it answers.", max_length=MAX_NAME)
    output: Content = Field(description="Text, or pieces of text.")
    id: str | None = Field(default=None, description=NO_EFFECT, max_length=MAX_NAME)
    status: Status | None = Field(default=None, description=NO_EFFECT)


class ReasoningItem(Body):
    """What another model thought; it is accepted, and the model is not shown it."""

    type: Literal["reasoning"] = Field(description="Always `reasoning`.")
    id: str | None = Field(default=None, description=NO_EFFECT, max_length=MAX_NAME)
    summary: list[dict[str, Any]] | None = Field(default=None, description=NO_EFFECT)
    content: list[dict[str, Any]] | None = Field(default=None, description=NO_EFFECT)
    encrypted_content: str | None = Field(default=None, description=NO_EFFECT)
    status: Status | None = Field(default=None, description=NO_EFFECT)


KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _item_tag(item: Any) -> str | None:
    kind = _type_of(item, "message")
    return f"({kind})" if kind in KINDS else None


Item = Annotated[
    Annotated[MessageItem, Tag("(message)")]
    | Annotated[FunctionCallItem, Tag("(function_call)")]
    | Annotated[FunctionOutputItem, Tag("(function_call_output)")]
    | Annotated[ReasoningItem, Tag("(reasoning)")],
    Discriminator(
        _item_tag,
        custom_error_type="kind_of_item",
        custom_error_message=f"must be an item of one of the types {', '.join(KINDS)}; earlier items are repeated whole, or continued "
        "from with previous_response_id",
    ),
]


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"] = Field(
        description="Always `function`: the server runs no tools of its own."
    )
    name: str = Field(description="Its name.", min_length=1, max_length=MAX_ID)
    description: str | None = Field(default=None, description="What the function does.")
    parameters: dict[str, Any] | None = Field(
        default=None, description="JSON schema of its arguments; the model reads it."
    )
    strict: bool | None = Field(
        default=None,
        description="true: a call whose arguments do not fit the schema stays text, so that calls always fit.",
    )


class Reasoning(Body):
    """How much the model thinks."""

    effort: str | None = Field(
        default=None,
        description="Passed to the chat template as `reasoning_effort`; refused where the template has none.",
        max_length=MAX_NAME,
    )
    summary: str | None = Field(default=None, description=NO_EFFECT, max_length=MAX_NAME)
    generate_summary: str | None = Field(default=None, description=NO_EFFECT, max_length=MAX_NAME)


class TextConfig(Body):
    """The form of the text."""

    format: dict[str, Any] | None = Field(
        default=None,
        description='{"type": "text"}, or what `response_format` of chats accepts.',
    )
    verbosity: str | None = Field(default=None, description=NO_EFFECT, max_length=MAX_NAME)


class ResponseStreamOptions(Body):
    """How a response is streamed."""

    include_obfuscation: bool | None = Field(
        default=None, description="No effect: the pieces are not padded."
    )


class ResponsesRequest(CompletionFields):
    """A conversation to be gone on with."""

    input: Annotated[
        Annotated[str, Tag("(text)")]
        | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES), Tag("(items)")],
        Discriminator(lambda given: "(items)" if isinstance(given, list) else "(text)"),
    ] = Field(description="What the user says, or messages, calls of tools and their outputs.")
    instructions: str | None = Field(
        default=None,
        description="System message of this response; that of an earlier one is not carried over.",
    )
    previous_response_id: str | None = Field(
        default=None,
        description="A response to continue from; it must have been kept (`store` not false), a day ago at most.",
        max_length=MAX_NAME,
    )
    store: bool | None = Field(
        default=None,
        description=(
            "null: keep the response, so that another can continue from it. true: also keep the completion as a member of a group, to be "
            "rewarded by the response's id. false: keep neither."
        ),
    )
    stream: bool | None = Field(default=None, description="Send events as the text is written.")
    stream_options: ResponseStreamOptions | None = Field(
        default=None, description="Only with `stream`."
    )
    tools: list[Annotated[FunctionTool, FUNCTIONS_ALONE]] | None = Field(
        default=None, description="Functions that the model may call.", max_length=MAX_TOOLS
    )
    tool_choice: ToolChoice = Field(default=None, description="As in chats.")
    parallel_tool_calls: bool | None = Field(
        default=None, description="false: a response has the first call alone."
    )
    max_output_tokens: int | None = Field(
        default=None,
        description="Longest completion in tokens; null: the run's `max_completion_length`.",
        ge=1,
        le=MAX_TOKENS,
    )
    metadata: dict[str, str] | None = Field(
        default=None, description="As in chats; the response repeats it.", max_length=16
    )
    reasoning: Reasoning | None = Field(default=None, description="How much the model thinks.")
    text: TextConfig | None = Field(default=None, description="The form of the text.")
    include: list[str] | None = Field(
        default=None,
        description="`message.output_text.logprobs` adds log-probabilities to the text; others name what no response here has.",
        max_length=16,
    )

    # Ours, as in chats.
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="As in chats.")

    max_tool_calls: int | None = Field(
        default=None, description="No effect: it counts calls of tools that a server runs."
    )

    top_logprobs: int | None = Field(
        default=None,
        description="Log-probabilities of the text, with so many of the most probable tokens at each position. Not with `store: true`.",
        ge=0,
        le=MAX_TOP_LOGPROBS,
    )

    # What is taken where it asks for nothing.
    truncation: Literal["disabled"] | None = Field(
        default=None, description="`disabled` alone: a prompt that is too long is refused."
    )
    background: Literal[False] | None = Field(default=None, description="false alone.")
    conversation: None = Field(
        default=None, description="null alone: continue with previous_response_id."
    )
    prompt: None = Field(default=None, description="null alone.")

    @property
    def wants_logprobs(self) -> bool:
        """True if the text has the log-probability of each token."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    @property
    def is_kept(self) -> bool:
        """True if another response may go on from this one."""
        return self.store is not False

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        for problem in self._problems():
            raise problem
        return self

    def _problems(self) -> Iterator[PydanticCustomError]:
        if self.stream_options is not None and not self.stream:
            yield wrong("stream_options", "has no effect without `stream: true`")


# Answers


class ResponseModel(BaseModel):
    """The base of all answers."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class OutputAlternative(ResponseModel):
    """A token that could be drawn."""

    token: str
    bytes: list[int]
    logprob: float = Field(description="In nats.")


class OutputLogprob(ResponseModel):
    """A token that was drawn."""

    token: str
    bytes: list[int]
    logprob: float = Field(description="In nats, under the distribution that it was drawn from.")
    top_logprobs: list[OutputAlternative] = Field(
        default=[],
        description="The most probable tokens at its position, as many as were asked for.",
    )


class OutputText(ResponseModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default=[], description="Always empty.")
    logprobs: list[OutputLogprob] = Field(
        default=[], description="Of all tokens of the completion, if they were asked for."
    )


class OutputMessage(ResponseModel):
    """The policy's words."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class OutputCall(ResponseModel):
    """A call of a tool that the policy wrote."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: Status
    call_id: str
    name: str
    arguments: str = Field(description="A JSON object as text.")


class InputDetails(ResponseModel):
    """Prompt tokens that were not computed again; the server does not count them."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(ResponseModel):
    """Thoughts are not told apart from words."""

    reasoning_tokens: int = 0


class ResponseUsage(ResponseModel):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class IncompleteDetails(ResponseModel):
    """Why a response is cut off."""

    reason: Literal["max_output_tokens"]


class ResponseData(ResponseModel):
    """One turn of the policy."""

    id: str = Field(description="With `store: true`, the id by which the completion is rewarded.")
    object: Literal["response"] = "response"
    created_at: float = Field(description="Seconds since 1970.")
    status: Status
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    model: str = Field(description="`run@step` that has written it.")
    output: list[OutputMessage | OutputCall]
    usage: ResponseUsage | None = Field(default=None, description="null before it is complete.")
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = Field(description="Whether it is kept.")
    tools: list[dict[str, Any]] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    reasoning: dict[str, Any] = {}
    text: dict[str, Any] = {"format": {"type": "text"}}
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    system_fingerprint: str | None = Field(
        default=None, description="Ours: fingerprint of the weights that wrote it."
    )
    policy_version: ModelVersion | None = Field(default=None, description="Ours.")
    group_id: str | None = Field(
        default=None, description="Ours: the group, with `store: true`; null: it is not trained on."
    )
    token_ids: list[int] = Field(
        default=[],
        description="Ours: the tokens as they were drawn, the one that ended it included.",
    )


class DeletedResponse(ResponseModel):
    """A response that is no longer kept."""

    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: Literal[True] = True
