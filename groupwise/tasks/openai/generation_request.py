"""Converts a request in OpenAI's format into a `GenerationRequest` for the engine.

Whether a completion is stored can be set in the body or by headers, because not every client library allows extra fields in the body.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

from pydantic import BaseModel

from groupwise.api.schemas.openai import (
    BY_IDS,
    GROUP,
    SIZE,
    TRAJECTORY,
    ChatMessage,
    ChatRequest,
    TextRequest,
)
from groupwise.api.schemas.problems import FieldError, Refusal
from groupwise.api.schemas.template_columns import ARGUMENTS, TOOLS, columns_of
from groupwise.api.schemas.training import MAX_COMPLETIONS
from groupwise.core.types import Prompt
from groupwise.tasks.data.messages import with_arguments
from groupwise.tasks.openai.sampling import OrderField, Sampling
from groupwise.tasks.openai.sampling_fields import processing_of, unlearnable_fields
from groupwise.tasks.openai.tools import CallFormat, strict_schema_problem


@dataclass(frozen=True, slots=True)
class StorageHeaders:
    """The headers that control whether a completion is stored for training, and in which group."""

    store: bool = False
    group: str | None = None
    size: int | None = None
    trajectory: str | None = None
    retries: int = 0
    """How often the client of OpenAI has sent this request before."""

    def hash_with(self, body: BaseModel) -> str:
        """Hash of the request that a retry shares with its first attempt (SHA-256, hex)."""
        headers = asdict(replace(self, retries=0))
        return hashlib.sha256(f"{json.dumps(headers)}{body.model_dump_json()}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Gather:
    """Calls whose completions are compared with each other: they share groups, and each call gets one member."""

    name: str | None
    """None: calls with the same prompt and settings share groups."""
    size: int | None
    """Members per group; None: the run's group size."""
    trajectory: str | None = None
    """Name of the trajectory that the call belongs to, or `BY_IDS`; None: the call is a member by itself."""


ReadCalls = Literal["none", "first", "all"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """The prompts to complete, and how."""

    model: str
    prompts: tuple[Prompt | tuple[int, ...], ...]
    n: int
    """Number of completions per prompt."""
    sampling: Sampling
    columns: Mapping[str, Any]
    """See `GroupSampleRequest.columns`."""
    logprobs: bool
    """True if the answer has the log-probability of each token."""
    store: bool
    """True if the completions are stored, to be rewarded; there is then exactly one prompt."""
    gather: Gather | None
    """None: the completions form a group of their own, or are not stored."""
    field_names: Mapping[OrderField, str]
    """The request's field names for the fields of a `GroupSampleRequest`."""
    read_calls: ReadCalls = "none"
    """Tool calls to extract from a completion's text: none, only the first, or all."""
    alternatives: int = 0
    """How many of the most probable tokens the answer has at each position."""
    echo: bool = False
    """True if the prompt is put before each completion; it is then text or tokens."""
    return_token_ids: bool = False
    """True if the answer has the prompt's tokens."""
    call_format: CallFormat = "hermes"
    """The notation of the model's tool calls."""
    callable_names: tuple[str, ...] | None = None
    """Names of the tools that may be called; None: all."""

    def with_call_format(self, call_format: CallFormat) -> GenerationRequest:
        """The request with this notation, in which calls are read, and sampled where they are forced."""
        processing = self.sampling.processing
        if processing is None or processing.tool_calls is None:
            return replace(self, call_format=call_format)
        calls = replace(processing.tool_calls, call_format=call_format)
        sampling = replace(self.sampling, processing=replace(processing, tool_calls=calls))
        return replace(self, call_format=call_format, sampling=sampling)

    @property
    def names_trajectory(self) -> bool:
        """True if it names its trajectory, so that calls of other trajectories have other bodies."""
        return self.gather is not None and self.gather.trajectory not in (None, BY_IDS)

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end a completion; they are not part of the text sent to the client."""
        return self.sampling.stop or ()

    @property
    def offered_tools(self) -> Sequence[Mapping[str, Any]]:
        """Schemas of the tools that the model may call."""
        return self.columns.get(TOOLS, ())

    @property
    def reasoning_effort(self) -> str | None:
        """Value for the template's argument of this name; None if it is not given."""
        return self.columns.get(ARGUMENTS, {}).get("reasoning_effort")

    def hash_with(self, size: int) -> str:
        """Hash of everything that the members of a group of this size share (SHA-256, hex)."""
        content: list[Any] = [list(self.prompts), size, asdict(self.sampling)]
        if self.columns:
            content.append(dict(self.columns))
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def parse_request(request: ChatRequest | TextRequest, headers: StorageHeaders) -> GenerationRequest:
    """Convert a request. Raises a refusal that names the field if the completions cannot be stored as requested."""
    columns: dict[str, Any] = {}
    read_calls: ReadCalls = "none"
    if isinstance(request, ChatRequest):
        prompts: tuple[Prompt | tuple[int, ...], ...] = (
            [_template_message(number, each) for number, each in enumerate(request.messages)],
        )
        columns = columns_of(tools := request.offered_tools, request.template_arguments)
        for index, tool in enumerate(tools):
            function = tool["function"]
            if function.get("strict") and (
                problem := strict_schema_problem(function.get("parameters") or {})
            ):
                raise field_refusal(f"tools.{index}.function.parameters", problem)
        if tools:
            read_calls = "first" if request.parallel_tool_calls is False else "all"
    else:
        prompts = request.prompts
    store = bool(request.store) or headers.store
    gather = _parse_gathering(request, headers, store)
    if store:
        _refuse_unlearnable(request, len(prompts))
    if gather is not None and gather.trajectory is not None and isinstance(prompts[0], tuple):
        raise field_refusal(
            "prompt",
            "has tokens, but a trajectory is shown by the text of its prompt; give text or messages, or leave the trajectory out",
        )
    restrictions: Mapping[str, Any] = request.restrictions
    sampling = Sampling(
        temperature=request.temperature,
        max_tokens=request.longest,
        stop=request.stops,
        seed=request.seed,
        min_tokens=request.min_tokens,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        processing=processing_of(request),
        **restrictions,
    )
    return GenerationRequest(
        model=request.model,
        prompts=prompts,
        n=request.choices,
        sampling=sampling,
        columns=columns,
        logprobs=request.wants_logprobs,
        store=store,
        gather=gather,
        field_names=request.field_names,
        read_calls=read_calls,
        alternatives=request.alternatives,
        echo=isinstance(request, TextRequest) and bool(request.echo),
        return_token_ids=bool(request.return_token_ids),
        callable_names=request.tool_selection.names if isinstance(request, ChatRequest) else None,
    )


def _template_message(number: int, chat_message: ChatMessage) -> dict[str, Any]:
    message = chat_message.plain()
    if chat_message.tool_calls:
        message["tool_calls"] = [
            with_arguments(_call(call, f"messages.{number}.tool_calls.{index}"))
            for index, call in enumerate(chat_message.tool_calls)
        ]
    return message


def _call(call: Mapping[str, Any], field: str) -> dict[str, Any]:
    """A call without what OpenAI's client adds to those that it has read: templates may show all that a call has."""
    function = call.get("function")
    fields = cast("dict[str, Any]", function) if isinstance(function, dict) else {}
    if not isinstance(fields.get("name"), str):
        raise field_refusal(
            field,
            'is not a call of a function; one is {"id": "...", "type": "function", "function": {"name": "...", "arguments": "{...}"}}',
        )
    plain = {name: value for name, value in call.items() if name != "index"}
    return {**plain, "function": {k: v for k, v in fields.items() if k != "parsed_arguments"}}


def _parse_gathering(
    request: ChatRequest | TextRequest, headers: StorageHeaders, store: bool
) -> Gather | None:
    metadata = request.metadata or {}
    options = {
        "X-Groupwise-Group": headers.group,
        "X-Groupwise-Size": headers.size,
        f"metadata.{GROUP}": metadata.get(GROUP),
        f"metadata.{SIZE}": metadata.get(SIZE),
        "X-Groupwise-Trajectory": headers.trajectory,
        f"metadata.{TRAJECTORY}": metadata.get(TRAJECTORY),
    }
    for field, value in options.items():
        if value is None:
            continue
        if not store:
            raise field_refusal(
                field, "has no effect without `store: true` (or X-Groupwise-Store: true)"
            )
        if request.choices > 1:
            raise field_refusal(
                field,
                f"gathers calls with n = 1; the {request.choices} completions of this one are a group by themselves",
            )
    if not store or request.choices > 1:
        return None
    name = headers.group or metadata.get(GROUP)
    if name == "":
        raise field_refusal(f"metadata.{GROUP}", "is empty; give a name, or leave it out")
    trajectory = headers.trajectory or metadata.get(TRAJECTORY)
    if trajectory == "":
        raise field_refusal(f"metadata.{TRAJECTORY}", "is empty; give a name, or leave it out")
    size = headers.size or _parse_group_size(metadata.get(SIZE))
    return Gather(name, size, trajectory)


def _parse_group_size(text: str | None) -> int | None:
    if text is None:
        return None
    if text.isascii() and text.isdecimal() and len(text) <= 4:
        size = int(text)
        if 1 <= size <= MAX_COMPLETIONS:
            return size
    raise field_refusal(
        f"metadata.{SIZE}", f"is a number from 1 to {MAX_COMPLETIONS}, as text: '8'"
    )


def _refuse_unlearnable(request: ChatRequest | TextRequest, prompts: int) -> None:
    for field, problem in unlearnable_fields(request):
        raise field_refusal(field, problem)
    if request.temperature == 0:
        raise field_refusal(
            "temperature",
            "is 0, with which all completions are the same, so that nothing can be learnt; give one above 0, or ask without `store`",
        )
    if request.seed is not None:
        raise field_refusal(
            "seed",
            "has no place with `store`: the seeds of what is kept follow from its draw, so that the run repeats; leave it out",
        )
    if prompts > 1:
        raise field_refusal(
            "prompt",
            f"has {prompts} texts; with `store` each is a group of its own: ask one by one",
        )


def field_refusal(field: str, problem: str) -> Refusal:
    """The refusal of a request for one of its fields."""
    return Refusal(
        "invalid_request", f"{field}: {problem}.", errors=[FieldError(field=field, message=problem)]
    )
