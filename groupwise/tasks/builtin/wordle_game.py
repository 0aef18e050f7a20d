"""Wordle as a game: up to six guesses, each marked by the environment, until the secret is found.

Needs `rollout.type: environment`. Every turn is written as in the task `wordle`: think, close `</think>`, `<guess>word</guess>`. A
turn without a guess, or with what is not a real word, is used up like any other and gets no marks. Six parts make the reward, 1.7 at
most; their weights are in `task.weights`:

    won             1      the secret was found
    format          0.2    share of the turns in which there is a guess
    dictionary      0.2    … a real word
    repeated       -0.5    … one that was guessed before, whether it is a real word or not
    constraints     0.1    mean over the turns: share of the marked turns before it whose marks allow the guess
    all_satisfied   0.2    share of the turns whose guess all marks before it allow

All prompts are the same, so rows differ only in their secret. No secret of the training rows is one of the held-out ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from pydantic import BaseModel

from groupwise.core.reward_call.text import CompletionText, completion_text
from groupwise.core.settings.schema import Strict, setting
from groupwise.core.settings.view import TaskSection
from groupwise.core.types import Message
from groupwise.tasks.builtin.wordle import PARTS, Verdict, judge_guess
from groupwise.tasks.builtin.wordle_rules import (
    GUESSES,
    Knowledge,
    Split,
    answer,
    choices_line,
    guesses_left,
    marked_guess,
    marks_of,
    reasoning,
    rules,
    words_of,
)
from groupwise.tasks.data.order import Stream
from groupwise.tasks.environment import Step


class Weights(Strict):
    """The weight of each part of the reward."""

    won: float = setting(1.0, "The secret was found.")
    format: float = setting(0.2, "Share of the turns with a guess.")
    dictionary: float = setting(0.2, "Share of the turns with a real word.")
    repeated: float = setting(-0.5, "Share of the turns with a guess that was made before.")
    constraints: float = setting(0.1, "Share of the marked turns that allow a guess, on average.")
    all_satisfied: float = setting(0.2, "Share of the turns whose guess all marks before it allow.")


class TaskConfig(TaskSection):
    """The `task:` section of a config for this task."""

    weights: Weights = setting(Weights(), "Weights of the reward's parts.")
    train_size: int | None = setting(
        None, "Training games; null: one for each training secret.", ge=1
    )
    guesses: int = setting(GUESSES, "Guesses of a game.", ge=1, le=GUESSES)
    choices: int | None = setting(
        None,
        "Number of words shown in the prompt, one of them the secret, for models that know few words; null: none.",
        ge=2,
        le=50,
    )
    secrets: str | None = setting(
        None, "File with the words that may be the secret, one in each line; null: 877 common ones."
    )
    dictionary: str | None = setting(
        None,
        "File with the real words, one in each line; null: 5,098 words. Secrets always count as real.",
    )
    seed: int = setting(0, "Seed of the examples; the run has a seed of its own.", ge=0)


def get_config_schema() -> type[BaseModel]:
    """The config's `task:` section."""
    return TaskConfig


def get_rl_dataset(config: Any) -> list[dict[str, Any]]:
    """A row for each secret, with the columns `secret` and `gold_completion` (the winning guess)."""
    return _game_rows(TaskConfig.of(config), "train")


def get_eval_dataset(config: Any) -> list[dict[str, Any]]:
    """The same for the secrets of the test split."""
    return _game_rows(TaskConfig.of(config), "test")


def get_sft_dataset(config: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """The training rows with games that a solver won."""
    return _rows_with_games(TaskConfig.of(config), "train")


def get_sft_eval_dataset(config: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Such games for the secrets of the validation split."""
    return _rows_with_games(TaskConfig.of(config), "validation")


def get_environment(config: Any) -> Callable[[], Game]:
    """A factory of games."""
    task_config = TaskConfig.of(config)
    real = words_of(task_config.secrets, task_config.dictionary).dictionary
    return partial(Game, real, task_config.guesses)


def get_reward_funcs(config: Any, tokenizer: Any) -> list[tuple[Callable[..., Any], float]]:
    """The reward parts with their weights."""
    task_config = TaskConfig.of(config)
    real = words_of(task_config.secrets, task_config.dictionary).dictionary
    weights = task_config.weights.model_dump()
    measures: dict[str, Callable[[GameResult], float]] = {"won": lambda game: float(game.won)}
    measures |= {name: _average_over_turns(of) for name, of in PARTS.items()}
    return [
        (Part(name, of, real, task_config.guesses), weights[name]) for name, of in measures.items()
    ]


def compute_metrics(
    prompts: Sequence[Any],
    completions: Sequence[CompletionText],
    dataset_rows: Sequence[dict[str, Any]],
    config: Any,
    tokenizer: Any,
) -> dict[str, Any]:
    """Share of the games won, guesses needed (a lost game counts as the limit + 1), and shares of all turns."""
    task_config = TaskConfig.of(config)
    real = words_of(task_config.secrets, task_config.dictionary).dictionary
    games = [
        play_messages(completion, row["secret"], real, task_config.guesses)
        for completion, row in zip(completions, dataset_rows, strict=True)
    ]
    turns = [verdict for game in games for verdict in game.verdicts] or [Verdict()]
    return {
        "metrics": {
            "win_rate": fmean(game.won for game in games),
            "mean_guesses": fmean(game.turns_needed for game in games),
            "format_accuracy": fmean(turn.guess is not None for turn in turns),
            "dict_accuracy": fmean(turn.real for turn in turns),
            "constraint_accuracy": fmean(turn.all_satisfied for turn in turns),
            "total_samples": len(games),
        },
        "guesses": [[verdict.guess for verdict in game.verdicts] for game in games],
    }


compute_metrics.reads_messages = True  # pyright: ignore[reportFunctionMemberAccess]


# --- the game ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Game:
    """The environment of one rollout. All rules for the course of a game are here."""

    real: frozenset[str]
    limit: int = GUESSES
    """Most guesses in a game."""
    secret: str = ""
    guesses: list[str] = field(default_factory=list[str])
    """Real words, in order."""
    unmarked: list[str] = field(default_factory=list[str])
    """Guesses that were not real words."""
    marks: list[str] = field(default_factory=list[str])
    verdicts: list[Verdict] = field(default_factory=list[Verdict])
    """One for each turn."""

    def reset(self, secret: str) -> None:
        """Start the game; the first prompt is that of the row."""
        self.secret = secret

    def step(self, completion: str) -> Step:
        """Mark a guess."""
        verdict = judge_guess(completion, self.guesses, self.marks, self.real, self.unmarked)
        self.verdicts.append(verdict)
        return Step(self._reply_to(verdict), done=self.over)

    @property
    def won(self) -> bool:
        """True if the secret was found."""
        return bool(self.verdicts) and self.verdicts[-1].guess == self.secret

    @property
    def over(self) -> bool:
        """True if nothing more can be guessed."""
        return self.won or len(self.verdicts) == self.limit

    def _reply_to(self, verdict: Verdict) -> str:
        """The environment's reply to the turn that was just judged."""
        remaining = guesses_left(self.limit - len(self.verdicts))
        if verdict.guess is None:
            return f"There is no guess of five letters after </think>. Write <guess>word</guess>.\n{remaining}"
        if not verdict.real:
            self.unmarked.append(verdict.guess)
            return f"{verdict.guess} is not in the word list.\n{remaining}"
        self.guesses.append(verdict.guess)
        self.marks.append(marks_of(verdict.guess, self.secret))
        return f"{marked_guess(verdict.guess, self.marks[-1])}\n{remaining}"


@dataclass(frozen=True, slots=True)
class GameResult:
    """A game that has ended, or was cut off."""

    won: bool
    verdicts: tuple[Verdict, ...]
    limit: int = GUESSES

    @property
    def turns_needed(self) -> int:
        """Turns until the game was won; the limit + 1 if it was not."""
        return len(self.verdicts) if self.won else self.limit + 1


def play_messages(
    completion: CompletionText, secret: str, real: frozenset[str], limit: int = GUESSES
) -> GameResult:
    """The result of a game whose turns are the assistant's messages; messages after its end do not count."""
    game = Game(real, limit)
    game.reset(secret)
    if isinstance(completion, str):
        turns = [completion]
    else:
        replies = [reply for reply in completion if reply.get("role", "assistant") == "assistant"]
        turns = [completion_text([message]) for message in replies]
    for text in turns:
        if not game.over:
            game.step(text)
    return GameResult(game.won, tuple(game.verdicts), limit)


# --- rewards -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """The reward function of one part."""

    name: str
    of: Callable[[GameResult], float]
    real: frozenset[str]
    limit: int

    def __call__(
        self, completions: Sequence[CompletionText], secret: Sequence[str], **_: Any
    ) -> list[float]:
        """One value for each game."""
        pairs = zip(completions, secret, strict=True)
        return [
            self.of(play_messages(completion, game_secret, self.real, self.limit))
            for completion, game_secret in pairs
        ]


def _average_over_turns(of: Callable[[Verdict], float]) -> Callable[[GameResult], float]:
    return lambda game: fmean(map(of, game.verdicts)) if game.verdicts else 0.0


# --- rows ----------------------------------------------------------------------------------------


def _game_rows(task_config: TaskConfig, split: Split) -> list[dict[str, Any]]:
    no_knowledge = Knowledge.of([], [])
    size = task_config.train_size if split == "train" else None
    words = words_of(task_config.secrets, task_config.dictionary).of(split, task_config.seed)
    stream = Stream("wordle choices", split, task_config.seed)
    rows: list[dict[str, Any]] = []
    for secret in words[:size]:
        choices = stream.among(secret, words, task_config.choices) if task_config.choices else []
        prompt = "\n".join([*choices_line(choices), guesses_left(task_config.guesses)])
        rows.append(
            {
                "prompt": [
                    {"role": "system", "content": rules(task_config.guesses)},
                    {"role": "user", "content": prompt},
                ],
                "secret": secret,
                **({"choices": choices} if choices else {}),
                "gold_completion": answer(reasoning(no_knowledge, secret), secret),
            }
        )
    return rows


def _rows_with_games(task_config: TaskConfig, split: Split) -> list[dict[str, Any]]:
    """The rows of a split, each with a game in which every guess is a word of that split that all marks allow."""
    words = words_of(task_config.secrets, task_config.dictionary)
    pool, stream = (
        words.of(split, task_config.seed),
        Stream("wordle games", split, task_config.seed),
    )
    return [
        {
            **row,
            "completion": _won_game(
                row["secret"],
                row.get("choices", pool),
                partial(Game, words.dictionary, task_config.guesses),
                stream,
            ),
        }
        for row in _game_rows(task_config, split)
    ]


def _won_game(
    secret: str, pool: Sequence[str], begin: Callable[[], Game], stream: Stream
) -> list[Message]:
    """A game that is won. A lost game, which is rare, is played again with other guesses."""
    while True:
        game = begin()
        game.reset(secret)
        messages = list(_solve(game, stream.sample(pool, len(pool))))
        if game.won:
            return messages[:-1]  # the marks of the last guess come after the end of the game


def _solve(game: Game, pool: Sequence[str]) -> Iterator[Message]:
    """The messages of a game: always the first word of the pool that the marks allow."""
    while not game.over:
        knowledge = Knowledge.of(game.guesses, game.marks)
        guess = next(word for word in pool if knowledge.allows(word))
        content = answer(reasoning(knowledge, guess), guess)
        yield {"role": "assistant", "content": content}
        yield {"role": "user", "content": str(game.step(content).observation)}
