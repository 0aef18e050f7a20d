"""Two stages: what is inserted, what teaches, and that nothing that was sampled is ever written anew."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.config import load_config, resolved
from groupwise.errors import ConfigError
from groupwise.rollouts.config import RolloutConfig
from groupwise.rollouts.rows import training_rows
from groupwise.rollouts.two_stage import TwoStage
from groupwise.testing.fakes import FakeLearner, FakeSampler, FakeTokenizer
from groupwise.types import Example, Group, Weight, Withheld
from tests.scripted import Pieces, ScriptedSampler, ask_for

CONFIG = RolloutConfig(type="two_stage", max_reasoning_length=12, max_answer_length=5)
PIECES = Pieces("</", "think", ">", "<answer>", "ink>x", "</th")


async def rollout_of(reasoning: str, answer: str, tokenizer=PIECES, config=CONFIG, **more):
    sampler = ScriptedSampler(
        tokenizer, lambda seed, seen: answer if config.answer_start in seen else reasoning
    )
    ask = ask_for(tokenizer, "ask:", tokenizer("ask:")["input_ids"], **more)
    group = await TwoStage(config, tokenizer).sample(sampler, ask)
    return group.rollouts[0], sampler


def pieces(rollout, source=None, tokenizer=PIECES):
    return [
        [tokenizer.pieces[token] for token in segment.token_ids]
        for segment in rollout.segments
        if source in (None, segment.source)
    ]


async def test_tag_that_the_policy_wrote_over_several_tokens_ends_the_first_stage():
    rollout, sampler = await rollout_of("a b</think> more", "42<eos>")
    assert pieces(rollout) == [
        ["a", " ", "b", "</th", "i", "n", "k", ">"],
        ["<answer>"],
        ["4", "2", "<eos>"],
    ]
    assert rollout.completion == "a b</think><answer>42"
    assert [s.source for s in rollout.segments] == ["policy", "inserted", "policy"]
    assert sampler.requests[0].params.stop == ("</think>",)


async def test_tag_that_is_missing_is_inserted():
    rollout, _ = await rollout_of("on and on and on", "7<eos>")
    assert rollout.completion == "on and on an</think><answer>7"
    assert not rollout.truncated  # the answer came to its end
    assert pieces(rollout, "inserted") == [["</th", "i", "n", "k", ">", "<answer>"]]


async def test_rest_of_a_token_in_which_the_tag_ends_stays_as_it_was_sampled():
    rollout, _ = await rollout_of("so</think>x and", "7<eos>")
    assert pieces(rollout)[0] == ["s", "o", "</th", "ink>x"]
    assert rollout.completion == "so</think>x<answer>7"


async def test_stop_token_that_ended_the_reasoning_stays_and_the_tags_follow():
    rollout, _ = await rollout_of("so<eos>", "7<eos>")
    assert pieces(rollout)[0] == ["s", "o", "<eos>"]
    assert pieces(rollout, "inserted")[0][-1] == "<answer>"
    assert rollout.completion == "so</think><answer>7"


async def test_stop_texts_of_the_config_end_either_stage():
    rollout, sampler = await rollout_of("so!!! on and on", "7!! 8", stop=("!!",))
    assert [request.params.stop for request in sampler.requests] == [("</think>", "!!"), ("!!",)]
    assert pieces(rollout)[0] == ["s", "o", "!", "!"]
    assert rollout.completion == "so!!</think><answer>7!!"
    assert not rollout.truncated


async def test_second_stage_sees_the_whole_prompt_and_has_its_own_limit_and_seed():
    rollout, sampler = await rollout_of("so</think>", "123456789", members=3, stop=("!",))
    first, *later = sampler.requests
    assert len(first.seeds) == 3
    assert len(later) == 3
    before = rollout.prompt_ids + rollout.segments[0].token_ids + rollout.segments[1].token_ids
    assert later[0].prompt_ids == before
    assert later[0].params.max_tokens == 5
    assert later[0].params.stop == ("!",)
    assert rollout.truncated
    assert pieces(rollout)[-1] == list("12345")
    seeds = [seed for request in sampler.requests for seed in request.seeds]
    assert len(set(seeds)) == 6


async def test_tags_and_limits_are_those_of_the_config():
    config = RolloutConfig(
        type="two_stage", reasoning_end="##", answer_start="", max_answer_length=9
    )
    tokenizer = Pieces()
    sampler = ScriptedSampler(tokenizer, lambda seed, seen: "7<eos>" if "##" in seen else "so## x")
    ask = ask_for(tokenizer, "ask:", tokenizer("ask:")["input_ids"])
    (rollout,) = (await TwoStage(config, tokenizer).sample(sampler, ask)).rollouts
    assert rollout.completion == "so##7"
    assert [s.source for s in rollout.segments] == ["policy", "policy"]  # nothing was inserted


@given(
    st.text("ab</think>x ", max_size=30),
    st.text("ab1<", max_size=9),
    st.lists(st.text("</think>abx", min_size=2, max_size=6), max_size=4),
)
async def test_mask_ids_and_log_probabilities_fit_whatever_is_said(reasoning, answer, found):
    tokenizer = Pieces(*found, "</", "think")
    rollout, sampler = await rollout_of(reasoning, answer + "<eos>", tokenizer)
    group = Group(rollout.draw, Example(0, "ask:"), (rollout,))
    (row,) = training_rows([group], [(Weight(1, 1),)])
    assert len(row.mask) == len(row.completion_ids) == len(row.sampling_logprobs)
    assert row.completion_ids == rollout.completion_ids
    taught = [i for i, counts in zip(row.completion_ids, row.mask, strict=True) if counts]
    policy = [i for s in rollout.segments if s.source == "policy" for i in s.token_ids]
    assert taught == policy
    written = tokenizer.decode(rollout.segments[0].token_ids)
    assert (reasoning + "<eos>").startswith(written)
    assert sampler.requests[1].prompt_ids[: 4 + len(rollout.segments[0].token_ids)] == (
        *rollout.prompt_ids,
        *rollout.segments[0].token_ids,
    )


async def test_it_needs_nothing_of_a_sampler_but_generate():
    tokenizer = FakeTokenizer()
    config = RolloutConfig(
        type="two_stage",
        reasoning_end="ab",
        answer_start="c",
        max_reasoning_length=6,
        max_answer_length=3,
    )
    ask = ask_for(tokenizer, "ask", tokenizer("ask")["input_ids"], members=8)
    kind = TwoStage(config, tokenizer)
    one, other = [await kind.sample(FakeSampler(), ask) for _ in range(2)]
    assert one == other
    assert all(len(each.segments) == 3 for each in one.rollouts)
    assert len({each.completion for each in one.rollouts}) > 1


@pytest.mark.parametrize("key", ["max_turns", "workers", "max_rollout_length"])
def test_keys_of_another_kind_are_refused(key):
    with pytest.raises(ValueError, match=f"{key} has no effect where type is two_stage"):
        RolloutConfig.model_validate({"type": "two_stage", key: 3})


@pytest.mark.parametrize("key", ["sampler", "eval"])
def test_length_of_a_single_completion_is_refused_beside_two_stages(key):
    given = {"model": {"name": "tiny"}, "rollout": {"type": "two_stage"}}
    load_config(resolved(load_config(given).config))
    with pytest.raises(ConfigError, match=rf"{key}\.max_completion_length has no effect"):
        load_config({**given, key: {"max_completion_length": 99}})


def test_longest_rollout_has_room_for_the_tags():
    assert CONFIG.longest(999) == 12 + 5 + len("</think><answer>")
    assert CONFIG.longest_written(999) == 17


async def test_reasoning_and_answer_both_have_their_least_length(tmp_path):
    """Stop texts before it have no effect either, the end tag among them; the learner knows where the stop tokens were withheld."""
    tokenizer = FakeTokenizer()
    config = RolloutConfig(
        type="two_stage",
        reasoning_end="a",
        answer_start="c",
        max_reasoning_length=9,
        max_answer_length=6,
    )
    ask = ask_for(tokenizer, "ask", tokenizer("ask")["input_ids"], members=60)
    ask = replace(ask, params=replace(ask.params, min_tokens=5))
    group = await TwoStage(config, tokenizer).sample(FakeSampler(), ask)
    written = [
        segment
        for rollout in group.rollouts
        for segment in rollout.segments
        if segment.source == "policy"
    ]
    assert len(written) == 120
    assert all(len(each.token_ids) >= 5 for each in written)
    assert any("a" in tokenizer.decode(each.token_ids[:4]) for each in written)
    rows = training_rows([group], [(Weight(1, 1),) * 60])
    for row, rollout in zip(rows, group.rollouts, strict=True):
        answer = len(row.completion_ids) - len(rollout.segments[-1].token_ids)
        end = (tokenizer.eos_token_id,)
        assert row.withheld == (Withheld(0, 5, end), Withheld(answer, answer + 5, end))
    learnt = await FakeLearner("r", tmp_path).logprobs(rows)
    for row, found in zip(rows, learnt, strict=True):
        taught = [
            (a, b) for a, b, m in zip(row.sampling_logprobs, found, row.mask, strict=True) if m
        ]
        assert [a for a, _ in taught] == [b for _, b in taught]
