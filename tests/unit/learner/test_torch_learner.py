"""The torch learner:

1. The gradient does not depend on how the work was cut up: micro-batches, order, calls, ranks, checkpointing.
2. What is masked teaches nothing and divides nothing; nothing at all gives 0, not NaN.
3. One update is torch's AdamW after clipping to the norm, exactly.
4. Dropout repeats itself, acts in every micro-batch, and nowhere but in the gradient.
5. Publications come and go, but the current one stays; a checkpoint restores whatever was saved.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from groupwise.algorithms.registry import ALGORITHMS, make
from groupwise.algorithms.sft import Sft
from groupwise.errors import ModelError, NonFiniteError, OutOfMemoryError, StoreError
from groupwise.learner.layout import PackedBatch
from groupwise.learner.native.layout import FlatBatch
from groupwise.models.lora import CONFIG, WEIGHTS
from groupwise.models.tiny import tiny_model, tiny_tokenizer
from groupwise.sampler.queued import DecodeLayout
from groupwise.sampler.torch_sampler import TorchSampler
from groupwise.sampler.weights import ServedAdapter
from groupwise.types import GroupRequest, OptimiserParams, SamplingParams
from tests.disks import small_disk

DR_GRPO = make("dr_grpo", {}).loss_spec()
SFT = Sft().loss_spec()
PENALISED = make("grpo", {"beta": 0.1}).loss_spec()
TOTALS = {"policy": 40.0, "kl": 40.0}
STEP = OptimiserParams(learning_rate=0.01, max_grad_norm=None)


def gradient(learner) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in learner._parameters.items() if p.grad is not None}


def values(learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner._parameters.items()}


async def computed(learner, rows, loss=PENALISED, totals=TOTALS):
    sums = await learner.forward_backward(rows, loss, totals)
    return sums, gradient(learner)


def close(found, wanted, rounding=1e-5):
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        size = float(expected.abs().max())
        torch.testing.assert_close(found[name], expected, rtol=rounding, atol=rounding * size)


def differs(found, wanted) -> bool:
    return any(not torch.allclose(found[name], wanted[name], rtol=1e-3) for name in wanted)


KINDS = pytest.mark.parametrize("kind", ["adapter", "modules", "full"])


@pytest.fixture(scope="module")
def plain():
    """What the plain path computes, by what it is for: the same for all that are compared with it."""
    return {}


async def computed_once(plain, what, learner, *arguments):
    """Sums and gradient, computed by the first that asks for them."""
    if what not in plain:
        plain[what] = await computed(learner(), *arguments)
    return plain[what]


# However the work is cut up


@KINDS
@pytest.mark.parametrize("max_tokens", [1, 20, 33, 60])
async def test_the_budget_of_a_micro_batch_does_not_matter(
    make_learner, make_rows, plain, kind, max_tokens
):
    rows = make_rows(reference=True)
    sums, wanted = await computed_once(plain, ("budget", kind), lambda: make_learner(kind), rows)
    cut_sums, found = await computed(make_learner(kind, max_tokens=max_tokens), rows)
    close(found, wanted)
    assert cut_sums == pytest.approx(sums, rel=1e-5)


@KINDS
@pytest.mark.parametrize("seed", [0, 1])
async def test_neither_does_the_order_of_the_rows(make_learner, make_rows, kind, seed):
    rows = make_rows(reference=True)
    _, wanted = await computed(make_learner(kind), rows)
    shuffled = random.Random(seed).sample(rows, len(rows))
    _, found = await computed(make_learner(kind, max_tokens=50), shuffled)
    close(found, wanted)


@KINDS
@pytest.mark.parametrize("ranks", [2, 3])
async def test_ranks_that_add_their_gradients_have_that_of_the_whole(
    make_learner, make_rows, kind, ranks
):
    rows = make_rows(reference=True)
    sums, wanted = await computed(make_learner(kind), rows)
    shares = [await computed(make_learner(kind), rows[rank::ranks]) for rank in range(ranks)]
    close({name: sum(share[1][name] for share in shares) for name in wanted}, wanted)
    assert {name: sum(share[0][name] for share in shares) for name in sums} == pytest.approx(sums)


@pytest.mark.parametrize("max_tokens", [1, 33, 60, 4096])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", ["adapter", "modules"])
async def test_right_tokens_are_those_that_the_model_would_write(
    make_learner, make_rows, kind, packing, max_tokens
):
    """Counted once each, however the rows are cut up; a model asked for the likeliest tokens gets them right."""
    (made,) = make_rows(count=1, prompts=1)
    learner = make_learner(kind, max_tokens=max_tokens, packing=packing)
    row = replace(made, mask=(1,) * len(made.completion_ids))
    written = await greedy(learner, row)
    first_wrong = ((written[0] + 1) % 100, *written[1:])
    rows = [
        replace(row, completion_ids=written),
        replace(row, completion_ids=first_wrong),
        replace(row, completion_ids=first_wrong, mask=(0, *row.mask[1:])),
        *make_rows(),
    ]
    found = await learner.predictions(rows)
    assert all(found[0].right)
    assert not found[1].right[0]
    assert [each.logprobs for each in found] == await learner.logprobs(rows)
    sums = await learner.forward_backward(rows, Sft().loss_spec(), {"sft": 100.0})
    pairs = zip(found, rows, strict=True)
    assert sums["right"] == sum(sum(compress(each.right, row.mask)) for each, row in pairs)
    assert sums["tokens"] == sum(sum(row.mask) for row in rows)


async def greedy(learner, row) -> tuple[int, ...]:
    """The completion of the row's length in which every token is the likeliest."""
    ids: tuple[int, ...] = ()
    for place in range(len(row.completion_ids)):
        tried = [
            replace(
                row,
                completion_ids=(*ids, token),
                mask=(1,) * (place + 1),
                sampling_logprobs=(0.0,) * (place + 1),
            )
            for token in range(learner._weights.model.config.vocab_size)
        ]
        logprobs = [each[-1] for each in await learner.logprobs(tried)]
        ids = (*ids, logprobs.index(max(logprobs)))
    return ids


async def test_no_search_for_likeliest_tokens_in_reinforcement_learning(make_learner, make_rows):
    sums, _ = await computed(make_learner(), make_rows(reference=True))
    assert "right" not in sums


async def test_a_shared_prompt_does_not_matter(make_learner, make_rows):
    rows = make_rows(count=6, prompts=1, reference=True)
    _, wanted = await computed(make_learner(), rows)
    learner = make_learner(max_tokens=1)
    for row in rows:
        await learner.forward_backward([row], PENALISED, TOTALS)
    close(gradient(learner), wanted)


@KINDS
@pytest.mark.parametrize("max_tokens", [30, 4096])
async def test_gradient_checkpointing_does_not_matter(make_learner, make_rows, kind, max_tokens):
    rows = make_rows(reference=True)
    sums, wanted = await computed(make_learner(kind), rows)
    learner = make_learner(kind, max_tokens=max_tokens, gradient_checkpointing=True)
    found_sums, found = await computed(learner, rows)
    close(found, wanted)
    assert found_sums == pytest.approx(sums, rel=1e-5)


@KINDS
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 40, 4096])
async def test_packing_does_not_matter(
    make_learner, make_rows, plain, kind, checkpointing, max_tokens
):
    rows = make_rows(count=14, prompts=9, reference=True)
    sums, wanted = await computed_once(
        plain, ("packing", kind), lambda: make_learner(kind, packing=False), rows
    )
    learner = make_learner(kind, max_tokens=max_tokens, gradient_checkpointing=checkpointing)
    assert kind == "adapter" or learner._engine.paths.packing
    found_sums, found = await computed(learner, rows)
    close(found, wanted)
    assert found_sums == pytest.approx(sums, rel=1e-5)


def taught(make_rows):
    """Rows of a teacher: prompts of their own, tokens between the trained ones, one long row among short ones."""
    rows = [replace(row, scale=1.0, advantage=1.0, temperature=1.0) for row in make_rows(14, 9)]
    longest = replace(
        rows[0],
        completion_ids=rows[0].completion_ids * 4,
        mask=(*rows[0].mask * 3, *[0] * len(rows[0].mask)),
        sampling_logprobs=rows[0].sampling_logprobs * 4,
    )
    return [*rows, longest]


@KINDS
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 45, 4096])
async def test_supervised_gradients_do_not_depend_on_the_cuts(
    make_learner, make_rows, plain, kind, packing, max_tokens
):
    """Nor on accumulation over calls: the mean is over the tokens of the whole step."""
    rows = taught(make_rows)
    totals = {"sft": float(sum(sum(row.mask) for row in rows))}
    sums, wanted = await computed_once(
        plain, ("sft", kind), lambda: make_learner(kind, packing=False), rows, SFT, totals
    )
    found_sums, found = await computed(
        make_learner(kind, packing=packing, max_tokens=max_tokens), rows, SFT, totals
    )
    close(found, wanted)
    assert found_sums == pytest.approx(sums, rel=1e-5)
    learner = make_learner(kind, packing=packing, max_tokens=max_tokens)
    for start in range(0, len(rows), 4):
        await learner.forward_backward(rows[start : start + 4], SFT, totals)
    close(gradient(learner), wanted)


async def test_the_supervised_loss_is_the_cross_entropy_of_transformers(make_learner, make_rows):
    model = tiny_model(seed=4)
    rows = taught(make_rows)
    losses, count = [], 0
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
        labels = torch.tensor([[*[-100] * len(row.prompt_ids), *row.completion_ids]])
        mask = torch.tensor([[*[0] * len(row.prompt_ids), *row.mask]])
        labels = labels.masked_fill(mask == 0, -100)
        losses.append(model(input_ids=ids, labels=labels).loss * sum(row.mask))
        count += sum(row.mask)
    mean = torch.stack(losses).sum() / count
    mean.backward()
    wanted = {name: p.grad for name, p in sorted(model.named_parameters()) if p.grad is not None}
    totals = {"sft": float(count)}
    sums, found = await computed(make_learner("full", model=tiny_model(seed=4)), rows, SFT, totals)
    assert sums["loss/sft"] / count == pytest.approx(mean.item(), rel=1e-5)
    assert sums["tokens"] == count
    close(found, wanted, 1e-4)


EVERYTHING = {
    "beta": 0.2,
    "entropy_coef": 0.1,
    "importance_sampling_correction": "sequence_truncate",
}
FAST = {
    "shared prompts": {"kind": "modules", "packing": False},
    "packed": {"kind": "modules", "packing": True},
    "packed in small batches": {"kind": "modules", "packing": True, "max_tokens": 40},
    "packed and recomputed": {"kind": "modules", "packing": True, "gradient_checkpointing": True},
    "native": {"kind": "adapter"},
    "native in small batches": {"kind": "adapter", "max_tokens": 40},
    "native and recomputed": {"kind": "adapter", "gradient_checkpointing": True},
}


async def computed_plainly(make_learner, rows, loss, totals):
    """Each row by itself, prompt included, nothing shared and nothing packed."""
    near = await make_learner().logprobs(rows)
    rows = [
        replace(
            row,
            sampling_logprobs=tuple(value + 0.2 for value in found),
            proximal_logprobs=tuple(value - 0.1 for value in found),
        )
        for row, found in zip(rows, near, strict=True)
    ]
    plain = make_learner("modules", packing=False, gradient_checkpointing=True, max_tokens=1)
    assert not plain._engine.paths.packing
    assert not plain._engine.paths.sharing
    return rows, *await computed(plain, rows, loss, totals)


@pytest.mark.parametrize("way", FAST)
@pytest.mark.parametrize("name", [*ALGORITHMS, "sft"])
async def test_every_fast_path_equals_the_plain_one_with_every_option(
    make_learner, make_rows, plain, name, way
):
    loss = SFT if name == "sft" else make(name, EVERYTHING).loss_spec()
    totals = {"policy": 40.0, "kl": 30.0, "entropy": 20.0, "sft": 50.0}
    if name not in plain:
        given = make_rows(count=14, prompts=9, reference=True)
        plain[name] = await computed_plainly(make_learner, given, loss, totals)
    rows, sums, wanted = plain[name]
    learner = make_learner(**FAST[way])
    batches = learner._engine.cut(rows, learner._max_tokens, gradient=True)
    assert any(isinstance(batch, PackedBatch) for batch in batches) == ("packed" in way)
    assert any(isinstance(batch, FlatBatch) for batch in batches) == ("native" in way)
    found_sums, found = await computed(learner, rows, loss, totals)
    assert any(bool(each.any()) for each in wanted.values())
    close(found, wanted)
    assert found_sums == pytest.approx(sums, rel=1e-4, abs=1e-5)


@KINDS
async def test_log_probabilities_do_not_depend_on_packing(make_learner, make_rows, kind):
    rows = make_rows(count=14, prompts=9)
    plain = await make_learner(kind, packing=False).logprobs(rows)
    packed = await make_learner(kind, max_tokens=40).logprobs(rows)
    for found, wanted in zip(packed, plain, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)


async def test_checkpointing_does_not_wake_the_dropout_of_the_base(make_learner, make_rows):
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=102, num_attention_heads=2, attention_dropout=0.5, **sizes)
    ).eval()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    _, wanted = await computed(make_learner("full", model=model), make_rows(), DR_GRPO)
    model.load_state_dict(kept)
    learner = make_learner("full", model=model, gradient_checkpointing=True)
    learner.discard()
    recomputed = []
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda *_: recomputed.append(layer.training))
    _, found = await computed(learner, make_rows(), DR_GRPO)
    close(found, wanted)
    assert any(recomputed), "it does act"
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("kind", ["adapter", "modules"])
async def test_checkpointing_leaves_a_sampler_on_the_same_base_alone(make_learner, kind):
    async def sampled(**settings):
        learner = make_learner(kind, **settings)
        served = ServedAdapter(learner._weights.adapted)
        sampler = TorchSampler(served, tiny_tokenizer(), DecodeLayout(8, 32))
        await sampler.load(await learner.publish(0))
        return await sampler.generate(GroupRequest(0, (40, 41), (1, 2), SamplingParams(9)))

    assert await sampled(gradient_checkpointing=True) == await sampled()


@KINDS
async def test_log_probabilities_do_not_depend_on_the_budget(make_learner, make_rows, kind):
    rows = make_rows()
    whole = await make_learner(kind).logprobs(rows)
    cut = await make_learner(kind, max_tokens=1).logprobs(rows)
    for row, one, other in zip(rows, whole, cut, strict=True):
        assert len(one) == len(row.completion_ids)
        assert one == pytest.approx(other, abs=1e-5)


# Masks and denominators


@pytest.mark.parametrize("loss", [DR_GRPO, PENALISED])
async def test_a_fully_masked_batch_gives_0(make_learner, make_rows, loss):
    rows = [replace(row, mask=(0,) * len(row.mask)) for row in make_rows(reference=True)]
    learner = make_learner()
    sums, found = await computed(learner, rows, loss)
    assert set(sums.values()) == {0.0}
    assert not any(bool(grad.any()) for grad in found.values())
    before = values(learner)
    assert await learner.update(STEP) is not None
    close(values(learner), before, rounding=0)


async def test_a_component_without_denominator_teaches_nothing(make_learner, make_rows):
    learner = make_learner()
    sums, found = await computed(learner, make_rows(), DR_GRPO, {"policy": 0.0})
    assert sums["tokens"] > 0
    assert not any(bool(grad.any()) for grad in found.values())


async def test_what_stands_under_the_mask_plays_no_part(make_learner, make_rows):
    rows = make_rows(reference=True)
    wild = replace(
        rows[2],
        sampling_logprobs=tuple(
            value if taught else -300.0
            for value, taught in zip(rows[2].sampling_logprobs, rows[2].mask, strict=True)
        ),
    )
    sums, wanted = await computed(make_learner(), rows)
    found_sums, found = await computed(make_learner(), [*rows[:2], wild, *rows[3:]])
    close(found, wanted)
    assert found_sums == pytest.approx(sums)
    assert sums["tokens"] == sum(sum(row.mask) for row in rows)


async def test_no_rows_are_no_gradient(make_learner):
    learner = make_learner()
    assert await learner.forward_backward([], DR_GRPO, TOTALS) == {}
    assert (await learner.update(STEP)).grad_norm == 0.0


async def test_the_denominator_divides_the_gradient(make_learner, make_rows):
    rows = make_rows()
    _, whole = await computed(make_learner(), rows, DR_GRPO, {"policy": 1.0})
    _, part = await computed(make_learner(), rows, DR_GRPO, {"policy": 8.0})
    close({name: 8 * grad for name, grad in part.items()}, whole)


# The update


@KINDS
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("max_norm", [None, 1e-3, 1e6])
async def test_an_update_is_torchs_adamw_after_clipping(
    make_learner, make_rows, kind, decay, max_norm
):
    learner = make_learner(kind)
    copies = {name: torch.nn.Parameter(value) for name, value in values(learner).items()}
    reference = torch.optim.AdamW(copies.values(), foreach=False)
    for step in range(3):
        params = OptimiserParams(0.01 / (step + 1), max_norm, decay, 0.8, 0.95, 1e-6)
        _, grads = await computed(learner, make_rows(seed=step), DR_GRPO)
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
        factor = min(1.0, max_norm / float(norm)) if max_norm else 1.0
        for name, copy in copies.items():
            copy.grad = grads[name] * factor
        reference.param_groups[0].update(
            lr=params.learning_rate, weight_decay=decay, betas=(0.8, 0.95), eps=1e-6
        )
        reference.step()
        result = await learner.update(params)
        assert result.applied
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-5), "before clipping"
    close(values(learner), {name: copy.detach() for name, copy in copies.items()}, rounding=2e-6)


async def test_clipping_holds_the_norm_exactly(make_learner, make_rows):
    learner = make_learner()
    _, grads = await computed(learner, make_rows(), DR_GRPO)
    norm = float(torch.stack([grad.norm() for grad in grads.values()]).norm())
    seen = {}
    learner._step = lambda params: seen.update(gradient(learner))
    await learner.update(replace(STEP, max_grad_norm=norm / 4))
    close(seen, {name: grad / 4 for name, grad in grads.items()}, rounding=1e-6)


async def test_the_base_of_an_adapter_never_moves(make_learner, make_rows):
    learner = make_learner()
    adapter = {id(p) for p in learner._parameters.values()}
    base = [p for p in learner._weights.model.parameters() if id(p) not in adapter]
    before = [p.detach().clone() for p in base]
    await computed(learner, make_rows(), DR_GRPO)
    await learner.update(replace(STEP, weight_decay=0.5))
    assert all(torch.equal(p, kept) for p, kept in zip(base, before, strict=True))
    assert not any(p.grad is not None for p in base)


async def test_a_cancelled_gradient_is_discarded_without_a_trace(make_learner, make_rows):
    rows = make_rows()
    _, wanted = await computed(make_learner(), rows, DR_GRPO)
    learner = make_learner(max_tokens=1)
    work = asyncio.ensure_future(learner.forward_backward(rows, DR_GRPO, TOTALS))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert any(bool(grad.any()) for grad in gradient(learner).values()), "a part was there"
    learner.discard()
    _, found = await computed(learner, rows, DR_GRPO)
    close(found, wanted)


# Dropout


async def test_dropout_repeats_itself(make_learner, make_rows):
    rows = make_rows()

    async def found(seed, updates=0):
        learner = make_learner(dropout=0.4, seed=seed)
        for _ in range(updates):
            await computed(learner, rows, DR_GRPO)
            await learner.update(replace(STEP, learning_rate=0.0))
        torch.manual_seed(random.randrange(10**6))
        return (await computed(learner, rows, DR_GRPO))[1]

    first = await found(1)
    close(await found(1), first, rounding=0)
    assert differs(await found(2), first)
    assert differs(await found(1, updates=1), first)


async def test_dropout_acts_in_every_micro_batch_and_only_in_the_gradient(make_learner, make_rows):
    rows = make_rows(count=8, prompts=2)
    plain, dropping = make_learner("modules"), make_learner(dropout=0.4)
    for part in (rows[0::2], rows[1::2], rows[0::2]):
        _, without = await computed(plain, part, DR_GRPO)
        _, found = await computed(dropping, part, DR_GRPO)
        assert differs(found, without)
        plain.discard()
        dropping.discard()
    assert await dropping.logprobs(rows) == await plain.logprobs(rows)


async def test_any_seed_will_do_for_dropout(make_learner, make_rows):
    learner = make_learner(dropout=0.4, seed=2**40 + 3)
    _, found = await computed(learner, make_rows(), DR_GRPO)
    assert any(bool(grad.any()) for grad in found.values())


# Files


async def test_old_publications_go_and_the_current_one_stays(make_learner):
    learner = make_learner()
    for version in (0, 1, 2, 9, 10, 100):
        policy = await learner.publish(version)
        assert (Path(policy.path) / WEIGHTS).is_file()
        assert (Path(policy.path) / CONFIG).is_file()
        kept = {path.name for path in Path(policy.path).parent.iterdir()}
        assert len(kept) <= 2, "the one before may still be read"
    assert "v000000100" in kept


async def test_a_version_published_again_is_written_anew(make_learner, make_rows):
    learner = make_learner()
    first = await learner.publish(1)
    (Path(first.path) / "scrap").write_text("")
    await computed(learner, make_rows(), DR_GRPO)
    await learner.update(STEP)
    second = await learner.publish(1)
    assert second.path == first.path
    assert second.fingerprint != first.fingerprint
    assert not (Path(second.path) / "scrap").exists()


@KINDS
async def test_a_checkpoint_before_the_first_update(make_learner, make_rows, tmp_path, kind):
    """Also into a learner that has learnt: its moments and its half-made gradient are gone."""
    rows = make_rows()
    learner = make_learner(kind)
    learner.save(str(tmp_path))
    for seed in (7, 8):
        await computed(learner, make_rows(seed=seed), DR_GRPO)
        await learner.update(STEP)
    await computed(learner, rows, DR_GRPO)
    learner.load(str(tmp_path))
    fresh = make_learner(kind)
    for each in (learner, fresh):
        await computed(each, rows, DR_GRPO)
        await each.update(STEP)
    close(values(learner), values(fresh), rounding=0)


@KINDS
async def test_another_process_goes_on_where_the_checkpoint_was(
    make_learner, make_rows, tmp_path, kind
):
    learner = make_learner(kind, dropout=0.2 if kind == "adapter" else 0.0)
    await computed(learner, make_rows(seed=1), DR_GRPO)
    await learner.update(STEP)
    learner.save(str(tmp_path))
    other = make_learner(kind, dropout=0.2 if kind == "adapter" else 0.0)
    other.load(str(tmp_path))
    for each in (learner, other):
        for seed in (2, 3):
            await computed(each, make_rows(seed=seed), DR_GRPO)
            await each.update(STEP)
    close(values(other), values(learner), rounding=0)


async def test_a_checkpoint_of_another_shape_is_refused(make_learner, tmp_path):
    make_learner().save(str(tmp_path))
    with pytest.raises(ModelError, match="of another shape"):
        make_learner(model=tiny_model(hidden_size=32)).load(str(tmp_path))


@pytest.fixture
def learner_with_an_idle_layer(make_learner):
    """A linear layer that no text reaches, such as one of a vision tower; `all-linear` gives it an adapter."""

    def made():
        model: Any = tiny_model(seed=4)
        model.model.vision = torch.nn.Linear(16, 16)
        return make_learner(model=model)

    return made


async def test_a_parameter_without_gradient_does_not_stand_in_the_way_of_a_resume(
    learner_with_an_idle_layer, make_rows, tmp_path
):
    learner, other = learner_with_an_idle_layer(), learner_with_an_idle_layer()
    assert any("vision" in name for name in values(learner))
    await computed(learner, make_rows(), DR_GRPO)
    await learner.update(STEP)
    learner.save(str(tmp_path))
    other.load(str(tmp_path))
    for each in (learner, other):
        await computed(each, make_rows(seed=2), DR_GRPO)
        await each.update(replace(STEP, weight_decay=0.1))
    close(values(other), values(learner), rounding=0)
    assert other._optimiser_tensors().keys() == learner._optimiser_tensors().keys()


@KINDS
async def test_an_update_without_a_gradient_is_the_same_before_and_after_a_resume(
    make_learner, make_rows, tmp_path, kind
):
    """Momentum must not move the weights of the one that went on without a stop."""
    learner, other = make_learner(kind), make_learner(kind)
    await computed(learner, make_rows(), DR_GRPO)
    await learner.update(STEP)
    learner.save(str(tmp_path))
    other.load(str(tmp_path))
    for each in (learner, other):
        await each.update(STEP)
    close(values(other), values(learner), rounding=0)


async def test_the_reference_model_is_looked_at_once(make_rows, tmp_path, monkeypatch):
    from groupwise.learner import torch_learner, transformers_engine
    from groupwise.learner.weights import TrainedModel

    made = []

    class Counting(transformers_engine.Decoder):
        def __init__(self, model) -> None:
            made.append(model)
            super().__init__(model)

    monkeypatch.setattr(transformers_engine, "Decoder", Counting)
    trained, reference = tiny_model(seed=1), tiny_model(seed=2)
    learner = torch_learner.TorchLearner(
        TrainedModel(trained, reference),
        run="r",
        publish_folder=tmp_path,
        max_tokens_per_microbatch=4096,
        seed=0,
    )
    first = await learner.logprobs(make_rows(), "reference")
    assert await learner.logprobs(make_rows(), "reference") == first
    assert await learner.logprobs(make_rows()) != first
    assert [model is trained for model in made] == [True, False]


async def test_the_reference_of_an_adapter_is_its_base(make_learner, make_rows):
    engine = make_learner("modules")._engine
    assert engine.reference() is engine._decoder


@pytest.mark.parametrize("rate", [1e38, 1e39])
async def test_a_step_out_of_the_numbers_says_so(make_learner, make_rows, rate):
    learner = make_learner()
    await computed(learner, make_rows(), DR_GRPO)
    with pytest.raises(NonFiniteError, match=r"learning rate 1e\+3.*Lower training.learning_rate"):
        await learner.update(replace(STEP, learning_rate=rate))


@KINDS
async def test_want_of_memory_is_explained(make_learner, make_rows, monkeypatch, kind):
    def refuse(*_: Any, **__: Any) -> Any:
        return torch.empty(1 << 60, dtype=torch.uint8)

    learner = make_learner(kind)
    _, wanted = await computed(learner, make_rows(), DR_GRPO)
    for owner, name, doing, failing in (
        (learner._engine, "acting", "learning", lambda: computed(learner, make_rows(), DR_GRPO)),
        (learner._engine, "acting", "computing log-prob", lambda: learner.logprobs(make_rows())),
        (learner._optimiser, "step", "updating", lambda: learner.update(STEP)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refuse)
            with pytest.raises(OutOfMemoryError, match=f"while {doing}.*max_tokens_per_micro"):
                await failing()
    close(gradient(learner), wanted)


@KINDS
async def test_a_full_disk_is_explained(make_learner, tmp_path, kind):
    learner = make_learner(kind)
    with small_disk(tmp_path / "published", "8k") as disk:
        with pytest.raises(StoreError, match=r"cannot write .*v000000001.*No space left"):
            await learner.publish(1)
        with pytest.raises(OSError, match="No space left"):
            learner.save(str(disk))


@KINDS
async def test_a_damaged_checkpoint_is_explained(make_learner, tmp_path, kind):
    learner = make_learner(kind)
    learner.save(str(tmp_path))
    damaged = next(tmp_path.glob("*model.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:50])
    with pytest.raises(ModelError, match="is damaged"):
        learner.load(str(tmp_path))
