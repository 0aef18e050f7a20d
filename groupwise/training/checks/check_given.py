"""Scores given completions: from a JSONL file, from an evaluation's results, or from the record of a run.

    {"prompt": …, "completion": "…"}      the prompt as the task gives it: text or messages
    {"example": 3, "completion": "…"}     row 3 of the training data, counted from 0

Results of `groupwise eval` (a JSON file with `rows`) have both. A run's rollouts contain their own examples and the rewards that they
earned in the run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from groupwise.core.errors import RunNotFoundError, UsageError
from groupwise.core.findings import Finding
from groupwise.core.types import Example
from groupwise.runs import find
from groupwise.runs.advice import DISTINCT, MAX_WITHOUT_SIGNAL, MIN_DISTINCT
from groupwise.runs.folder import RECORD
from groupwise.runs.store import Store
from groupwise.tasks.data.overlap import prompt_key
from groupwise.training.checks.check_rewards import (
    Trial,
    Verdict,
    distribution,
    is_constant,
    rewards_of,
)
from groupwise.training.evaluation.measures import Success, distinct_share

MAX_ROLLOUTS = 512
"""Approximate number of rollouts of a run that are scored again, from its newest steps."""
MIN_JUDGED = 8
"""It means little that none of fewer completions than this is right."""
TOLERANCE = 1e-6
"""Rewards that differ by less count as equal to the recorded ones."""


@dataclass(frozen=True, slots=True)
class CompletionGroup:
    """Completions of one example."""

    example: Example
    texts: tuple[str, ...]
    recorded: tuple[float | None, ...] = ()
    """The reward of each completion in its run; empty if unknown."""


def load_completions(
    source: str, train: Sequence[Example], held_out: Sequence[Example], runs_dir: Path
) -> list[CompletionGroup]:
    """Load the completions of a file or of a run's record. Raises UsageError for other sources, and for rows that do not match the task."""
    path = Path(source).expanduser()
    if path.is_file():
        by_prompt = {prompt_key(example.prompt): example for example in (*held_out, *train)}
        by_index = {example.index: example for example in train}
        texts_by_prompt: dict[str, tuple[Example, list[str]]] = {}
        for location, row in _read_rows(path):
            example = _find_example(row, location, by_prompt, by_index)
            completion = row.get("completion")
            if not isinstance(completion, str):
                raise UsageError(f"{location}: `completion` is {completion!r:.40}; expected text.")
            texts_by_prompt.setdefault(prompt_key(example.prompt), (example, []))[1].append(
                completion
            )
        if not texts_by_prompt:
            raise UsageError(f"--completions {path}: the file has no rows. {_EXPECTED}")
        return [
            CompletionGroup(example, tuple(texts)) for example, texts in texts_by_prompt.values()
        ]
    try:
        address = find.resolve(source, runs_dir)
    except RunNotFoundError as error:
        raise UsageError(
            f"--completions {source}: there is no file of that name, and it names no run: {error}"
        ) from error
    groups: list[CompletionGroup] = []
    with Store.open(address.path / RECORD, readonly=True) as store:
        for record in reversed(store.steps()):
            groups += [
                CompletionGroup(
                    group.example,
                    tuple(rollout.completion for rollout in group.rollouts),
                    tuple(rollout.reward for rollout in group.rollouts),
                )
                for group in store.groups(record.step)
            ]
            if sum(len(group.texts) for group in groups) >= MAX_ROLLOUTS:
                break
    if not groups:
        raise UsageError(
            f"--completions {address.path}: the run has no committed step, so no rollouts."
        )
    return groups


async def score_completions(trial: Trial, groups: Sequence[CompletionGroup]) -> list[list[Verdict]]:
    """Score the completions; returns a list of verdicts per group."""
    return [
        [
            Verdict(group.example.row_number, "given", text, member)
            for text, member in zip(
                group.texts, await trial.score(group.example, group.texts), strict=True
            )
        ]
        for group in groups
    ]


def judge_completions(
    groups: Sequence[CompletionGroup],
    verdicts_by_group: Sequence[Sequence[Verdict]],
    success: Success,
) -> list[Finding]:
    """Report the rewards' distribution, groups without signal, successes, failures, and whether rewards equal the recorded ones."""
    rewards_by_group = [rewards_of(verdicts) for verdicts in verdicts_by_group]
    values = [value for rewards in rewards_by_group for value in rewards]
    total = sum(len(group.texts) for group in groups)
    failed = total - len(values)
    findings = [
        _spread_of_given(groups, rewards_by_group, values, total),
        *_judge_solved(verdicts_by_group, success),
    ]
    if failed:
        reasons = Counter(
            v.member.reason or v.member.outcome
            for verdicts in verdicts_by_group
            for v in verdicts
            if v.member.outcome != "scored"
        )
        reason_list = "\n".join(f"{count} × {reason}" for reason, count in reasons.most_common(3))
        findings.append(
            Finding(
                "given: failures",
                "problem",
                f"{failed} of {total} given completions could not be scored:\n{reason_list}",
                "such rollouts do not teach",
                "let the reward functions take what a model writes",
                {"failed": failed, "reasons": dict(reasons)},
            )
        )
    findings += _compare_with_recorded(groups, verdicts_by_group)
    return findings


def _spread_of_given(
    groups: Sequence[CompletionGroup],
    rewards_by_group: Sequence[Sequence[float]],
    values: Sequence[float],
    total: int,
) -> Finding:
    if not values:
        return Finding("given completions", "skipped", f"none of {total} was scored")
    groups_compared = [rewards for rewards in rewards_by_group if len(rewards) > 1]
    constant = sum(is_constant(rewards) for rewards in groups_compared)
    texts = [group.texts for group in groups if len(group.texts) > 1]
    distinct_fraction = fmean(map(distinct_share, texts)) if texts else 1.0
    numbers = distribution(values)
    data = {
        **numbers,
        "completions": total,
        "prompts": len(groups),
        "groups": len(groups_compared),
        "constant_groups": constant,
        **({DISTINCT: distinct_fraction} if texts else {}),
    }
    measured = (
        f"{total} of {len(groups)} prompts: mean {numbers['mean']:.4g}, from {numbers['min']:.4g} to {numbers['max']:.4g}"
        + (f"; {constant} of {len(groups_compared)} groups are constant" if groups_compared else "")
        + (f"; {distinct_fraction:.0%} of the completions of a prompt differ" if texts else "")
    )
    if is_constant(values) and len(values) > 1:
        return Finding(
            "given completions",
            "warning",
            measured,
            "a reward that is the same for all of them teaches nothing",
            "begin with easier prompts, or add a part for what comes before a right answer",
            data,
        )
    if groups_compared and constant > MAX_WITHOUT_SIGNAL * len(groups_compared):
        return Finding(
            "given completions",
            "warning",
            measured,
            "members of a group are compared with each other, and here they hardly ever earn anything different",
            "raise sampler.temperature, or end the warm-up sooner (its training.stop_when), because the members of a group are alike"
            if distinct_fraction < MIN_DISTINCT
            else "begin with prompts that are sometimes solved, pay for parts of an answer, or warm the model up first (warm_up)",
            data,
        )
    return Finding("given completions", "ok", measured, data=data)


def _judge_solved(
    verdicts_by_group: Sequence[Sequence[Verdict]], success: Success
) -> list[Finding]:
    members = [verdict.member for verdicts in verdicts_by_group for verdict in verdicts]
    successes = [
        success.is_reached(member.reward, {part.name: part.value for part in member.parts})
        for member in members
    ]
    if any(successes) or len(successes) < MIN_JUDGED:
        return []
    return [
        Finding(
            "given: solved",
            "warning",
            f"none of {len(successes)} counts as solved (eval.success_threshold, eval.success_part)",
            "a reward for right answers alone cannot rise from here; one for steps towards them can",
            "begin with easier examples or with hints in the prompt, warm the model up first (warm_up), or say in the config what counts",
            {"completions": len(successes)},
        )
    ]


def _compare_with_recorded(
    groups: Sequence[CompletionGroup], verdicts_by_group: Sequence[Sequence[Verdict]]
) -> list[Finding]:
    pairs = [
        (verdict, recorded)
        for group, verdicts in zip(groups, verdicts_by_group, strict=True)
        if group.recorded
        for verdict, recorded in zip(verdicts, group.recorded, strict=True)
        if recorded is not None and verdict.member.reward is not None
    ]
    if not pairs:
        return []
    differences = [
        (v, recorded)
        for v, recorded in pairs
        if abs((v.member.reward or 0.0) - recorded) > TOLERANCE
    ]
    data = {"compared": len(pairs), "changed": len(differences)}
    if not differences:
        return [
            Finding(
                "given: recorded",
                "ok",
                f"all {len(pairs)} earn what the run recorded",
                data=data,
            )
        ]
    verdict, recorded = differences[0]
    return [
        Finding(
            "given: recorded",
            "warning",
            f"{len(differences)} of {len(pairs)} earn something else than the run recorded; row {verdict.example}: "
            f"{recorded:.4g} then, {verdict.member.reward:.4g} now",
            "the rewards were changed since, depend on the step, or are not deterministic",
            "nothing, if you changed them",
            data,
        )
    ]


# --- reading -------------------------------------------------------------------------------------


_EXPECTED = 'Expected one JSON object in each line: {"prompt": …, "completion": "…"} or {"example": 0, "completion": "…"}.'


def _read_rows(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """The rows, each with its position for messages."""
    text = path.read_text(encoding="utf-8")
    document = _parse_json(text)
    if isinstance(document, Mapping) and isinstance(document.get("rows"), list):  # type: ignore[reportUnknownMemberType]
        rows = cast("list[Any]", document["rows"])
        return [_require_object(row, f"{path}, row {number}") for number, row in enumerate(rows)]
    return [
        _require_object(_parse_json(line), f"{path}:{number}")
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip()
    ]


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _require_object(row: Any, location: str) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(row, Mapping):
        raise UsageError(f"{location}: this is not a JSON object. {_EXPECTED}")
    return location, cast("Mapping[str, Any]", row)


def _find_example(
    row: Mapping[str, Any],
    location: str,
    by_prompt: Mapping[str, Example],
    by_index: Mapping[int, Example],
) -> Example:
    """The example of a row: that with its prompt or, without a prompt, that with its number."""
    if "prompt" in row:
        example = by_prompt.get(prompt_key(row["prompt"]))
        label = f"the prompt {json.dumps(row['prompt'], ensure_ascii=False)[:60]}"
    elif "example" in row:
        example = by_index.get(row["example"])
        label = f"example {row['example']!r:.40}"
    else:
        raise UsageError(f"{location}: there is neither `prompt` nor `example`. {_EXPECTED}")
    if example is None:
        raise UsageError(
            f"{location}: {label} is not in the task's data, which have {len(by_index)} training rows. "
            "Rewards need the other columns of the row, so only prompts of the task can be scored."
        )
    return example
