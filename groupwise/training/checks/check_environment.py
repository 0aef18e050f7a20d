"""The checks of `groupwise check` on an environment: it can be created, starts the same for all members, answers a turn and gives rewards.

Only the task knows whether the rewards are right: a conversation has no gold answer. If the environment itself gives the rewards,
players without a model play some games in it: some say nothing or nonsense, some guess a word that they have read or a number, some say
the contents of the row, which often include the answer. They play as in training, with the prompts, limits and parts of
`EnvironmentRollouts`; only the sampler is replaced.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, cast

from groupwise.core.errors import EnvironmentWorkerError
from groupwise.core.findings import Finding
from groupwise.core.types import Completion, Example, GroupRequest, Rollout, Sampler, SamplingParams
from groupwise.tasks.contract import Task
from groupwise.tasks.rollouts.dialogue import first_ids
from groupwise.tasks.rollouts.hosts import LocalHost, WorkerHost
from groupwise.tasks.rollouts.rollout_request import RolloutRequest
from groupwise.tasks.rollouts.sessions import Reply, SessionCall, Sessions
from groupwise.training import rollout_builder
from groupwise.training.checks.check_data import prompt_as_text, spread
from groupwise.training.checks.check_gold import GARBAGE
from groupwise.training.checks.check_rewards import distribution, is_constant
from groupwise.training.config import RunConfig, view
from groupwise.training.evaluation.statistics import mean_or_none

ROWS = 8
"""Number of rows whose games are played, spread over the data."""
BUDGET = 20.0
"""Seconds after which no further row is started."""
MAX_NUMBER = 10
"""Numbers are guessed from 0 to this one."""


async def check_environment(task: Task, config: RunConfig, example: Example) -> Finding:
    """Start two members of a group, answer one turn with nonsense, and end them."""
    if task.spec is None or config.rollout.in_process:
        host = LocalHost(Sessions(task.environment(view(config))))
    else:
        host = WorkerHost(
            "groupwise.training.rollout_builder:environments_for_worker",
            {"config": config.model_dump(mode="json"), "task": task.spec},
            start_limit=config.rollout.start_limit,
        )
    try:
        await host.start()
        opening_call = SessionCall(0, example.index, 0, 0, example.prompt, example.columns)
        first_reply = await host.ask(opening_call, config.rollout.time_limit)
        if first_reply.reason is not None:
            return _broken_environment(f"the first prompt: {first_reply.reason}")
        second_reply = await host.ask(replace(opening_call, session=1), config.rollout.time_limit)
        turn = replace(opening_call, completions=(GARBAGE,), reply_digests=(first_reply.digest,))
        turn_reply = await host.ask(turn, config.rollout.time_limit)
        if turn_reply.reason is not None:
            return _broken_environment(f"a turn with {GARBAGE!r}: {turn_reply.reason}")
        end_reply = await host.ask(
            replace(turn, reply_digests=(first_reply.digest, turn_reply.digest), ending=True),
            config.rollout.time_limit,
        )
        if end_reply.reason is not None:
            return _broken_environment(f"the end of a rollout: {end_reply.reason}")
        return _judge_replies(first_reply, second_reply, turn_reply, end_reply)
    except EnvironmentWorkerError as error:
        return _broken_environment(str(error))
    finally:
        await host.close()


def _judge_replies(
    first_reply: Reply, second_reply: Reply, turn_reply: Reply, end_reply: Reply
) -> Finding:
    earned: dict[str, float] = {}
    for part in (*turn_reply.parts, *end_reply.parts):
        if part.weight and part.value is not None:
            earned[part.name] = earned.get(part.name, 0.0) + part.value
    opening = (
        "the row's prompt"
        if first_reply.prompt is None
        else repr(prompt_as_text(first_reply.prompt)[:80])
    )
    observation = (
        "nothing"
        if turn_reply.observation is None
        else repr(prompt_as_text(turn_reply.observation)[:80])
    )
    measured = (
        f"begins with {opening}; answers nonsense with {observation}{' and ends' if turn_reply.done else ''}; "
        f"rewards so far: {json.dumps(earned) if earned else 'none'}"
    )
    data = {
        "done": turn_reply.done,
        "rewards": earned,
        "seconds": first_reply.seconds + turn_reply.seconds,
    }
    if first_reply.digest != second_reply.digest:
        return Finding(
            "environment",
            "problem",
            "two members of a group begin differently with the same seed",
            "they are compared with each other, and a lost process cannot be replaced",
            "draw what is random from the `seed` that `reset` is given",
            data,
        )
    return Finding("environment", "ok", measured, data=data)


def _broken_environment(reason: str) -> Finding:
    return Finding(
        "environment",
        "problem",
        reason,
        "in training such rollouts are failed and do not teach",
        "let the environment take any text",
    )


@dataclass(frozen=True, slots=True)
class PlayerView:
    """The information that a player answers from."""

    example: Example
    context: str
    """The text of the conversation so far, including the prompt."""
    turn: int
    random: Random


Player = Callable[[PlayerView], str]


def _random_word(state: PlayerView) -> str:
    return state.random.choice(state.context.split() or [GARBAGE])


def _random_number(state: PlayerView) -> str:
    return str(state.random.randint(0, MAX_NUMBER))


def _columns_in_turn(state: PlayerView) -> str:
    """Say one column of the row in each turn."""
    texts = [text for value in state.example.columns.values() for text in _flatten_texts(value)]
    return texts[state.turn % len(texts)] if texts else GARBAGE


def _flatten_texts(value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        return [text for item in cast("Sequence[Any]", value) for text in _flatten_texts(item)]
    return [str(value)] if isinstance(value, str | int | float) else []


SILENT = "nothing"
PLAYERS: tuple[tuple[str, Player], ...] = (
    (SILENT, lambda _: ""),
    ("nonsense", lambda _: GARBAGE),
    ("the row", _columns_in_turn),
    *[("a word of the prompt", _random_word)] * 3,
    *[("a number", _random_number)] * 3,
)
"""The members of each group: a name, and the function that gives the answer."""


@dataclass(frozen=True, slots=True)
class Game:
    """One rollout of a player."""

    player: str
    rollout: Rollout

    @property
    def failed(self) -> bool:
        return self.rollout.outcome != "pending"

    @property
    def given_rewards(self) -> list[float]:
        """The weighted rewards that the environment gave; parts without a weight are left out."""
        parts = self.rollout.parts
        return [
            part.weight * part.value for part in parts if part.weight and part.value is not None
        ]


class ScriptedSampler:
    """Replaces the sampler: writes the completions of a group's players. The seed of a request determines the player and the turn."""

    def __init__(self, tokenizer: Any, example: Example) -> None:
        self._tokenizer = tokenizer
        self._example = example

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        """See `Sampler.generate`."""
        context = self._tokenizer.decode(list(request.prompt_ids), skip_special_tokens=True)
        return tuple(
            self._completion_of_player(seed, context, request.params) for seed in request.seeds
        )

    def _completion_of_player(self, seed: int, context: str, params: SamplingParams) -> Completion:
        turn, member = divmod(seed, len(PLAYERS))
        random = Random(f"{self._example.index} {seed}")
        text = PLAYERS[member][1](PlayerView(self._example, context, turn, random))
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        ids_with_stop = [*ids, *params.stop_token_ids]
        completion_ids = tuple(ids_with_stop[: params.max_tokens])
        finish = "stop" if len(completion_ids) == len(ids_with_stop) else "length"
        return Completion(completion_ids, (0.0,) * len(completion_ids), finish, seed, 0, "")


# --- games ---------------------------------------------------------------------------------------


async def play(
    config: RunConfig, task: Task, tokenizer: Any, examples: Sequence[Example], room: int | None
) -> list[Game]:
    """Play one game per player on some of the rows. Raises EnvironmentWorkerError if no environment can be run."""
    tools = rollout_builder.check_rollouts(config, task, ())
    rollouts = rollout_builder.build_rollouts(config, task, tokenizer, room)
    end: int | None = tokenizer.eos_token_id
    params = SamplingParams(
        max_tokens=config.sampler.max_completion_length,
        stop_token_ids=() if end is None else (end,),
    )
    games: list[Game] = []
    try:
        await rollouts.start()
        started_at = time.perf_counter()  # a library that loads slowly takes nothing from its games
        for draw, example in enumerate(spread(examples, ROWS)):
            if time.perf_counter() - started_at > BUDGET:
                break
            request = RolloutRequest(
                draw=draw,
                example=example,
                prompt_ids=first_ids(tokenizer, example.prompt, tools, example.columns),
                members=len(PLAYERS),
                seed=lambda member, turn: max(turn, 0) * len(PLAYERS) + member,
                params=params,
            )
            group = await rollouts.sample(
                cast("Sampler", ScriptedSampler(tokenizer, example)), request
            )
            games += [Game(PLAYERS[rollout.member][0], rollout) for rollout in group.rollouts]
    finally:
        await rollouts.close()
    return games


def judge_games(games: Sequence[Game]) -> Iterator[Finding]:
    """Report failed games, then the rewards of the others."""
    failed = [game for game in games if game.failed]
    if failed:
        reasons = Counter(game.rollout.reason or game.rollout.outcome for game in failed)
        reason_list = "\n".join(f"{count} × {reason}" for reason, count in reasons.most_common(3))
        # Some libraries take an empty reply for a failure of the server; a model seldom gives one.
        is_harmless = all(game.player == SILENT for game in failed)
        whose = ", all of the player who says nothing" if is_harmless else ""
        yield Finding(
            "games",
            "warning" if is_harmless else "problem",
            f"{len(failed)} of {len(games)} games failed{whose}:\n{reason_list}",
            "in training such rollouts do not teach",
            "let the environment take any text",
            {"failed": len(failed), "reasons": dict(reasons)},
        )
    scored_games = [game for game in games if not game.failed]
    if not scored_games:
        return
    count = f"{len(scored_games)} games of players without a model"
    if not any(game.given_rewards for game in scored_games):
        yield Finding(
            "rewards",
            "problem",
            f"the environment gave no reward in {count}, and there is no get_reward_funcs",
            "a rollout without a reward counts as 0, and nothing is learnt from rewards that never vary",
            "return Step(reward=...), or add a method `reward` or the hook get_reward_funcs; where only a win is rewarded, give "
            "0 for what is lost",
            {"games": len(scored_games), "rewarded": 0},
        )
        return
    earned = [sum(game.given_rewards) for game in scored_games]
    data = {
        **distribution(earned),
        "games": len(scored_games),
        "rewarded": sum(bool(game.given_rewards) for game in scored_games),
    }
    if is_constant(earned):
        yield Finding(
            "rewards",
            "skipped",
            f"all of {count} earn {earned[0]:.4g}, but none of them knows how to play",
            "whether a good one earns more could not be checked",
            data=data,
        )
        return
    yield Finding(
        "rewards",
        "ok",
        "{games} games earn {min:.4g} to {max:.4g}, mean {mean:.4g}".format_map(data),
        "of players without a model; the environment gives them itself",
        data=data,
    )


def games_table(games: Iterable[Game]) -> list[dict[str, Any]]:
    """A table of the rewards that each player earned, with the columns of `check_rewards.table`."""
    by_player: dict[str, list[Game]] = {}
    for game in games:
        by_player.setdefault(game.player, []).append(game)
    return [
        {
            "completion": player,
            "count": len(player_games),
            "failed": sum(game.failed for game in player_games),
            "reward": mean_or_none(
                None if game.failed else sum(game.given_rewards) for game in player_games
            ),
            "parts": {
                name: mean_or_none(game.rollout.part_values.get(name) for game in player_games)
                for name in dict.fromkeys(
                    name for game in player_games for name in game.rollout.part_values
                )
            },
        }
        for player, player_games in by_player.items()
    ]
