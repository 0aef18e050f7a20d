"""Tells about the tokens of an answer, as texts with log-probabilities: those of the completion, and with `echo` those of the prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from groupwise.core.types import PromptLogprobs, Rollout, TopLogprobs

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
    alternatives = tuple(_with_texts(tops, rest) for tops in top_logprobs)
    return TokenDetails(texts[: len(ids)], tuple(logprobs), None if best is None else alternatives)


def _with_texts(tops: TopLogprobs | None, texts: Iterator[str]) -> Alternatives | None:
    return None if tops is None else tuple((next(texts), logprob) for _, logprob in tops)
