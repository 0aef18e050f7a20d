"""Joins the calls of an agent, one completion each, into one rollout.

The caller renders its conversation again for each call, so the server sees only prompts as tokens. A turn continues a row if its prompt
begins with every token of that row; the tokens after them are the environment's and are masked. Otherwise it starts a row of its own, whose
prompt is everything that the policy saw. So each sampled token is trained once, after exactly the tokens that it was sampled after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from groupwise.core.types import Message, Prompt, Rollout, Segment
from groupwise.engine.models.tool_calls import calls_as_text


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the agent."""

    prompt: Prompt
    rollout: Rollout
    """The conversation as it was sampled: the prompt's tokens, and one segment of the policy."""


@dataclass(slots=True)
class _OpenRow:
    """A row that later turns may continue."""

    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    """All tokens of the row so far, its prompt's included."""
    temperature: float | None
    segments: list[Segment] = field(default_factory=list[Segment])

    def continues_with(self, turn: Segment, prompt_ids: tuple[int, ...]) -> bool:
        """True if the turn can be appended. A row has one temperature."""
        return (
            prompt_ids[: len(self.tokens)] == self.tokens and _temperature(turn) == self.temperature
        )


def join_turns(draw: int, member: int, turns: Sequence[Turn]) -> Rollout:
    """The turns of a trajectory, in order and at least one, as one pending rollout of this member."""
    assert turns, "a trajectory has at least one turn"
    rows: list[_OpenRow] = []
    for turn in turns:
        (segment,), prompt_ids = turn.rollout.segments, turn.rollout.prompt_ids
        candidates = [row for row in rows if row.continues_with(segment, prompt_ids)]
        if candidates:
            row = max(candidates, key=lambda candidate: len(candidate.tokens))
            if observed := prompt_ids[len(row.tokens) :]:
                row.segments.append(Segment("environment", observed))
        else:
            row = _OpenRow(prompt_ids, prompt_ids, _temperature(segment))
            rows.append(row)
        row.segments.append(segment)
        row.tokens = prompt_ids + segment.token_ids
    for row in rows[1:]:
        row.segments[0] = replace(row.segments[0], prompt_ids=row.prompt_ids)
    last = turns[-1].rollout
    messages = _messages(turns)
    several = len(turns) > 1
    return Rollout(
        draw=draw,
        member=member,
        attempt=0,
        prompt_ids=rows[0].prompt_ids,
        segments=tuple(segment for row in rows for segment in row.segments),
        completion=_text(turns, messages),
        messages=messages,
        ended_by=("tokens" if last.finish_reason == "length" else "environment")
        if several
        else None,
    )


def _temperature(segment: Segment) -> float | None:
    return None if segment.params is None else segment.params.temperature


def _messages(turns: Sequence[Turn]) -> tuple[Message, ...] | None:
    """The messages after the first prompt; None for one turn, for text, and if the last prompt does not begin with the first one."""
    first, last = turns[0].prompt, turns[-1].prompt
    if len(turns) == 1 or isinstance(first, str) or isinstance(last, str):
        return None
    if last[: len(first)] != first:
        return None
    answer = {"role": "assistant", "content": turns[-1].rollout.completion}
    return (*last[len(first) :], answer)


def _text(turns: Sequence[Turn], messages: Sequence[Message] | None) -> str:
    """The conversation for readers, with calls of tools as text; without messages, the completions alone."""
    if messages is None:
        return "\n\n".join(turn.rollout.completion for turn in turns)
    messages = [calls_as_text(message) for message in messages]
    return "\n\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)
