"""The contract of rollouts in an environment.

1. What the policy wrote is trained as it was sampled; what the environment said is seen and does not teach.
2. In a chat, tokens and template agree turn by turn; where the template wrote earlier turns anew, a new row begins.
3. Each limit ends a rollout with its mark, and it is scored; a failure or a time-out is never a reward.
4. Rewards by turn, for the whole, and of reward functions add up.
5. Seeds follow from what is drawn: no group depends on others, or on the order in which things happen.
"""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from groupwise.core.reward_call.request import GroupScore, MemberScore, unscored_group
from groupwise.core.reward_call.text import completion_text
from groupwise.core.types import Group, MaskedTokens, RewardPart, Rollout, RolloutCredit
from groupwise.tasks.environment import Step
from groupwise.tasks.rewards.rubric import NO_REWARD
from groupwise.tasks.rollouts.dialogue import first_ids
from groupwise.tasks.rollouts.environment import EnvironmentRollouts, Limits
from groupwise.tasks.rollouts.hosts import LocalHost
from groupwise.tasks.rollouts.rows import training_rows
from groupwise.tasks.rollouts.score import score_group, score_request
from groupwise.tasks.rollouts.sessions import Reply, Sessions
from groupwise.testing import FakeSampler, FakeTokenizer
from tests.chat import SPECIAL, chat_tokenizer
from tests.scripted import Pieces, ScriptedSampler, ask_for

LIMITS = Limits(max_turns=4, max_tokens=400, time_limit=20.0, max_seconds=60.0)
USER = [{"role": "user", "content": "Guess."}]


class Guess:
    """Says higher or lower."""

    def reset(self, secret: int) -> None:
        self.secret = secret
        self.turns = 0

    def step(self, completion: str) -> Step:
        self.turns += 1
        number = int((completion.split() or "0")[-1])
        if number == self.secret:
            return Step("Right.", done=True, reward=1.0)
        return Step("higher;" if number < self.secret else "lower;", reward=0.1)

    def reward(self) -> dict[str, float]:
        return {"quick": -0.01 * self.turns}

    async def metrics(self) -> dict[str, float]:
        return {"turns": self.turns}


AnyGuess: Any = Guess
"""For games whose `reset` asks for something else."""


class Inline:
    """Sessions in this very thread: an `EnvironmentHost` for tests."""

    def __init__(self, factory: Any, seconds: float = 0.5) -> None:
        self.sessions = Sessions(factory)
        self.seconds = seconds
        self.calls: list[Any] = []
        self.limits: list[float] = []

    async def start(self) -> None: ...

    async def ask(self, call: Any, limit: float) -> Reply:
        self.calls.append(call)
        self.limits.append(limit)
        return replace(
            await self.sessions.reply(call, lambda name, **_: None), seconds=self.seconds
        )

    async def close(self) -> None: ...


async def sampled(factory: Any, say: Any, prompt: Any = "guess:", **more: Any) -> Group:
    tokenizer = more.pop("tokenizer", None) or Pieces()
    limits = replace(LIMITS, **more.pop("limits", {}))
    host = more.pop("host", None) or Inline(factory)
    sampler = more.pop("sampler", None) or ScriptedSampler(tokenizer, say)
    tools = more.pop("tools", ())
    kind = EnvironmentRollouts(host, tokenizer, limits, tools)
    ids = first_ids(tokenizer, prompt, tools, {})
    return await kind.sample(sampler, ask_for(tokenizer, prompt, ids, **more))


def turns(*texts: str) -> Any:
    """What the policy says turn by turn: the texts in their order, by how many answers it has seen."""
    return lambda seed, seen: texts[seen.count(";")]


def one(group: Group) -> Rollout:
    (rollout,) = group.rollouts
    return rollout


def reason_of(rollout: Rollout) -> str:
    assert rollout.reason
    return rollout.reason


async def scored(scorer: Any, group: Group) -> Group:
    return await score_group(scorer, group, 0, 1)


def row_of(rollout: Rollout) -> Any:
    (row,) = rows_of(rollout)
    return row


def rows_of(rollout: Rollout) -> Any:
    group = Group(rollout.draw, ask_for(Pieces(), "p", (1,)).example, (rollout,))
    return training_rows([group], [(RolloutCredit(0.5, 0.25),)])


# 1. tokens and masks


async def test_turns_and_answers_follow_each_other_and_only_turns_teach():
    tokenizer = Pieces()
    rollout = one(await sampled(Guess, turns("5<eos>", "9<eos>", "7<eos>"), secret=7))
    told = [(s.source, tokenizer.decode(s.token_ids)) for s in rollout.segments]
    assert told == [
        ("policy", "5<eos>"), ("environment", "higher;"), ("policy", "9<eos>"), ("environment", "lower;"), ("policy", "7<eos>"),
    ]  # fmt: skip
    row = row_of(rollout)
    assert row.completion_ids == rollout.completion_ids
    assert row.mask == (1, 1, *[0] * 7, 1, 1, *[0] * 6, 1, 1)
    assert len(row.sampling_logprobs) == len(row.mask)
    assert rollout.completion == "5higher;9lower;7Right."
    assert rollout.messages is None
    assert (rollout.outcome, rollout.ended_by) == ("pending", "environment")
    assert not rollout.truncated


async def test_tokens_stay_as_sampled_where_writing_them_again_would_change_them():
    """The policy may spell a word in other pieces than the tokenizer would."""
    tokenizer = Pieces("12", "higher")

    class Spells(ScriptedSampler):
        def _completion(self, seed, seen, params):
            drawn = super()._completion(seed, seen, params)
            return replace(drawn, token_ids=spelt, logprobs=(-0.1, -0.2))

    spelt = (*tokenizer("1")["input_ids"], *tokenizer("2")["input_ids"])
    sampler = Spells(tokenizer, lambda seed, seen: "12")
    rollout = one(await sampled(Guess, None, tokenizer=tokenizer, sampler=sampler, secret=13))
    assert tokenizer("12")["input_ids"] != list(spelt)
    assert all(s.token_ids == spelt for s in rollout.segments if s.source == "policy")
    assert sampler.requests[1].prompt_ids[6:8] == spelt


async def test_first_turn_is_asked_for_once_and_later_ones_with_all_that_was_said():
    """Each with a seed of its own, the environment with one for its group."""
    tokenizer = Pieces()
    sampler, host = ScriptedSampler(tokenizer, turns("5", "6", "7")), Inline(Guess)
    group = await sampled(
        None, None, tokenizer=tokenizer, sampler=sampler, host=host, members=3, secret=7
    )
    assert [len(request.seeds) for request in sampler.requests] == [3, 1, 1, 1, 1, 1, 1]
    for rollout in group.rollouts:
        assert sum(s.source == "policy" for s in rollout.segments) == 3
    seen = {tokenizer.decode(request.prompt_ids) for request in sampler.requests}
    assert seen == {"guess:", "guess:5higher;", "guess:5higher;6higher;"}
    seeds = [s.seed for rollout in group.rollouts for s in rollout.segments if s.seed is not None]
    assert len(set(seeds)) == len(seeds) == 9
    (environment,) = {call.seed for call in host.calls}
    assert environment not in seeds


TURN = st.tuples(st.text("ab1 ", max_size=5), st.text("xyz;", max_size=5))


@given(st.lists(TURN, min_size=1, max_size=5), st.integers(5, 60), st.integers(1, 5))
async def test_any_structure_of_turns_gives_rows_that_fit(said, max_tokens, max_turns):
    """Item 5: mask, ids and log-probabilities have one length, whatever is said and wherever a limit falls."""

    class Plays:
        def reset(self):
            self.turn = 0

        def step(self, completion):
            self.turn += 1
            return Step(said[self.turn - 1][1], done=self.turn == len(said))

    written = iter(text + "<eos>" for text, _ in said)
    limits = {"max_tokens": max_tokens, "max_turns": max_turns}
    rollout = one(
        await sampled(Plays, lambda seed, seen: next(written), limits=limits, max_tokens=7)
    )
    row = row_of(rollout)
    assert len(row.completion_ids) == len(row.mask) == len(row.sampling_logprobs)
    assert len(row.completion_ids) <= max_tokens
    assert sum(row.mask) == sum(len(s.token_ids) for s in rollout.segments if s.source == "policy")
    assert sum(s.source == "policy" for s in rollout.segments) <= max_turns
    assert rollout.segments[-1].source == "policy"  # nothing is paid for that nobody answers
    assert all(value == 0 for value, counts in _logprobs(row) if not counts)
    assert (rollout.ended_by == "environment") == (
        sum(s.source == "policy" for s in rollout.segments) == len(said)
    )


def _logprobs(row):
    return zip(row.sampling_logprobs, row.mask, strict=True)


# 2. chats


def chat_say(family: str, *texts: str) -> Any:
    end = SPECIAL[family][-1]
    return lambda seed, seen: texts[seen.count("er;")] + end


async def test_template_that_forgets_reasoning_begins_a_new_row():
    tokenizer = chat_tokenizer("qwen3")
    thoughts = [f"<think>\n{'hm ' * n}\n</think>\n\n{n}" for n in (5, 9, 7)]
    say = chat_say("qwen3", *thoughts)
    sampler = ScriptedSampler(tokenizer, say)
    rollout = one(
        await sampled(
            Guess, say, USER, tokenizer=tokenizer, sampler=sampler, secret=7, max_tokens=90
        )
    )
    rows = rows_of(rollout)
    assert [tokenizer.decode(row.prompt_ids).count("<think>") for row in rows] == [0, 0, 0]
    assert [row.prompt_ids for row in rows] == [each.prompt_ids for each in sampler.requests]
    assert [tokenizer.decode(row.completion_ids) for row in rows] == [
        f"{thought}<|im_end|>" for thought in thoughts
    ]
    assert all(set(row.mask) == {1} for row in rows)
    assert {(row.advantage, row.scale) for row in rows} == {(0.5, 0.25)}
    assert tokenizer.decode(rows[2].prompt_ids).count("9<|im_end|>") == 1


async def test_turn_that_was_cut_off_is_closed_by_the_template_outside_of_the_mask():
    tokenizer = chat_tokenizer("chatml")

    def say(seed, seen):
        return "7<|im_end|>" if "er;" in seen else "555555555"

    rollout = one(await sampled(Guess, say, USER, tokenizer=tokenizer, secret=7, max_tokens=3))
    row = row_of(rollout)
    assert tokenizer.decode(row.completion_ids).startswith(
        "555<|im_end|>\n<|im_start|>user\nlower;"
    )
    assert row.mask[:5] == (1, 1, 1, 0, 0)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=40)
@given(
    st.sampled_from(sorted(SPECIAL)),
    st.lists(st.tuples(st.text("ab \n1", max_size=6), st.text("xyz", min_size=1)), max_size=4),
)
async def test_trained_contexts_are_those_that_were_sampled_for_any_template(family, said):
    """Item 2: for each completion, some row holds exactly the context that it was sampled after."""
    texts = [text for text, _ in said]

    class Talks:
        def reset(self):
            self.turn = 0

        def step(self, completion):
            self.turn += 1
            last = self.turn == len(said)
            return Step(None if last else said[self.turn][1], done=last)

    if not said:
        return
    tokenizer = chat_tokenizer(family)
    written = iter(texts)
    sampler = ScriptedSampler(tokenizer, lambda seed, seen: next(written) + SPECIAL[family][-1])
    rollout = one(await sampled(Talks, None, USER, tokenizer=tokenizer, sampler=sampler))
    assert rollout.outcome == "pending", rollout.reason
    seen_before = []
    for row in rows_of(rollout):
        whole = (*row.prompt_ids, *row.completion_ids)
        starts = [
            len(row.prompt_ids) + place
            for place, counts in enumerate(row.mask)
            if counts and (place == 0 or not row.mask[place - 1])
        ]
        seen_before += [whole[:start] for start in starts]
    assert seen_before == [request.prompt_ids for request in sampler.requests]


# 3. limits and failures


async def test_turns_and_tokens_are_limited_and_the_rollout_is_still_rewarded():
    group = await sampled(Guess, turns("1", "2", "3", "4"), limits={"max_turns": 2}, secret=9)
    rollout = one(group)
    assert (rollout.ended_by, rollout.truncated, rollout.outcome) == ("turns", True, "pending")
    assert rollout.segments[-1].source == "policy"
    assert RewardPart("quick", -0.02) in rollout.parts
    tokenizer = Pieces()
    sampler = ScriptedSampler(tokenizer, turns("55555", "66666"))
    rollout = one(
        await sampled(
            Guess, None, sampler=sampler, limits={"max_tokens": 14}, max_tokens=5, secret=70000
        )
    )
    assert [request.params.max_tokens for request in sampler.requests] == [5, 2]
    assert (rollout.ended_by, len(rollout.completion_ids)) == ("tokens", 14)
    assert [s.params.max_tokens for s in rollout.segments if s.params] == [5, 2]


async def test_each_turn_has_its_least_length_as_far_as_there_is_room():
    tokenizer = Pieces()
    sampler = ScriptedSampler(tokenizer, turns("55", "66666", "77777"))
    kind = EnvironmentRollouts(Inline(Guess), tokenizer, replace(LIMITS, max_tokens=16))
    ids = tokenizer("guess:")["input_ids"]
    request = ask_for(tokenizer, "guess:", ids, max_tokens=4, secret=70000)
    request = replace(request, params=replace(request.params, min_tokens=3))
    rollout = one(await kind.sample(sampler, request))
    assert [request.params.min_tokens for request in sampler.requests] == [3, 3]
    assert [request.params.max_tokens for request in sampler.requests] == [4, 4]
    written = [len(each.token_ids) for each in rollout.segments if each.source == "policy"]
    assert written == [2, 4]
    second = len(rollout.completion_ids) - 4
    end = (tokenizer.eos_token_id,)
    assert row_of(rollout).withheld == (
        MaskedTokens(0, 2, end),
        MaskedTokens(second, second + 3, end),
    )


async def test_prompt_of_the_environment_is_the_one_of_its_group():
    """A member with another one fails."""

    class Asks(AnyGuess):
        def reset(self, secret, seed, prompt, member):
            super().reset(secret)
            again = random.Random(seed).randrange(1000)
            return f"{prompt} {again}" if member % 2 == 0 else "odd"

    group = await sampled(Asks, lambda seed, seen: "7", members=3, secret=7)
    assert str(group.example.prompt).startswith("guess: ")
    assert score_request(group, 0, 1).prompts == [group.example.prompt] * 2
    assert [each.outcome for each in group.rollouts] == ["pending", "failed", "pending"]
    assert "another first prompt" in reason_of(group.rollouts[1])


async def test_environments_own_time_is_limited_over_all_turns():
    limits = {"max_seconds": 1.2}
    host = Inline(Guess)
    rollout = one(await sampled(None, turns("1", "2", "3"), host=host, limits=limits, secret=9))
    assert (rollout.outcome, rollout.ended_by) == ("timed_out", None)
    assert "rollout.max_seconds is 1.2" in reason_of(rollout)
    assert host.limits == [1.2, pytest.approx(0.7), pytest.approx(0.2), 20.0]
    assert host.calls[-1].ending  # it is freed all the same


@pytest.mark.parametrize("place", ["__init__", "step", "metrics"])
async def test_environment_that_raises_fails_its_rollout_with_the_line(place):
    def raises(self, *arguments):
        raise RuntimeError("boom")

    broken = type("Broken", (Guess,), {place: raises})
    rollout = one(await sampled(broken, turns("7"), secret=7))
    assert rollout.outcome == "failed"
    assert "RuntimeError: boom" in reason_of(rollout)
    assert 'raise RuntimeError("boom")' in reason_of(rollout)
    assert rollout.reward is None


async def test_environment_is_closed_however_its_rollout_ends():
    closed = []

    class Closes(AnyGuess):
        def reset(self, secret, member):
            super().reset(secret)
            self.member = member

        def step(self, completion):
            if self.member == 1:
                raise ValueError
            return super().step(completion)

        async def close(self):
            closed.append(self.member)

    await sampled(Closes, turns(*"5678"), members=3, limits={"max_turns": 2}, secret=7)
    assert sorted(closed) == [0, 1, 2]


# 4. rewards


class Answers:
    """A scorer that gives what it was made with, or says that no reward function applies."""

    def __init__(self, *rewards: float) -> None:
        self.rewards = rewards
        self.asked: list[Any] = []

    async def score(self, request):
        self.asked.append(request)
        if self.rewards:
            return GroupScore(
                tuple(
                    MemberScore("scored", None, r, (RewardPart("quick", r),), {"n": 1})
                    for r in self.rewards
                )
            )
        return unscored_group(len(request.completions), "failed", NO_REWARD)


async def test_rewards_by_turn_and_for_the_whole_add_up():
    group = await sampled(Guess, turns("5", "7"), secret=7)
    rollout = one(await scored(Answers(), group))
    assert rollout.parts == (
        RewardPart("environment", 0.1, 1.0, 0),
        RewardPart("environment", 1.0, 1.0, 1),
        RewardPart("quick", -0.02),
        RewardPart("turns", 2.0, 0.0),
    )
    assert rollout.reward == pytest.approx(1.08)
    assert rollout.outcome == "scored"
    assert rollout.part_values == pytest.approx({"environment": 1.1, "quick": -0.02, "turns": 2.0})


async def test_reward_functions_see_the_transcript_and_add_to_the_environments_rewards():
    tokenizer = chat_tokenizer("chatml")
    say = chat_say("chatml", "5", "7")
    group = await sampled(Guess, say, USER, tokenizer=tokenizer, secret=7)
    scorer = Answers(0.5)
    rollout = one(await scored(scorer, group))
    assert rollout.reward == pytest.approx(0.5 + 1.08)
    assert [part.name for part in rollout.parts] == [
        "quick", "environment", "environment", "environment/quick", "turns",
    ]  # fmt: skip
    (completion,) = scorer.asked[0].completions
    assert [message["role"] for message in completion] == ["assistant", "user"] * 2
    assert completion_text(completion) == "5\n7"
    assert scorer.asked[0].columns == {"secret": [7], "origin": ["fresh"]}


class Mute:
    def step(self, completion):
        return Step(done=True)


async def test_without_reward_functions_a_missing_environment_reward_counts_as_zero():
    """It would be wrong to leave the losers out: the mean of a group would be that of its winners."""
    rollout = one(await scored(Answers(), await sampled(Mute, turns("5"))))
    assert (rollout.outcome, rollout.reward, rollout.reason) == ("scored", 0.0, None)
    assert rollout.parts == (RewardPart("environment", 0.0),)
    left = one(await scored(Answers(0.25), await sampled(Mute, turns("5"))))
    assert (left.outcome, left.reward) == ("scored", 0.25), "of reward functions"


# 5. determinism


class Chatters:
    """Says more or less, by the seed of its group."""

    def reset(self, seed, member):
        self.rng = random.Random(f"{seed}-{member}")

    async def step(self, completion):
        await asyncio.sleep(0)
        said = self.rng.choice(["go on ", "again ", "so "])
        return Step(said, done=self.rng.random() < 0.2, reward=len(completion) / 10)


async def test_a_group_does_not_depend_on_others_or_on_their_order():
    order = (3, 1, 0, 2)
    tokenizer = FakeTokenizer()
    limits = Limits(max_turns=6, max_tokens=80, time_limit=20.0, max_seconds=60.0)

    async def drawn(draws):
        kind = EnvironmentRollouts(LocalHost(Sessions(Chatters)), tokenizer, limits)
        requests = [
            ask_for(tokenizer, "ask", (1, 2), members=3, draw=d, max_tokens=8) for d in draws
        ]
        groups = await asyncio.gather(
            *(kind.sample(FakeSampler(), request) for request in requests)
        )
        await kind.close()
        return {group.draw: group for group in groups}

    together = await drawn(order)
    for draw in order:
        assert (await drawn((draw,)))[draw] == together[draw]
    texts = {rollout.completion for group in together.values() for rollout in group.rollouts}
    assert len(texts) == 12
