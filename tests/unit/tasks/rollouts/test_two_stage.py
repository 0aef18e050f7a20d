"""Two stages: what is inserted, what is trained on, and that sampled tokens are never rewritten."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.types import Example, Group, MaskedTokens, RolloutCredit
from groupwise.tasks.rollouts.config import RolloutConfig
from groupwise.tasks.rollouts.rows import training_rows
from groupwise.tasks.rollouts.two_stage import TwoStage
from groupwise.testing import FakeLearner, FakeSampler, FakeTokenizer
from tests.scripted import Pieces, ScriptedSampler, ask_for

CONFIG = RolloutConfig(type="two_stage", max_reasoning_length=12, max_answer_length=5)
PIECES = Pieces("</", "think", ">", "<answer>", "ink>x", "</th")


async def rollout_of(reasoning: str, answer: str, tokenizer=PIECES, config=CONFIG, **more):
    sampler = ScriptedSampler(
        tokenizer, lambda seed, seen: answer if config.answer_start in seen else reasoning
    )
    request = ask_for(tokenizer, "ask:", tokenizer("ask:")["input_ids"], **more)
    group = await TwoStage(config, tokenizer).sample(sampler, request)
    return group.rollouts[0], sampler


def pieces(rollout, source=None, tokenizer=PIECES):
    return [
        [tokenizer.pieces[token] for token in segment.token_ids]
        for segment in rollout.segments
        if source in (None, segment.source)
    ]


@pytest.mark.parametrize(("reasoning", "written", "inserted", "completion"), [
    ("a b</think> more", ["a", " ", "b", "</th", *"ink>"], [], "a b</think><answer>7"),
    ("on and on and on", [*"on and on an"], ["</th", *"ink>"], "on and on an</think><answer>7"),
    ("so</think>x and", ["s", "o", "</th", "ink>x"], [], "so</think>x<answer>7"),
    ("so<eos>", ["s", "o", "<eos>"], ["</th", *"ink>"], "so</think><answer>7"),
])  # fmt: skip
async def test_the_first_stage_ends_with_its_tag(reasoning, written, inserted, completion):
    """Written over several tokens, or within one that stays as it was sampled; where it is missing, it is inserted."""
    rollout, sampler = await rollout_of(reasoning, "7<eos>")
    assert pieces(rollout) == [written, [*inserted, "<answer>"], ["7", "<eos>"]]
    assert [s.source for s in rollout.segments] == ["policy", "inserted", "policy"]
    assert rollout.completion == completion
    assert not rollout.truncated  # the answer came to its end
    assert sampler.requests[0].params.stop == ("</think>",)
    assert CONFIG.longest(999) == 12 + 5 + len("</think><answer>")


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


@given(
    st.text("ab</think>x ", max_size=30),
    st.text("ab1<", max_size=9),
    st.lists(st.text("</think>abx", min_size=2, max_size=6), max_size=4),
)
async def test_mask_ids_and_log_probabilities_fit_whatever_is_said(reasoning, answer, found):
    tokenizer = Pieces(*found, "</", "think")
    rollout, sampler = await rollout_of(reasoning, answer + "<eos>", tokenizer)
    group = Group(rollout.draw, Example(0, "ask:"), (rollout,))
    (row,) = training_rows([group], [(RolloutCredit(1, 1),)])
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
    request = ask_for(tokenizer, "ask", tokenizer("ask")["input_ids"], members=60)
    request = replace(request, params=replace(request.params, min_tokens=5))
    group = await TwoStage(config, tokenizer).sample(FakeSampler(), request)
    written = [
        segment
        for rollout in group.rollouts
        for segment in rollout.segments
        if segment.source == "policy"
    ]
    assert len(written) == 120
    assert all(len(each.token_ids) >= 5 for each in written)
    assert any("a" in tokenizer.decode(each.token_ids[:4]) for each in written)
    rows = training_rows([group], [(RolloutCredit(1, 1),) * 60])
    for row, rollout in zip(rows, group.rollouts, strict=True):
        answer = len(row.completion_ids) - len(rollout.segments[-1].token_ids)
        end = (tokenizer.eos_token_id,)
        assert row.withheld == (MaskedTokens(0, 5, end), MaskedTokens(answer, answer + 5, end))
    learnt = await FakeLearner("r", tmp_path).logprobs(rows)
    for row, found in zip(rows, learnt, strict=True):
        taught = [
            (a, b) for a, b, m in zip(row.sampling_logprobs, found, row.mask, strict=True) if m
        ]
        assert [a for a, _ in taught] == [b for _, b in taught]
