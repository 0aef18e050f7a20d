"""The weights that a sampler serves, from whatever folder they come."""

import asyncio
import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from groupwise.algorithms.registry import make
from groupwise.core.errors import ModelError
from groupwise.core.types import GroupRequest, OptimiserParams, Row, SamplingParams
from groupwise.engine.learner import gradient_flow
from groupwise.engine.learner.gradient_flow import trained_slopes
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedAdapter, TrainedModel
from groupwise.engine.models.config import LoraConfig
from groupwise.engine.models.lora import AdaptedModel, fingerprint
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.models.tiny import tiny_model
from groupwise.engine.sampler.weights import ServedAdapter, ServedModel
from groupwise.training import placement
from groupwise.training.assembly.start import start_serving
from groupwise.training.config import load_config
from groupwise.training.evaluation import evaluate


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
    layout = placement.choose_layout(config, 16)
    request = GroupRequest(0, (40, 41), (1, 2, 3), SamplingParams(9))

    async def draw():
        parts = await start_serving(config, layout, weights)
        return await parts.sampler.generate(request)

    return [each.token_ids for each in asyncio.run(draw())]


def test_without_weights_the_policy_that_a_run_would_start_from_is_served(adapter):
    given = str(adapter)
    assert drawn(adapter=given) == drawn(adapter) != drawn()
    labels = [
        evaluate._find_policy("base", load_config({"model": {"name": "tiny", **more}}).config).label
        for more in ({}, {"adapter": given})
    ]
    assert labels == ["base", "base+adapter"]
    with pytest.raises(ModelError, match="/nope"):
        drawn(adapter="/nope")


ROWS = [Row((40, 41), (50, 51, 52), (1, 1, 1), (-4.0,) * 3, 1.0, 1.0)]


def learnt(weights, folder, rate):
    """One update, published."""
    learner = TorchLearner(
        weights, run="r", publish_folder=folder, max_tokens_per_microbatch=999, seed=0
    )

    async def step():
        await learner.forward_backward(ROWS, make("dr_grpo", {}).loss_spec(), {"policy": 1.0})
        assert (await learner.update(OptimiserParams(learning_rate=rate))).applied
        return await learner.publish(1)

    return asyncio.run(step())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_weights_are_published_once_in_the_format_of_the_sampler(tmp_path, dtype):
    """Tied embeddings stay tied, and the sampler finds the fingerprint of the learner."""
    trained, format = TrainedModel(tiny_model(), dtype=dtype), getattr(torch, dtype)
    policy = learnt(trained, tmp_path, rate=0.01)
    published = load_file(f"{policy.path}/model.safetensors")
    assert "lm_head.weight" not in published
    assert {each.dtype for each in published.values()} == {format}
    served = ServedModel(cast("Any", tiny_model()).to(format))
    served.read(Path(policy.path))
    assert fingerprint(served.tensors()) == policy.fingerprint
    reloaded: Any = AutoModelForCausalLM.from_pretrained(policy.path, dtype="auto")
    assert reloaded.dtype == format
    assert trained.model.dtype == torch.float32
    ids = torch.tensor([[40, 41, 50]])
    with torch.no_grad():
        wanted = copy.deepcopy(trained.model).to(format)(ids).logits
        untrained = cast("Any", tiny_model()).to(format)
        assert not torch.allclose(wanted, untrained(ids).logits, atol=1e-3)
        for model in (served.model, reloaded):
            assert torch.equal(model(ids).logits, wanted)
            head: Any = model.get_output_embeddings()
            assert head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(("rate", "tokens"), [(1e-5, 1 << 13), (1e-4, 1 << 12)])
def test_a_small_step_on_a_rounded_base_acts_in_learner_and_sampler(
    tmp_path, monkeypatch, rate, tokens
):
    """The factors are float32 on both sides, and both compute with products that add before they round."""
    base: Any = tiny_model(hidden_size=64)
    model = AdaptedModel(base.to(torch.bfloat16), new_lora_config(LoraConfig(r=16, alpha=32)))
    trained, served = TrainedAdapter(model, seed=1), ServedAdapter(model)
    before = {name: value.detach().clone() for name, value in trained.parameters().items()}
    served.read(Path(learnt(trained, tmp_path, rate).path))
    for name, value in served.tensors().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, trained.parameters()[name])
        if ".lora_B." in name:
            moved = (value - before[name]).abs().max()
            assert float(moved) == pytest.approx(rate, rel=1e-3)
    monkeypatch.setattr(gradient_flow, "TOKENS", tokens)  # so many for narrow layers: noise is 1 %
    assert all(0.95 < each.value < 1.05 for each in trained_slopes(trained, rate))
