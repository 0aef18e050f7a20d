"""What every sampler keeps:

1. One completion for each seed, in the order of the seeds, each naming its seed.
2. As many log-probabilities as tokens, at most `max_tokens`; `stop` exactly where a stop token or text ended it.
3. The same seeds give the same completion, whatever else is asked at the same time, before or after: to the bit, or, by Unsloth, but for
   the last digits of its log-probabilities.
4. Distinct seeds draw differently; greedy completions do not depend on the seed.
5. Every completion names version and fingerprint of the weights that were loaded; `fingerprint()` is of the tensors in memory.
6. Other weights than the policy says are refused.
7. A cancelled call disturbs nobody else.
8. Requests and results survive a round trip through JSON.
9. Published changes reach the sampler: other weights, other log-probabilities.
10. A stop text may be spread over tokens; the token that completes it is the last.
11. In the first `min_tokens` tokens no stop token comes, greedily neither, and no stop text ends a completion before the last of them.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from dataclasses import replace

import pytest

from groupwise.core.errors import PolicyMismatchError
from groupwise.core.types import Completion, GroupRequest, SamplingParams, from_json, to_json

PROMPT = "sort these"
pytestmark = pytest.mark.asyncio(loop_scope="module")


def request(pair, draw=0, members=4, max_tokens=12, prompt=PROMPT, **params) -> GroupRequest:
    ids = tuple(pair.tokenizer(prompt)["input_ids"])
    seeds = tuple(1000 * draw + member for member in range(members))
    return GroupRequest(
        draw, ids, seeds, SamplingParams(max_tokens, stop_token_ids=(pair.end_id,), **params)
    )


def same(pair, found, wanted) -> bool:
    """To the bit where the sampler promises that, else but for the last digits of log-probabilities."""
    if pair.exact:
        return found == wanted
    near = [
        replace(each, logprobs=()) == replace(other, logprobs=())
        and each.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        for each, other in zip(found, wanted, strict=True)
    ]
    return all(near)


async def ready(pair) -> None:
    await pair.sampler.load(await pair.learner.publish(0))


async def test_one_completion_for_each_seed_with_its_length_and_end(pair):
    await ready(pair)
    asked = request(pair, members=30, max_tokens=30)
    found = await pair.sampler.generate(asked)
    assert [each.seed for each in found] == list(asked.seeds)
    assert from_json(GroupRequest, to_json(asked)) == asked
    for completion in found:
        assert from_json(Completion, to_json(completion)) == completion
        assert 1 <= len(completion.token_ids) == len(completion.logprobs) <= 30
        assert all(logprob <= 0 for logprob in completion.logprobs)
        ended = completion.token_ids[-1] == pair.end_id
        assert completion.finish_reason == ("stop" if ended else "length")
        assert pair.end_id not in completion.token_ids[:-1]
    assert {"stop", "length"} == {completion.finish_reason for completion in found}


async def test_results_do_not_depend_on_what_else_is_asked(pair):
    await ready(pair)
    asked = request(pair, draw=3, members=5)
    alone = await pair.sampler.generate(asked)
    others = [request(pair, draw, members=3, prompt="x" * (draw + 1)) for draw in range(10, 16)]
    crowd = await asyncio.gather(*map(pair.sampler.generate, [*others[:3], asked, *others[3:]]))
    assert same(pair, crowd[3], alone)
    if not pair.seeded:
        return
    again = await pair.sampler.generate(replace(asked, seeds=asked.seeds[::-1]))
    assert same(pair, again, alone[::-1])


async def test_seeds_differ_and_greedy_does_not_use_them(pair):
    await ready(pair)
    drawn = await pair.sampler.generate(request(pair, members=8))
    assert len({completion.token_ids for completion in drawn}) > 1
    greedy = await pair.sampler.generate(request(pair, members=8, temperature=0.0))
    assert len({(completion.token_ids, completion.logprobs) for completion in greedy}) == 1


async def test_other_weights_than_named_are_refused(pair):
    policy = await pair.learner.publish(0)
    with pytest.raises(PolicyMismatchError, match="fingerprint"):
        await pair.sampler.load(replace(policy, fingerprint="0" * 16))


async def test_weights_swapped_behind_its_back_are_refused(pair):
    policy = await pair.learner.publish(0)
    pair.disturb()
    other = await pair.learner.publish(1)
    shutil.copytree(other.path, policy.path, dirs_exist_ok=True)
    with pytest.raises(PolicyMismatchError):
        await pair.sampler.load(policy)


async def test_cancelling_a_request_does_not_disturb_others(pair):
    await ready(pair)
    asked = request(pair, draw=1, members=6)
    alone = await pair.sampler.generate(asked)
    given_up = asyncio.ensure_future(pair.sampler.generate(request(pair, draw=2, members=12)))
    kept = asyncio.ensure_future(pair.sampler.generate(asked))
    await asyncio.sleep(0)
    given_up.cancel()
    assert same(pair, await kept, alone)
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert await pair.sampler.generate(asked) == alone


async def test_a_published_change_reaches_the_sampler(pair):
    """Not before it is loaded; completions name the weights that drew them."""
    asked = request(pair, temperature=0.0, members=1)
    found = []
    for version in (0, 1):
        policy = await pair.learner.publish(version)
        await pair.sampler.load(policy)
        assert pair.sampler.fingerprint() == policy.fingerprint
        found += await pair.sampler.generate(asked)
        pair.disturb()
        assert await pair.sampler.generate(asked) == (found[-1],), "not published yet"
        assert (found[-1].policy_version, found[-1].fingerprint) == (version, policy.fingerprint)
    assert found[0].logprobs != found[1].logprobs


async def test_a_stop_text_may_be_spread_over_tokens(pair):
    await ready(pair)
    free = request(pair, members=1, max_tokens=20)
    free = replace(free, params=replace(free.params, stop_token_ids=()))
    whole = (await pair.sampler.generate(free))[0]
    stop = pair.tokenizer.decode(list(whole.token_ids[3:6]))
    stopped = (
        await pair.sampler.generate(replace(free, params=replace(free.params, stop=(stop,))))
    )[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
    found = pair.tokenizer.decode(list(stopped.token_ids))
    assert found.endswith(stop)
    assert stop not in found[:-1]


async def test_min_tokens_is_kept_unless_max_tokens_is_smaller(pair):
    """But it may be cut off there."""
    await ready(pair)
    stops = (pair.end_id, *range(5, 10))

    async def found(members, **params):
        asked = request(pair, members=members)
        params = replace(asked.params, stop_token_ids=stops, **params)
        return await pair.sampler.generate(replace(asked, params=params))

    for late in (await found(1, min_tokens=4, temperature=0.0), await found(24, min_tokens=4)):
        assert all(len(each.token_ids) >= 4 for each in late)
        assert not any({*stops} & {*each.token_ids[:4]} for each in late)
        assert all(math.isfinite(value) for each in late for value in each.logprobs)
    assert {each.finish_reason for each in late} == {"stop", "length"}
    assert min(len(each.token_ids) for each in await found(24)) < 4
    cut = await found(12, min_tokens=9, max_tokens=4)
    assert {(len(each.token_ids), each.finish_reason) for each in cut} == {(4, "length")}


async def test_a_stop_text_counts_from_the_least_length_on(pair):
    """One that was complete before has no effect later, though it is still in sight; another one has."""
    await ready(pair)
    asked = request(pair, members=12, max_tokens=20)
    asked = replace(asked, params=replace(asked.params, stop_token_ids=()))
    wholes = [each.token_ids for each in await pair.sampler.generate(asked)]
    for least in (3, 7):
        await _counts_from(pair, asked, wholes, least)


async def _counts_from(pair, asked, wholes, least) -> None:
    def places(token) -> int:
        """How many different ends it would give."""
        return len({whole.index(token, least) for whole in wholes if token in whole[least:]})

    stop = pair.tokenizer.decode([max(sorted(set(wholes[0])), key=places)])
    params = replace(asked.params, min_tokens=least, stop=(stop,))
    found = await pair.sampler.generate(replace(asked, params=params))

    def seen(ids) -> int:
        return pair.tokenizer.decode(list(ids)).count(stop)

    for whole, each in zip(wholes, found, strict=True):
        ends = [n for n in range(least, 21) if seen(whole[:n]) > seen(whole[: n - 1])]
        assert each.token_ids == whole[: min(ends, default=20)]
        assert each.finish_reason == ("stop" if ends else "length")
    assert len({len(each.token_ids) for each in found}) > 2
