"""Turns scored rollouts and their credit into training rows.

A rollout is one row, or several if the chat template rewrote earlier turns: each segment with a prompt of its own starts a row. All
rows of a rollout have its credit, so sums over rows are sums over rollouts. Rows are computed separately; a value for the rollout
as a whole, such as a ratio or an importance weight, needs `with_sibling_stats`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from groupwise.core.types import (
    Group,
    MaskedTokens,
    Rollout,
    RolloutCredit,
    RoutedExperts,
    Row,
    Segment,
    SiblingRowStats,
    TopLogprobs,
)

GroupCredits = tuple[RolloutCredit | None, ...]
"""The credit of each rollout of a group, in their order; None for rollouts that are not trained."""


class TeacherLogprobs(Protocol):
    """The log-probabilities that a teacher gives the tokens of a row."""

    @property
    def logprobs(self) -> tuple[float, ...]: ...
    @property
    def top(self) -> tuple[TopLogprobs, ...]: ...


def training_rows(groups: Sequence[Group], credits: Sequence[GroupCredits]) -> list[Row]:
    """The rows of each rollout that has a credit; the sampled ids are used unchanged. A row without a token of the policy is left out."""
    return [
        row
        for group, group_credits in zip(groups, credits, strict=True)
        for rollout, credit in zip(group.rollouts, group_credits, strict=True)
        if credit is not None
        for row in _rows_of_rollout(rollout, credit)
    ]


def with_sibling_stats(
    rows: Sequence[Row],
    policy: Sequence[Sequence[float]] | None = None,
    bounds: Callable[[float], tuple[float, float]] = lambda _: (-math.inf, math.inf),
) -> list[Row]:
    """The rows, each with sums over the other rows of its rollout, if it has any; the call must include all rows of a rollout.

    `policy` holds the log-probabilities of each row's tokens under the weights of this update; None means the old ones. `bounds` is
    `Algorithm.log_ratio_bounds`: the lowest and highest log-ratio of a token, by the advantage of its row.
    """
    indices_of_rollout: defaultdict[tuple[int, int] | None, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        indices_of_rollout[row.rollout].append(index)
    with_stats = list(rows)
    for rollout, indices in indices_of_rollout.items():
        if rollout is None or len(indices) == 1:
            continue
        sums = {
            index: _row_stats(
                rows[index], policy[index] if policy else None, bounds(rows[index].advantage)
            )
            for index in indices
        }
        for index in indices:
            others = _sum_stats([sums[other] for other in indices if other != index])
            with_stats[index] = replace(rows[index], others=others)
    return with_stats


def segments_by_row(rollout: Rollout) -> list[tuple[tuple[int, ...], list[Segment]]]:
    """The prompt and the segments of each row that `training_rows` makes of a rollout."""
    return [part for part in _rollout_parts(rollout) if any(map(_is_trained, part[1]))]


def with_teacher_logprobs(rollout: Rollout, answers: Sequence[TeacherLogprobs]) -> Rollout:
    """The rollout with the teacher's numbers beside its tokens: one answer for each of `segments_by_row`."""
    remaining = iter(answers)
    segments: list[Segment] = []
    for _, part in _rollout_parts(rollout):
        answer = next(remaining) if any(map(_is_trained, part)) else None
        start = 0
        for segment in part:
            end = start + len(segment.token_ids)
            if answer is not None and _is_trained(segment):
                segment = replace(
                    segment,
                    teacher_logprobs=answer.logprobs[start:end],
                    teacher_top=answer.top[start:end],
                )
            segments.append(segment)
            start = end
    return replace(rollout, segments=tuple(segments))


def with_advantages(group: Group, credits: GroupCredits) -> Group:
    """The group with each rollout's advantage, for the record."""
    rollouts = [
        replace(rollout, advantage=credit.advantage if credit else None)
        for rollout, credit in zip(group.rollouts, credits, strict=True)
    ]
    return replace(group, rollouts=tuple(rollouts))


def with_learner_logprobs(
    group: Group, credits: GroupCredits, logprobs: Sequence[Sequence[float]] | None
) -> Group:
    """The group with the learner's log-probabilities of the trained tokens, for the record.

    `logprobs` has the log-probabilities for each row that `training_rows` makes of the group with these credits; None if they were
    not kept.
    """
    remaining = iter(logprobs or ())
    is_trained = [credit is not None and logprobs is not None for credit in credits]
    rollouts = [
        replace(rollout, segments=tuple(_segments_with_logprobs(rollout, remaining)))
        if trained
        else rollout
        for rollout, trained in zip(group.rollouts, is_trained, strict=True)
    ]
    assert next(remaining, None) is None, "log-probabilities of more rows than the group has"
    return replace(group, rollouts=tuple(rollouts))


def _segments_with_logprobs(
    rollout: Rollout, logprobs: Iterator[Sequence[float]]
) -> Iterator[Segment]:
    """The segments of a rollout whose rows come next in `logprobs`."""
    for _, segments in _rollout_parts(rollout):
        values = next(logprobs) if any(map(_is_trained, segments)) else ()
        start = 0
        for segment in segments:
            end = start + len(segment.token_ids)
            segment_logprobs = tuple(values[start:end]) if _is_trained(segment) else None
            yield replace(segment, learner_logprobs=segment_logprobs)
            start = end


def _rows_of_rollout(rollout: Rollout, credit: RolloutCredit) -> list[Row]:
    rows = [
        replace(
            _make_row(prompt, part, credit),
            rollout=(rollout.draw, rollout.member),
            teacher_prompt_ids=rollout.teacher_prompt_ids,
        )
        for prompt, part in segments_by_row(rollout)
    ]
    if credit.token_advantages is None:
        parts = segments_by_row(rollout)
        return [_with_teacher(row, part) for row, (_, part) in zip(rows, parts, strict=True)]
    remaining = iter(credit.token_advantages)
    rows = [
        replace(row, credits=tuple(next(remaining) if trained else 0.0 for trained in row.mask))
        for row in rows
    ]
    assert next(remaining, None) is None, "advantages of more tokens than the policy wrote"
    return rows


def _with_teacher(row: Row, segments: Sequence[Segment]) -> Row:
    """The row with the numbers of the teacher's endpoint, if there are any.

    With its k most probable tokens at each place, the row's targets are at each place the token itself, then these k.
    """
    if not any(segment.teacher_logprobs for segment in segments):
        return row
    count = max(len(best) for segment in segments for best in (segment.teacher_top or ((),)))
    targets: list[int] = []
    teacher: list[float] = []
    for segment in segments:
        length = len(segment.token_ids)
        own = segment.teacher_logprobs or (0.0,) * length
        best_by_token = segment.teacher_top or (((0, 0.0),) * count,) * length
        for token, logprob, best in zip(segment.token_ids, own, best_by_token, strict=True):
            targets += [token, *(other for other, _ in best)]
            teacher += [logprob, *(value for _, value in best)]
    each = 1 + count
    return replace(
        row,
        targets=tuple(targets) if count else None,
        teacher_logprobs=tuple(teacher),
        mask=tuple(value for value in row.mask for _ in range(each)),
        sampling_logprobs=tuple(
            value if index == 0 else 0.0 for value in row.sampling_logprobs for index in range(each)
        ),
    )


def _rollout_parts(rollout: Rollout) -> list[tuple[tuple[int, ...], list[Segment]]]:
    """The segments, divided at each new row, each part with its prompt."""
    parts: list[tuple[tuple[int, ...], list[Segment]]] = [(rollout.prompt_ids, [])]
    for segment in rollout.segments:
        if segment.prompt_ids is not None:
            parts.append((segment.prompt_ids, []))
        parts[-1][1].append(segment)
    return parts


def _is_trained(segment: Segment) -> bool:
    return segment.source == "policy" and bool(segment.token_ids)


def _make_row(
    prompt_ids: tuple[int, ...], segments: Sequence[Segment], credit: RolloutCredit
) -> Row:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    temperatures: set[float] = set()
    withheld: list[MaskedTokens] = []
    routed: list[RoutedExperts] = []
    for segment in segments:
        length = len(segment.token_ids)
        withheld += _tokens_withheld(segment, len(ids))
        ids.extend(segment.token_ids)
        mask.extend([1 if segment.source == "policy" else 0] * length)
        logprobs.extend(segment.sampling_logprobs or [0.0] * length)
        if segment.params is not None:
            temperatures.add(segment.params.temperature)
        if (chosen := segment.routed_experts) is not None:
            # Each request reports the experts of all tokens before it as well. Those tokens were sampled
            # with the experts of an earlier request, so only the rest is added.
            first = max(chosen.first, routed[-1].end if routed else 0)
            end = min(chosen.end, len(prompt_ids) + len(ids) - 1)
            routed += [chosen.part(first, end)] if first < end else []
    assert len(temperatures) == 1, f"one row, several temperatures: {sorted(temperatures)}"
    return Row(
        prompt_ids=prompt_ids,
        completion_ids=tuple(ids),
        mask=tuple(mask),
        sampling_logprobs=tuple(logprobs),
        advantage=credit.advantage,
        scale=credit.scale,
        temperature=temperatures.pop(),
        withheld=tuple(withheld),
        routed_experts=tuple(routed),
    )


def _tokens_withheld(segment: Segment, start: int) -> tuple[MaskedTokens, ...]:
    """Tokens that were excluded from sampling in a segment that starts at `start` of its row: the stop tokens before `min_tokens`,
    which counts from the start of each segment.
    """
    params = segment.params
    if segment.source != "policy" or params is None:
        return ()
    assert not params.truncates, f"drawn from a part of the policy's distribution: {params}"
    assert params.processing is None, f"drawn from a changed distribution: {params}"
    if not params.min_tokens or not params.stop_token_ids:
        return ()
    end = start + min(params.min_tokens, len(segment.token_ids))
    return (MaskedTokens(start, end, params.stop_token_ids),)


def _row_stats(
    row: Row, policy: Sequence[float] | None, bounds: tuple[float, float]
) -> SiblingRowStats:
    """This row's contribution to sums over the rows of its rollout."""
    old = row.sampling_logprobs if row.proximal_logprobs is None else row.proximal_logprobs
    return SiblingRowStats(
        tokens=sum(row.mask),
        log_weight=_logprob_difference(row, old, row.sampling_logprobs),
        log_ratio=_logprob_difference(row, old if policy is None else policy, old, bounds),
    )


def _logprob_difference(
    row: Row,
    logprobs: Sequence[float],
    reference: Sequence[float],
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> float:
    """The sum of `logprobs` − `reference` over the trained tokens, each clipped to the bounds."""
    low, high = bounds
    return math.fsum(
        min(max(a - b, low), high)
        for a, b, counts in zip(logprobs, reference, row.mask, strict=True)
        if counts
    )


def _sum_stats(sums: Sequence[SiblingRowStats]) -> SiblingRowStats:
    return SiblingRowStats(
        tokens=sum(stats.tokens for stats in sums),
        log_weight=math.fsum(stats.log_weight for stats in sums),
        log_ratio=math.fsum(stats.log_ratio for stats in sums),
    )
