"""Sort a few words alphabetically: a task that a small model learns in minutes.

The prompt lists words in random order and the answer is the same words in alphabetical order. Two presets differ in how the
answer is written and rewarded:

- `quickstart`: one line, separated by commas. 0.3 × share of right words, and for a true permutation also
  0.7 × share of words in their right place. 1 at most. Only the first line counts, in lower case.
- `classic`: one word per line. Five parts, each a share: 0.01 × given words contained ignoring case,
  0.1 × given words contained, 1 × given words that begin a line, 1 × written words that belong to the given ones (a
  repetition does not count), 10 × pairs of given words whose first appearances, as whole words, are in ascending order.
  12.11 at most.

No set of words occurs twice, neither in the training rows, nor in validation or test rows, nor in two of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from math import comb
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, model_validator

from groupwise.core.reward_call.tags import after_reasoning
from groupwise.core.reward_call.text import CompletionText, completion_text
from groupwise.core.settings.schema import setting
from groupwise.core.settings.view import TaskSection
from groupwise.tasks.data.order import Stream

Preset = Literal["quickstart", "classic"]
RewardFunction = Callable[..., list[float]]

WORDS: tuple[str, ...] = tuple(
    """
    anchor apple autumn banana basket bicycle blanket bottle branch bread breeze bridge butter button cabin camera
    candle canyon carpet castle cherry circle cloud coffee copper cotton desert dinner doctor dolphin dragon eagle
    engine evening family farmer feather finger flower forest fountain garden giraffe grape guitar hammer harbor helmet
    honey island jacket journey jungle kettle kitchen kitten ladder lantern lemon library lizard machine magnet marble
    market meadow mirror monkey mountain needle notebook ocean office orange oyster painter paper pencil pepper piano
    picture pillow planet pocket potato pumpkin puzzle quarter queen rabbit railway ribbon river rocket saddle sailor
    school shadow shelter silver singer spider spring station stone student sugar summer table teacher temple thunder
    tiger tomato tower tunnel turtle umbrella uncle valley velvet village violin voyage waiter walnut water whisper
    window winter wizard yellow zebra
    """.split()
)
"""Common words; none is a substring of another, so a search for one never finds another."""

_DEFAULT_WORDS = 3
_INSTRUCTION = {
    "quickstart": "Answer with the words only, separated by commas.",
    "classic": "Answer with the words only, one per line.",
}
_SEPARATOR = {"quickstart": ", ", "classic": "\n"}


class TaskConfig(TaskSection):
    """The `task:` section of a config for this task."""

    preset: Preset = setting("quickstart", "How answers are written and rewarded.")
    words: int = setting(_DEFAULT_WORDS, "Words in each prompt.", ge=2, le=5)
    min_words: int | None = setting(
        None, "With max_words, instead of words: a random number of words.", ge=2, le=5
    )
    max_words: int | None = setting(None, "See min_words.", ge=2, le=5)
    train_size: int = setting(2000, "Training examples.", ge=1)
    validation_size: int = setting(128, "Held-out examples of a supervised run.", ge=1)
    eval_size: int = setting(128, "Held-out examples of evaluations.", ge=1)
    seed: int = setting(0, "Decides the examples; the run has a seed of its own.", ge=0)

    @property
    def counts(self) -> range:
        """The numbers of words that a prompt may have."""
        if self.min_words is None or self.max_words is None:
            return range(self.words, self.words + 1)
        return range(self.min_words, self.max_words + 1)

    @model_validator(mode="after")
    def _check_word_counts(self) -> TaskConfig:
        if (self.min_words is None) != (self.max_words is None):
            raise ValueError("min_words and max_words are given together or not at all")
        if self.min_words is not None and self.words != _DEFAULT_WORDS:
            raise ValueError("give words, or min_words and max_words, not both")
        if not self.counts:
            raise ValueError("min_words is greater than max_words")
        set_count = comb(len(WORDS), self.counts.start)
        if self.train_size + self.validation_size + self.eval_size > set_count // 2:
            raise ValueError(
                f"train_size + validation_size + eval_size may be at most {set_count // 2}: there are {set_count} different sets of "
                f"{self.counts.start} words, and no two examples share one"
            )
        return self


def get_config_schema() -> type[BaseModel]:
    """The config's `task:` section."""
    return TaskConfig


def get_rl_dataset(config: Any) -> list[dict[str, Any]]:
    """The training examples, with the columns `words` (as asked) and `answer` (a right completion)."""
    task_config = TaskConfig.of(config)
    return _eval_and_train_rows(task_config, task_config.train_size)[task_config.eval_size :]


def get_eval_dataset(config: Any) -> list[dict[str, Any]]:
    """The held-out examples. They are drawn first, so they do not depend on `train_size`."""
    task_config = TaskConfig.of(config)
    return _eval_and_train_rows(task_config, 0)


def get_sft_dataset(config: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """The training examples, each with its sorted words as completion."""
    return [_with_completion(row) for row in get_rl_dataset(config)]


def get_sft_eval_dataset(config: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """The validation examples with their sorted words. They use a random stream of their own and exclude the examples of the other
    splits.
    """
    task_config = TaskConfig.of(config)
    drawn_rows = _eval_and_train_rows(task_config, task_config.train_size)
    used_sets = {frozenset(row["words"]) for row in drawn_rows}
    stream = Stream("sort_words", task_config.seed, "validation")
    return [
        _with_completion(row)
        for row in _draw_rows(stream, task_config, task_config.validation_size, used_sets)
    ]


def get_reward_funcs(config: Any, tokenizer: Any) -> list[tuple[RewardFunction, float]]:
    """The parts of the preset with their weights."""
    return list(PARTS[TaskConfig.of(config).preset])


def compute_metrics(
    prompts: Sequence[Any],
    completions: Sequence[CompletionText],
    dataset_rows: Sequence[dict[str, Any]],
    config: Any,
    tokenizer: Any,
) -> dict[str, Any]:
    """Share of answers that are exactly right, share of true permutations, mean reward."""
    preset = TaskConfig.of(config).preset
    given_words = [row["words"] for row in dataset_rows]
    answers = [_answer_words(completion, preset) for completion in completions]
    pairs = list(zip(answers, given_words, strict=True))
    correct = [answer == sorted(words) for answer, words in pairs]
    weighted = [
        [weight * value for value in function(completions=completions, words=given_words)]
        for function, weight in PARTS[preset]
    ]
    return {
        "metrics": {
            "accuracy": fmean(correct),
            "permutation_accuracy": fmean(
                sorted(answer) == sorted(words) for answer, words in pairs
            ),
            "reward": fmean([sum(values) for values in zip(*weighted, strict=True)]),
        },
        "correct": correct,
    }


def right_words(completions: Sequence[CompletionText], words: Any, **_: Any) -> list[float]:
    """Share of right words; both missing and extra words count against it."""
    pairs = [(_answer_words(c, "quickstart"), w) for c, w in zip(completions, words, strict=True)]
    return [len(set(answer) & set(w)) / max(len(answer), len(w)) for answer, w in pairs]


def right_positions(completions: Sequence[CompletionText], words: Any, **_: Any) -> list[float]:
    """Share of words in their right place; 0 unless the answer is a permutation of the given words."""
    pairs = [
        (_answer_words(c, "quickstart"), sorted(w)) for c, w in zip(completions, words, strict=True)
    ]
    return [
        _share_true(a == b for a, b in zip(x, w, strict=True)) if sorted(x) == w else 0.0
        for x, w in pairs
    ]


def contained_ignoring_case(
    completions: Sequence[CompletionText], words: Any, **_: Any
) -> list[float]:
    """Share of the given words that occur, ignoring case."""
    texts = [_after_thinking(completion).lower() for completion in completions]
    return [_share_true(word in text for word in w) for text, w in zip(texts, words, strict=True)]


def contained(completions: Sequence[CompletionText], words: Any, **_: Any) -> list[float]:
    """Share of the given words that occur as they were given."""
    texts = [_after_thinking(completion) for completion in completions]
    return [_share_true(word in text for word in w) for text, w in zip(texts, words, strict=True)]


def begins_line(completions: Sequence[CompletionText], words: Any, **_: Any) -> list[float]:
    """Share of the given words that a line starts with."""
    pairs = zip(completions, words, strict=True)
    return [
        _share_true(
            word in set(re.findall(r"^[a-zA-Z]+", _after_thinking(completion), re.MULTILINE))
            for word in w
        )
        for completion, w in pairs
    ]


def belongs(completions: Sequence[CompletionText], words: Any, **_: Any) -> list[float]:
    """Share of the written words that are given ones, each counted once."""
    pairs = [(_answer_words(c, "classic"), w) for c, w in zip(completions, words, strict=True)]
    return [len(set(answer) & set(w)) / max(len(answer), 1) for answer, w in pairs]


def ascending(completions: Sequence[CompletionText], words: Any, **_: Any) -> list[float]:
    """Share of the pairs of given words whose first appearances as whole words are in alphabetical order; pairs with a missing word
    do not count.
    """
    shares: list[float] = []
    for completion, row_words in zip(completions, words, strict=True):
        text = _after_thinking(completion)
        positions = {word: _first_index(word, text) for word in row_words}
        pairs = combinations(sorted(positions), 2)
        shares.append(
            _share_true(0 <= positions[first] < positions[second] for first, second in pairs)
        )
    return shares


PARTS: dict[Preset, tuple[tuple[RewardFunction, float], ...]] = {
    "quickstart": ((right_words, 0.3), (right_positions, 0.7)),
    "classic": (
        (contained_ignoring_case, 0.01),
        (contained, 0.1),
        (begins_line, 1.0),
        (belongs, 1.0),
        (ascending, 10.0),
    ),
}
"""The reward functions of each preset with their weights."""


def _eval_and_train_rows(task_config: TaskConfig, train_size: int) -> list[dict[str, Any]]:
    """Held-out examples first, then `train_size` examples for training."""
    stream = Stream("sort_words", task_config.seed)
    return _draw_rows(stream, task_config, task_config.eval_size + train_size, set())


def _draw_rows(
    stream: Stream, task_config: TaskConfig, count: int, seen: set[frozenset[str]]
) -> list[dict[str, Any]]:
    """Draws `count` rows with sets of words that are not in `seen`, and adds them to it."""
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        words = stream.sample(WORDS, task_config.counts[stream.below(len(task_config.counts))])
        if frozenset(words) not in seen:
            seen.add(frozenset(words))
            rows.append(
                {
                    "prompt": [
                        {"role": "system", "content": _INSTRUCTION[task_config.preset]},
                        {"role": "user", "content": "Sort alphabetically: " + ", ".join(words)},
                    ],
                    "words": words,
                    "answer": _SEPARATOR[task_config.preset].join(sorted(words)),
                }
            )
    return rows


def _with_completion(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "completion": row["answer"]}


def _after_thinking(completion: CompletionText) -> str:
    """The completion's text after its reasoning."""
    return after_reasoning(completion_text(completion))


def _answer_words(completion: CompletionText, preset: Preset) -> list[str]:
    """The words of the answer, as the preset reads it."""
    text = _after_thinking(completion)
    if preset == "quickstart":
        text = text.strip().partition("\n")[0].lower()
    return re.findall(r"[a-zA-Z]+", text)


def _first_index(word: str, text: str) -> int:
    """Index of the first occurrence of the word without a letter before or after it; -1 if there is none."""
    letter = r"[^\W\d_]"
    match = re.search(rf"(?<!{letter}){re.escape(word)}(?!{letter})", text)
    return match.start() if match else -1


def _share_true(holds: Iterable[bool]) -> float:
    return fmean(list(holds) or [False])
