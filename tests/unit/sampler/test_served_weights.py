"""The weights that a sampler serves, from whatever folder they come."""

import asyncio

import pytest
import torch

from groupwise import build
from groupwise.config import load_config
from groupwise.errors import ModelError
from groupwise.models.config import LoraConfig
from groupwise.models.lora import AdaptedModel, new_lora_config
from groupwise.models.tiny import tiny_model
from groupwise.sampler.weights import ServedModel
from groupwise.types import GroupRequest, SamplingParams


def test_a_model_in_several_files_is_served(tmp_path):
    tiny_model(seed=9).save_pretrained(tmp_path, max_shard_size="10KB")
    served = ServedModel(tiny_model())
    served.read(tmp_path)
    wanted = dict(tiny_model(seed=9).named_parameters())
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in served.tensors().items())


def test_a_damaged_model_is_explained(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        ServedModel(tiny_model()).read(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        ServedModel(tiny_model()).read(tmp_path)


@pytest.fixture
def adapter(tmp_path):
    model = AdaptedModel(tiny_model(), new_lora_config(LoraConfig(r=4, alpha=8)))
    model.add("policy", trainable=True, seed=0)
    with torch.no_grad():
        for parameter in model.parameters("policy").values():
            parameter.fill_(0.3)
    model.save("policy", tmp_path)
    return tmp_path


def drawn(weights=None, **model):
    config = load_config({"model": {"name": "tiny", **model}, "run": {"threads": 1}}).config
    layout = build.choose_layout(config, 16)
    sampler, _ = build.serving_sampler(config, layout, weights)
    request = GroupRequest(0, (40, 41), (1, 2, 3), SamplingParams(9))
    return [each.token_ids for each in asyncio.run(sampler.generate(request))]


def test_without_weights_the_policy_that_a_run_would_start_from_is_served(adapter):
    given = str(adapter)
    assert drawn(adapter=given) == drawn(adapter) != drawn()
    labels = [
        build.serving_label(load_config({"model": {"name": "tiny", **more}}).config)
        for more in ({}, {"adapter": given})
    ]
    assert labels == ["base", "base+adapter"]
    with pytest.raises(ModelError, match="there is no folder /nope"):
        drawn(adapter="/nope")


def test_an_adapter_of_another_base_is_warned_about(adapter, caplog):
    described = (adapter / "adapter_config.json").read_text()
    (adapter / "adapter_config.json").write_text(
        described.replace('"base_model_name_or_path": ""', '"base_model_name_or_path": "org/x"')
    )
    drawn(adapter)
    assert "names org/x as its base" in caplog.text
