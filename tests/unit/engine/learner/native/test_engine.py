"""The native engine equals transformers' modules with torch's graph: every family, every layer, every number.

The reference computes each row by itself, prompt included (`whole_rows`).
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from groupwise.algorithms.registry import make
from groupwise.core.types import MaskedTokens, Row
from groupwise.engine.learner.engine import TransformersEngine
from groupwise.engine.learner.native.engine import NativeEngine
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedAdapter
from groupwise.engine.models.config import LoraConfig
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import new_lora_config
from tests.unit.engine.models.native.families import SMALL

SIZES: dict[str, Any] = {**SMALL, "vocab_size": 102}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama with biases": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
}
EVERYTHING = make("grpo", {"beta": 0.2, "entropy_coef": 0.1}).loss_spec()
TOTALS = {"policy": 40.0, "kl": 30.0, "entropy": 20.0, "sft": 50.0}
TARGETS = [
    ("q_proj",), ("k_proj", "o_proj"), ("v_proj", "down_proj"), ("gate_proj",), ("up_proj",),
]  # fmt: skip


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0).add_(torch.randn(parameter.shape) * 0.05)
    return model


def adapter(model: Any, targets: Any = "all-linear", *, start: bool = False) -> TrainedAdapter:
    settings = new_lora_config(LoraConfig(r=4, alpha=8, target_modules=targets))
    adapted = AdaptedModel(model, settings)
    given = None
    if start:
        adapted.add("given", trainable=False, seed=2)
        given = {name: value + 0.1 for name, value in adapted.parameters("given").items()}
    weights = TrainedAdapter(adapted, seed=1, start=given)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in weights.parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return weights


def learner(weights: Any, folder: Path, *, native: bool, **settings: Any) -> TorchLearner:
    plain = {} if native else {"packing": False, "gradient_checkpointing": True}
    made = TorchLearner(
        weights,
        run="r",
        publish_folder=folder,
        seed=1,
        native=native,
        **{"max_tokens_per_microbatch": 4096, **plain, **settings},
    )
    assert isinstance(made._engine, NativeEngine if native else TransformersEngine)
    return made


def rows_of(groups: tuple[int, ...] = (1, 4, 1, 6, 3), below: int = 100) -> list[Row]:
    """Groups of these sizes with completions of many lengths, one token too; masks, temperatures and withheld tokens."""
    rng = random.Random(0)
    rows: list[Row] = []
    for number, size in enumerate(groups):
        prompt = tuple(rng.randrange(2, below) for _ in range(2 + 5 * number))
        for member in range(size):
            length = rng.choice((1, 2, 5, 9, 13, 30))
            barred = (MaskedTokens(0, length // 2, (1, 7)),) if member % 2 and length > 1 else ()
            rows.append(
                Row(
                    prompt_ids=prompt,
                    completion_ids=tuple(rng.randrange(8, below) for _ in range(length)),
                    mask=tuple(int(rng.random() < 0.8) for _ in range(length)),
                    sampling_logprobs=tuple(rng.uniform(-6, -4) for _ in range(length)),
                    advantage=rng.uniform(-1, 1),
                    scale=1 / length,
                    temperature=rng.choice((0.7, 1.0, 1.3)),
                    reference_logprobs=tuple(rng.uniform(-6, -4) for _ in range(length)),
                    withheld=barred,
                )
            )
    return rows


async def learned(made: TorchLearner, rows: list[Row], loss: Any = EVERYTHING):
    """Sums and gradients, which are discarded."""
    sums = await made.forward_backward(rows, loss, TOTALS)
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in made._parameters.items()
        if parameter.grad is not None
    }
    made.discard()
    return sums, gradients


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], rounding: float = 3e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        size = float(expected.abs().max())
        assert size > 0, name
        torch.testing.assert_close(found[name], expected, rtol=rounding, atol=rounding * size)


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family(tmp_path, family):
    weights, rows = adapter(model_of(family)), rows_of()
    plain, native = (learner(weights, tmp_path, native=native) for native in (False, True))
    sums, wanted = await learned(plain, rows)
    found_sums, found = await learned(native, rows)
    close(found, wanted)
    assert found_sums == pytest.approx(sums, rel=1e-5)
    for role in ("policy", "reference"):
        pairs = zip(
            await native.logprobs(rows, role), await plain.logprobs(rows, role), strict=True
        )
        assert all(mine == pytest.approx(theirs, rel=1e-5, abs=1e-5) for mine, theirs in pairs)
    assert await native.logprobs(rows) != await native.logprobs(rows, "reference")


@pytest.mark.parametrize("native", [False, True], ids=["plain", "native"])
async def test_the_gradients_pass_also_has_the_log_probabilities_outside_the_masks(
    tmp_path, native, monkeypatch
):
    """With the same gradient, and without another pass through the layers."""
    weights, rows = adapter(model_of("qwen3")), rows_of()
    made = learner(weights, tmp_path, native=native)
    _, wanted = await learned(made, rows)
    everywhere = await made.logprobs(rows)
    assert any(0 in row.mask for row in rows)
    passes: list[bool] = []
    acting = made._engine.acting

    def counted(role: Any, *, gradient: bool) -> Any:
        passes.append(gradient)
        return acting(role, gradient=gradient)

    monkeypatch.setattr(made._engine, "acting", counted)
    monkeypatch.setattr(
        made, "forward_backward", made.forward_backward_logprobs
    )  # for `learned`, which keeps the gradients
    (_, found), gradients = await learned(made, rows)
    assert len(passes) == len(made._engine.cut(rows, made._max_tokens, gradient=True))
    assert all(passes)
    for values, expected in zip(found, everywhere, strict=True):
        assert values == pytest.approx(expected, rel=1e-5, abs=1e-5)
    close(gradients, wanted)


@pytest.mark.parametrize("targets", TARGETS)
async def test_any_layers_may_have_an_adapter(tmp_path, targets):
    weights, rows = adapter(model_of("qwen3"), targets), rows_of((1, 4))
    _, wanted = await learned(learner(weights, tmp_path, native=False), rows)
    _, found = await learned(learner(weights, tmp_path, native=True), rows)
    close(found, wanted)


async def test_the_reference_may_be_an_adapter_that_the_run_started_from(tmp_path):
    weights, rows = adapter(model_of("llama"), start=True), rows_of((1, 4))
    plain, native = (learner(weights, tmp_path, native=native) for native in (False, True))
    wanted = await plain.logprobs(rows, "reference")
    found = await native.logprobs(rows, "reference")
    pairs = zip(found, wanted, strict=True)
    assert all(mine == pytest.approx(theirs, rel=1e-5, abs=1e-5) for mine, theirs in pairs)
    assert found != await native.logprobs(rows, "policy")


async def test_a_rounded_model_is_nearer_to_the_exact_one_than_by_its_modules(tmp_path):
    rows = [replace(row, withheld=()) for row in rows_of((6, 6, 6))]

    async def made(dtype: torch.dtype, native: bool) -> tuple[Tensor, Tensor]:
        weights = adapter(model_of("llama").to(dtype))
        each = learner(weights, tmp_path, native=native)
        _, gradients = await learned(each, rows, make("dr_grpo", {}).loss_spec())
        logprobs = [value for row in await each.logprobs(rows) for value in row]
        return torch.cat([g.double().flatten() for g in gradients.values()]), torch.tensor(logprobs)

    exact, exact_logprobs = await made(torch.float32, native=False)
    theirs, their_logprobs = await made(torch.bfloat16, native=False)
    ours, our_logprobs = await made(torch.bfloat16, native=True)
    cosines = [float(torch.cosine_similarity(each, exact, 0)) for each in (theirs, ours)]
    assert cosines[1] > max(0.98, cosines[0])
    gaps = [float((x - exact_logprobs).abs().mean()) for x in (their_logprobs, our_logprobs)]
    assert gaps[1] < gaps[0]


@pytest.mark.parametrize(
    "native", [True, pytest.param(False, marks=pytest.mark.soak(suite="engine"))]
)
async def test_a_gradient_by_two_threads_is_the_same_to_the_bit_each_time(native, tmp_path):
    """Many rows behind one prompt: all of them give a gradient to its last place."""
    made = learner(adapter(model_of("llama")), tmp_path, native=native)
    rows = rows_of((80, 100))
    torch.set_num_threads(2)
    try:
        first, *others = [(await learned(made, rows))[1] for _ in range(4)]
    finally:
        torch.set_num_threads(1)
    for name, gradient in first.items():
        assert all(torch.equal(gradient, other[name]) for other in others), name
