"""Measures how much of a rubric's vocabulary an answer uses, and how near it comes to a reference answer.

A cheap substitute for a judge: it compares words, not their meaning. Repeating the prompt would earn points, so runs of words
copied from it do not count. If the rubric itself is in the prompt, no word of the prompt counts, in any order: all points are then
for the similarity of the other words to those of the reference.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, cast

from groupwise.core.reward_call.call import score_each_row
from groupwise.core.reward_call.tags import after_reasoning
from groupwise.core.reward_call.text import CompletionText, completion_texts
from groupwise.core.types import Prompt
from groupwise.tasks.rewards.gold import gold_answers, gold_of_row
from groupwise.tasks.rewards.registry import reward

RUBRIC_COLUMNS = ("rubric", "rubrics", "grading_rubric", "rubric_text")
"""Columns searched for a rubric, in this order."""

COMPARED = 500
"""Most words of each text that are compared, because the comparison can take cubic time."""

COPIED_RUN = 5
"""Number of consecutive words that are rarely equal by chance."""

_SHORT = 2
"""Words with this many letters or fewer say nothing about the subject."""


@reward("rubric_overlap")
@dataclass(frozen=True, slots=True)
class RubricOverlap:
    """`rubric_points` × share of the rubric's vocabulary + `reference_points` × similarity to the reference; None without a rubric.

    A word of the rubric weighs 1/count, so that its own refrains count for little.
    """

    answer_column: str | None = None
    rubric_column: str | None = None
    """null: the first of `RUBRIC_COLUMNS` that there is."""
    rubric_points: float = 10.0
    reference_points: float = 5.0
    """Half of the rubric's: a good answer need not be worded like the reference."""
    copied_run: int | None = None
    """Runs of at least so many words that also occur in the prompt do not count. 1: no word of the prompt counts. 0: all do.
    null: 5; if the prompt contains the rubric, 1, with all points for the similarity of the words that are not copied."""

    def __post_init__(self) -> None:
        if self.copied_run is not None and self.copied_run < 0:
            raise ValueError(f"copied_run is {self.copied_run}; expected 0 or more words.")

    def __call__(
        self, prompts: Sequence[Prompt], completions: Sequence[CompletionText], **columns: Any
    ) -> list[float | None]:
        """A reward between 0 and the sum of both points for each completion. Raises ValueError without a column of rubrics, or a
        row without a reference.
        """
        rubrics = columns[self._rubric_in(columns)]
        references = gold_answers(columns, len(completions), self.answer_column)
        texts = map(after_reasoning, completion_texts(completions, {"prompts": prompts}))
        return score_each_row(self._reward_of_text, prompts, texts, rubrics, references)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row that `__call__` would refuse."""
        self._rubric_in(row)
        gold_of_row(row, self.answer_column)

    def _rubric_in(self, columns: Mapping[str, Any]) -> str:
        candidates = RUBRIC_COLUMNS if self.rubric_column is None else (self.rubric_column,)
        for name in candidates:
            if name in columns:
                return name
        raise ValueError(
            f"there is no rubric: looked for the column {' or '.join(candidates)}. "
            f"The dataset has: {', '.join(sorted(columns)) or 'none but prompt'}. Name it in rubric_column"
        )

    def _reward_of_text(
        self, prompt: Prompt, text: str, rubric: Any, references: Sequence[str]
    ) -> float | None:
        vocabulary = [word for word in words(_all_text(rubric)) if len(word) > _SHORT]
        if not vocabulary:
            return None
        answer_words, prompt_words = words(text), words(_all_text(prompt))
        models = [words(reference) for reference in references]
        if self.copied_run is None and contains_rubric(rubric, prompt):
            points = self.rubric_points + self.reference_points
            return points * max(
                new_words_similarity(answer_words, model, prompt_words) for model in models
            )
        run = COPIED_RUN if self.copied_run is None else self.copied_run
        new_words = set(words_outside_prompt(answer_words, prompt_words, run))
        likeness = max(similarity(answer_words, model) for model in models)
        return (
            self.rubric_points * overlap(new_words, vocabulary) + self.reference_points * likeness
        )


def words(text: str) -> list[str]:
    """The words of a text in lower case; a number counts as a word."""
    return re.findall(r"\w+", text.lower())


def overlap(answer_words: set[str], vocabulary: Sequence[str]) -> float:
    """Σ 1/count over the words of the vocabulary that occur in the answer / Σ 1/count over all of them."""
    counts = Counter(vocabulary)
    covered = sum(1 / count for word, count in counts.items() if word in answer_words)
    return covered / sum(1 / count for count in counts.values())


def similarity(one: Sequence[str], other: Sequence[str]) -> float:
    """2 × words in matching runs / words of both, from 0 to 1; see difflib. 0 if both are empty."""
    if not one or not other:
        return 0.0
    # autojunk would ignore words that are frequent in texts of 200 words or more.
    return SequenceMatcher(None, one[:COMPARED], other[:COMPARED], autojunk=False).ratio()


def contains_rubric(rubric: Any, prompt: Prompt) -> bool:
    """True if a prompt contains a rubric literally: each of its lines or, for a list, some line of each criterion."""
    prompt_text = f" {' '.join(words(_all_text(prompt)))} "
    is_list = isinstance(rubric, list | tuple)
    criteria = cast("Sequence[Any]", rubric) if is_list else _all_text(rubric).splitlines()
    lines = [[words(line) for line in _all_text(criterion).splitlines()] for criterion in criteria]
    phrases = [[" ".join(line) for line in criterion_lines if line] for criterion_lines in lines]
    return any(phrases) and all(
        any(f" {line} " in prompt_text for line in criterion_phrases)
        for criterion_phrases in phrases
        if criterion_phrases
    )


def new_words_similarity(
    answer_words: Sequence[str], model: Sequence[str], prompt: Sequence[str]
) -> float:
    """Similarity of the words that are not in the prompt; if the reference has none of its own, only the reference itself is similar."""
    model_words = words_outside_prompt(model, prompt, 1)
    if not model_words:
        return float(answer_words == model)
    return similarity(words_outside_prompt(answer_words, prompt, 1), model_words)


def words_outside_prompt(answer_words: Sequence[str], prompt: Sequence[str], run: int) -> list[str]:
    """The words without runs of `run` or more that also occur in the prompt; all of them if `run` is 0."""
    if run == 0:
        return list(answer_words)
    prompt_runs = {tuple(prompt[index : index + run]) for index in range(len(prompt) - run + 1)}
    copied: set[int] = set()
    for index in range(len(answer_words) - run + 1):
        if tuple(answer_words[index : index + run]) in prompt_runs:
            copied.update(range(index, index + run))
    return [word for index, word in enumerate(answer_words) if index not in copied]


def _all_text(value: Any) -> str:
    """All text in a value: a rubric may be text, or a list of criteria, each text or fields; a prompt may be messages."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\n".join(_all_text(item) for item in cast("Mapping[str, Any]", value).values())
    if isinstance(value, list | tuple):
        return "\n".join(_all_text(item) for item in cast("Sequence[Any]", value))
    return ""
