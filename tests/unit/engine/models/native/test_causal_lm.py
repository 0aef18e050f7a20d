"""Our own modules of native families are transformers', but for the time that these take to import."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from groupwise.core.errors import ModelError
from groupwise.core.types import LossSpec
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedAdapter
from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.files import FULL_WEIGHTS
from groupwise.engine.models.load import load_base, load_model
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.models.native.causal_lm import CausalLM
from groupwise.engine.models.native.facts import head_size
from tests.unit.engine.learner.native.test_engine import rows_of
from tests.unit.engine.models.native.families import FAMILIES, family, in_own_modules

OLD = {"rope_parameters": None, "dtype": None, "layer_types": None, "rms_norm_eps": None}
"""Keys that older files have under other names, or not at all."""
IDS = torch.arange(3, 40)[None]


def model_of(folder: Path, name: str, **changes) -> ModelConfig:
    """A stored model; keys of its config.json that are changed to None are left out."""
    family(name).save_pretrained(folder)
    said = {**json.loads((folder / "config.json").read_text()), **changes}
    said = {key: value for key, value in said.items() if value is not None or key not in changes}
    (folder / "config.json").write_text(json.dumps(said))
    return ModelConfig(name=str(folder))


@pytest.mark.parametrize(("name", "changes"), [
    *((name, {}) for name in FAMILIES if name != "llama-yarn"), ("llama", {**OLD, "rope_theta": 500.0, "eos_token_id": None}),
    ("mistral", {"head_dim": None, "eos_token_id": None}), ("qwen2", {**OLD, "eos_token_id": None}), ("qwen3", {"eos_token_id": [3, 5]}),
    ("llama", {**OLD, "rope_scaling": {"type": "linear", "factor": 2.0}}),
])  # fmt: skip
def test_it_computes_what_transformers_does(name, changes, tmp_path):
    config = model_of(tmp_path, name, **changes)
    ours: Any = load_base(config, "float32")
    theirs: Any = load_model(config, "float32")
    assert isinstance(ours, CausalLM)
    wanted = theirs.state_dict()
    assert [*ours.state_dict()] == [*wanted]
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in ours.state_dict().items())
    assert [path for path, _ in ours.named_modules() if not path.endswith("act_fn")] == [
        path for path, _ in theirs.named_modules() if not path.endswith("act_fn")
    ]
    frequencies = [each.get_decoder().rotary_emb.inv_freq for each in (ours, theirs)]
    assert torch.equal(*frequencies)
    assert head_size(ours.config) == head_size(theirs.config)
    for key in ("eos_token_id", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours.config, key) == getattr(theirs.config, key), key
    logits = [model.requires_grad_(True)(input_ids=IDS).logits for model in (ours, theirs)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    for each in logits:
        each.square().mean().backward()
    gradients = [dict(model.named_parameters()) for model in (ours, theirs)]
    for key, parameter in gradients[0].items():
        torch.testing.assert_close(parameter.grad, gradients[1][key].grad, atol=1e-5, rtol=1e-4)


def test_models_that_our_modules_do_not_support_are_left_to_transformers(tmp_path):
    """Another kind of positions, a stored head that the config ties, and files that lack something: it knows, or says what is wrong."""
    assert not isinstance(load_base(model_of(tmp_path / "yarn", "llama-yarn"), "float32"), CausalLM)
    config = model_of(tmp_path / "tied", "llama-mha-tied")
    file = tmp_path / "tied" / FULL_WEIGHTS
    stored = load_file(file)
    save_file({**stored, "lm_head.weight": torch.ones(96, 32)}, file)
    base = load_base(config, "float32")
    assert not isinstance(base, CausalLM)
    assert torch.equal(
        base.get_output_embeddings().weight,
        load_model(config, "float32").get_output_embeddings().weight,
    )
    del stored["model.norm.weight"]
    save_file(stored, file)
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        load_base(config, "float32")


def rows_adapter(model, **settings) -> TrainedAdapter:
    """An adapter that changes something."""
    weights = TrainedAdapter(
        AdaptedModel(model, new_lora_config(LoraConfig(r=4, **settings))), seed=1
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in weights.parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return weights


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(
    "settings", [{"dropout": 0.5}, {"target_modules": ("q_proj", "up_proj", "lm_head")}], ids=str
)
async def test_settings_that_the_native_engine_lacks_are_learnt_by_modules(
    settings, recomputed, tmp_path
):
    """The results equal those of transformers' modules, to rounding."""
    found = []
    for change in (in_own_modules, lambda model: model):
        weights = rows_adapter(change(family("qwen3")), **settings)
        learner = TorchLearner(
            weights,
            run="r",
            publish_folder=tmp_path,
            seed=1,
            max_tokens_per_microbatch=4096,
            gradient_checkpointing=recomputed,
        )
        torch.manual_seed(3)  # of dropout
        sums = await learner.forward_backward(rows_of(below=90), LossSpec("sft"), {"sft": 40.0})
        found.append((sums, {name: each.grad for name, each in weights.parameters().items()}))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)
