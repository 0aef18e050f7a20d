"""Logits of the native forward pass against transformers' own, for each family, number format and adapter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.native.forward import Adapter, plain_logits
from groupwise.engine.models.native.weights import NativeModel
from tests.unit.engine.models.native.families import FAMILIES, adapted, family, own_logits, text

LENGTHS = (1, 2, 40, 130)
TARGETS: dict[str, Any] = {
    "all": "all-linear", "queries": ("q_proj",), "attention": ("q_proj", "v_proj", "o_proj"), "mlp": ("up_proj", "down_proj"),
}  # fmt: skip


def native(model: Any) -> NativeModel:
    found = NativeModel(model)
    found.pack()
    return found


def products(model: NativeModel, adapter: AdaptedModel) -> Adapter:
    factors = adapter.low_rank("policy")
    return [linear.low_rank(factors) for linear in model.products[:-1]]


@torch.no_grad()
def assert_equal(model: NativeModel, wanted: Any, adapter: Adapter | None = None) -> None:
    for length in LENGTHS:
        ids_N = text(length)
        wanted_NV = own_logits(wanted, ids_N)
        scale = float(wanted_NV.abs().max())
        torch.testing.assert_close(
            plain_logits(model, ids_N, adapter), wanted_NV, rtol=1e-5, atol=1e-5 * scale
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name):
    model, untouched = family(name), family(name)
    assert_equal(native(model), untouched)
    ids_N = text(40)
    other_N = ids_N.clone()
    other_N[5] = 3 + (ids_N[5] + 1) % 90
    moved = own_logits(untouched, other_N)[-1] - own_logits(untouched, ids_N)[-1]
    assert float(moved.abs().max()) > 1e-2, "attention does not matter, so nothing is compared"
    turned = own_logits(untouched, ids_N.roll(-1))[-2] - own_logits(untouched, ids_N)[-1]
    assert float(turned.abs().max()) > 1e-3, "positions do not matter, so nothing is compared"


@pytest.mark.parametrize(
    ("name", "targets"),
    [("llama", "all"), ("llama-biases", "queries"), ("qwen3", "attention"), ("qwen3", "mlp")],
)
def test_an_adapter_changes_them_as_it_changes_the_modules(name, targets):
    adapter = adapted(family(name), TARGETS[targets])
    model = native(adapter.base)
    with torch.no_grad(), adapter.using("policy") as acting:
        assert_equal(model, acting, products(model, adapter))
        changed = own_logits(acting, text(40))
    with torch.no_grad(), adapter.using(None) as plain:
        assert_equal(model, plain)
        assert float((own_logits(plain, text(40)) - changed).abs().max()) > 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_in_bfloat16_they_are_as_near_to_float32_as_transformers(name):
    """Of the same rounded weights, computed in float32; a tenth more is allowed, for chance."""
    model = family(name, dtype=torch.bfloat16)
    exact = family(name, dtype=torch.bfloat16).float()
    ours, theirs = 0.0, 0.0
    found = native(model)
    for seed in range(3):
        ids_N = text(60, seed=seed)
        wanted = own_logits(exact, ids_N).log_softmax(-1)
        theirs += float((own_logits(model, ids_N).log_softmax(-1) - wanted).abs().mean())
        with torch.no_grad():
            logits = plain_logits(found, ids_N)
        ours += float((logits.log_softmax(-1) - wanted).abs().mean())
        assert abs(float((logits - own_logits(exact, ids_N)).mean())) < 0.05, "they are shifted"
    assert ours < 1.1 * theirs


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.soak(suite="engine"))]
)
def test_logits_of_the_bundled_model(dtype):
    from groupwise.engine.models.load import load_model
    from groupwise.engine.models.tokenizer import load_tokenizer

    config = ModelConfig(name="smollm2-135m-instruct")
    tokenizer = load_tokenizer(config)
    ids_N = torch.tensor(
        tokenizer("The capital of Italy is Rome. The capital of France is")["input_ids"]
    )
    exact: Any = load_model(config, "float32")
    wanted_NV = own_logits(exact, ids_N)
    model = exact if dtype == torch.float32 else load_model(config, "bfloat16")
    theirs_NV = own_logits(model, ids_N)
    with torch.no_grad():
        ours_NV = plain_logits(NativeModel(model), ids_N)
    if dtype == torch.float32:
        torch.testing.assert_close(
            ours_NV, wanted_NV, rtol=1e-5, atol=1e-5 * float(wanted_NV.abs().max())
        )
        assert tokenizer.decode(int(ours_NV[-1].argmax())) == " Paris"
    else:
        gap = (ours_NV.log_softmax(-1) - wanted_NV.log_softmax(-1)).abs().mean()
        own_gap = (theirs_NV.log_softmax(-1) - wanted_NV.log_softmax(-1)).abs().mean()
        assert float(gap) < float(own_gap)
