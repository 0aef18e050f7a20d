"""Which models Tunix gets, and which are refused because Tunix would compute another model or read other numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from groupwise.core.errors import ModelError, UsageError
from groupwise.engine.backends.tunix import fits
from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.load import text_config_of
from tests.tunix_models import model_of

Tensors = dict[str, torch.Tensor]
FAMILIES = ("gemma3", "gemma3-all-heads", "gemma3-pictures", "llama", "qwen2", "qwen3")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


def text_of(family: str, **other: Any) -> dict[str, Any]:
    return {**text_config_of(ModelConfig(name=str(model_of(family)))), **other}


def layers_of(family: str, *parts: str) -> list[str]:
    inside = "model.language_model" if family == "gemma3-pictures" else "model"
    return [f"{inside}.layers.{number}.{part}" for number in range(2) for part in parts]


KEYS, VALUES = "self_attn.k_proj", "self_attn.v_proj"


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_of_transformers_fit_and_fused_layers_are_adapted_together(
    family: str,
) -> None:
    text = text_of(family)
    fits.check_description(text)
    fits.check_mesh(text, (2, 2))
    fits.check_files(model_of(family), text)
    every = ["self_attn.q_proj", KEYS, VALUES, "self_attn.o_proj", "mlp.up_proj", "mlp.gate_proj", "mlp.down_proj"]  # fmt: skip
    fused = {"gemma3-all-heads": [every[0], KEYS, VALUES]}.get(family, [KEYS, VALUES])
    for together in (every, ["mlp.up_proj"], fused):
        fits.check_layers(text, layers_of(family, *together))
    if family.startswith("gemma3"):
        for apart in (layers_of(family, KEYS), layers_of(family, *fused)[:-1]):
            with pytest.raises(ModelError, match="take all or none"):
                fits.check_layers(text, apart)
    else:
        fits.check_layers(text, layers_of(family, KEYS))
    with pytest.raises(ModelError, match="lm_head"):
        fits.check_layers(text, ["lm_head"])


LAYERS = [*["sliding_attention"] * 5, "full_attention", "full_attention"]


@pytest.mark.parametrize(
    ("family", "key", "value", "tunix"),
    [
        ("gemma3", "tie_word_embeddings", False, "has True alone"),
        ("gemma3", "final_logit_softcapping", 30.0, "has None alone"),
        ("gemma3", "rms_norm_eps", 1e-5, "has 1e-06 alone"),
        ("gemma3", "use_bidirectional_attention", True, "has False alone"),
        ("gemma3", "query_pre_attn_scalar", 24, r"has 16 \(head_dim\) and 8"),
        ("gemma3", "layer_types", LAYERS, r"\[6\] .* 'full_attention'.* has sliding_attention there"),
        ("llama", "hidden_act", "gelu", "has 'silu' alone"),
        ("llama", "attention_bias", True, "has False alone"),
        ("qwen2", "layer_types", LAYERS, r"\[0\] .* has full_attention there"),
        ("qwen3", "attention_bias", True, "has False alone"),
        ("llama", "rope_parameters", {"rope_type": "llama3", "rope_theta": 1.0}, r"scaled \(llama3\)"),
        ("llama", "rope_parameters", {"rope_theta": 1.0, "partial_rotary_factor": 0.5}, "has 1 alone"),
        ("llama", "model_type", "gpt_neox", "no models of the type 'gpt_neox'; it has: gemma3_text"),
    ],
)  # fmt: skip
def test_models_that_tunix_does_not_compute_are_refused(
    family: str, key: str, value: Any, tunix: str
) -> None:
    with pytest.raises(ModelError, match=tunix) as error:
        fits.check_description(text_of(family, **{key: value}))
    assert "Leave model.backend out" in str(error.value)


def test_devices_divide_the_model() -> None:
    for family, mesh, other, told in (
        ("llama", (1, 4), {}, r"tp of 4 .* num_key_value_heads is 2\."),
        ("gemma3", (3, 1), {}, r"fsdp of 3 .* hidden_size is 32\."),
        ("llama", (1, 2), {"num_key_value_heads": 1}, "num_key_value_heads is 1"),
    ):
        with pytest.raises(UsageError, match=told):
            fits.check_mesh(text_of(family, **other), mesh)
    fits.check_mesh(text_of("gemma3", num_key_value_heads=1), (1, 2))  # it keeps that head whole


def changed_copy(family: str, folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    shutil.copytree(model_of(family), folder / "model")
    file = folder / "model" / fits.MODEL
    save_file(change(load_file(file)), file)
    return folder / "model"


def without(tensors: Tensors) -> Tensors:
    return {name: each for name, each in tensors.items() if name != UP}


def in_halves(tensors: Tensors, norms: torch.dtype) -> Tensors:
    return {name: each.to(norms if "norm" in name else torch.bfloat16) for name, each in tensors.items()}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "change", "told"),
    [
        ("gemma3", without, f"1 weights are missing in .*: {UP}"),
        ("gemma3", lambda all_: {**all_, UP: all_[UP][:-1]}, r"up_proj.weight .* shape \[47, 32\], .* \[48, 32\]"),
        ("gemma3", lambda all_: in_halves(all_, torch.float32), "several formats"),
        ("gemma3", lambda all_: {**all_, NORM: all_[NORM].to(torch.int32)}, "in the format I32"),
        ("llama", lambda all_: {**all_, f"{UP[:-6]}bias": all_[NORM].clone()}, "has no place for: model.layers.1.mlp.up_proj.bias"),
        ("qwen3", lambda all_: {**all_, HEAD: all_[EMBEDDING] + 1}, "lm_head.weight that is not its embedding"),
        ("gemma3-pictures", lambda all_: {**all_, "vision_tower.embeddings.position_ids": torch.arange(4)}, r"several formats \(I64 first"),
        ("gemma3-pictures", lambda all_: {f"language_model.{NORM}": all_[f"language_model.{NORM}"]}, "weights are missing"),
    ],
)  # fmt: skip
def test_files_that_would_be_misread_are_refused(
    family: str, change: Callable[[Tensors], Tensors], told: str, tmp_path: Path
) -> None:
    folder = changed_copy(family, tmp_path, change)
    with pytest.raises(ModelError, match=told):
        fits.check_files(folder, text_of(family))


def test_other_files(tmp_path: Path) -> None:
    folder, text = changed_copy("llama", tmp_path, dict), text_of("llama")
    model, other = folder / fits.MODEL, folder / "consolidated.safetensors"

    def refused(told: str) -> None:
        with pytest.raises(ModelError, match=told):
            fits.check_files(folder, text)

    shutil.copy(model, other)
    refused(r"consolidated.safetensors .* Move that file away")
    other.unlink()
    model.write_bytes(model.read_bytes()[:-8])
    refused("shorter than its header says")
