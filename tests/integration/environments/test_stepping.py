"""Environments that are stepped through by our bridges: text games of TextArena, and a server of OpenEnv that is started here."""

import re
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.types import Rollout
from groupwise.tasks.contract import load_task
from groupwise.tasks.rollouts.external import ExternalLimits, ExternalRollouts
from tests.chat import chat_tokenizer
from tests.scripted import Say, ScriptedSampler, ask_for

LIMITS = ExternalLimits(
    max_turns=30, max_tokens=20_000, max_seconds=120.0, max_concurrent=64, start_limit=120.0
)
TOKENIZER = chat_tokenizer("chatml")


async def play(spec: str, say: Say, examples: int, **args: Any) -> list[Rollout]:
    """Two members of each of the first examples."""
    config: Any = {"task": {"args": args, "max_examples": 40}, "rollout": {"start_limit": 120.0}}
    task = load_task(spec)
    rollouts = ExternalRollouts(task.program(config), TOKENIZER, LIMITS)
    sampler = ScriptedSampler(TOKENIZER, say)
    played: list[Rollout] = []
    try:
        for example in task.rl_examples(config)[:examples]:
            ids = TOKENIZER.apply_chat_template(example.prompt, tokenize=True)["input_ids"]
            ask = ask_for(
                TOKENIZER, example.prompt, ids, members=2, max_tokens=60, **example.columns
            )
            played += (await rollouts.sample(sampler, ask)).rollouts
    finally:
        await rollouts.close()
    assert [rollout.reason for rollout in played] == [None] * len(played)
    return played


def value(rollout: Rollout, name: str) -> float | None:
    return {part.name: part.value for part in rollout.parts}[name]


@pytest.mark.timeout(300)
async def test_a_single_player_game_is_won_by_a_good_player():
    def halve(seed: int, seen: str) -> str:
        low, high = 1, 20
        said = re.findall(r"\[(\d+)\]<\|im_end\|>.*?number is (higher|lower)", seen, re.DOTALL)
        for guess, answer in said:
            low, high = (int(guess) + 1, high) if answer == "higher" else (low, int(guess) - 1)
        return f"[{(low + high) // 2}]<|im_end|>"

    first, second = await play("textarena:GuessTheNumber-v0", halve, 1)
    assert (value(first, "game"), value(second, "game")) == (1.0, 1.0)
    assert value(first, "turns") == len([s for s in first.segments if s.source == "policy"])


@pytest.mark.timeout(300)
async def test_seats_of_self_play_are_groups_of_their_own():
    def first_free(seed: int, seen: str) -> str:
        return re.findall(r"'(\[\d\])'", seen)[-9:][0] + "<|im_end|>"

    left, _, right, _ = await play("textarena:TicTacToe-v0", first_free, 2, players=2)
    assert left.prompt_ids != right.prompt_ids
    rewards = {value(left, "game"), value(right, "game")}
    assert rewards in ({1.0, -1.0}, {0.0})


@pytest.mark.timeout(300)
async def test_games_that_are_played_at_once_do_not_shift_each_others_luck():
    """Cards of Blackjack are drawn as they are asked for, from the random numbers of the process."""
    first, second = await play("textarena:Blackjack-v0", lambda seed, seen: "[Hit]<|im_end|>", 1)
    assert first.messages == second.messages
    assert len(first.segments) > 1


@pytest.mark.timeout(300)
async def test_steps_of_openenv_add_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(Path(__file__).parent)

    def count(seed: int, seen: str) -> str:
        return f"{seen.count('<|im_start|>assistant')}<|im_end|>"

    first, _, second, _ = await play("openenv:counter_app:app", count, 2, sessions=8)
    assert [value(rollout, "environment") for rollout in (first, second)] == [2.0, 3.0]
    assert first.messages is not None
    assert [message["content"] for message in first.messages] == ["1", "Go on.", "2"]
