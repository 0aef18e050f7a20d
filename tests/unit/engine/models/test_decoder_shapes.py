"""The parameter counts computed from a config.json equal those of transformers' model, or none are given."""

import json
from pathlib import Path

import pytest

from groupwise.engine.models import load, plan
from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.decoder_shapes import read_decoder
from tests.unit.engine.models.native.families import FAMILIES

NAMES = ("q_proj", "mlp.down_proj", "model.layers.1.self_attn.v_proj")
LORAS = (None, LoraConfig(r=3), LoraConfig(r=99, rslora=True, dropout=0.1, target_modules=NAMES))
OLD = {"rope_parameters": None, "dtype": None, "layer_types": None}
"""Keys that files had under other names, or not at all."""


def model_of(folder: Path, family: str, **changes) -> ModelConfig:
    """A folder with a config.json alone; what is changed to None it does not have."""
    FAMILIES[family]().save_pretrained(folder)
    said = {**json.loads((folder / "config.json").read_text()), **changes}
    said = {key: value for key, value in said.items() if value is not None or key not in changes}
    (folder / "config.json").write_text(json.dumps(said))
    return ModelConfig(name=str(folder))


@pytest.mark.parametrize("lora", LORAS)
@pytest.mark.parametrize(("family", "changes"), [
    *((family, {}) for family in FAMILIES if family != "llama-yarn"),
    ("llama", {**OLD, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("llama-128", {"dtype": "bfloat16", "attention_bias": None, "mlp_bias": None}),
    ("qwen2", {"torch_dtype": "bfloat16", **OLD, "sliding_window": 64}), ("mistral", {"head_dim": None, "torch_dtype": "float16", **OLD}),
])  # fmt: skip
def test_it_counts_what_a_model_without_storage_has(family, changes, lora, tmp_path, monkeypatch):
    model = model_of(tmp_path, family, **changes)

    def told():
        return (
            plan.count_parameters(model, lora),
            plan.vocabulary(model),
            plan.prompt_room(model, 8),
        )

    monkeypatch.setattr(plan, "_text_config", None)
    by_arithmetic = told()
    monkeypatch.undo()
    monkeypatch.setattr(plan, "read_decoder", lambda config: None)
    monkeypatch.setattr(load, "read_config", lambda config: None)
    assert by_arithmetic == told()


UNUSUAL = {
    "model_type": "gemma2", "hidden_act": "gelu", "num_key_value_heads": None, "vocab_size": "96", "tie_word_embeddings": None,
    "hidden_size": 33, "head_dim": 3, "pad_token_id": 96, "attention_bias": 1, "dtype": "float64", "text_config": {},
    "quantization_config": {}, "auto_map": {}, "partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "llama3", "factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize(("family", "changes"), [
    ("llama-yarn", {}), ("qwen3", {"head_dim": None}), ("mistral", {"sliding_window": 4096}), ("qwen2", {"use_sliding_window": True}),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("llama", {"rope_scaling": {"rope_type": "dynamic"}, "rope_parameters": None}),
    ("llama", {"dtype": "float32", "torch_dtype": "bfloat16"}), *(("llama", {key: value}) for key, value in UNUSUAL.items()),
])  # fmt: skip
def test_it_says_nothing_of_a_model_that_may_be_another_one(family, changes, tmp_path):
    model = model_of(tmp_path, family, **changes)
    assert read_decoder(model) is None
    assert "hidden_act" not in changes or not plan.count_parameters(model, None).native


def test_it_says_nothing_of_remote_code_other_layers_or_a_given_adapter(tmp_path):
    model = model_of(tmp_path, "llama")
    assert read_decoder(model.model_copy(update={"trust_remote_code": True})) is None
    found = read_decoder(model)
    for name in ("lm_head", "embed_tokens", "proj", "self_attn"):
        assert found.counts(model, LoraConfig(target_modules=("q_proj", name))) is None
    assert found.counts(model.model_copy(update={"adapter": "a"}), LoraConfig()) is None
    (tmp_path / "config.json").write_text("{")
    assert read_decoder(model) is None


def test_a_model_of_the_hub_is_asked_for_its_config_alone(tmp_path, monkeypatch):
    model_of(tmp_path, "qwen3")
    files = {("someone/model", "config.json", "v2"): str(tmp_path / "config.json")}
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda *what, revision, **_: files[*what, revision]
    )
    assert read_decoder(ModelConfig(name="someone/model", revision="v2")).longest == 512
