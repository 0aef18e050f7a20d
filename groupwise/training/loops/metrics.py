"""The metrics of a step. They have the names that TRL gives to the same quantities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from groupwise.algorithms.advantages import all_equal
from groupwise.core.types import Group
from groupwise.runs.advice import DISTILLATION, DISTINCT
from groupwise.training.evaluation.measures import distinct_share

TOKEN_MEANS = {
    "kl": "kl",
    "entropy": "entropy",
    "distillation_kl": DISTILLATION,
    "right": "mean_token_accuracy",
    "ratio": "sampling/ratio_mean",
    "logprob_gap": "sampling/logprob_gap",
    "clip_low": "clip_ratio/low_mean",
    "clip_high": "clip_ratio/high_mean",
    "clip_delta": "clip_ratio/delta_mean",
    "importance_sampling_ratio": "sampling/importance_sampling_ratio/mean",
    "importance_sampling_clipped": "sampling/importance_sampling_clipped",
}
"""Sums by the learner that are shown as means over the trained tokens: name of the sum -> metric."""

RESERVED_NAMES = frozenset(
    {
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "loss",
        "kl",
        "beta",
        "entropy",
        "grad_norm",
        "learning_rate",
        "num_tokens",
    }
)
RESERVED_PREFIXES = (
    "rewards/",
    "completions/",
    "rollouts/",
    "sampling/",
    "clip_ratio/",
    "distillation/",
    "reward/",
    "data/",
    "replay/",
    "curriculum/",
    "signals/",
    "updates/",
    "time/",
    "perf/",
    "task/",
)
"""Names and prefixes that belong to the loop, even if a step does not have them."""


@dataclass(slots=True)
class Timings:
    """Durations of a step's phases in seconds; sampling and scoring overlap."""

    sampling: float = 0.0
    scoring: float = 0.0
    """Seconds from the last sampled token until the last group was scored."""
    learning: float = 0.0
    publishing: float = 0.0
    step: float = 0.0
    sampled_tokens: int = 0
    learned_tokens: int = 0

    def set_sampling(self, sampling: float, scoring: float, sampled_tokens: int) -> None:
        """Set how long the groups of the step took; part of that time may have been during earlier steps."""
        self.sampling, self.scoring, self.sampled_tokens = sampling, scoring, sampled_tokens


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, lengths and outcomes of a step's groups. Numbers that do not exist in this step are omitted."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    outcomes = Counter(rollout.outcome for rollout in rollouts)
    lengths = [rollout.written for rollout in rollouts]
    full_lengths = [len(rollout.completion_ids) for rollout in rollouts]
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.part_values.items():
            if value is not None:
                parts.setdefault(name, []).append(value)
    texts_by_group = [
        [r.completion for r in group.rollouts] for group in groups if len(group.rollouts) > 1
    ]
    # Metrics that reward functions logged; one with a name of the loop's becomes `task/<name>`.
    metrics: dict[str, float] = {}
    for name in sorted({name for group in groups for name in group.metrics}):
        is_reserved = name in RESERVED_NAMES or name.startswith(RESERVED_PREFIXES)
        values = (group.metrics[name] for group in groups if name in group.metrics)
        metrics[f"task/{name}" if is_reserved else name] = fmean(values)
    return {
        **_reward_metrics(groups),
        **({DISTINCT: fmean(map(distinct_share, texts_by_group))} if texts_by_group else {}),
        **{f"rewards/{name}/mean": fmean(values) for name, values in parts.items()},
        **{f"rewards/{name}/std": _std(values) for name, values in parts.items()},
        **metrics,
        "completions/mean_length": fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": fmean(rollout.truncated for rollout in rollouts),
        **({} if full_lengths == lengths else {"rollouts/mean_length": fmean(full_lengths)}),
        "rollouts/scored": float(outcomes["scored"]),
        "rollouts/failed": float(outcomes["failed"]),
        "rollouts/timed_out": float(outcomes["timed_out"]),
    }


def loss_metrics(
    updates: Sequence[tuple[Mapping[str, float], Mapping[str, float]]],
) -> dict[str, float]:
    """The mean loss and per-token means, from the learner's sums and the denominators of each update."""
    metrics = {
        "loss": fmean(
            sum(sums[f"loss/{name}"] / value for name, value in denominators.items() if value)
            for sums, denominators in updates
        )
    }
    names = {name for sums, _ in updates for name in sums}
    sums = {
        name: math.fsum(update_sums.get(name, 0.0) for update_sums, _ in updates)
        for name in sorted(names)
    }
    tokens = sums.get("tokens", 0.0)
    means = {
        metric: sums[name] / tokens
        for name, metric in TOKEN_MEANS.items()
        if tokens and name in sums
    }
    # An algorithm that clips only from above has no lower ratio.
    if "clip_ratio/high_mean" in means:
        low = means.get("clip_ratio/low_mean", 0.0)
        means["clip_ratio/region_mean"] = low + means["clip_ratio/high_mean"]
    return {**metrics, **means}


def timing_metrics(timings: Timings) -> dict[str, float]:
    """Seconds and tokens per second. They differ between runs that are otherwise identical."""
    rates = {
        "perf/sampling_tokens_per_second": (timings.sampled_tokens, timings.sampling),
        "perf/learning_tokens_per_second": (timings.learned_tokens, timings.learning),
    }
    return {
        "time/sampling": timings.sampling,
        "time/scoring": timings.scoring,
        "time/learning": timings.learning,
        "time/publishing": timings.publishing,
        "time/step": timings.step,
        **{
            name: tokens / seconds
            for name, (tokens, seconds) in rates.items()
            if tokens and seconds
        },
    }


def failure_reasons(groups: Sequence[Group], limit: int = 3) -> list[str]:
    """Reasons why rollouts were not scored, with counts, the most frequent first."""
    reasons = Counter(
        rollout.reason or "no reason given"
        for group in groups
        for rollout in group.rollouts
        if rollout.outcome in ("failed", "timed_out")
    )
    return [f"{count} × {reason}" for reason, count in reasons.most_common(limit)]


def _reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    per_group = [
        [rollout.reward for rollout in group.scored if rollout.reward is not None]
        for group in groups
    ]
    scored_groups = [rewards for rewards in per_group if rewards]
    if not scored_groups:
        return {}
    mean = {"reward": fmean(value for rewards in scored_groups for value in rewards)}
    # There is nothing to compare within a group.
    if all(len(group.rollouts) == 1 for group in groups):
        return mean
    ties = [all_equal(rewards) for rewards in scored_groups]
    return {
        **mean,
        "reward_std": fmean(_std(rewards) for rewards in scored_groups),
        "frac_reward_zero_std": fmean(ties),
    }


def _std(values: Sequence[float]) -> float:
    """Standard deviation of a sample, with n − 1 as in the algorithms; 0 for a single value."""
    return stdev(values) if len(values) > 1 else 0.0
