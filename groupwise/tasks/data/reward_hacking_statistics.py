"""Statistics of a step's groups that show how the policy earns its reward: lengths, repetition, diversity, contribution of each
part.

Texts count if the policy wrote something, even if scoring failed; rewards count if the rollout was scored. A number without any
value is left out of a step; groups of one, for example, have nothing to compare within. In rollouts of several turns, only the
policy's own text counts, and n-grams do not span turns.

    length                 mean number of tokens that the policy wrote
    truncated              share of rollouts that a limit cut off
    reward                 mean reward
    length_correlation     Pearson's r of length and reward within groups: both less their group's mean, all groups together
    repetition             mean of 1 − distinct n-grams / n-grams of a completion's tokens (seq-rep-n of Welleck et al. 2019,
                           arXiv 1908.04319; n = 3 here)
    repeated_lines         mean share of a completion's lines that occur earlier in it; blank ones do not count
    distinct_completions   mean over groups of (distinct texts − 1) / (members − 1)
    distinct_ngrams        mean over groups of (u − m) / (s − m): u distinct n-grams of the group, s the sum of its members' own
                           numbers, m the largest of them. 1: no two members share one; 0: one member has all. Unlike distinct-n
                           (Li et al. 2016, arXiv 1510.03055), repetition within a completion does not count
    same_answers           chance that completions of two prompts of the step are the same text
    value/PART             mean of the part's own value where it applies, as in rewards/PART/mean
    gain/PART              mean of weight × value there; of a part of weight 0, of its value
    spread/PART            mean over groups of the standard deviation of that
    share/PART             Σ (weight × value − mean) (reward − mean) / Σ (reward − mean)², sums within groups: the share of the
                           variance of the reward that the part explains. Shares add up to 1; one below 0 works against the others

The cost is linear in the tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from groupwise.core.types import Group, Rollout

NGRAM = 3
"""Length of an n-gram in tokens: pairs repeat in any good text, and longer ones miss loops with small changes."""
TIED = 1e-9
"""Rewards of a group count as equal if their relative difference is below this (rounding)."""


def group_statistics(groups: Sequence[Group]) -> dict[str, float]:
    """The statistics listed above for these groups; those without a finite value are left out."""
    texts = [[_WrittenText.of(r) for r in group.rollouts if r.written] for group in groups]
    statistics = {
        **_length_statistics(groups),
        **_repetition_statistics([written for group in texts for written in group]),
        **_diversity_statistics(texts),
        "same_answers": _same_answers(groups, texts),
        **_part_statistics(groups),
    }
    return {
        name: value
        for name, value in statistics.items()
        if value is not None and math.isfinite(value)
    }


@dataclass(frozen=True, slots=True)
class _WrittenText:
    """The text that the policy wrote in a rollout, with its n-grams."""

    text: str
    ngrams: frozenset[tuple[int, ...]]
    count: int
    """Number of n-grams, including repeated ones."""

    @staticmethod
    def of(rollout: Rollout) -> _WrittenText:
        ngrams = [
            ngram
            for segment in rollout.segments
            if segment.source == "policy"
            for ngram in zip(*(segment.token_ids[offset:] for offset in range(NGRAM)), strict=False)
        ]
        return _WrittenText(_written_text(rollout), frozenset(ngrams), len(ngrams))


def _written_text(rollout: Rollout) -> str:
    if rollout.messages is None:
        return rollout.completion.strip()
    contents = [m.get("content") for m in rollout.messages if m.get("role") == "assistant"]
    return "\n".join(str(content) for content in contents if content).strip()


# --- texts ---------------------------------------------------------------------------------------


def _length_statistics(groups: Sequence[Group]) -> dict[str, float | None]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    pairs = [
        [(float(rollout.written), reward) for rollout, reward in _rollouts_with_rewards(group)]
        for group in groups
    ]
    return {
        "length": _finite_mean(rollout.written for rollout in rollouts),
        "truncated": _finite_mean(rollout.truncated for rollout in rollouts),
        "reward": _finite_mean(reward for group in pairs for _, reward in group),
        "length_correlation": _correlation(pairs),
    }


def _correlation(groups: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """Pearson's r of pairs within groups; None if one side does not vary."""
    covariance = first = second = 0.0
    for pairs in groups:
        xs, ys = _subtract_mean([x for x, _ in pairs]), _subtract_mean([y for _, y in pairs])
        covariance += _dot_product(xs, ys)
        first += _dot_product(xs, xs)
        second += _dot_product(ys, ys)
    return covariance / (math.sqrt(first) * math.sqrt(second)) if first and second else None


def _repetition_statistics(texts: Sequence[_WrittenText]) -> dict[str, float | None]:
    lines = [
        [line.strip() for line in written.text.splitlines() if line.strip()] for written in texts
    ]
    return {
        "repetition": _finite_mean(
            1 - len(written.ngrams) / written.count for written in texts if written.count
        ),
        "repeated_lines": _finite_mean(
            1 - len(set(text_lines)) / len(text_lines) for text_lines in lines if text_lines
        ),
    }


def _diversity_statistics(groups: Sequence[Sequence[_WrittenText]]) -> dict[str, float | None]:
    texts = [[written.text for written in group] for group in groups if len(group) > 1]
    ngrams = [[written.ngrams for written in group if written.ngrams] for group in groups]
    return {
        "distinct_completions": _finite_mean((len(set(t)) - 1) / (len(t) - 1) for t in texts),
        "distinct_ngrams": _finite_mean(_not_shared(sets) for sets in ngrams if len(sets) > 1),
    }


def _not_shared(sets: Sequence[frozenset[tuple[int, ...]]]) -> float:
    sizes = [len(ngram_set) for ngram_set in sets]
    largest = max(sizes)
    return (len(frozenset[tuple[int, ...]]().union(*sets)) - largest) / (sum(sizes) - largest)


def _same_answers(
    groups: Sequence[Group], texts_of_groups: Sequence[Sequence[_WrittenText]]
) -> float | None:
    """Share of the pairs of completions of two different examples that are the same text."""
    of_example: dict[int, Counter[str]] = {}
    for group, texts in zip(groups, texts_of_groups, strict=True):
        counts = of_example.setdefault(group.example.index, Counter())
        counts.update(written.text for written in texts)
    totals: Counter[str] = Counter()
    for counts in of_example.values():
        totals.update(counts)
    all_pairs = totals.total() ** 2 - sum(counts.total() ** 2 for counts in of_example.values())
    same_pairs = sum(n * n for n in totals.values()) - sum(
        n * n for counts in of_example.values() for n in counts.values()
    )
    return same_pairs / all_pairs if all_pairs else None


# --- parts ---------------------------------------------------------------------------------------


def _part_statistics(groups: Sequence[Group]) -> dict[str, float | None]:
    scored = [_rollouts_with_rewards(group) for group in groups]
    parts = [part for group in scored for rollout, _ in group for part in rollout.parts]
    weighted = {part.name for part in parts if part.weight and part.value is not None}
    contributions = [[_part_contributions(rollout) for rollout, _ in group] for group in scored]
    totals = [_subtract_mean([reward for _, reward in group]) for group in scored]
    part_values = [rollout.part_values for group in scored for rollout, _ in group]
    variance = sum(_dot_product(total, total) for total in totals)
    statistics: dict[str, float | None] = {}
    for name in dict.fromkeys(part.name for part in parts):
        applied = [
            [contribution[name] for contribution in group if name in contribution]
            for group in contributions
        ]
        values = [values_by_part.get(name) for values_by_part in part_values]
        statistics[f"value/{name}"] = _finite_mean(value for value in values if value is not None)
        statistics[f"gain/{name}"] = _finite_mean(value for group in applied for value in group)
        statistics[f"spread/{name}"] = _finite_mean(
            _deviation(group) for group in applied if len(group) > 1
        )
        if name in weighted and variance:
            all_of = [
                [contribution.get(name, 0.0) for contribution in group] for group in contributions
            ]
            explained = sum(map(_dot_product, map(_subtract_mean, all_of), totals))
            statistics[f"share/{name}"] = explained / variance
    return statistics


def lowest_part_values(groups: Sequence[Group]) -> dict[str, float]:
    """The lowest finite weight × value of each part in a scored rollout."""
    lowest: dict[str, float] = {}
    for rollout in (rollout for group in groups for rollout, _ in _rollouts_with_rewards(group)):
        for name, value in _part_contributions(rollout).items():
            if math.isfinite(value):
                lowest[name] = min(lowest.get(name, value), value)
    return lowest


def _part_contributions(rollout: Rollout) -> dict[str, float]:
    """The contribution of each applicable part to the reward; a part without weight counts by its value."""
    contributions: dict[str, float] = {}
    for part in rollout.parts:
        if part.value is not None:
            value = part.weight * part.value if part.weight else part.value
            contributions[part.name] = contributions.get(part.name, 0.0) + value
    return contributions


# --- sums ----------------------------------------------------------------------------------------


def _rollouts_with_rewards(group: Group) -> list[tuple[Rollout, float]]:
    return [(rollout, rollout.reward) for rollout in group.scored if rollout.reward is not None]


def _finite_mean(values: Iterable[float]) -> float | None:
    """The mean of the finite values; None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def _subtract_mean(values: Sequence[float]) -> list[float]:
    """The values minus their mean; zeros if they differ by rounding only."""
    if not values:
        return []
    size = max(map(abs, values))
    if max(values) - min(values) <= TIED * size:
        return [0.0] * len(values)
    mean = sum(value / len(values) for value in values)
    return [value - mean for value in values]


def _dot_product(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(first, second, strict=True))


def _deviation(values: Sequence[float]) -> float:
    centred = _subtract_mean(values)
    return math.sqrt(_dot_product(centred, centred) / (len(values) - 1))
