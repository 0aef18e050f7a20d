"""The torch learner:

1. The gradient does not depend on how the work was cut up: micro-batches, order, calls, ranks, checkpointing.
2. What is masked teaches nothing and divides nothing; nothing at all gives 0, not NaN.
3. One update is torch's AdamW after clipping to the norm, exactly.
4. Dropout repeats itself, acts in every micro-batch, and nowhere but in the gradient.
5. In bfloat16 the gradient of all weights is nearly that of float32, and the weights keep changes that bfloat16 would lose.
6. Publications come and go, but the current one stays; a checkpoint restores whatever was saved.
"""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from groupwise.algorithms.registry import ALGORITHMS, make
from groupwise.algorithms.sft import Sft
from groupwise.core.errors import ModelError, NonFiniteError, OutOfMemoryError, StoreError
from groupwise.core.types import OptimiserParams
from groupwise.engine.learner.layout import PackedBatch, PackedGroups
from groupwise.engine.learner.native.layout import FlatBatch
from groupwise.engine.models import varlen
from groupwise.engine.models.lora_config import CONFIG, WEIGHTS
from groupwise.engine.models.tiny import tiny_model
from tests.disks import small_disk
from tests.unit.engine.learner.native.test_attention import varlen_attn

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


KINDS = pytest.mark.parametrize("kind", ["adapter", "modules", "full", "rounded"])
BOTH = pytest.mark.parametrize("kind", ["adapter", "full"])


@pytest.fixture(scope="module")
def plain():
    """What the plain path computes, by algorithm."""
    return {}


# However the work is cut up


async def test_budget_packing_and_order_do_not_matter(make_learner, make_rows):
    """With and without gradient checkpointing, of all weights; for adapters see below. Nobody looks for likeliest tokens here."""
    rows = make_rows(count=14, prompts=9, reference=True)
    sums, wanted = await computed(make_learner("full", packing=False), rows)
    assert "right" not in sums
    for max_tokens, packing, checkpointing in ((20, False, False), (40, True, False), (60, True, True)):  # fmt: skip
        learner = make_learner(
            "full", max_tokens=max_tokens, packing=packing, gradient_checkpointing=checkpointing
        )
        assert learner._engine.paths.packing == packing
        shuffled = random.Random(max_tokens).sample(rows, len(rows))
        found_sums, found = await computed(learner, shuffled)
        close(found, wanted)
        assert found_sums == pytest.approx(sums, rel=1e-5)


@BOTH
async def test_ranks_that_add_their_gradients_have_that_of_the_whole(make_learner, make_rows, kind):
    ranks = 3
    rows = make_rows(reference=True)
    sums, wanted = await computed(make_learner(kind), rows)
    shares = [await computed(make_learner(kind), rows[rank::ranks]) for rank in range(ranks)]
    close({name: sum(share[1][name] for share in shares) for name in wanted}, wanted)
    assert {name: sum(share[0][name] for share in shares) for name in sums} == pytest.approx(sums)


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


@BOTH
async def test_supervised_gradients_do_not_depend_on_the_cuts(make_learner, make_rows, kind):
    """Nor on accumulation over calls: the mean is over the tokens of the whole step."""
    rows = taught(make_rows)
    totals = {"sft": float(sum(sum(row.mask) for row in rows))}
    sums, wanted = await computed(make_learner(kind, packing=False), rows, SFT, totals)
    for packing, max_tokens in ((False, 45), (True, 45)):
        learner = make_learner(kind, packing=packing, max_tokens=max_tokens)
        found_sums, found = await computed(learner, rows, SFT, totals)
        close(found, wanted)
        assert found_sums == pytest.approx(sums, rel=1e-5)
    learner.discard()
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
    "whole groups": {"kind": "modules", "max_tokens": 100},
    "whole groups, recomputed": {"kind": "modules", "gradient_checkpointing": True},
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


EVERY = [
    *(("grpo", way) for way in FAST),
    *zip(
        (name for name in (*ALGORITHMS, "sft") if name != "grpo"),
        cycle(("packed in small batches", "native in small batches")),
        strict=False,
    ),
]
"""GRPO in every way; of the others, which differ in the loss alone, each in one."""


@pytest.mark.parametrize(("name", "way"), EVERY)
async def test_every_fast_path_equals_the_plain_one_with_every_option(
    make_learner, make_rows, plain, name, way, monkeypatch
):
    loss = SFT if name == "sft" else make(name, EVERYTHING).loss_spec()
    totals = {"policy": 40.0, "kl": 30.0, "entropy": 20.0, "sft": 50.0}
    if name not in plain:
        given = make_rows(count=14, prompts=9, reference=True)
        plain[name] = await computed_plainly(make_learner, given, loss, totals)
    rows, sums, wanted = plain[name]
    if "whole groups" in way:
        monkeypatch.setattr(varlen, "suits", lambda *_: True)
        monkeypatch.setattr(varlen, "varlen_kernel", lambda: varlen_attn)
    learner = make_learner(**FAST[way])
    batches = learner._engine.cut(rows, learner._max_tokens, gradient=True)
    assert any(isinstance(batch, PackedBatch) for batch in batches) == ("packed" in way)
    assert any(isinstance(batch, PackedGroups) for batch in batches) == ("whole groups" in way)
    assert any(isinstance(batch, FlatBatch) for batch in batches) == ("native" in way)
    found_sums, found = await computed(learner, rows, loss, totals)
    assert any(bool(each.any()) for each in wanted.values())
    close(found, wanted, rounding=2e-5)  # a gradient of 14 rows, added up in another order
    assert found_sums == pytest.approx(sums, rel=1e-4, abs=1e-5)


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


# Masks and denominators


async def test_a_fully_masked_batch_gives_0(make_learner, make_rows):
    """So do no rows at all."""
    rows = [replace(row, mask=(0,) * len(row.mask)) for row in make_rows(reference=True)]
    learner = make_learner()
    sums, found = await computed(learner, rows)
    assert set(sums.values()) == {0.0}
    assert not any(bool(grad.any()) for grad in found.values())
    before = values(learner)
    assert await learner.update(STEP) is not None
    close(values(learner), before, rounding=0)
    assert await learner.forward_backward([], DR_GRPO, TOTALS) == {}
    assert (await learner.update(STEP)).grad_norm == 0.0


async def test_the_denominator_divides_the_gradient(make_learner, make_rows):
    rows = make_rows()
    _, whole = await computed(make_learner(), rows, DR_GRPO, {"policy": 1.0})
    _, part = await computed(make_learner(), rows, DR_GRPO, {"policy": 8.0})
    close({name: 8 * grad for name, grad in part.items()}, whole)
    sums, found = await computed(make_learner(), rows, DR_GRPO, {"policy": 0.0})
    assert sums["tokens"] > 0
    assert not any(bool(grad.any()) for grad in found.values()), "without one nothing is taught"


# The update


@pytest.mark.parametrize(
    ("kind", "decay", "max_norm"),
    [("adapter", 0.0, None), ("modules", 0.1, 1e-3), ("full", 0.1, 1e6), ("full", 0.0, 1e-3)],
)
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


async def test_all_weights_are_computed_in_bfloat16_and_kept_in_float32(
    make_learner, make_rows, tmp_path
):
    """The gradient has the direction of that in float32 (a cosine above 0.99) and its length to 5 %."""
    learner, plain = make_learner("rounded"), make_learner("full")
    sums, found = await computed(learner, make_rows(), DR_GRPO)
    wanted_sums, wanted = await computed(plain, make_rows(), DR_GRPO)
    assert sums != wanted_sums, "nothing was rounded"
    assert sums["loss/policy"] == pytest.approx(wanted_sums["loss/policy"], rel=0.02)
    assert {each.dtype for each in found.values()} == {torch.float32}
    one, other = (torch.cat([g.flatten() for g in each.values()]) for each in (found, wanted))
    assert torch.cosine_similarity(one, other, dim=0) > 0.99
    assert float(one.norm() / other.norm()) == pytest.approx(1, abs=0.05)

    before = values(learner)
    rate = 1e-7  # a millionth of what bfloat16 can add to a norm's weight, which is 1
    await learner.update(replace(STEP, learning_rate=rate, weight_decay=0.0))
    moved = [(after - before[name]).abs().max() for name, after in values(learner).items()]
    assert min(moved) > 0
    await learner.save(str(tmp_path / "checkpoint"))
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype="auto")
    close(dict(stored.named_parameters()), values(learner), rounding=0)


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
    assert any(bool(grad.any()) for grad in (await found(2**40 + 3)).values()), "any seed will do"


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


@pytest.mark.parametrize("cancelled", [False, True])
async def test_weights_are_hashed_while_they_are_written_and_the_event_loop_continues(
    make_learner, monkeypatch, cancelled
):
    """A publication that is cancelled is completed first."""
    learner, written, goes_on = make_learner(), threading.Event(), threading.Event()
    wanted, save = learner.fingerprint(), learner._weights.save

    def hashed() -> str:
        assert written.wait(20)
        assert goes_on.wait(20)
        return wanted

    monkeypatch.setattr(learner, "fingerprint", hashed)
    monkeypatch.setattr(learner._weights, "save", lambda folder: (save(folder), written.set()))
    publishing = asyncio.create_task(learner.publish(1))
    await asyncio.sleep(0)
    if cancelled:
        publishing.cancel()
        await asyncio.sleep(0)
    assert not publishing.done()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError) if cancelled else nullcontext():
        assert (await publishing).fingerprint == wanted
    assert written.is_set()


async def test_a_checkpoint_is_written_while_the_event_loop_continues(
    make_learner, monkeypatch, tmp_path
):
    """One that is cancelled is completed first."""
    learner, goes_on = make_learner(), threading.Event()
    save = learner._weights.save
    monkeypatch.setattr(learner._weights, "save", lambda folder: goes_on.wait(20) and save(folder))
    saving = asyncio.create_task(learner.save(str(tmp_path)))
    await asyncio.sleep(0)
    saving.cancel()
    await asyncio.sleep(0)
    assert not saving.done()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await saving
    make_learner().load(str(tmp_path))


async def test_a_version_published_again_is_rewritten(make_learner, make_rows):
    learner = make_learner()
    first = await learner.publish(1)
    (Path(first.path) / "scrap").write_text("")
    await computed(learner, make_rows(), DR_GRPO)
    await learner.update(STEP)
    second = await learner.publish(1)
    assert second.path == first.path
    assert second.fingerprint != first.fingerprint
    assert not (Path(second.path) / "scrap").exists()


@BOTH
async def test_a_checkpoint_before_the_first_update(make_learner, make_rows, tmp_path, kind):
    """Also into a learner that has learnt: its moments and its half-made gradient are gone."""
    rows = make_rows()
    learner = make_learner(kind)
    await learner.save(str(tmp_path))
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
async def test_another_process_continues_where_the_checkpoint_was(
    make_learner, make_rows, tmp_path, kind
):
    learner = make_learner(kind, dropout=0.2 if kind == "adapter" else 0.0)
    await computed(learner, make_rows(seed=1), DR_GRPO)
    await learner.update(STEP)
    await learner.save(str(tmp_path))
    other = make_learner(kind, dropout=0.2 if kind == "adapter" else 0.0)
    other.load(str(tmp_path))
    for each in (learner, other):
        await each.update(
            STEP
        )  # without a gradient, whose momentum must not move the weights of one
        for seed in (2, 3):
            await computed(each, make_rows(seed=seed), DR_GRPO)
            await each.update(STEP)
    close(values(other), values(learner), rounding=0)


@BOTH
async def test_a_checkpoint_of_another_shape_or_a_damaged_one_is_refused(
    make_learner, tmp_path, kind
):
    learner = make_learner(kind)
    await learner.save(str(tmp_path))
    with pytest.raises(ModelError, match="of another shape"):
        make_learner(kind, model=tiny_model(hidden_size=32)).load(str(tmp_path))
    damaged = next(tmp_path.glob("*model.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:50])
    with pytest.raises(ModelError, match="is damaged"):
        learner.load(str(tmp_path))


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
    await learner.save(str(tmp_path))
    other.load(str(tmp_path))
    for each in (learner, other):
        await computed(each, make_rows(seed=2), DR_GRPO)
        await each.update(replace(STEP, weight_decay=0.1))
    close(values(other), values(learner), rounding=0)
    assert other._optimiser_tensors().keys() == learner._optimiser_tensors().keys()


async def test_a_step_out_of_the_numbers_says_so(make_learner, make_rows):
    learner = make_learner()
    await computed(learner, make_rows(), DR_GRPO)
    with pytest.raises(NonFiniteError, match=r"training\.learning_rate"):
        await learner.update(replace(STEP, learning_rate=1e38))


@BOTH
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


async def test_a_full_disk_is_explained(make_learner, tmp_path):
    learner = make_learner()
    with small_disk(tmp_path / "published", "8k") as disk:
        with pytest.raises(StoreError, match=r"v000000001.*No space left"):
            await learner.publish(1)
        with pytest.raises(OSError, match="No space left"):
            await learner.save(str(disk))
