"""Tries rewards on completions of known quality: `Trial` calls them as training does, the `judge_…` functions report findings.

find_layout      how a gold answer has to be written for the rewards to read it
try_cases        scores gold and wrong completions of some rows, with one call per row
judge_…          one finding each, based only on the verdicts
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev
from typing import Any

from groupwise.core.findings import Finding, Level
from groupwise.core.reward_call.request import MemberScore, Scorer, ScoreRequest, unscored_group
from groupwise.core.reward_call.text import as_completion
from groupwise.core.types import Example
from groupwise.engine.models.tokens import text_ids
from groupwise.tasks.rewards.rubric import NO_REWARD
from groupwise.training.checks.check_gold import (
    LAYOUTS,
    Gold,
    accepted_forms,
    cases_of,
    format_answer,
)
from groupwise.training.evaluation.statistics import mean_or_none

LAYOUT_ROWS = 4
"""Number of rows on which each way of writing a gold answer is tried."""
ALONE_ROWS = 2
"""Number of rows whose completions are also scored one by one."""
TOLERANCE = 1e-9
"""Rewards that differ by less count as equal."""
MAX_CHEAP_SHARE = 0.25
"""A completion without an answer causes a warning above this fraction of the range from the lowest reward to gold's."""
SLOW_SHARE = 0.5
"""Fraction of the time limit above which a call is reported as slow."""
CHAT_HINT = (
    'for a chat prompt a completion is a list of messages; its text is completion[0]["content"]'
)
_WRONG_RESULT = re.compile(r"(?s) returned \d+ values? for | returned .+; expected a list of ")
"""Reasons of a reward function whose result has not one value for each completion."""
MAX_TIMEOUTS_IN_A_ROW = 3
"""Number of time-outs in a row after which rewards are no longer called: each costs the full time limit and shows nothing new."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The score of one completion."""

    example: int
    kind: str
    text: str
    member: MemberScore


@dataclass(slots=True)
class Trial:
    """Calls the rewards as training does and measures each call.

    After `MAX_TIMEOUTS_IN_A_ROW` time-outs in a row, the rewards are no longer called: all further completions count as timed out, with
    that reason.
    """

    scorer: Scorer
    tokenizer: Any
    """None without a tokenizer: functions that require `completion_ids` then receive empty lists."""
    seconds: list[float] = field(default_factory=list[float])
    """Duration of each call in seconds."""
    largest_call: int = 0
    """Number of completions in the largest call."""
    too_long: int = 0
    """Number of time-outs in a row, up to the last call."""
    reason: str | None = None
    """The reason of the last time-out."""
    _ids_of: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])

    @property
    def given_up(self) -> str | None:
        """Why the rewards are no longer called; None if they are."""
        if self.too_long < MAX_TIMEOUTS_IN_A_ROW:
            return None
        return f"given up after {self.too_long} time-outs in a row; the last one: {self.reason}"

    async def score(self, example: Example, texts: Sequence[str]) -> tuple[MemberScore, ...]:
        """Score completions of one example in one call."""
        count = len(texts)
        if self.given_up:
            return unscored_group(count, "timed_out", self.given_up).members
        request = ScoreRequest(
            draw=example.index,
            prompts=[example.prompt] * count,
            completions=[as_completion(example.prompt, text) for text in texts],
            completion_ids=[self._token_ids(text) for text in texts],
            columns={name: [value] * count for name, value in example.columns.items()},
            global_step=0,
            max_steps=1,
        )
        started_at = time.perf_counter()
        score = await self.scorer.score(request)
        self.seconds.append(time.perf_counter() - started_at)
        self.largest_call = max(self.largest_call, count)
        # A call is stopped as a whole, so one member's reason applies to all members.
        reasons = [member.reason for member in score.members if member.outcome == "timed_out"]
        self.too_long = self.too_long + 1 if reasons else 0
        self.reason = reasons[0] if reasons else None
        return score.members

    def _token_ids(self, text: str) -> list[int]:
        """The tokens of a completion; cached, because most completions are tried on many rows."""
        if self.tokenizer is None:
            return []
        if text not in self._ids_of:
            self._ids_of[text] = text_ids(self.tokenizer, text)
        return list(self._ids_of[text])


async def find_layout(
    trial: Trial, examples: Sequence[Example], column: str
) -> tuple[str, dict[str, float], bool]:
    """Find the layout of gold answers that the rewards can read. Returns it, the mean reward of each layout, and whether any can be read.

    A layout can be read if a row's own answer earns more or less than another row's. Less counts as well: otherwise a reward with the wrong
    sign would be taken for one that cannot read the layout. Of layouts that are read equally well, the one that earns most is chosen.
    """
    own_rewards: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    margins: dict[str, list[float]] = {layout: [0.0] for layout in LAYOUTS}
    with_gold = [row for row in examples if accepted_forms(row.columns.get(column))]
    for example in with_gold[:LAYOUT_ROWS]:
        stored = accepted_forms(example.columns[column])[0]
        # The gold answer of another row that is not an accepted form of this row's; if there is none,
        # the same answer.
        forms = accepted_forms(example.columns[column])
        other_answers = (accepted_forms(row.columns[column])[0] for row in with_gold)
        other_answer = next((answer for answer in other_answers if answer not in forms), forms[0])
        texts = [
            format_answer(answer, layout) for answer in (stored, other_answer) for layout in LAYOUTS
        ]
        members = await trial.score(example, texts)
        halves = members[: len(LAYOUTS)], members[len(LAYOUTS) :]
        for layout, own_member, other_member in zip(LAYOUTS, *halves, strict=True):
            if own_member.reward is not None:
                own_rewards[layout].append(own_member.reward)
            if own_member.reward is not None and other_member.reward is not None:
                margins[layout].append(abs(own_member.reward - other_member.reward))
    means = {layout: fmean(values) for layout, values in own_rewards.items() if values}
    read = {layout: round(fmean(values), 6) for layout, values in margins.items()}
    best = max(means, key=lambda layout: (read[layout], means[layout]), default="as plain text")
    return best, means, any(read.values())


async def try_cases(
    trial: Trial, examples: Sequence[Example], gold: Gold | None, cut: Callable[[str], str]
) -> list[list[Verdict]]:
    """Score gold and wrong completions; returns a list of verdicts per example. For `cut` see `cases_of`."""
    verdicts_by_example: list[list[Verdict]] = []
    for index, example in enumerate(examples):
        other_examples = [*examples[index + 1 :], *examples[:index]]
        cases = cases_of(example, other_examples, gold, cut)
        members = await trial.score(example, [case.text for case in cases])
        verdicts_by_example.append(
            [
                Verdict(example.row_number, case.kind, case.text, member)
                for case, member in zip(cases, members, strict=True)
            ]
        )
    return verdicts_by_example


# --- judging -------------------------------------------------------------------------------------


def judge_failures(verdicts: Sequence[Verdict], *, chat: bool = False) -> Iterator[Finding]:
    """Report completions that could not be scored, because a reward failed or because none applied. `chat`: prompts are messages."""
    failures = [
        v for v in verdicts if v.member.outcome != "scored" and v.member.reason != NO_REWARD
    ]
    if not failures:
        yield Finding("exceptions", "ok", f"none in {len(verdicts)} completions")
    else:
        reasons = Counter(v.member.reason or v.member.outcome for v in failures)
        kinds = ", ".join(dict.fromkeys(v.kind for v in failures))
        reason_list = [f"{count} × {reason}" for reason, count in reasons.most_common(3)]
        yield Finding(
            "exceptions",
            "problem",
            f"{len(failures)} of {len(verdicts)} completions could not be scored ({kinds}):\n"
            + "\n".join(reason_list),
            "in training such rollouts are failed and do not teach; a model writes all of these",
            "; ".join(_remedies(reasons, chat=chat)),
            {"failed": len(failures), "reasons": dict(reasons)},
        )
    unrewarded = [v for v in verdicts if v.member.reason == NO_REWARD]
    if unrewarded:
        all_unrewarded = len(unrewarded) == len(verdicts)
        yield Finding(
            "no reward",
            "problem" if all_unrewarded else "warning",
            f"every reward function returned None for {len(unrewarded)} of {len(verdicts)} completions "
            f"({', '.join(dict.fromkeys(v.kind for v in unrewarded))})",
            "rollouts without any reward do not teach",
            "return a number where the reward applies",
            {"unrewarded": len(unrewarded)},
        )


def _remedies(reasons: Iterable[str], *, chat: bool) -> Iterator[str]:
    """What to change in a reward function that failed for these reasons."""
    wrong_results = {reason for reason in reasons if _WRONG_RESULT.search(reason)}
    broken = {reason for reason in reasons if " raised " in reason or " returned " in reason}
    if wrong_results:
        yield "let the reward function return a list with one number for each completion"
    if broken - wrong_results:
        yield "let the reward function take any text and return a number for it, or None where it does not apply"
        if chat and any("list" in reason for reason in broken - wrong_results):
            yield CHAT_HINT
    if not broken:
        yield "remove the cause that the reward itself names (its judge, its sandbox, its time limit)"


def judge_spread(verdicts_by_example: Sequence[Sequence[Verdict]], gold: Gold | None) -> Finding:
    """Report whether rewards differ between completions at all.

    Without gold, all tried completions are wrong and may rightly earn the same.
    """
    with_gold = gold is not None
    rewards_by_row = [rewards_of(verdicts) for verdicts in verdicts_by_example]
    rewards_by_row = [rewards for rewards in rewards_by_row if len(rewards) > 1]
    values = [value for rewards in rewards_by_row for value in rewards]
    if not values:
        return Finding("spread", "skipped", "no completion was scored")
    constant = sum(is_constant(rewards) for rewards in rewards_by_row)
    data = {**distribution(values), "rows": len(rewards_by_row), "constant_rows": constant}
    measured = f"rewards from {min(values):.4g} to {max(values):.4g}"
    if is_constant(values) and not with_gold:
        return Finding(
            "spread",
            "skipped",
            f"every completion earns {values[0]:.4g}, but none of them is meant to be right",
            "whether a right one earns more could not be checked",
            data=data,
        )
    if is_constant(values) and gold is not None and not gold.is_read:
        return Finding(
            "spread",
            "warning",
            f"every completion of every row earns {values[0]:.4g}, in whichever of {len(LAYOUTS)} ways the gold answer was written",
            "either the reward never varies, or right completions look different",
            "add a column `gold_completion` with completions as they should be, which is used unchanged",
            data,
        )
    if is_constant(values):
        return Finding(
            "spread",
            "problem",
            f"every completion of every row earns {values[0]:.4g}",
            "nothing can be learnt from a reward that never varies",
            "look at what the reward functions compare, and at the column that they compare with",
            data,
        )
    if constant and with_gold:
        return Finding(
            "spread",
            "warning",
            f"{measured}; in {constant} of {len(rewards_by_row)} rows all completions earn the same",
            "a group whose members earn the same teaches nothing",
            "look at these rows: is their gold answer right?",
            data,
        )
    rows = f"{constant} rows are constant" if constant else "no row is constant"
    return Finding("spread", "ok", f"{measured}; {rows}", data=data)


def judge_order(
    verdicts_by_example: Sequence[Sequence[Verdict]], gold: Gold, *, chat: bool = False
) -> Finding:
    """Report whether the right completion earns most. `chat`: prompts are messages."""
    pairs = [
        (right, max(wrong, key=_verdict_reward))
        for right, wrong in map(_right_and_wrong, verdicts_by_example)
        if right is not None and wrong
    ]
    name = "gold earns most"
    if not pairs:
        return Finding(name, "skipped", "no gold completion was scored")
    if not gold.is_read:
        return Finding(
            name,
            "warning",
            f"the rewards read the gold answer in none of the {len(LAYOUTS)} ways in which it was written",
            "either a right completion earns no more than a wrong one, or right completions look different",
            "look at what the reward functions compare"
            + (f" ({CHAT_HINT})" if chat else "")
            + "; if right completions look different, add a column `gold_completion` that holds them",
            {"column": gold.column},
        )
    beaten_pairs = [(r, w) for r, w in pairs if _verdict_reward(w) > _verdict_reward(r) + TOLERANCE]
    tied_pairs = [
        (r, w) for r, w in pairs if abs(_verdict_reward(w) - _verdict_reward(r)) <= TOLERANCE
    ]
    mean = fmean(_verdict_reward(right) for right, _ in pairs)
    data = {
        "rows": len(pairs),
        "beaten": len(beaten_pairs),
        "tied": len(tied_pairs),
        "gold_reward": mean,
        "column": gold.column,
        "layout": gold.layout,
    }
    layout_hint = (
        ""
        if gold.layout is None
        else "; if right completions look different, add a column `gold_completion` that holds them"
    )
    if beaten_pairs:
        right, wrong = max(
            beaten_pairs, key=lambda pair: _verdict_reward(pair[1]) - _verdict_reward(pair[0])
        )
        return Finding(
            name,
            "problem",
            f"in {len(beaten_pairs)} of {len(pairs)} rows a wrong completion earns more than gold; row {right.example}: "
            f"{wrong.kind} {_verdict_reward(wrong):.4g}, gold {_verdict_reward(right):.4g}",
            "training would teach the wrong answer",
            f"fix the reward{layout_hint}",
            data,
        )
    if tied_pairs:
        right, wrong = tied_pairs[0]
        return Finding(
            name,
            "warning",
            f"in {len(tied_pairs)} of {len(pairs)} rows a wrong completion earns as much as gold; row {right.example}: "
            f"{wrong.kind}, {_verdict_reward(wrong):.4g}",
            "the reward does not tell right from wrong there",
            f"look at these rows{layout_hint}",
            data,
        )
    return Finding(name, "ok", f"in all {len(pairs)} rows; {mean:.4g} on average", data=data)


def judge_forms(verdicts_by_example: Sequence[Sequence[Verdict]]) -> Iterator[Finding]:
    """Report whether the rewards accept every accepted form of an answer."""
    unequal_pairs: list[tuple[Verdict, Verdict]] = []
    rows = 0
    for verdicts in verdicts_by_example:
        gold_verdicts = [v for v in verdicts if v.kind == "gold" and v.member.reward is not None]
        rows += len(gold_verdicts) > 1
        unequal_pairs += [
            (gold_verdicts[0], v)
            for v in gold_verdicts[1:]
            if _verdict_reward(v) < _verdict_reward(gold_verdicts[0]) - TOLERANCE
        ]
    if unequal_pairs:
        first_form, other_form = unequal_pairs[0]
        yield Finding(
            "accepted forms",
            "warning",
            f"{len(unequal_pairs)} further forms of gold answers earn less than the first; row {first_form.example}: "
            f"{other_form.text!r:.60} {_verdict_reward(other_form):.4g}, {first_form.text!r:.60} {_verdict_reward(first_form):.4g}",
            "an answer that the data call right is punished",
            "compare with every form in the list",
            {"unequal": len(unequal_pairs), "rows": rows},
        )
    elif rows:
        yield Finding("accepted forms", "ok", f"all earn the same in {rows} rows that have several")


def judge_cheap(verdicts_by_example: Sequence[Sequence[Verdict]]) -> Iterator[Finding]:
    """Report completions that contain no answer but still earn a reward."""
    names = {
        "empty": "saying nothing",
        "prompt echoed": "repeating the prompt",
        "very long": "going on and on",
    }
    for kind, description in names.items():
        shares = [
            share
            for verdicts in verdicts_by_example
            if (share := _share_of_gold(verdicts, kind)) is not None
        ]
        if not shares:
            continue
        mean = fmean(shares)
        level: Level = "warning" if mean > MAX_CHEAP_SHARE else "ok"
        yield Finding(
            kind,
            level,
            f"{description} earns {mean:.0%} of the way from the worst completion to gold",
            "a policy learns that first, and may stay there" if level == "warning" else "",
            "give it less than an honest wrong answer" if level == "warning" else "",
            {"share_of_gold": mean},
        )


def judge_parts(verdicts: Sequence[Verdict], *, with_gold: bool) -> Iterator[Finding]:
    """Report for each reward function how often it applies and whether it ever varies (which means nothing without gold)."""
    parts = part_values(verdicts)
    failures = Counter(name for v in verdicts for name in v.member.notes.get("failed_rewards", ()))
    for name, values in parts.items():
        rewards = [value for value in values if value is not None]
        failed = failures[name] / len(values)
        absent = 1 - len(rewards) / len(values) - failed
        numbers = distribution(rewards) if rewards else {}
        description = "no value"
        if rewards:
            description = "{min:.4g} to {max:.4g}, mean {mean:.4g}".format_map(numbers)
        if failures[name]:
            description += f"; failed for {failed:.0%}"
        if len(rewards) + failures[name] < len(values):
            description += f"; None for {absent:.0%}"
        never_applies = not rewards and not failures[name]
        has_no_effect = with_gold and (
            never_applies or (bool(rewards) and is_constant(rewards) and len(parts) > 1)
        )
        level: Level = "warning" if has_no_effect or failures[name] else "ok"
        meaning = remedy = ""
        if failures[name]:
            meaning = "this part has no value where it fails"
            remedy = "let the function take any text"
        elif has_no_effect:
            meaning = "the same for every completion: this part changes nothing that is learnt"
            remedy = "remove it, or look at what it expects"
        yield Finding(
            f"part {name}",
            level,
            description,
            meaning,
            remedy,
            {"none_share": absent, "failed_share": failed, **numbers},
        )


def judge_repetition(first: Sequence[MemberScore], second: Sequence[MemberScore]) -> Finding:
    """Report whether the same call gives the same rewards."""
    differences = _differences(first, second)
    data = {"changed": len(differences), "completions": len(first)}
    if not differences:
        return Finding(
            "determinism",
            "ok",
            f"a second call gives the same for {len(first)} completions",
            data=data,
        )
    return Finding(
        "determinism",
        "warning",
        f"a second call gives something else for {len(differences)} of {len(first)} completions: {differences[0]}",
        "repeated runs and resumes will differ, and the policy learns from chance",
        "seed what is random by the completion's text; a judge needs temperature 0",
        data,
    )


def judge_alone(
    group_scores: Sequence[MemberScore], single_scores: Sequence[MemberScore]
) -> Finding:
    """Report whether a completion's reward depends on the others of its call.

    Failures are left out: one member on which a function raises fails the whole call.
    """
    pairs = [
        (grouped, single)
        for grouped, single in zip(group_scores, single_scores, strict=True)
        if not (_has_failed(grouped) or _has_failed(single))
    ]
    name = "independence"
    if not pairs:
        return Finding(name, "skipped", "no completion was scored both alone and together")
    differences = _differences(*zip(*pairs, strict=True))
    data = {"changed": len(differences), "completions": len(pairs)}
    if not differences:
        return Finding(
            name,
            "ok",
            f"{len(pairs)} completions earn the same alone and together",
            data=data,
        )
    return Finding(
        name,
        "warning",
        f"{len(differences)} of {len(pairs)} completions earn something else when scored alone: {differences[0]}",
        "the reward of a completion depends on the others of its group",
        "if it is meant to compare them, say so with `function.relative = True`; otherwise look for an index or a list that is "
        "shared",
        data,
    )


def judge_latency(trial: Trial, limit: float, group: int) -> Finding:
    """Report the duration of calls, compared with `rewards.time_limit`. The first call may include imports and loading."""
    first_seconds, later_seconds = trial.seconds[0], trial.seconds[1:] or trial.seconds
    median_seconds, max_seconds = median(later_seconds), max(later_seconds)
    data = {
        "median": median_seconds,
        "max": max_seconds,
        "first": first_seconds,
        "calls": len(trial.seconds),
        "completions": trial.largest_call,
        "time_limit": limit,
    }
    measured = (
        f"{seconds(median_seconds)} for the median call, {seconds(max_seconds)} for the longest, of up to "
        f"{trial.largest_call} completions (a group has {group}); the limit is {limit:g} s for each function"
    )
    if max(max_seconds, first_seconds) > SLOW_SHARE * limit:
        return Finding(
            "latency",
            "warning",
            measured,
            "calls near the limit time out on a busy machine, and those rollouts do not teach",
            "make the reward faster, raise rewards.time_limit, or give it more rewards.workers",
            data,
        )
    return Finding("latency", "ok", measured, data=data)


# --- numbers -------------------------------------------------------------------------------------


def table(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    """A table of the rewards by kind of completion: count, failures, and means of total and parts."""
    by_kind: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_kind.setdefault(verdict.kind, []).append(verdict)
    return [
        {
            "completion": kind,
            "count": len(kind_verdicts),
            "failed": sum(v.member.outcome != "scored" for v in kind_verdicts),
            "reward": mean_or_none(rewards_of(kind_verdicts)),
            "parts": {
                name: mean_or_none(values) for name, values in part_values(kind_verdicts).items()
            },
        }
        for kind, kind_verdicts in by_kind.items()
    ]


def part_values(verdicts: Iterable[Verdict]) -> dict[str, list[float | None]]:
    """The values of each part, with None if it does not apply."""
    values: dict[str, list[float | None]] = {}
    for verdict in verdicts:
        for part in verdict.member.parts:
            values.setdefault(part.name, []).append(part.value)
    return values


def rewards_of(verdicts: Iterable[Verdict]) -> list[float]:
    """The total rewards of the scored completions."""
    return [v.member.reward for v in verdicts if v.member.reward is not None]


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation and range."""
    return {"mean": fmean(values), "std": pstdev(values), "min": min(values), "max": max(values)}


def is_constant(values: Sequence[float]) -> bool:
    """True if all values are equal, up to `TOLERANCE`."""
    return max(values) - min(values) <= TOLERANCE


def seconds(value: float) -> str:
    """A short duration as text."""
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.1f} s"


def _verdict_reward(verdict: Verdict) -> float:
    assert verdict.member.reward is not None
    return verdict.member.reward


def _right_and_wrong(verdicts: Sequence[Verdict]) -> tuple[Verdict | None, list[Verdict]]:
    """The preferred gold completion and all wrong ones, as far as they were scored."""
    scored_verdicts = [v for v in verdicts if v.member.reward is not None]
    right = next((v for v in scored_verdicts if v.kind == "gold"), None)
    return right, [v for v in scored_verdicts if v.kind != "gold"]


def _share_of_gold(verdicts: Sequence[Verdict], kind: str) -> float | None:
    """The reward of a kind of completion as a fraction of the range from the worst to gold; None if that cannot be computed."""
    right, wrong = _right_and_wrong(verdicts)
    rewards_of_kind = [_verdict_reward(v) for v in wrong if v.kind == kind]
    if right is None or not rewards_of_kind:
        return None
    floor = min(_verdict_reward(v) for v in wrong)
    span = _verdict_reward(right) - floor
    return (rewards_of_kind[0] - floor) / span if span > TOLERANCE else None


def _differences(first: Sequence[MemberScore], second: Sequence[MemberScore]) -> list[str]:
    """Describe each difference between two scores of the same completions."""
    differences: list[str] = []
    for before, after in zip(first, second, strict=True):
        values = _part_values(before), _part_values(after)
        changed_names = [name for name in values[0] if values[0][name] != values[1].get(name)]
        if changed_names:
            name = changed_names[0]
            differences.append(
                f"`{name}` {_format_value(values[0][name])}, then {_format_value(values[1].get(name))}"
            )
        elif before.outcome != after.outcome:
            differences.append(f"{before.outcome}, then {after.outcome}")
    return differences


def _has_failed(member: MemberScore) -> bool:
    """True if the completion, or one part of its reward, could not be scored; a reward that does not apply has not failed."""
    if member.notes.get("failed_rewards"):
        return True
    return member.outcome != "scored" and member.reason != NO_REWARD


def _part_values(member: MemberScore) -> Mapping[str, float | None]:
    return {part.name: part.value for part in member.parts}


def _format_value(value: float | None) -> str:
    return "None" if value is None else f"{value:.4g}"
