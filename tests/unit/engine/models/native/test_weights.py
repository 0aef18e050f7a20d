"""Which models are computed natively, which are refused and why, and what their own modules keep."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config

from groupwise.core.errors import ModelError
from groupwise.core.types import GroupRequest, SamplingParams
from groupwise.engine.models.native import products
from groupwise.engine.models.native.forward import plain_logits
from groupwise.engine.models.native.weights import NativeModel, native_model, refusal
from groupwise.engine.models.tiny import tiny_model, tiny_tokenizer
from groupwise.engine.sampler.queued import DecodeLayout
from groupwise.engine.sampler.torch_sampler import TorchSampler
from groupwise.engine.sampler.weights import ServedModel
from tests.unit.engine.models.native.families import SMALL, adapted, family, made, own_logits, text

ROPE: dict[str, Any] = {"rope_theta": 1000.0}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0, **ROPE}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "gemma3": (Gemma3TextConfig, {"head_dim": 8}, "text is none of llama, mistral, qwen2, qwen3"),
    "gelu": (LlamaConfig, {"hidden_act": "gelu"}, "its activation is gelu, not silu"),
    "qwen2-window": (Qwen2Config, WINDOW, "a window of the text"),
    "dynamic": (LlamaConfig, {"rope_parameters": DYNAMIC}, r"\(dynamic\) depend on the length"),
}


def greedy(sampler: TorchSampler) -> tuple[int, ...]:
    request = GroupRequest(0, (5, 6, 7, 8), (1,), SamplingParams(12, temperature=0.0))
    return asyncio.run(sampler.generate(request))[0].token_ids


def sampler(model: Any, **how: Any) -> TorchSampler:
    return TorchSampler(ServedModel(model), tiny_tokenizer(), DecodeLayout(8, 32), **how)


# Refused


def test_int8_is_refused_where_it_cannot_be(monkeypatch):
    with pytest.raises(ModelError, match="computed by transformers"):
        sampler(tiny_model(), int8=True, native=False)
    monkeypatch.setattr(products, "HAS_VNNI", False)
    with pytest.raises(ModelError, match="AVX512_VNNI"):
        sampler(family("llama"), int8=True)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_model_is_sampled_by_transformers_and_the_log_says_why(name, caplog):
    config, numbers, reason = REFUSED[name]
    model = AutoModelForCausalLM.from_config(config(**SMALL, **numbers)).eval()
    with pytest.raises(ValueError, match=reason):
        NativeModel(model)
    with caplog.at_level(logging.WARNING):
        found = greedy(sampler(model))
    ours = [record for record in caplog.records if record.name.startswith("groupwise")]
    assert [record.levelname for record in ours] == ["WARNING"]
    assert "by transformers' modules" in caplog.text
    assert str(refusal(model)) in caplog.text
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        wanted = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
        )  # fmt: skip
    assert found == tuple(wanted[0, 4:].tolist())


def test_heads_that_are_turned_in_part_are_refused():
    """Of these families transformers itself cannot compute them, so there is nothing to compare with."""
    rope = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5, **ROPE}
    model = made(LlamaConfig(**SMALL, rope_parameters=rope))
    with pytest.raises(ValueError, match="a part of each head"):
        NativeModel(model)


@pytest.mark.parametrize("lie", ["scaled", "no_rope"])
def test_a_model_that_is_not_what_it_says_is_found_out(lie, monkeypatch, caplog):
    """Code of its own under a known name: the logits of its weights are not its logits."""
    model = family("llama", dtype=torch.bfloat16)
    if lie == "scaled":
        head = model.lm_head.forward
        monkeypatch.setattr(model.lm_head, "forward", lambda x: head(x) * 0.6)
    else:
        turn = model.model.rotary_emb.forward
        monkeypatch.setattr(
            model.model.rotary_emb, "forward", lambda x, position_ids: turn(x, position_ids * 0)
        )
    assert refusal(model) is None
    with pytest.raises(ValueError, match="its logits differ"):
        NativeModel(model)
    with caplog.at_level(logging.WARNING):
        found = greedy(sampler(model))
    assert "its logits differ" in caplog.text
    assert found == greedy(sampler(model, native=False))


class Scaled(nn.Linear):
    """What it multiplies with is not its weight, as in layers of models in eight bits."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5


@pytest.mark.parametrize("place", ["lm_head", "model.layers.0.self_attn.q_proj"])
def test_every_layer_must_be_a_plain_matrix_in_the_models_format(place):
    """Those below an adapter, too."""
    for change, reason in (
        (lambda layer: setattr(layer, "__class__", Scaled), "Scaled"),
        (lambda layer: layer.to(torch.float16), "float16"),
    ):
        model = family("llama")
        change(model.get_submodule(place))
        assert reason in str(refusal(model))
        assert reason in str(refusal(adapted(model).base))


# What the modules keep


@pytest.mark.parametrize("name", ["llama-biases", "llama-mha-tied"])
def test_the_models_own_modules_continue_and_share_memory(name):
    model, untouched = family(name), family(name)
    native = NativeModel(model)
    native.pack()
    ids_N = text(40)
    assert torch.equal(own_logits(model, ids_N), own_logits(untouched, ids_N))
    wanted = untouched.state_dict()
    assert all(torch.equal(value, wanted[key]) for key, value in model.state_dict().items())
    memory = [linear.weight_OI.untyped_storage().data_ptr() for linear in native.products]
    shared = ("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
    for path, module in model.named_modules():
        if path.endswith(shared):
            assert module.weight.untyped_storage().data_ptr() in memory, path
    for path, module in model.named_modules():
        if path.endswith(shared[:-1]):
            module.weight.data.mul_(1.5)
            untouched.get_submodule(path).weight.data.mul_(1.5)
    with torch.no_grad():
        found = plain_logits(native, ids_N)
    wanted_NV = own_logits(untouched, ids_N)
    torch.testing.assert_close(
        found, wanted_NV, rtol=1e-5, atol=1e-5 * float(wanted_NV.abs().max())
    )


@pytest.mark.filterwarnings("ignore")
def test_a_native_model_is_still_written_whole(tmp_path):
    """Some of its tensors are now parts of larger ones, which files of tensors do not take."""
    model = family("llama-biases")
    NativeModel(model)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    wanted = family("llama-biases").state_dict()
    assert reloaded.state_dict().keys() == wanted.keys()
    assert all(torch.equal(value, wanted[key]) for key, value in reloaded.state_dict().items())


# Made once


def test_it_takes_the_weights_as_they_are_now():
    model = family("llama")
    old = native_model(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05)
    new = native_model(model, anew=True)
    assert new is not None
    assert new is old, "recordings read its memory"
    assert native_model(model) is new
    wanted = own_logits(model, text(40))
    with torch.no_grad():
        found = plain_logits(new, text(40))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
