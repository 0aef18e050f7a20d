"""A prompt computed once for all its completions, and rows packed behind each other, are the same as each row by itself."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig

from groupwise.core.types import MaskedTokens
from groupwise.engine.learner import forward
from groupwise.engine.learner.forward import (
    ForwardOutputs,
    choose_paths,
    packed_groups,
    packed_rows,
    packing_is_exact,
    shared_prompt,
    whole_rows,
)
from groupwise.engine.learner.layout import MicroBatch, microbatches, pack_groups, pack_rows
from groupwise.engine.models.decoder import Decoder
from groupwise.engine.models.text_mask import TextMask
from tests.unit.engine.models.native.families import SMALL

SIZES: dict[str, Any] = {**SMALL, "vocab_size": 102, "head_dim": 8}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "window": lambda: MistralConfig(**SIZES, sliding_window=4),
    "caps": lambda: Gemma2Config(**SIZES, sliding_window=4, final_logit_softcapping=5.0),
}


WAYS = (shared_prompt, whole_rows, packed_rows, packed_groups)


@pytest.fixture(params=CONFIGS)
def decoder(request):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return Decoder(model)


def gradients(decoder, compute, batch):
    decoder.model.zero_grad()
    found = compute(decoder, batch)
    weights = torch.randn(found.logprobs_BT.shape, generator=torch.Generator().manual_seed(1))
    (found.logprobs_BT * weights).sum().backward()
    return found, {
        name: parameter.grad.clone()
        for name, parameter in decoder.model.named_parameters()
        if parameter.grad is not None
    }


def plain_logits(decoder, row):
    """By transformers' own forward of the whole row."""
    whole = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
    with torch.no_grad():
        logits = decoder.model(input_ids=whole, use_cache=False).logits[0]
    return logits[len(row.prompt_ids) - 1 : -1] / row.temperature


def batches_for(compute, rows, budget) -> list[Any]:
    """In the layout that this way computes; padded ones hold any number of tokens."""
    packs: dict[Any, Any] = {packed_rows: pack_rows, packed_groups: pack_groups}
    return packs[compute](rows, budget) if compute in packs else microbatches(rows, 10_000)


def assert_plain(decoder, compute, rows):
    """What is computed is what the plain model gives of each row; padding is 0."""
    for batch in batches_for(compute, rows, 60):
        with torch.no_grad():
            found = compute(decoder, batch).logprobs_BT
        for row, mine in zip(batch.rows, found, strict=True):
            tail = plain_logits(decoder, row)
            for each in row.withheld:
                tail[each.start : each.end, list(each.token_ids)] = -torch.inf
            targets = torch.tensor(row.completion_ids)[:, None]
            close(mine[: len(targets)], tail.log_softmax(-1).gather(1, targets)[:, 0])
            assert not mine[len(targets) :].any()


def close(found, wanted):
    found, wanted = found.detach(), wanted.detach()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_shared_prompts_equal_whole_rows_in_values_and_gradients(decoder, make_rows):
    for batch in microbatches(make_rows(), 10_000):
        shared, shared_gradients = gradients(decoder, shared_prompt, batch)
        whole, whole_gradients = gradients(decoder, whole_rows, batch)
        close(shared.logprobs_BT, whole.logprobs_BT)
        close(shared.entropies_BT, whole.entropies_BT)
        assert shared_gradients.keys() == whole_gradients.keys()
        for name, wanted in whole_gradients.items():
            close(shared_gradients[name], wanted)


@pytest.mark.parametrize("compute", WAYS)
def test_values_are_those_of_the_plain_model(decoder, make_rows, compute):
    rows = make_rows()
    assert min(len(row.completion_ids) for row in rows) == 1
    assert_plain(decoder, compute, rows)


@pytest.mark.parametrize("compute", [shared_prompt, whole_rows])
def test_a_row_is_the_same_beside_any_other(decoder, make_rows, compute):
    """So the content of padding plays no part: beside a longer row there is some, alone there is none."""
    (batch,) = microbatches(make_rows(count=6, prompts=1), 10_000)
    together = compute(decoder, batch)
    for place, row in enumerate(batch.rows):
        alone = compute(decoder, MicroBatch(batch.prompt_ids, (row,), (0,)))
        length = len(row.completion_ids)
        close(together.logprobs_BT[place, :length], alone.logprobs_BT[0])
        close(together.entropies_BT[place, :length], alone.entropies_BT[0])


@pytest.mark.parametrize("compute", WAYS)
def test_padding_is_recognised_by_lengths_and_not_by_its_token(decoder, make_rows, compute):
    """Where the token that pads also ends a text, or stands within one, it is a token like any other."""
    padding = 0
    rows = [
        replace(row, prompt_ids=(5, padding, 7), completion_ids=(*row.completion_ids[:-1], padding))
        for row in make_rows(count=6, prompts=1)
    ]
    rows[3] = replace(rows[3], completion_ids=(padding,) * len(rows[3].completion_ids))
    assert len({len(row.completion_ids) for row in rows}) > 2
    assert_plain(decoder, compute, rows)


@pytest.mark.parametrize("budget", [60, 10_000])
@pytest.mark.parametrize("packed", [packed_rows, packed_groups])
def test_packed_rows_equal_whole_rows_in_values_and_gradients(decoder, make_rows, packed, budget):
    """Each row's weights are its own, so that a gradient that reached a neighbour would show."""
    rows = make_rows(count=14, prompts=9)
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(len(row.completion_ids), generator=generator) for row in rows]

    def computed(compute, batches):
        decoder.model.zero_grad()
        values = {}
        for batch in batches:
            found = compute(decoder, batch)
            for place, index in enumerate(batch.indices):
                mine = found.logprobs_BT[place, : len(weights[index])]
                values[index] = mine.detach(), found.entropies_BT[place, : len(mine)]
            sums = [
                (found.logprobs_BT[place, : len(weights[index])] * weights[index]).sum()
                for place, index in enumerate(batch.indices)
            ]
            torch.stack(sums).sum().backward()
        named = decoder.model.named_parameters()
        return values, {name: p.grad.clone() for name, p in named if p.grad is not None}

    packs = batches_for(packed, rows, budget)
    assert len(packs) < len(rows)
    values, slopes = computed(packed, packs)
    plain_values, plain_slopes = computed(whole_rows, microbatches(rows, 10_000))
    for index, wanted in plain_values.items():
        close(values[index][0], wanted[0])
        close(values[index][1], wanted[1])
    assert slopes.keys() == plain_slopes.keys()
    for name, wanted in plain_slopes.items():
        close(slopes[name], wanted)


def test_packing_is_refused_where_rows_see_each_other(decoder, monkeypatch, caplog):
    def everything(queries, *, past=0, lengths=None):
        return TextMask(queries, past=past)

    assert packing_is_exact(decoder)
    assert choose_paths(decoder, packing=True, sharing=True).packing
    monkeypatch.setattr(forward, "TextMask", everything)
    assert not packing_is_exact(decoder)
    assert not choose_paths(decoder, packing=True, sharing=True).packing
    assert "training.packing" in caplog.text


@pytest.mark.parametrize("compute", WAYS)
def test_excluded_tokens_are_masked_in_their_own_row_and_place(decoder, make_rows, compute):
    barred = (0, 1, 101)
    rows = [
        replace(row, withheld=spans(index, len(row.completion_ids), barred))
        for index, row in enumerate(make_rows())
    ]
    assert len({bool(row.withheld) for row in rows}) == 2
    assert_plain(decoder, compute, rows)


@pytest.mark.parametrize("compute", WAYS)
def test_given_targets_have_the_plain_models_numbers_and_gradients(decoder, make_rows, compute):
    """One target or several for each token, in one batch; the context stays the row's own tokens, and what could not be drawn counts."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for index, row in enumerate(make_rows(count=8, prompts=2)):
        length, several = len(row.completion_ids), (None, 1, 3)[index % 3]
        if several is not None:
            targets = torch.randint(3, 100, (length * several,), generator=generator).tolist()
            mask = torch.randint(0, 2, (len(targets),), generator=generator).tolist()
            row = replace(row, targets=tuple(targets), mask=tuple(mask))
        rows.append(replace(row, withheld=(MaskedTokens(0, length, (0, 1, 101)),)))
    batches = batches_for(compute, rows, 200)
    assert any(len({row.targets_per_token for row in batch.rows}) > 1 for batch in batches)
    for outputs in (
        ForwardOutputs(accuracy=True),
        ForwardOutputs(trained_only=True),
        ForwardOutputs(trained_only=True, untrained_logprobs=True),
    ):
        slopes = []
        for by_us in (True, False):
            decoder.model.zero_grad()
            for batch in batches:
                found = compute(decoder, batch, outputs) if by_us else None
                for place, row in enumerate(batch.rows):
                    wanted, best = of_targets(decoder, row)
                    counted = torch.tensor(row.mask) != 0
                    counted = counted if outputs.trained_only else torch.ones_like(counted)
                    factors = torch.arange(1.0, len(counted) + 1) * counted
                    known = torch.ones_like(counted) if outputs.untrained_logprobs else counted
                    values = wanted
                    if found is not None:
                        values = found.logprobs_BT[place, : len(counted)]
                        close(values * known, wanted * known)
                        assert not found.logprobs_BT[place, len(counted) :].any()
                        if found.right_BT is not None:
                            right = found.right_BT[place, : len(counted)]
                            assert torch.equal(right, best == torch.tensor(row.target_ids))
                    (values * factors).sum().backward(retain_graph=True)
            named = decoder.model.named_parameters()
            slopes.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        for name, wanted in slopes[1].items():
            close(slopes[0][name], wanted)


def of_targets(decoder, row):
    """By transformers: the log-probability of each target, and the most likely token there."""
    whole = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
    logits = decoder.model(input_ids=whole, use_cache=False).logits[0]
    tail = logits[len(row.prompt_ids) - 1 : -1] / row.temperature
    barred = torch.zeros_like(tail, dtype=torch.bool)
    for each in row.withheld:
        barred[each.start : each.end, list(each.token_ids)] = True
    tail = tail.masked_fill(barred, -torch.inf).repeat_interleave(row.targets_per_token, 0)
    logprobs = tail.log_softmax(-1).gather(1, torch.tensor(row.target_ids)[:, None])[:, 0]
    return logprobs, tail.argmax(-1)


def spans(index: int, length: int, barred: tuple[int, ...]) -> tuple[MaskedTokens, ...]:
    """None, all of a row, its beginning, or two stretches of different tokens."""
    return (
        (),
        (MaskedTokens(0, length, barred),),
        (MaskedTokens(0, length // 2, barred),),
        (MaskedTokens(0, length // 3, barred), MaskedTokens(length // 2, length, barred[:1])),
    )[index % 4]
