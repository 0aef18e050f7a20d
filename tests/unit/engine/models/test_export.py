"""Adapters merged into their base: the same model, once rounded, and nothing else of the base changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from groupwise.core.errors import ModelError
from groupwise.engine.models.bundled import tiny_folder
from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.export import write_merged, write_whole
from groupwise.engine.models.files import read_model_tensors
from groupwise.engine.models.load import load_model
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.models.tiny import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft
BASE = ModelConfig(name="tiny")
IDS = torch.tensor([[7, 8, 9, 30, 31, 4, 50, 66]])


def adapter(folder: Path, *, size: float = 0.3, **settings: Any) -> torch.Tensor:
    """Write an adapter; returns the logits with it, computed in float32."""
    folder.mkdir()
    adapted = AdaptedModel(load_model(BASE, "float32"), new_lora_config(LoraConfig(**settings)))
    adapted.add("policy", trainable=True, seed=1)
    if size:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in adapted.parameters("policy").values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    adapted.save("policy", folder)
    with torch.no_grad(), adapted.using("policy") as acting:
        return acting(IDS).logits


def merged(tmp_path: Path, **settings: Any) -> Path:
    into = tmp_path / "merged"
    into.mkdir()
    write_merged(BASE, tmp_path / "adapter", into, **settings)
    return into


def logits_of(folder: Path, **arguments: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, **arguments)
    with torch.no_grad():
        return model.eval()(IDS).logits


def test_unmerged_merged_and_reloaded_by_peft_give_the_same_logits(tmp_path):
    expected = adapter(tmp_path / "adapter", r=4, alpha=12)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32)
    plain = logits_of(tiny_folder(), dtype=torch.float32)
    with torch.no_grad():
        by_peft = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(IDS).logits
    folder = merged(tmp_path)
    found = logits_of(folder)
    assert "lm_head.weight" not in read_model_tensors(folder)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert (expected - plain).abs().max() > 0.1, "the adapter does something"
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, by_peft, atol=1e-5, rtol=1e-5)


def test_only_layers_with_an_adapter_are_changed_and_the_base_stays(tmp_path):
    before = {name: t.clone() for name, t in read_model_tensors(tiny_folder()).items()}
    adapter(tmp_path / "adapter", r=2, alpha=4, target_modules=("q_proj",))
    found = read_model_tensors(merged(tmp_path))
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, before[name])}
    assert changed == {f"model.layers.{n}.self_attn.q_proj.weight" for n in (0, 1)}
    assert all(torch.equal(t, before[n]) for n, t in read_model_tensors(tiny_folder()).items())


def test_an_adapter_that_changes_nothing_gives_the_base_to_the_bit(tmp_path):
    adapter(tmp_path / "adapter", size=0.0, r=4)
    found, base = read_model_tensors(merged(tmp_path)), read_model_tensors(tiny_folder())
    assert found.keys() == base.keys()
    assert all(torch.equal(found[name], base[name]) for name in base)


def test_the_sum_is_rounded_once(tmp_path):
    adapter(tmp_path / "adapter", r=4, alpha=8)
    exact = read_model_tensors(merged(tmp_path, dtype="float32"))
    rounded_folder = tmp_path / "rounded"
    rounded_folder.mkdir()
    written = write_merged(BASE, tmp_path / "adapter", rounded_folder, "bfloat16")
    assert written.dtype == "bfloat16"
    rounded = read_model_tensors(rounded_folder)
    assert all(torch.equal(rounded[n], exact[n].to(torch.bfloat16)) for n in exact)
    assert json.loads((rounded_folder / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.filterwarnings("ignore:.*a tied layer is part:UserWarning")  # in making it
def test_an_adapter_on_a_tied_head_leaves_the_embeddings_alone(tmp_path):
    targets = ("q_proj", "lm_head")
    expected = adapter(tmp_path / "adapter", r=4, alpha=8, target_modules=targets)
    folder = merged(tmp_path)
    found = read_model_tensors(folder)
    embeddings = "model.embed_tokens.weight"
    assert torch.equal(found[embeddings], read_model_tensors(tiny_folder())[embeddings])
    assert not torch.equal(found["lm_head.weight"], found[embeddings])
    torch.testing.assert_close(logits_of(folder), expected, atol=1e-5, rtol=1e-5)


def test_an_adapter_of_another_base_is_refused(tmp_path):
    adapter(tmp_path / "adapter", r=4)
    other = tmp_path / "other"
    tiny_model(hidden_size=32).save_pretrained(other)
    with pytest.raises(ModelError, match="do not match"):
        write_merged(ModelConfig(name=str(other)), tmp_path / "adapter", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_whole_model_is_written_in_another_format(tmp_path):
    assert write_whole(tiny_folder(), tmp_path / "whole", "float16").dtype == "float16"
    base = read_model_tensors(tiny_folder())
    found = read_model_tensors(tmp_path / "whole")
    assert all(torch.equal(found[name], base[name].half()) for name in base)


@pytest.mark.parametrize(("size", "least", "most"), [(0.3, 0.98, 1.02), (3e-4, -0.5, 0.5)])
def test_it_says_how_much_of_the_change_survived_the_rounding(tmp_path, size, least, most):
    """Entries of about 0.02 are told apart from steps of 0.0001 in bfloat16; a change far below is mostly lost."""
    base = tmp_path / "base"
    write_whole(tiny_folder(), base, "bfloat16")
    adapter(tmp_path / "adapter", r=4, size=size)
    for dtype in ("auto", "float32"):
        into = tmp_path / dtype
        into.mkdir()
        written = write_merged(ModelConfig(name=str(base)), tmp_path / "adapter", into, dtype)
        assert str(base) not in (into / "config.json").read_text()
        if dtype == "auto":
            assert written.dtype == "bfloat16"
            assert least < written.kept_share < most
        else:
            assert written.kept_share == pytest.approx(1.0, abs=1e-3)
    keeping = tmp_path / "keeping"
    keeping.mkdir()
    given = ModelConfig(name=str(base))
    written = write_merged(given, tmp_path / "adapter", keeping, keeping=0.95)
    assert written.dtype == ("bfloat16" if least > 0 else "float32")
    found = {str(t.dtype) for t in read_model_tensors(keeping).values()}
    assert (found, written.kept_share > 0.95) == ({f"torch.{written.dtype}"}, True)
