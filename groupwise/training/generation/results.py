"""Writes the result files from the journal, each time from scratch, in the order of the input.

    generations.jsonl    one line for each answered row: its columns, `generation` (a list if there are several), finish_reason,
                         reasoning, reward, usage and model
    train.jsonl          data for `groupwise sft`: one line for each kept generation, with `prompt` and `completion`
    failures.jsonl       rows without all their generations, with prompt and reason

Generations are not kept if they have no text, if the length limit cut them off (unless `keep_truncated`), or if their reward is too low.
If no generation could be scored, `min_reward` cannot be applied, and train.jsonl stays unchanged.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from groupwise.core.atomic_files import building_path, explaining_disk_errors, publish_file
from groupwise.core.reward_call.plain import plain
from groupwise.core.reward_call.request import MemberScore
from groupwise.core.terminal.text import shorten
from groupwise.training.generation.config import GenerateConfig
from groupwise.training.generation.journal import Answers, Generation
from groupwise.training.generation.prompts import Item
from groupwise.training.generation.row_requests import Failure
from groupwise.training.generation.scoring import Scores

GENERATIONS = "generations.jsonl"
TRAIN = "train.jsonl"
FAILURES = "failures.jsonl"

MAX_PROMPT_CHARACTERS = 200
"""Number of characters of a prompt that `failures.jsonl` shows."""
CUT_OFF = frozenset({"length", "content_filter"})
"""Finish reasons of incomplete texts."""
OTHER_FORMS = frozenset(
    {"messages", "input_ids", "labels", "attention_mask", "completion_mask", "assistant_masks"}
)
"""Columns of the input that supervised training would use instead of prompt and completion."""


@dataclass(slots=True)
class Counts:
    """Statistics of the generations."""

    rows: int = 0
    generations: int = 0
    kept: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])
    """Number of generations that are not trained on, by reason."""
    rewards: list[float] = field(default_factory=list[float])
    best: list[float] = field(default_factory=list[float])
    unscored: Counter[str] = field(default_factory=Counter[str])
    """Number of generations without a reward, by reason."""

    @property
    def summary(self) -> dict[str, Any]:
        """Summary for people and `--json`."""
        summary: dict[str, Any] = {
            "answered": self.rows,
            "generations": self.generations,
            "kept": self.kept,
        }
        if self.left_out:
            summary["left_out"] = dict(self.left_out.most_common())
        if self.rewards:
            summary["reward"] = {"mean": fmean(self.rewards), "mean_of_best": fmean(self.best)}
        if self.unscored:
            summary["unscored"] = dict(self.unscored.most_common(5))
        return summary


def write_results(
    folder: Path,
    config: GenerateConfig,
    items: Sequence[Item],
    answers: Answers,
    scores: Scores,
    failures: Sequence[Failure],
) -> Counts:
    """Write the three files atomically. Rows without all their generations appear only in failures.jsonl.

    If `min_reward` is set but no generation could be scored, train.jsonl is left unchanged.
    """
    counts = Counts()
    complete_items = [
        (item, generations[: config.num_generations])
        for item in items
        if len(generations := answers.of(item.key)) >= config.num_generations
    ]
    _write_rows(folder / GENERATIONS, _generation_rows(complete_items, answers, scores))
    selection: list[tuple[Item, Generation, MemberScore | None]] = []
    for item, generations in complete_items:
        members = scores.get(item.key, (None,) * len(generations))[: len(generations)]
        counts.rows += 1
        counts.generations += len(members)
        known_scores = [score for score in members if score is not None]
        earned = [score.reward for score in known_scores if score.reward is not None]
        counts.rewards += earned
        counts.best += [max(earned)] if earned else []
        counts.unscored.update(
            score.reason or score.outcome for score in known_scores if score.reward is None
        )
        verdicts = _exclusion_reasons(generations, members, config)
        for generation, score, reason in zip(generations, members, verdicts, strict=True):
            if reason is not None:
                counts.left_out[reason] += 1
                continue
            counts.kept += 1
            selection.append((item, generation, score))
    if not nothing_was_scored(config, counts):
        _write_rows(folder / TRAIN, (_train_row(*entry) for entry in selection))
    _write_rows(folder / FAILURES, _failure_rows(failures, items))
    return counts


def nothing_was_scored(config: GenerateConfig, counts: Counts) -> bool:
    """True if rewards decide which generations are kept, but none could be scored."""
    return config.min_reward is not None and bool(counts.unscored) and not counts.rewards


def replaced_columns(items: Sequence[Item], config: GenerateConfig) -> list[str]:
    """Columns of the input that the results replace."""
    result_columns = {"generation", "finish_reason", "reasoning", "usage", "model"}
    result_columns |= {"reward"} if config.scores else set()
    input_columns = {name for item in items for name in item.columns}
    return sorted(result_columns & input_columns)


def _write_rows(path: Path, rows: Iterator[Mapping[str, Any]]) -> None:
    temp_path = building_path(path)
    with explaining_disk_errors(path):
        try:
            with temp_path.open("w", encoding="utf-8") as file:
                for row in rows:
                    file.write(json.dumps(plain(row), ensure_ascii=False) + "\n")
            publish_file(temp_path, path)
        finally:
            temp_path.unlink(missing_ok=True)


def _generation_rows(
    complete_items: Sequence[tuple[Item, Sequence[Generation]]], answers: Answers, scores: Scores
) -> Iterator[dict[str, Any]]:
    for item, generations in complete_items:
        usage = answers.usage(item.key)
        row: dict[str, Any] = {
            **item.columns,
            "generation": _one_or_all([generation.text for generation in generations]),
            "finish_reason": _one_or_all([generation.finish_reason for generation in generations]),
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
            },
            "model": generations[0].model,
        }
        if any(generation.reasoning for generation in generations):
            row["reasoning"] = _one_or_all([generation.reasoning for generation in generations])
        if item.key in scores:
            row["reward"] = _one_or_all(
                [score.reward for score in scores[item.key][: len(generations)]]
            )
        yield row


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _failure_rows(failures: Sequence[Failure], items: Sequence[Item]) -> Iterator[dict[str, Any]]:
    by_index = {item.index: item for item in items}
    for failure in sorted(failures, key=lambda failure: failure.index):
        item = by_index.get(failure.index)  # a row without a usable prompt is not among the items
        prompt = item.prompt if item else ""
        text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")
        yield {
            "row": failure.index,
            "key": item and item.key,
            "prompt": item and shorten(text, MAX_PROMPT_CHARACTERS),
            "reason": failure.reason,
        }


def _exclusion_reasons(
    generations: Sequence[Generation], members: Sequence[MemberScore | None], config: GenerateConfig
) -> list[str | None]:
    """The reason why each generation of a row is left out, or None."""
    reasons = [_unusable_reason(generation, config) for generation in generations]
    if config.min_reward is None:
        return reasons
    earned = [score.reward if score is not None else None for score in members]
    for index, reward in enumerate(earned):
        if reasons[index] is None and (reward is None or reward < config.min_reward):
            reasons[index] = "unscored" if reward is None else "reward too low"
    remaining = [index for index, reason in enumerate(reasons) if reason is None]
    if config.keep == "best" and remaining:
        best = max(remaining, key=lambda index: (earned[index] or 0.0, -index))
        for index in remaining:
            reasons[index] = None if index == best else "not the best"
    return reasons


def _unusable_reason(generation: Generation, config: GenerateConfig) -> str | None:
    if not generation.text.strip():
        return "empty"
    if generation.finish_reason in CUT_OFF and not config.keep_truncated:
        return "cut off"
    return None


def _train_row(item: Item, generation: Generation, score: MemberScore | None) -> dict[str, Any]:
    row = {name: value for name, value in item.columns.items() if name not in OTHER_FORMS}
    row |= {
        "prompt": item.prompt,
        "completion": _train_completion(item, generation),
        "generation": generation.text,
        "finish_reason": generation.finish_reason,
        "model": generation.model,
    }
    return row if score is None else {**row, "reward": score.reward}


def _train_completion(item: Item, generation: Generation) -> Any:
    if isinstance(item.prompt, str):
        return generation.text
    message = {"role": "assistant", "content": generation.text}
    if generation.reasoning:
        message["reasoning_content"] = generation.reasoning
    return [message]
