"""Games that `groupwise check` plays in an environment which gives the rewards itself: whether it gives any, and how they spread.

There is no gold for a conversation. So the players are such as need no model: some say nothing or nonsense, some guess among the words
that they were told or among numbers, some say what stands in the row, which is often the answer. They play as in training: the
prompts, limits and parts are those of `EnvironmentRollouts`, and only the sampler is another one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, cast

from groupwise.core.types import Completion, Example, GroupRequest, Rollout, Sampler, SamplingParams
from groupwise.tasks.contract import Task
from groupwise.tasks.rollouts.asking import Ask
from groupwise.tasks.rollouts.dialogue import first_ids
from groupwise.training import rollout_builder
from groupwise.training.checks.check_data import spread
from groupwise.training.checks.check_gold import GARBAGE
from groupwise.training.checks.check_rewards import distribution, is_constant, mean_or_none
from groupwise.training.checks.findings import Finding
from groupwise.training.config import RunConfig

NAME = "rewards"
ROWS = 8
"""Rows whose games are played, spread over the data."""
BUDGET = 20.0
"""Seconds after which no further row is begun."""
NUMBERS = 10
"""Numbers are guessed from 0 to this one."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a player knows."""

    example: Example
    context: str
    """All that was said so far, the prompt included."""
    turn: int
    random: Random


Player = Callable[[Seen], str]


def _one_of_the_words(seen: Seen) -> str:
    return seen.random.choice(seen.context.split() or [GARBAGE])


def _the_row(seen: Seen) -> str:
    """Its columns, one in each turn."""
    held = [text for value in seen.example.columns.values() for text in _texts(value)]
    return held[seen.turn % len(held)] if held else GARBAGE


def _texts(value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        return [text for each in cast("Sequence[Any]", value) for text in _texts(each)]
    return [str(value)] if isinstance(value, str | int | float) else []


def _nothing(seen: Seen) -> str:
    return ""


def _nonsense(seen: Seen) -> str:
    return GARBAGE


def _a_number(seen: Seen) -> str:
    return str(seen.random.randint(0, NUMBERS))


PLAYERS: tuple[tuple[str, Player], ...] = (
    ("nothing", _nothing),
    ("nonsense", _nonsense),
    ("the row", _the_row),
    *[("a word of the prompt", _one_of_the_words)] * 3,
    *[("a number", _a_number)] * 3,
)
"""The members of each group, with what they say."""


@dataclass(frozen=True, slots=True)
class Game:
    """One rollout of a player."""

    player: str
    rollout: Rollout

    @property
    def failed(self) -> bool:
        return self.rollout.outcome != "pending"

    @property
    def given(self) -> list[float]:
        """What the environment gave; parts that do not count are left out."""
        parts = self.rollout.parts
        return [
            part.weight * part.value for part in parts if part.weight and part.value is not None
        ]


class Crowd:
    """Writes the completions of one group's players, where training has a sampler; seeds say who is asked in which turn."""

    def __init__(self, tokenizer: Any, example: Example) -> None:
        self._tokenizer = tokenizer
        self._example = example

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        """See `Sampler.generate`."""
        context = self._tokenizer.decode(list(request.prompt_ids), skip_special_tokens=True)
        return tuple(self._said(seed, context, request.params) for seed in request.seeds)

    def _said(self, seed: int, context: str, params: SamplingParams) -> Completion:
        turn, member = divmod(seed, len(PLAYERS))
        random = Random(f"{self._example.index} {seed}")
        text = PLAYERS[member][1](Seen(self._example, context, turn, random))
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        ended = [*ids, *params.stop_token_ids]
        taken = tuple(ended[: params.max_tokens])
        finish = "stop" if len(taken) == len(ended) else "length"
        return Completion(taken, (0.0,) * len(taken), finish, seed, 0, "")


async def play(
    config: RunConfig, task: Task, tokenizer: Any, examples: Sequence[Example], room: int | None
) -> list[Game]:
    """A game of each player for some of the rows. Raises EnvironmentWorkerError where no environment can be held."""
    tools = rollout_builder.check_rollouts(config, task, ())
    rollouts = rollout_builder.build_rollouts(config, task, tokenizer, room)
    end: int | None = tokenizer.eos_token_id
    params = SamplingParams(
        max_tokens=config.sampler.max_completion_length,
        stop_token_ids=() if end is None else (end,),
    )
    games: list[Game] = []
    begun = time.perf_counter()
    try:
        await rollouts.start()
        for draw, example in enumerate(spread(examples, ROWS)):
            if time.perf_counter() - begun > BUDGET:
                break
            ask = Ask(
                draw=draw,
                example=example,
                prompt_ids=first_ids(tokenizer, example.prompt, tools, example.columns),
                members=len(PLAYERS),
                seed=lambda member, turn: max(turn, 0) * len(PLAYERS) + member,
                params=params,
            )
            group = await rollouts.sample(cast("Sampler", Crowd(tokenizer, example)), ask)
            games += [Game(PLAYERS[each.member][0], each) for each in group.rollouts]
    finally:
        await rollouts.close()
    return games


def judge_games(games: Sequence[Game]) -> Iterator[Finding]:
    """Games that failed, then what the others earned."""
    failed = [game for game in games if game.failed]
    if failed:
        reasons = Counter(game.rollout.reason or game.rollout.outcome for game in failed)
        shown = "\n".join(f"{count} × {reason}" for reason, count in reasons.most_common(3))
        yield Finding(
            "games",
            "problem",
            f"{len(failed)} of {len(games)} games failed:\n{shown}",
            "in training such rollouts do not teach",
            "let the environment take any text",
            {"failed": len(failed), "reasons": dict(reasons)},
        )
    played = [game for game in games if not game.failed]
    if played:
        yield _judge_rewards(played)


def _judge_rewards(played: Sequence[Game]) -> Finding:
    count = f"{len(played)} games of players without a model"
    if not any(game.given for game in played):
        return Finding(
            NAME,
            "problem",
            f"the environment gave no reward in {count}, and there is no get_reward_funcs",
            "a rollout that is given nothing counts as 0, and from rewards that never vary nothing is learnt",
            "return Step(reward=...), or add a method `reward` or the hook get_reward_funcs; where only a win is rewarded, give "
            "0 for what is lost",
            {"games": len(played), "rewarded": 0},
        )
    earned = [sum(game.given) for game in played]
    data = {
        **distribution(earned),
        "games": len(played),
        "rewarded": sum(bool(game.given) for game in played),
    }
    if is_constant(earned):
        return Finding(
            NAME,
            "skipped",
            f"all of {count} earn {earned[0]:.4g}, but none of them knows how to play",
            "whether a good one earns more could not be checked",
            data=data,
        )
    return Finding(
        NAME, "ok", "{games} games earn {min:.4g} to {max:.4g}, mean {mean:.4g}".format_map(data),
        "of players without a model; the environment gives them itself", data=data,
    )  # fmt: skip


def table(games: Iterable[Game]) -> list[dict[str, Any]]:
    """What each player earned, in the columns of `check_rewards.table`."""
    by_player: dict[str, list[Game]] = {}
    for game in games:
        by_player.setdefault(game.player, []).append(game)
    return [
        {
            "completion": player,
            "count": len(found),
            "failed": sum(game.failed for game in found),
            "reward": mean_or_none(None if game.failed else sum(game.given) for game in found),
            "parts": {
                name: mean_or_none(game.rollout.part_values.get(name) for game in found)
                for name in dict.fromkeys(
                    name for each in found for name in each.rollout.part_values
                )
            },
        }
        for player, found in by_player.items()
    ]
