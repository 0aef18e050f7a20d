"""Attempts that an environment plays in a process of its own.

1. What the policy wrote is trained as it was sampled, and only what the environment says that it teaches.
2. A failure, a time-out or a lie costs its attempt; the others of its process are played again if that had to be killed.
3. Each limit cuts an attempt off with its mark.
"""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from groupwise.core.errors import EnvironmentWorkerError
from groupwise.core.types import Completion, GroupRequest, Rollout
from groupwise.tasks.external.process import MAX_LOG, list_examples
from groupwise.tasks.external.protocol import Program
from groupwise.tasks.rollouts.external import ExternalLimits, ExternalRollouts
from tests.chat import chat_tokenizer
from tests.scripted import ScriptedSampler, ask_for

SCRIPT = Path(__file__).parents[3] / "plain_environment.py"
PROGRAM = Program("plain:letters", (sys.executable, str(SCRIPT)), "letters")
LIMITS = ExternalLimits(
    max_turns=4, max_tokens=400, max_seconds=60.0, max_concurrent=200, start_limit=60.0
)
TOKENIZER = chat_tokenizer("chatml")
USER = [{"role": "user", "content": "say 3"}]


class SlowSampler(ScriptedSampler):
    """Takes its time."""

    slowness = 0.0

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        await asyncio.sleep(self.slowness)
        return await super().generate(request)


@asynccontextmanager
async def playing(
    limits: ExternalLimits = LIMITS, workers: int = 1, slowness: float = 0.0, **args: Any
) -> AsyncGenerator[Any]:
    """A function that plays a group. `slowness`: seconds that the policy takes for a completion."""
    rollouts = ExternalRollouts(replace(PROGRAM, args=args), TOKENIZER, limits, workers)
    sampler = SlowSampler(TOKENIZER, lambda seed, seen: "banana<|im_end|>")
    sampler.slowness = slowness

    async def play(does: str, members: int = 1, **more: Any) -> tuple[Rollout, ...]:
        ids = TOKENIZER.apply_chat_template(USER, tokenize=True, add_generation_prompt=True)[
            "input_ids"
        ]
        ask = ask_for(TOKENIZER, USER, ids, members=members, does=does, **more)
        return (await rollouts.sample(sampler, ask)).rollouts

    try:
        yield play
    finally:
        await rollouts.close()


async def test_two_turns_become_one_row_with_the_rewards_of_the_environment():
    async with playing() as play:
        first, second = await play("play", members=2)
    assert first.outcome == "pending"
    assert [segment.source for segment in first.segments] == ["policy", "environment", "policy"]
    assert first.segments[0].sampling_logprobs is not None
    assert TOKENIZER.decode(first.segments[1].token_ids).count("more") == 1
    assert {part.name: (part.value, part.weight, part.turn) for part in first.parts} == {
        "letters": (0.5, 2.0, None),
        "first": (0.5, 1.0, 0),
        "length": (12.0, 0.0, None),
    }
    assert first.notes == {"seen": "bananabanana", "stopped": "two turns"}
    assert first.messages is not None
    assert [message["content"] for message in first.messages] == ["banana", "more", "banana"]
    assert {s.seed for s in first.segments}.isdisjoint({s.seed for s in second.segments} - {None})


@pytest.mark.parametrize("does", ["last_teaches", "sessions"])
async def test_only_what_the_environment_names_teaches(does: str):
    async with playing() as play:
        (rollout,) = await play(does)
    assert rollout.outcome == "pending"
    (segment,) = rollout.segments
    assert segment.source == "policy"
    word = "two" if does == "last_teaches" else "right"
    assert word in TOKENIZER.decode(rollout.prompt_ids)


@pytest.mark.parametrize(
    ("does", "outcome", "reason"),
    [
        ("raises", "failed", "the board fell over"),
        ("dies", "failed", "exit code 7"),
        ("lies_about_ids", "failed", "not an id of a completion"),
        ("lies_about_numbers", "failed", "expected a finite number"),
        ("lies_about_infinity", "failed", "`r` is nan; expected a finite number"),
        ("never_asks", "failed", "without asking the policy"),
        ("babbles", "failed", "cannot be read"),
        ("sleeps", "timed_out", "rollout.max_seconds"),
    ],
)
async def test_a_failure_costs_only_its_own_attempt(does: str, outcome: str, reason: str):
    async with playing(replace(LIMITS, max_seconds=1.0)) as play:
        (bad,), good = await asyncio.gather(play(does), play("play", members=4))
        (after,) = await play("play")
    assert (bad.outcome, reason in str(bad.reason)) == (outcome, True), bad.reason
    assert [rollout.outcome for rollout in (*good, after)] == ["pending"] * 5


async def test_printed_text_is_not_an_answer_and_its_log_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
):
    deadline = time.monotonic() + 30
    with TemporaryDirectory() as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        async with playing() as play:
            (rollout,) = await play("floods")
            while len(text := printed(folder)) > MAX_LOG:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
    assert text.endswith('"result": {}}\n')
    assert rollout.outcome == "pending", rollout.reason


def printed(folder: str) -> str:
    (log,) = Path(folder).glob("groupwise-environment-*/log")
    return log.read_text()


async def test_a_long_path_for_temporary_files_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A Unix socket takes about a hundred bytes."""
    (tmp_path / ("long" * 25)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 25)))
    async with playing() as play:
        (rollout,) = await play("play")
    assert rollout.outcome == "pending", rollout.reason


@pytest.mark.parametrize(
    ("code", "start_limit", "said"),
    [
        ("import nonesuch", 60.0, r"(?s)exit code 1.*No module named 'nonesuch'"),
        (
            "import time; time.sleep(100)",
            0.3,
            r"not ready within 0\.3 s; raise rollout\.start_limit",
        ),
    ],
)
async def test_a_process_that_does_not_start_ends_the_run_with_the_reason(
    code: str, start_limit: float, said: str
):
    program = replace(PROGRAM, command=(sys.executable, "-c", code))
    rollouts = ExternalRollouts(program, TOKENIZER, replace(LIMITS, start_limit=start_limit))
    with pytest.raises(EnvironmentWorkerError, match=said):
        await rollouts.start()
    await rollouts.close()


async def test_a_group_is_scored_together_if_the_environment_says_so():
    async with playing(workers=2, scores="well") as play:
        group = await play("play", members=3)
        (bad,) = await play("raises")
    parts = [{part.name: part.value for part in rollout.parts} for rollout in group]
    assert [(each["place"], each["letters"]) for each in parts] == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert "the board fell over" in str(bad.reason)
    async with playing(scores="badly") as play:
        unscored = await play("play", members=2)
    assert {rollout.outcome for rollout in unscored} == {"failed"}
    assert "the judge is asleep" in str(unscored[0].reason)


async def test_a_process_that_hangs_is_killed_and_its_others_are_played_again(monkeypatch):
    monkeypatch.setattr("groupwise.tasks.rollouts.external.CANCEL_SECONDS", 0.5)
    async with playing(replace(LIMITS, max_seconds=1.0)) as play:
        (bad,) = await play("hangs")
        (after,) = await play("play")
    assert bad.outcome == "timed_out"
    assert after.outcome == "pending"


async def test_waiting_for_the_policy_is_not_the_environments_time():
    async with playing(replace(LIMITS, max_seconds=1.5), slowness=1.0) as play:
        (rollout,) = await play("play")
    assert rollout.outcome == "pending", rollout.reason


async def test_limits_cut_an_attempt_off():
    async with playing() as play:
        (refused,) = await play("endless")
        (scored,) = await play("endless_but_scored")
        (flooded,) = await play("quotes_an_encyclopedia")
    assert (refused.outcome, "rollout.max_turns" in str(refused.reason)) == ("failed", True)
    assert "rollout.max_rollout_length" in str(flooded.reason)
    assert (scored.outcome, scored.ended_by, scored.written) == ("pending", "turns", 4 * 7)
    prompt = len(
        TOKENIZER.apply_chat_template(USER, tokenize=True, add_generation_prompt=True)["input_ids"]
    )
    async with playing(replace(LIMITS, room=prompt + 10)) as play:
        (short,) = await play("play")
    assert (short.outcome, "rollout.max_rollout_length" in str(short.reason)) == ("failed", True)


async def test_a_hundred_attempts_at_once_are_served():
    async with playing(workers=2) as play:
        rollouts = await play("play", members=100)
    assert {rollout.outcome for rollout in rollouts} == {"pending"}
    assert len({rollout.notes["seen"] for rollout in rollouts}) == 1


async def test_an_environment_that_cannot_be_loaded_ends_the_run_with_its_words():
    with pytest.raises(EnvironmentWorkerError, match="no such game"):
        await list_examples(replace(PROGRAM, name="cannot"), None, 60.0)


async def test_examples_are_listed():
    listed = await list_examples(PROGRAM, 7, 60.0)
    assert [example["columns"]["example"] for example in listed.train] == list(range(7))
    assert (listed.held_out, listed.opened["library"]) == ([], "plain 1.0")
