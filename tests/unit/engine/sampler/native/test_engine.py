"""The engines of the sampler: the native one, the one for GPUs and that of transformers.

The one for GPUs runs here as it would run there without recordings ("graph") and with recordings of the same strictness ("recorded").

1. What it computes is what transformers computes, for prompts and completions around every length at which it changes its ways.
2. A row's logits are its own, to the bit: whatever the other rows, their order, their lengths, and what its place held before.
3. A row of NaN spoils no other row, and leaves nothing behind after a reset.
4. New weights are computed with at once and entirely.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from groupwise.core.errors import NonFiniteError
from groupwise.core.types import Completion, GroupRequest, SamplingParams
from groupwise.engine.models.native import products
from groupwise.engine.models.native.weights import NativeModel
from groupwise.engine.models.tiny import tiny_tokenizer
from groupwise.engine.sampler.engine import DecodeEngine, DecodeRow, Prompt
from groupwise.engine.sampler.native.engine import NativeEngine
from groupwise.engine.sampler.native.graph_engine import GraphEngine
from groupwise.engine.sampler.native.recording import run_eagerly
from groupwise.engine.sampler.queued import DecodeLayout
from groupwise.engine.sampler.torch_sampler import TorchSampler
from groupwise.engine.sampler.transformers_engines import SlotEngine
from groupwise.engine.sampler.weights import ServedAdapter, ServedModel, ServedWeights
from tests.device_checks import changed, generated, published
from tests.fake_cuda_graph import FakeCudaGraph
from tests.unit.engine.models.native.families import (
    SMALL,
    adapted,
    family,
    made,
    own_logits,
    text,
)

TOKENIZER: Any = tiny_tokenizer()
PROMPTS = (1, 2, 5, 15, 16, 17, 63, 64, 65, 200)
LAYOUT = DecodeLayout(slots=16, key_length=340)
BROAD = LlamaConfig(**{**SMALL, "vocab_size": 1500, "hidden_size": 256, "intermediate_size": 512})
"""So many numbers for each row that torch gives those of 72 rows to several threads."""
WIDE = LlamaConfig(**{**SMALL, "num_key_value_heads": 1, "num_hidden_layers": 1}, head_dim=32)
"""Four queries of 32 numbers for one key: products whose sums libraries cut up in other ways than those of narrow heads."""


def request(draw: int, length: int, members: int, max_tokens: int = 9, **params: Any):
    ids = tuple(text(length, seed=draw).tolist())
    seeds = tuple(100 * draw + member for member in range(members))
    return GroupRequest(draw, ids, seeds, SamplingParams(max_tokens, **params))


def weights_of(
    name: str, dtype: torch.dtype = torch.float32, *, adapter: bool = False
) -> ServedWeights:
    """Of a family's model; the same ones each time."""
    model = made(WIDE, dtype=dtype) if name == "wide" else family(name, dtype=dtype)
    if not adapter:
        return ServedModel(model)
    weights = ServedAdapter(adapted(model))
    weights.adapted.write("served", dict(weights.adapted.parameters("policy")), "policy")
    return weights


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Torch alone computes: no kernels of our own for what stands between products, and no weights in another order."""
    monkeypatch.setattr("groupwise.engine.models.native.compiled.suits", lambda tensor: False)
    monkeypatch.setattr(NativeModel, "pack", lambda self, **_: None)


def by(*kinds: str) -> Any:
    """Run with each of these."""
    return pytest.mark.parametrize("kind", kinds, indirect=True)


@pytest.fixture
def kind(request) -> str:
    """What computes; as on a GPU where it is for one."""
    if request.param in ("graph", "recorded"):
        request.getfixturevalue("as_on_a_gpu")
    if request.param == "int8" and not products.HAS_VNNI:
        pytest.skip("needs a CPU with AVX512_VNNI")
    return request.param


def engine_of(weights: ServedWeights, kind: str, *, slots: int = 16, key_length: int = 700):
    if kind == "transformers":
        return SlotEngine(weights, slots, min(key_length, 180))
    int8 = kind == "int8"
    model = weights.native(int8=int8)
    assert model is not None
    if kind in ("native", "int8"):
        return NativeEngine(model, weights, int8=int8)
    return GraphEngine(
        model, weights, slots, key_length, FakeCudaGraph() if kind == "recorded" else run_eagerly
    )


def sampler_of(weights: ServedWeights, kind: str) -> TorchSampler:
    sampler = TorchSampler(weights, TOKENIZER, LAYOUT, native=kind != "transformers")
    if kind in ("graph", "recorded"):
        sampler._engine = engine_of(weights, kind, slots=LAYOUT.slots, key_length=LAYOUT.key_length)
    return sampler


@cache
def by_transformers(name: str, asked: tuple[GroupRequest, ...], adapter: bool) -> list[Completion]:
    """What it computes is the same for whatever of ours stands beside it."""
    return generated(sampler_of(weights_of(name, adapter=adapter), "transformers"), [*asked])


def assert_like_transformers(
    name: str, asked: list[GroupRequest], kind: str, *, adapter: bool = False
):
    ours = generated(sampler_of(weights_of(name, adapter=adapter), kind), asked)
    theirs = by_transformers(name, tuple(asked), adapter)
    assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
    assert [each.finish_reason for each in ours] == [each.finish_reason for each in theirs]
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
    return ours


# Against transformers


@pytest.mark.parametrize(
    ("name", "adapter", "kind"),
    [
        ("llama", True, "native"), ("llama-mha-tied", False, "recorded"), ("llama-mqa", True, "graph"), ("qwen2", False, "native"),
        ("qwen3-biases", True, "recorded"),
    ],
    indirect=["kind"],
)  # fmt: skip
def test_prompts_of_all_lengths_and_groups_of_all_sizes(name, adapter, kind):
    asked = [
        request(draw, length, members=(1, 3, 8)[draw % 3], temperature=float(draw % 2))
        for draw, length in enumerate(PROMPTS)
    ]
    found = assert_like_transformers(name, asked, kind, adapter=adapter)
    assert len({each.token_ids for each in found}) > len(PROMPTS)


@by("native", "recorded")
def test_completions_across_the_stretches_in_which_keys_are_read(kind):
    lengths = (63, 64, 65, 130, 260)
    asked = [
        request(draw, 5 + draw, 2 - draw % 2, max_tokens=length, temperature=float(draw % 2))
        for draw, length in enumerate(lengths)
    ]
    found = assert_like_transformers("llama-mha-tied", asked, kind)
    assert {len(each.token_ids) for each in found} == set(lengths)


@by("native", "graph")
def test_every_way_of_drawing(kind):
    stops = tuple(range(3, 30))
    asked = [
        request(0, 7, 4, 30, stop_token_ids=stops), request(1, 16, 4, 30, stop_token_ids=stops, min_tokens=12),
        request(2, 7, 4, 30, temperature=0.4, top_k=5), request(3, 30, 4, 30, temperature=1.7, top_p=0.8, min_p=0.01),
        request(4, 7, 4, 60, stop=("a", "b", "the")), request(5, 3, 2, 30, temperature=0.0, min_tokens=9, stop_token_ids=stops),
    ]  # fmt: skip
    found = assert_like_transformers("llama", asked, kind, adapter=True)
    assert {each.finish_reason for each in found} == {"stop", "length"}


@pytest.mark.parametrize(
    ("name", "adapter", "dtype"),
    [("llama-mqa", True, torch.bfloat16), ("qwen3", False, torch.float32)],
)
def test_compiled_kernels_compute_what_torch_does(request, name, adapter, dtype):
    """The same histories, whose rows are of all lengths, with our kernels and with torch's as on a GPU."""
    how = {"steps": 60, "rows": 12, "lengths": [1, 2, 20, 33, 50], "vocabulary": 96}
    ours = scheduled(engine_of(weights_of(name, dtype, adapter=adapter), "native"), 5, **how)
    request.getfixturevalue("as_on_a_gpu")
    theirs = scheduled(engine_of(weights_of(name, dtype, adapter=adapter), "graph"), 5, **how)
    assert len(ours) == len(theirs) > 10
    found, wanted = (
        torch.stack([logits for history in each for logits in history.logits]).float()
        for each in (ours, theirs)
    )
    close = 1e-5 if dtype == torch.float32 else 0.03
    assert float((found - wanted).abs().mean() / wanted.std()) < close


# Each row by itself


@dataclass
class History:
    """One row as it went: what it was given, and the logits that came back."""

    ids: list[int]
    prompt: Prompt
    until: int
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


@torch.inference_mode()
def scheduled(
    engine: DecodeEngine, seed: int, steps: int, rows: int, lengths: list[int], vocabulary: int
):
    """Rows that begin, end and are given up at random, of prompts old and new; all of their histories."""
    rng = random.Random(seed)
    prompts: list[tuple[list[int], Prompt]] = []
    running: dict[DecodeRow, History] = {}
    ended: list[History] = []
    for _ in range(steps):
        while len(engine.rows) < rows and rng.random() < 0.5:
            if not prompts or rng.random() < 0.3:
                length = rng.choice([1, 2, 15, 16, 17, 40, 63, 64, 65, 100])
                ids = [rng.randrange(vocabulary) for _ in range(length)]
                prompts.append((ids, engine.prefill(ids)))
            ids, prompt = rng.choice(prompts[-4:])
            running[engine.add_row(prompt)] = History(ids, prompt, rng.choice(lengths))
        if not engine.rows:
            continue
        order = list(engine.rows)
        tokens = {row: rng.randrange(vocabulary) for row in running}
        logits = engine.decode([tokens[row] for row in order])
        for row, logits_V in zip(order, logits.clone(), strict=True):
            running[row].tokens.append(tokens[row])
            running[row].logits.append(logits_V)
        logits.fill_(torch.nan)  # the caller's to overwrite
        over = [
            row
            for row in running
            if len(running[row].tokens) == running[row].until or rng.random() < 0.01
        ]
        engine.remove_rows(over)
        ended += [running.pop(row) for row in over]
    return [*ended, *running.values()]


@torch.inference_mode()
def assert_alone(engine: DecodeEngine, history: History) -> None:
    prompt = engine.prefill(history.ids)
    assert torch.equal(prompt.logits_V, history.prompt.logits_V)
    row = engine.add_row(prompt)
    for number, (token, wanted) in enumerate(zip(history.tokens, history.logits, strict=True)):
        found = engine.decode([token])[0]
        assert torch.equal(found, wanted), f"token {number} after {len(history.ids)}"
    engine.remove_rows([row])


SCHEDULES = {
    ("llama", True, "native"): torch.bfloat16, ("llama", True, "int8"): torch.bfloat16, ("llama-mha-tied", False, "native"): torch.float32,
    ("llama-mqa", True, "native"): None, ("qwen2", False, "native"): None,
    ("qwen3", True, "native"): None, ("wide", False, "native"): torch.float32,
    ("llama", True, "transformers"): torch.float32, ("llama", True, "recorded"): None,
    ("llama-mqa", False, "graph"): torch.float32, ("qwen2", True, "graph"): None,
    ("qwen3", True, "recorded"): torch.float32, ("wide", False, "graph"): None,
}  # fmt: skip
"""Families and what computes them: in the usual run with one number format at most, with the others as soak tests."""


@pytest.mark.parametrize(
    ("name", "adapter", "kind", "dtype"),
    [
        pytest.param(*case, dtype, marks=[] if dtype is usual else pytest.mark.soak(suite="engine"))
        for case, usual in SCHEDULES.items()
        for dtype in (torch.float32, torch.bfloat16)
    ],
    indirect=["kind"],
)
def test_random_schedules_leave_every_row_its_bits(name, adapter, kind, dtype):
    weights = weights_of(name, dtype, adapter=adapter)
    engine = engine_of(weights, kind)
    many = kind in ("native", "int8")
    lengths = [1, 2, 7, 20, 63, 64, 65, 70] if many else [1, 2, 7, 20, 33]
    histories = scheduled(engine, len(name), 110 if many else 50, 14, lengths, 96)
    longest = sorted(histories, key=lambda each: -len(each.tokens))[:2]
    assert len(longest[0].tokens) > (64 if many else 30)
    fresh = engine_of(weights, kind)
    for history in [*longest, *random.Random(1).sample(histories, 6)]:
        assert_alone(fresh, history)
    assert_alone(engine_of(weights, kind), longest[0])


@by("native", "graph")
def test_a_row_that_is_longer_by_far_changes_no_other(kind):
    """Its keys and values are read to its own length, those of the others beyond theirs."""
    dtype = torch.bfloat16 if kind == "native" else torch.float32
    weights = weights_of("wide", dtype, adapter=False)
    engine = engine_of(weights, kind)
    with torch.inference_mode():
        prompt = engine.prefill(text(9).tolist())
        long = engine.add_row(prompt)
        for token in text(100).tolist():
            engine.decode([token])
        assert long.written == 100
        history = History(text(20).tolist(), engine.prefill(text(20).tolist()), 0)
        late = engine.add_row(history.prompt)
        for token in text(50).tolist():
            tokens = [token if row is late else 5 for row in engine.rows]
            history.tokens.append(token)
            history.logits.append(engine.decode(tokens)[engine.rows.index(late)].clone())
    assert_alone(engine_of(weights, kind), history)


@pytest.fixture
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("threads", "dtype"), [(1, torch.bfloat16), (2, torch.float32)], indirect=["threads"]
)
def test_a_row_is_the_same_beside_none_and_beside_a_hundred(threads, dtype):
    """Several threads have other ways for many rows than for few, and how many there are depends on timing."""
    weights = ServedModel(made(BROAD, dtype=dtype))
    ids, tokens = text(9).tolist(), text(6).tolist()

    def first_of(rows: int) -> Tensor:
        engine = engine_of(weights, "native")
        prompt = engine.prefill(ids)
        for _ in range(rows):
            engine.add_row(prompt)
        return torch.stack([engine.decode([token] * rows)[0].clone() for token in tokens])

    alone = first_of(1)
    for rows in (65, 101):
        assert torch.equal(first_of(rows), alone), rows


@by("native", "recorded")
def test_members_that_are_cancelled_leave_the_others_their_bits(kind):
    sampler = sampler_of(weights_of("llama"), kind)
    asked = [request(draw, 10 + draw, 3, max_tokens=30) for draw in range(3)]
    wanted = [generated(sampler, [each]) for each in asked]

    async def cancelled_after(turns: int) -> list[Any]:
        tasks = [asyncio.ensure_future(sampler.generate(each)) for each in asked]
        for _ in range(turns):
            await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    for turns in (0, 1, 12):
        first, second, third = asyncio.run(cancelled_after(turns))
        assert isinstance(second, asyncio.CancelledError)
        assert [list(first), list(third)] == [wanted[0], wanted[2]], turns


# What is not a number


@torch.inference_mode()
@by("native", "recorded", "transformers")
def test_a_row_that_is_no_numbers_spoils_no_other_and_a_reset_forgets_it(kind):
    model = family("llama")
    model.model.embed_tokens.weight.data[50] = torch.nan
    weights = ServedModel(model)
    engine = engine_of(weights, kind)
    ids = text(9).tolist()
    prompt = engine.prefill(ids)
    rows = [engine.add_row(prompt) for _ in range(3)]
    history = History(ids, prompt, 0)
    for token in (7, 8, 50, 9, 10):
        found = engine.decode([token if row is rows[1] else 7 for row in engine.rows])
        history.tokens.append(7)
        history.logits.append(found[engine.rows.index(rows[2])].clone())
        spoiled = not torch.isfinite(found[engine.rows.index(rows[1])]).any()
        assert spoiled == (len(history.tokens) > 2)
    engine.reset()
    assert engine.rows == []
    again = [engine.add_row(engine.prefill(ids)) for _ in range(3)]
    for number in range(5):
        found = engine.decode([7] * 3)
        assert all(torch.equal(found[row], history.logits[number]) for row in range(len(again)))
    assert_alone(engine_of(weights, kind), history)


# New weights


def assert_serves(sampler: TorchSampler, weights: ServedWeights) -> None:
    """Log-probabilities are those of transformers with the weights as they are now; also of a group's first token."""
    asked = [request(0, 20, 3, 20), request(1, 5, 1, 20, temperature=0.0)]
    found = generated(sampler, asked)
    prompts = [asked[0].prompt_ids] * 3 + [asked[1].prompt_ids]
    for ids, each in zip(prompts, found, strict=True):
        with weights.acting():
            logits = own_logits(weights.model, torch.tensor([*ids, *each.token_ids]))
        tail = logits[len(ids) - 1 : -1].log_softmax(-1)
        wanted = tail[range(len(each.token_ids)), list(each.token_ids)]
        assert each.logprobs == pytest.approx(wanted.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "adapter", "kind"),
    [
        ("llama-biases", True, "native"),
        ("qwen3", True, "recorded"),
        ("llama-mha-tied", False, "native"),
        ("llama-mha-tied", False, "graph"),
    ],
    indirect=["kind"],
)
def test_new_weights_are_served_at_once_and_entirely(tmp_path, name, adapter, kind):
    weights = weights_of(name, adapter=adapter)
    sampler = sampler_of(weights, kind)
    assert_serves(sampler, weights)
    asked = [request(0, 20, 3, 20)]
    seen = [generated(sampler, asked)]
    for version in (1, 2):
        tensors = changed(weights, version)
        asyncio.run(sampler.load(published(weights, tensors, tmp_path, version)))
        for key, value in weights.tensors().items():
            assert torch.equal(value, tensors[key])
        assert_serves(sampler, weights)
        seen.append(generated(sampler, asked))
    assert len({tuple(each.logprobs for each in found) for found in seen}) == 3


@pytest.mark.parametrize(
    ("adapter", "part", "kind"),
    [
        (True, "up_proj.lora_B", "native"),
        (True, "up_proj.lora_B", "recorded"),
        (False, "q_proj", "native"),
        (False, "norm", "graph"),
    ],
    indirect=["kind"],
)
def test_new_weights_that_are_no_numbers_are_reported_and_good_ones_serve_again(
    tmp_path, adapter, part, kind
):
    """Not the weights from before under the new name, and not a mixture."""
    weights = weights_of("llama", adapter=adapter)
    sampler = sampler_of(weights, kind)
    good = changed(weights, 1)
    broken = {
        key: torch.full_like(value, torch.nan) if part in key else value
        for key, value in good.items()
    }
    asyncio.run(sampler.load(published(weights, broken, tmp_path, 1)))
    with pytest.raises(NonFiniteError, match="policy version 1"):
        generated(sampler, [request(0, 20, 3, 20)])
    asyncio.run(sampler.load(published(weights, good, tmp_path, 2)))
    assert_serves(sampler, weights)
