"""One turn of Wordle: one to four guesses and their marks are given, and the next guess is asked for.

A completion is to think, close `</think>` and write `<guess>word</guess>`; the first well-formed guess after the tag counts. Six parts
make the reward, 0.7 at most; their weights are in `task.weights`:

    format          0.2    there is a guess
    dictionary      0.2    it is a real word
    repeated       -0.5    it was guessed before
    constraints     0.1    share of the earlier turns whose marks allow it, of a real word
    all_satisfied   0.2    all of them do
    over_length    -0.5    the completion has more tokens than `task.overlong_length`

Without a guess all of them are 0 but the last. Any word that the marks allow is a right answer, be it the secret or not.

No secret of the training rows occurs in held-out ones, neither as secret nor as guess, and so no prompt does. The whole game is the
task `wordle_game`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from statistics import fmean
from typing import Any

from pydantic import BaseModel, model_validator

from groupwise.core.errors import TaskError
from groupwise.core.reward_call.text import CompletionText, completion_text
from groupwise.core.settings.schema import Strict, setting
from groupwise.core.settings.view import TaskSection
from groupwise.tasks.builtin.wordle_rules import (
    GUESSES,
    Knowledge,
    Split,
    answer,
    choices_line,
    guess_in,
    guesses_left,
    marked_guess,
    marks_of,
    reasoning,
    rules,
    turns_met,
    words_of,
)
from groupwise.tasks.data.order import Stream

OVERLONG_SHARE = 0.75
"""Default limit of over-length, as a share of the longest completion, if the config gives none."""
MAX_DUPLICATES_IN_A_ROW = 1000
"""Number of consecutive duplicate rows after which the generator gives up."""


class Weights(Strict):
    """The weight of each part of the reward."""

    format: float = setting(0.2, "There is a guess.")
    dictionary: float = setting(0.2, "It is a real word.")
    repeated: float = setting(-0.5, "It was guessed before.")
    constraints: float = setting(0.1, "Share of the earlier turns that allow it.")
    all_satisfied: float = setting(0.2, "All earlier turns allow it.")
    over_length: float = setting(-0.5, "The completion is longer than overlong_length.")


class TaskConfig(TaskSection):
    """The `task:` section of a config for this task."""

    weights: Weights = setting(Weights(), "Weights of the reward's parts.")
    overlong_length: int | None = setting(
        None,
        "Tokens above which a completion counts as over-length, below sampler.max_completion_length; null: three quarters of that.",
        ge=1,
    )
    min_history: int = setting(
        1, "Minimum number of earlier guesses in a prompt.", ge=1, le=GUESSES - 1
    )
    max_history: int = setting(
        4, "Maximum number of earlier guesses in a prompt.", ge=1, le=GUESSES - 1
    )
    choices: int | None = setting(
        None,
        "Number of words shown in the prompt, one of them the secret, for models that know few words; null: none.",
        ge=2,
        le=50,
    )
    train_size: int = setting(1000, "Training examples.", ge=1)
    validation_size: int = setting(128, "Held-out examples of a supervised run.", ge=1)
    eval_size: int = setting(128, "Held-out examples of evaluations.", ge=1)
    secrets: str | None = setting(
        None, "File with the words that may be the secret, one in each line; null: 877 common ones."
    )
    dictionary: str | None = setting(
        None,
        "File with the real words, one in each line; null: 5,098 words. Secrets always count as real.",
    )
    seed: int = setting(0, "Seed of the examples; the run has a seed of its own.", ge=0)

    @model_validator(mode="after")
    def _check_history_range(self) -> TaskConfig:
        if self.min_history > self.max_history:
            raise ValueError("min_history is greater than max_history")
        return self


def get_config_schema() -> type[BaseModel]:
    """The config's `task:` section."""
    return TaskConfig


def get_rl_dataset(config: Any) -> list[dict[str, Any]]:
    """The training rows, with the columns `guesses`, `feedback`, `secret` and `gold_completion`."""
    task_config = TaskConfig.of(config)
    return _turn_rows(task_config, "train", task_config.train_size)


def get_eval_dataset(config: Any) -> list[dict[str, Any]]:
    """The test rows."""
    task_config = TaskConfig.of(config)
    return _turn_rows(task_config, "test", task_config.eval_size)


def get_sft_dataset(config: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """The training rows with a solver's completion: a word that all marks allow, with the reasoning."""
    return [_with_completion(row) for row in get_rl_dataset(config)]


def get_sft_eval_dataset(config: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """The validation rows with a solver's completion."""
    task_config = TaskConfig.of(config)
    return [
        _with_completion(row)
        for row in _turn_rows(task_config, "validation", task_config.validation_size)
    ]


def get_reward_funcs(config: Any, tokenizer: Any) -> list[tuple[Callable[..., Any], float]]:
    """The reward parts with their weights."""
    task_config = TaskConfig.of(config)
    real = words_of(task_config.secrets, task_config.dictionary).dictionary
    weights = task_config.weights.model_dump()
    parts = [(Part(name, of, real), weights[name]) for name, of in PARTS.items()]
    return [
        *parts,
        (OverLength(_overlong_length(task_config, config)), task_config.weights.over_length),
    ]


def compute_metrics(
    prompts: Sequence[Any],
    completions: Sequence[CompletionText],
    dataset_rows: Sequence[dict[str, Any]],
    config: Any,
    tokenizer: Any,
) -> dict[str, Any]:
    """Shares of completions with a guess, with a real word, with one that all marks allow, and with the secret itself."""
    task_config = TaskConfig.of(config)
    real = words_of(task_config.secrets, task_config.dictionary).dictionary
    verdicts = [
        judge_guess(completion_text(completion), row["guesses"], row["feedback"], real)
        for completion, row in zip(completions, dataset_rows, strict=True)
    ]
    secrets = [row["secret"] for row in dataset_rows]
    return {
        "metrics": {
            "format_accuracy": fmean(v.guess is not None for v in verdicts),
            "dict_accuracy": fmean(v.real for v in verdicts),
            "constraint_accuracy": fmean(v.all_satisfied for v in verdicts),
            "win_rate": fmean(v.guess == s for v, s in zip(verdicts, secrets, strict=True)),
            "total_samples": len(verdicts),
        },
        "guesses": [verdict.guess for verdict in verdicts],
    }


# --- judging -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """A completion's guess, and how it fits the turns before."""

    guess: str | None = None
    real: bool = False
    repeated: bool = False
    satisfied: float = 0.0
    """Share of the earlier turns that allow it; 1 if there are none."""

    @property
    def all_satisfied(self) -> bool:
        """True if all of them allow it."""
        return self.satisfied == 1


def judge_guess(
    text: str,
    guesses: Sequence[str],
    marks: Sequence[str],
    real: frozenset[str],
    unmarked: Sequence[str] = (),
) -> Verdict:
    """The verdict on a completion. A guess that is not a real word satisfies no turn; `unmarked` are earlier guesses that were not
    real words.
    """
    guess = guess_in(text)
    if guess is None:
        return Verdict()
    repeated = guess in guesses or guess in unmarked
    if guess not in real:
        return Verdict(guess, repeated=repeated)
    satisfied = turns_met(guess, guesses, marks) / len(guesses) if guesses else 1.0
    return Verdict(guess, True, repeated, satisfied)


PARTS: Mapping[str, Callable[[Verdict], float]] = {
    "format": lambda verdict: float(verdict.guess is not None),
    "dictionary": lambda verdict: float(verdict.real),
    "repeated": lambda verdict: float(verdict.repeated),
    "constraints": lambda verdict: verdict.satisfied,
    "all_satisfied": lambda verdict: float(verdict.all_satisfied),
}
"""The parts that depend on the guess."""


@dataclass(frozen=True, slots=True)
class Part:
    """The reward function of one of these parts."""

    name: str
    of: Callable[[Verdict], float]
    real: frozenset[str]

    def __call__(
        self,
        completions: Sequence[CompletionText],
        guesses: Sequence[Sequence[str]],
        feedback: Sequence[Sequence[str]],
        log_extra: Callable[[str, Sequence[Any]], None],
        **_: Any,
    ) -> list[float]:
        turns = zip(completions, guesses, feedback, strict=True)
        verdicts = [judge_guess(completion_text(c), g, f, self.real) for c, g, f in turns]
        log_extra("extracted_answer", [verdict.guess for verdict in verdicts])
        return [self.of(verdict) for verdict in verdicts]


@dataclass(frozen=True, slots=True)
class OverLength:
    """The reward function that is 1 for a completion of more than `limit` tokens; always 0 without a limit."""

    limit: int | None
    name: str = "over_length"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        limit = self.limit
        return [float(limit is not None and len(ids) > limit) for ids in completion_ids]


def _overlong_length(task_config: TaskConfig, config: Any) -> int | None:
    """The limit in tokens. Raises TaskError for a limit that no completion can exceed."""
    # The longest completion in training, in tokens; None if the config sets no limit.
    rollout: Mapping[str, Any] = config.get("rollout") or {}
    if rollout.get("type") == "two_stage":
        longest = int(rollout["max_reasoning_length"] + rollout["max_answer_length"])
    else:
        sampler: Mapping[str, Any] = config.get("sampler") or {}
        longest = sampler.get("max_completion_length")
    if task_config.overlong_length is None or longest is None:
        return task_config.overlong_length or (longest and int(OVERLONG_SHARE * longest))
    if task_config.overlong_length >= longest:
        raise TaskError(
            f"task.overlong_length is {task_config.overlong_length}, but completions are cut off at {longest} tokens, so that none would "
            f"be over-length. Leave it out, which makes it three quarters of the longest ({int(OVERLONG_SHARE * longest)} here), lower it, "
            "or raise sampler.max_completion_length. task.weights.over_length=0 pays for any length."
        )
    return task_config.overlong_length


# --- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """A secret, the guesses and marks so far, and a word that all marks allow."""

    secret: str
    guesses: tuple[str, ...]
    marks: tuple[str, ...]
    gold: str
    choices: tuple[str, ...] = ()
    """Words listed in the prompt, one of which is the secret; empty without `task.choices`."""

    @property
    def row(self) -> dict[str, Any]:
        """The row for training and evaluation."""
        knowledge = Knowledge.of(self.guesses, self.marks)
        history = zip(self.guesses, self.marks, strict=True)
        lines = [
            *choices_line(self.choices),
            *(marked_guess(guess, marks) for guess, marks in history),
        ]
        return {
            "prompt": [
                {"role": "system", "content": rules()},
                {
                    "role": "user",
                    "content": "\n".join([*lines, guesses_left(GUESSES - len(self.guesses))]),
                },
            ],
            "guesses": list(self.guesses),
            "feedback": list(self.marks),
            "secret": self.secret,
            **({"choices": list(self.choices)} if self.choices else {}),
            "gold_completion": answer(reasoning(knowledge, self.gold), self.gold),
        }


def _turn_rows(task_config: TaskConfig, split: Split, size: int) -> list[dict[str, Any]]:
    """The first `size` rows of a split, no two with the same prompt; a larger size starts with the same rows."""
    words = tuple(words_of(task_config.secrets, task_config.dictionary).of(split, task_config.seed))
    turns = _draw_turns(
        words,
        split,
        task_config.seed,
        task_config.min_history,
        task_config.max_history,
        task_config.choices,
        size,
    )
    return [turn.row for turn in turns]


@lru_cache(maxsize=3)  # one per split: rewards and SFT use the same rows
def _draw_turns(
    words: tuple[str, ...],
    split: Split,
    seed: int,
    least: int,
    most: int,
    choices: int | None,
    size: int,
) -> tuple[Turn, ...]:
    """Draws `size` different turns, each with `least` to `most` guesses, and with `choices` words to choose from."""
    stream = Stream("wordle", split, seed)
    rows: dict[tuple[tuple[str, ...], tuple[str, ...]], Turn] = {}
    vain = 0
    while len(rows) < size:
        secret = words[stream.below(len(words))]
        turns = least + stream.below(most - least + 1)
        guesses: list[str] = []
        marks: list[str] = []
        while len(guesses) < turns:
            guesses.append(_earlier_guess(words, secret, guesses, marks, stream))
            marks.append(marks_of(guesses[-1], secret))
        knowledge = Knowledge.of(guesses, marks)
        fresh = [word for word in words if word not in guesses]
        shown_words = stream.among(secret, fresh, choices) if choices else []
        gold = next(
            word for word in shown_words or _from_anywhere(words, stream) if knowledge.allows(word)
        )
        turn = Turn(secret, tuple(guesses), tuple(marks), gold, tuple(shown_words))
        key = (turn.guesses, turn.marks)
        vain = vain + 1 if key in rows else 0
        rows.setdefault(key, turn)
        if vain == MAX_DUPLICATES_IN_A_ROW:
            raise TaskError(
                f"The {len(words)} secrets of the {split} split seem to make no more than {len(rows)} different prompts, and {size} "
                "are asked for. Ask for fewer, or raise task.max_history."
            )
    return tuple(rows.values())


def _earlier_guess(
    words: Sequence[str],
    secret: str,
    guesses: Sequence[str],
    marks: Sequence[str],
    stream: Stream,
) -> str:
    """A plausible guess: every other time one that the marks so far allow, if there is such a word other than the secret."""
    shuffled = _from_anywhere(words, stream)
    must_fit = stream.below(2)
    candidates = (word for word in shuffled if word != secret and word not in guesses)
    first = next(candidates)
    if not must_fit:
        return first
    return next(filter(Knowledge.of(guesses, marks).allows, chain([first], candidates)), first)


def _from_anywhere(words: Sequence[str], stream: Stream) -> list[str]:
    """The words in their order, from a random one to the end, then from the start."""
    begin = stream.below(len(words))
    return [*words[begin:], *words[:begin]]


def _with_completion(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "completion": row["gold_completion"]}
