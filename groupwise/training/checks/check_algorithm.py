"""The self-test of an algorithm of one's own: what every algorithm here guarantees, on a made-up step, without a model.

    micro-batching          the gradient does not depend on how the rows are cut into batches
    padding                 values outside the mask have no effect
    order of rollouts       what a rollout gets does not depend on its place in its group
    permutation of groups   nor on the place of its group in the step
    failed rollouts         one that was not scored gets no credit

A learner cuts rows by their length and the memory that is free, spreads them over processes and pads them; with an algorithm that breaks
one of these, the same run would learn something else on another machine. The gradients of one step are computed in each way and compared.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from groupwise.algorithms.base import Algorithm
from groupwise.core.errors import TaskError
from groupwise.core.findings import Finding
from groupwise.core.plugins import run_user_code
from groupwise.core.types import Example, Group, RewardPart, Rollout, Row, SamplingParams, Segment
from groupwise.tasks.rollouts.rows import training_rows

TOLERANCE = 1e-5
"""Largest difference of two slopes, as a share of the largest slope: the rounding of float32 in sums of some dozen terms."""
GROUPS, MEMBERS, MAX_TOKENS = 3, 6, 7
LIMIT = 32
"""max_completion_length of the step, in tokens."""

Gradient = Mapping[tuple[int, int], Sequence[Sequence[float]]]
"""The slopes of a rollout's rows in their tokens' log-probabilities, by draw and member."""


def check_algorithm(algorithm: Algorithm, name: str) -> Iterator[Finding]:
    """Test the algorithm; `name` is that of the config. A violation is a problem, named after what is violated."""
    try:
        tests = run_user_code(
            lambda: _violations(algorithm), what=f"{name} failed in its self-test"
        )
    except TaskError as error:
        yield Finding(
            "algorithm",
            "problem",
            str(error),
            "the first step of a training would fail in the same way",
            "groupwise.algorithms.group_relative.GroupRelative says what each method is given and returns",
        )
        return
    broken = {test: where for test, where in tests.items() if where}
    for test, where in broken.items():
        meaning, remedy = _ADVICE[test]
        yield Finding(f"algorithm: {test}", "problem", f"{name}: {where}", meaning, remedy)
    if not broken:
        yield Finding("algorithm", "ok", f"{name} keeps what all algorithms do: {', '.join(tests)}")


_ADVICE = {
    "micro-batching": (
        "the gradient depends on how the rows are cut into batches, and so on the machine",
        "return sums in `loss`, and divide only by what `denominators` returns",
    ),
    "padding": (
        "values outside the mask reach the gradient",
        "replace them before they are used: values_BT.masked_fill(mask_BT == 0, 0.0)",
    ),
    "order of rollouts": (
        "what a rollout gets depends on its place in its group",
        "add rewards with math.fsum, and do not use the index of a rollout",
    ),
    "permutation of groups": (
        "what a rollout gets depends on the place of its group in the step",
        "return credits in the order of the groups, and do not carry anything from one group to the next",
    ),
    "failed rollouts": (
        "a failed attempt would be trained on as if it had been a bad one",
        "give None for rollouts whose outcome is not scored; `to_members` of groupwise.algorithms.advantages does",
    ),
    "gradient": (
        "training would move nothing, or break the weights, so that the other tests were left out",
        "look at what `surrogate` and `scale` return, at the sum in `loss`, and whether `denominator` can be 0",
    ),
}
"""What each test's violation means, and what to do."""


def _violations(algorithm: Algorithm) -> dict[str, str]:
    """Where each test is violated; empty if it is not. Without a gradient nothing else is tested."""
    groups = [_group(draw) for draw in range(GROUPS)]
    whole = _gradient(algorithm, groups)
    if faulty := _no_gradient(whole):
        return {"gradient": faulty}
    turned = [replace(group, rollouts=group.rollouts[::-1]) for group in groups]
    credited = [
        credit is not None
        for group, credits in zip(groups, algorithm.credits(groups), strict=True)
        for rollout, credit in zip(group.rollouts, credits, strict=True)
        if rollout.outcome != "scored"
    ]
    return {
        "gradient": "",
        "micro-batching": _difference(whole, _gradient(algorithm, groups, size=1)),
        "padding": _difference(whole, _gradient(algorithm, groups, padding=3)),
        "order of rollouts": _difference(whole, _gradient(algorithm, turned)),
        "permutation of groups": _difference(whole, _gradient(algorithm, groups[::-1])),
        "failed rollouts": "a rollout that failed has a credit" if any(credited) else "",
    }


def _gradient(
    algorithm: Algorithm, groups: Sequence[Group], *, size: int | None = None, padding: int = 0
) -> Gradient:
    """The slopes of a step whose rows are computed `size` at a time; None: all at once."""
    from groupwise.engine.learner.loss_gradient import loss_gradient  # which imports torch

    rows = training_rows(groups, algorithm.credits(groups))
    denominators = algorithm.denominators(groups, LIMIT)
    found: dict[tuple[int, int], list[Sequence[float]]] = {}
    size = size or len(rows)
    for start in range(0, len(rows), size):
        batch = [
            replace(
                row,
                proximal_logprobs=tuple(_numbers(row, 1, -2.0, -0.2)),
                reference_logprobs=tuple(_numbers(row, 2, -2.0, -0.2)),
            )
            for row in rows[start : start + size]
        ]
        entropies = [_numbers(row, 3, 0.1, 2.0) for row in batch]
        policy = [_numbers(row, 4, -2.0, -0.2) for row in batch]
        loss = algorithm.loss_spec()
        # A learner makes the loss from its knobs alone, so this does too.
        _, slopes = loss_gradient(
            batch, policy, entropies, type(algorithm)(**loss.knobs), denominators, padding=padding
        )
        for row, of_row in zip(batch, slopes, strict=True):
            assert row.rollout is not None
            found.setdefault(row.rollout, []).append(of_row)
    return found


def _no_gradient(gradient: Gradient) -> str:
    """Say where a gradient is not finite, or that it is 0 everywhere; empty if neither is so."""
    for (draw, member), rows in gradient.items():
        slopes = [slope for row in rows for slope in row]
        if not all(math.isfinite(slope) for slope in slopes):
            return (
                f"the gradient of rollout {member + 1} of group {draw + 1} is not finite: {slopes}"
            )
    moves = any(slope for rows in gradient.values() for row in rows for slope in row)
    return "" if moves else "the gradient is 0 everywhere"


def _numbers(row: Row, seed: int, low: float, high: float) -> list[float]:
    """Random numbers for the tokens of a row, which depend on its rollout alone."""
    rng = random.Random(f"{row.rollout} {seed}")
    return [rng.uniform(low, high) for _ in row.completion_ids]


def _difference(one: Gradient, other: Gradient) -> str:
    """Describe where two gradients of the same step differ; empty if they are equal."""
    largest = max((abs(slope) for rows in one.values() for row in rows for slope in row), default=0)
    if one.keys() != other.keys():
        return "other rollouts have a gradient"
    for (draw, member), rows in one.items():
        pairs = zip(rows, other[draw, member], strict=True)
        gap = max(abs(a - b) for row, same in pairs for a, b in zip(row, same, strict=True))
        if not gap <= TOLERANCE * largest:
            return (
                f"the gradient of rollout {member + 1} of group {draw + 1} differs by {gap:.2g}, where the largest slope of the step is "
                f"{largest:.2g}"
            )
    return ""


def _group(draw: int) -> Group:
    """Members of several lengths and rewards, some of two turns; one failed, one was cut off."""
    rng = random.Random(draw)
    return Group(
        draw,
        Example(draw, "?"),
        tuple(_rollout(rng, draw, member) for member in range(MEMBERS + 1)),
    )


def _rollout(rng: random.Random, draw: int, member: int) -> Rollout:
    turns = 1 + member % 2
    params = SamplingParams(max_tokens=LIMIT)
    segments: list[Segment] = []
    for turn in range(turns):
        length = rng.randint(1, MAX_TOKENS)
        logprobs = tuple(rng.uniform(-2.0, -0.2) for _ in range(length))
        ids = tuple(range(10, 10 + length))
        finish = "length" if member == 1 and turn else "stop"
        segments += [Segment("environment", (7, 8))] if turn else []
        segments.append(
            Segment("policy", ids, sampling_logprobs=logprobs, params=params, finish_reason=finish)
        )
    failed = member == MEMBERS
    values = (round(rng.random(), 2), float(rng.random() < 0.5))
    parts = (RewardPart("first", values[0]), RewardPart("second", values[1], turn=turns - 1))
    return Rollout(
        draw,
        member,
        0,
        (1, 2, 3),
        tuple(segments),
        "",
        outcome="failed" if failed else "scored",
        reward=None if failed else sum(values),
        parts=() if failed else parts,
    )
