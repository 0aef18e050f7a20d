"""What every learner keeps:

1. The update depends on the sum over rows, not on how they were cut up, ordered, or padded beside each other.
2. A positive advantage makes the row's tokens more probable, a negative one less; masked tokens do not teach.
3. `discard` leaves no trace; a second update has nothing to apply.
4. `save` and `load` restore exactly: what is computed and learnt afterwards is equal to the bit.
5. The fingerprint of a publication changes with the weights and only with them.
6. The reference stays what the run started from.
7. Its log-probabilities agree with the sampler's, at every temperature: the ratio right after publication is 1. So they do where
   tokens were withheld, which have probability 0 for policy and reference.
8. A gradient that is not finite is not applied.
9. Log-probabilities come back in the order of the rows, one for each token; so does which tokens are the likeliest.
10. The pass that learns tells the log-probabilities of the tokens that teach, those of the weights before the update; being asked
   changes nothing.
11. Targets that a row names take the place of the completion's own ids, which remain the context.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from groupwise.algorithms.registry import make
from groupwise.core.types import GroupRequest, MaskedTokens, OptimiserParams, Row, SamplingParams

DR_GRPO = make("dr_grpo", {}).loss_spec()
STEP = OptimiserParams(learning_rate=0.05, max_grad_norm=None)
pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPTS = ("sort these", "x", "what is it then")


def row_of(prompt, found, advantage, temperature) -> Row:
    mask = (1,) * len(found.token_ids)
    return Row(prompt, found.token_ids, mask, found.logprobs, advantage, 1.0, temperature)


def least(rows, count, end_id) -> list[Row]:
    """The rows as of completions in whose first tokens the end could not be drawn."""
    return [
        replace(row, withheld=(MaskedTokens(0, min(count, len(row.completion_ids)), (end_id,)),))
        for row in rows
    ]


async def sampled_rows(
    pair, temperature=1.0, groups=3, members=4, max_tokens=9, min_tokens=0
) -> list[Row]:
    await pair.sampler.load(await pair.learner.publish(0))
    generator = random.Random(0)
    rows = []
    for draw in range(groups):
        prompt = tuple(pair.tokenizer(PROMPTS[draw])["input_ids"])
        params = SamplingParams(max_tokens, temperature, (pair.end_id,), min_tokens=min_tokens)
        seeds = tuple(100 * draw + member for member in range(members))
        found = await pair.sampler.generate(GroupRequest(draw, prompt, seeds, params))
        rows += [row_of(prompt, each, generator.uniform(-1, 1), temperature) for each in found]
    return rows


def tokens(rows) -> float:
    return float(sum(sum(row.mask) for row in rows))


async def learnt(pair, rows, cuts=1, probe=None):
    """Log-probabilities after one update from rows given in `cuts` calls."""
    total = {"policy": tokens(rows)}
    size = math.ceil(len(rows) / cuts)
    for start in range(0, len(rows), size):
        await pair.learner.forward_backward(rows[start : start + size], DR_GRPO, total)
    result = await pair.learner.update(STEP)
    assert result.applied
    return result.grad_norm, flat(await pair.learner.logprobs(probe or rows))


def flat(logprobs):
    return [value for row in logprobs for value in row]


async def test_the_update_does_not_depend_on_the_cuts(pair, tmp_path):
    """Nor on the order of the rows, of which some could not end at first."""
    rows = await sampled_rows(pair, min_tokens=4)
    rows = [*least(rows[:6], 4, pair.end_id), *rows[6:]]
    await pair.learner.save(str(tmp_path))
    norm, whole = await learnt(pair, rows)
    for given, cuts in ((random.Random(1).sample(rows, len(rows)), 3), (rows[::-1], 12)):
        pair.learner.load(str(tmp_path))
        cut_norm, cut = await learnt(pair, given, cuts, probe=rows)
        assert cut_norm == pytest.approx(norm, rel=1e-5)
        assert cut == pytest.approx(whole, abs=2e-5, rel=5e-6)


async def test_the_sign_of_the_advantage_decides(pair, tmp_path):
    (row, *_) = await sampled_rows(pair)
    await pair.learner.save(str(tmp_path))
    for sign in (1.0, -1.0):
        pair.learner.load(str(tmp_path))
        before = sum((await pair.learner.logprobs([row]))[0])
        told = replace(row, advantage=sign)
        await pair.learner.forward_backward([told], DR_GRPO, {"policy": 1.0})
        await pair.learner.update(STEP)
        assert (sum((await pair.learner.logprobs([row]))[0]) - before) * sign > 0


async def test_masked_tokens_do_not_teach(pair, tmp_path):
    rows = await sampled_rows(pair)
    long = next(row for row in rows if len(row.completion_ids) > 4)
    masked = replace(long, mask=(0,) * len(long.mask), sampling_logprobs=(0.0,) * len(long.mask))
    await pair.learner.save(str(tmp_path))
    _, without = await learnt(pair, rows, probe=rows)
    pair.learner.load(str(tmp_path))
    _, beside = await learnt(pair, [*rows, masked], probe=rows)
    assert beside == pytest.approx(without, abs=2e-5, rel=5e-6)


async def test_save_and_load_restore_exactly(pair, tmp_path):
    rows = await sampled_rows(pair)
    await learnt(pair, rows)
    await pair.learner.save(str(tmp_path))
    saved = await pair.learner.logprobs(rows)
    straight = [await learnt(pair, rows, cuts=2) for _ in range(2)]
    pair.disturb()
    pair.learner.load(str(tmp_path))
    assert await pair.learner.logprobs(rows) == saved
    assert [await learnt(pair, rows, cuts=2) for _ in range(2)] == straight


async def test_the_fingerprint_follows_the_weights(pair):
    first = await pair.learner.publish(0)
    again = await pair.learner.publish(1)
    assert (again.version, again.fingerprint) == (1, first.fingerprint)
    pair.disturb()
    assert (await pair.learner.publish(2)).fingerprint != first.fingerprint


async def test_the_reference_stays(pair):
    rows = await sampled_rows(pair)
    reference = await pair.learner.logprobs(rows, "reference")
    assert flat(reference) == pytest.approx(flat(await pair.learner.logprobs(rows)), abs=1e-6)
    await learnt(pair, rows)
    assert await pair.learner.logprobs(rows, "reference") == reference
    assert flat(await pair.learner.logprobs(rows)) != pytest.approx(flat(reference), abs=1e-3)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
async def test_sampler_and_learner_agree(pair, temperature):
    pair.disturb()
    rows = await sampled_rows(pair, temperature)
    sampled = [value for row in rows for value in row.sampling_logprobs]
    assert flat(await pair.learner.logprobs(rows)) == pytest.approx(sampled, abs=2e-5, rel=5e-6)


async def test_learner_and_sampler_agree_under_min_tokens(pair):
    pair.disturb()
    rows = await sampled_rows(pair, min_tokens=4)
    sampled = [value for row in rows for value in row.sampling_logprobs]
    told = least(rows, 4, pair.end_id)
    for role in ("policy", "reference"):
        found = flat(await pair.learner.logprobs(told, role))
        free = flat(await pair.learner.logprobs(rows, role))
        places = [place for row in rows for place in range(len(row.completion_ids))]
        early = [a - b for a, b, at in zip(found, free, places, strict=True) if at < 4]
        late = [a - b for a, b, at in zip(found, free, places, strict=True) if at >= 4]
        assert min(early) > -1e-6, "the other tokens share the end token's probability"
        assert max(early) > 1e-3
        assert late == pytest.approx([0.0] * len(late), abs=2e-5, rel=5e-6)
        if role == "policy":
            assert found == pytest.approx(sampled, abs=2e-5, rel=5e-6)


async def test_discarded_and_non_finite_gradients_are_not_applied(pair):
    rows = await sampled_rows(pair)
    before = await pair.learner.logprobs(rows)
    await pair.learner.forward_backward(rows, DR_GRPO, {"policy": 1.0})
    pair.learner.discard()
    assert (await pair.learner.update(replace(STEP, learning_rate=0.0))).grad_norm == 0.0
    poisoned = replace(rows[0], advantage=math.inf)
    await pair.learner.forward_backward([poisoned], DR_GRPO, {"policy": 1.0})
    assert not (await pair.learner.update(STEP)).applied
    assert await pair.learner.logprobs(rows) == before
    await learnt(pair, rows)


async def test_logprobs_come_back_in_order(pair):
    rows = await sampled_rows(pair)
    found = await pair.learner.logprobs(rows)
    assert [len(values) for values in found] == [len(row.completion_ids) for row in rows]
    one_by_one = [(await pair.learner.logprobs([row]))[0] for row in rows]
    assert flat(found) == pytest.approx(flat(one_by_one), abs=2e-5, rel=5e-6)


async def test_given_targets_take_the_place_of_the_completions_ids(pair):
    """The log-probability of a target is that of a completion which ends with it there."""
    pair.disturb()
    rows = (await sampled_rows(pair, temperature=0.7))[3:6]
    named = [
        replace(row, targets=tuple((token + 1 + index) % 20 for index, token in enumerate(ids)))
        for row in rows
        if (ids := row.completion_ids)
    ]
    ends = [
        replace(
            row,
            completion_ids=(*row.completion_ids[:index], target),
            mask=(1,) * (index + 1),
            sampling_logprobs=(0.0,) * (index + 1),
            targets=None,
        )
        for row in named
        for index, target in enumerate(row.target_ids)
    ]
    assert any(row.targets != row.completion_ids for row in named)
    found = await pair.learner.logprobs(named)
    wanted = [values[-1] for values in await pair.learner.logprobs(ends)]
    assert flat(found) == pytest.approx(wanted, abs=2e-5, rel=5e-6)
    taught = [
        replace(row, advantage=1.0, sampling_logprobs=values)
        for row, values in zip(named, found, strict=True)
    ]
    await pair.learner.forward_backward(taught, DR_GRPO, {"policy": tokens(taught)})
    await pair.learner.update(OptimiserParams(learning_rate=1e-4, max_grad_norm=None))
    assert sum(flat(await pair.learner.logprobs(named))) > sum(flat(found))


async def test_the_pass_that_learns_tells_its_logprobs(pair, tmp_path):
    """Of the rows that were last given, in their order, each token that teaches."""
    pair.disturb()
    rows = await sampled_rows(pair)
    rows[5] = replace(rows[5], mask=(0, *rows[5].mask[1:]))
    await pair.learner.save(str(tmp_path))
    norm, after = await learnt(pair, rows, cuts=2)
    pair.learner.load(str(tmp_path))
    known = await pair.learner.logprobs(rows)
    for part in (slice(0, 6), slice(6, None)):
        await pair.learner.forward_backward(rows[part], DR_GRPO, {"policy": tokens(rows)})
        told = await pair.learner.trained_logprobs()
        assert told is not None
        assert [len(values) for values in told] == [len(row.mask) for row in rows[part]]
        teaches = [counts for row in rows[part] for counts in row.mask]
        both = zip(flat(told), flat(known[part]), teaches, strict=True)
        seen = [pair for *pair, counts in both if counts]
        assert [one for one, _ in seen] == pytest.approx([other for _, other in seen], abs=2e-5)
    assert (await pair.learner.update(STEP)).grad_norm == norm
    assert flat(await pair.learner.logprobs(rows)) == after


async def test_the_likeliest_tokens_are_right(pair):
    """What a greedy sampler writes, and nothing else in its place; in the order of the rows."""
    pair.disturb()
    greedy = await sampled_rows(pair, temperature=0.0, members=1)
    rows = [replace(row, temperature=1.0) for row in greedy]
    wrong = [
        replace(row, completion_ids=(*row.completion_ids[:-1], (row.completion_ids[-1] + 1) % 20))
        for row in rows
    ]
    found = await pair.learner.predictions([*rows, *wrong])
    assert [each.logprobs for each in found] == await pair.learner.logprobs([*rows, *wrong])
    for row, right, soiled in zip(rows, found, found[len(rows) :], strict=False):
        assert right.right == (True,) * len(row.completion_ids)
        assert soiled.right == (*right.right[:-1], False)
