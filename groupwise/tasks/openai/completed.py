"""Completions and the details of their tokens as the service holds them, before conversion to OpenAI's format."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from groupwise.api.schemas.openai import FinishReason
from groupwise.core.types import PromptLogprobs, Rollout, TopLogprobs
from groupwise.tasks.openai.generation_request import GenerationRequest
from groupwise.tasks.openai.stop_strings import cut_at_stop, streamable_prefix
from groupwise.tasks.openai.tools import ends_within_call, split_calls, streamable_before_calls
from groupwise.tasks.tools import ToolCall

Alternatives = tuple[tuple[str, float], ...]
"""Tokens as texts with their log-probabilities (nats), the most probable first."""


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """Tokens in their order."""

    texts: tuple[str, ...]
    """Each token as text of its own."""
    logprobs: tuple[float | None, ...]
    """One value in nats for each of `texts`; None for the first token of a prompt."""
    alternatives: tuple[Alternatives | None, ...] | None = None
    """The most probable tokens at each position, likewise; None as a whole if they were not asked for."""


@dataclass(frozen=True, slots=True)
class CompletionChoice:
    """One completion."""

    text: str
    """Text without the stop text that ended it, and without `calls`."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    details: TokenDetails | None
    """None if log-probabilities were not requested."""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls extracted from the text."""
    prompt_ids: tuple[int, ...] | None = None
    """The prompt's tokens, if they were requested."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The content of the response to one request."""

    id: str
    """Id without the prefix (`chatcmpl-` or `cmpl-`)."""
    group: str | None
    """Id of the group, if the completions are stored."""
    run: str
    step: int
    """Completed steps when it was sampled."""
    fingerprint: str
    created: float
    """Seconds since 1970."""
    prompt_tokens: int
    choices: tuple[CompletionChoice, ...]

    @property
    def model(self) -> str:
        """Model name of the policy that wrote it."""
        return f"{self.run}@{self.step}"

    @property
    def completion_tokens(self) -> int:
        """Total over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)


def write_completion(
    rollout: Rollout, request: GenerationRequest, details: TokenDetails | None, echo: str = ""
) -> CompletionChoice:
    """Convert a sampled completion: cut it at the stop text, and extract tool calls if requested. `echo` goes before its text."""
    logprobs = (
        logprob for segment in rollout.segments for logprob in segment.sampling_logprobs or ()
    )
    text, calls = cut_at_stop(rollout.completion, request.stops), list[ToolCall]()
    finish_reason: FinishReason = rollout.finish_reason or "length"
    if request.read_calls != "none":
        text, calls = split_calls(
            text, request.call_format, request.offered_tools, request.callable_names
        )
        if calls and not (
            finish_reason == "length" and ends_within_call(text, request.call_format)
        ):
            finish_reason = "tool_calls"
    return CompletionChoice(
        text=echo + text,
        token_ids=rollout.completion_ids,
        logprobs=tuple(logprobs),
        finish_reason=finish_reason,
        details=details,
        calls=tuple(calls[:1] if request.read_calls == "first" else calls),
        prompt_ids=rollout.prompt_ids if request.return_token_ids else None,
    )


def streamable_text(text: str, request: GenerationRequest) -> str:
    """The part of an unfinished text that is certain to be a prefix of the choice's final text."""
    if request.read_calls == "none":
        return streamable_prefix(text, request.stops)
    return streamable_before_calls(text, request.stops, request.call_format, request.offered_tools)


async def describe_tokens(
    rollout: Rollout,
    best: Sequence[TopLogprobs] | None,
    prompt: PromptLogprobs | None,
    token_texts: Callable[[tuple[int, ...]], Awaitable[tuple[str, ...]]],
) -> TokenDetails:
    """Describe a completion's tokens, with their alternatives if `best` has them, and with `prompt` the prompt's tokens before them."""
    ids = rollout.completion_ids
    logprobs: list[float | None] = [
        logprob for segment in rollout.segments for logprob in segment.sampling_logprobs or ()
    ]
    top_logprobs: list[TopLogprobs | None] = [*(best or ())]
    if prompt is not None:
        ids = (*rollout.prompt_ids, *ids)
        logprobs = [None, *prompt.logprobs, *logprobs]
        top_logprobs = [None, *prompt.top_logprobs, *top_logprobs]
    others = [token for tops in top_logprobs for token, _ in tops or ()]
    texts = await token_texts((*ids, *others))
    rest = iter(texts[len(ids) :])
    alternatives = tuple(
        None if tops is None else tuple((next(rest), logprob) for _, logprob in tops)
        for tops in top_logprobs
    )
    return TokenDetails(texts[: len(ids)], tuple(logprobs), None if best is None else alternatives)
