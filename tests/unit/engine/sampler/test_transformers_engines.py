"""Models with a state: decoded token by token they give the logits of a whole pass, and they learn by whole rows."""

from importlib.metadata import version
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    Mamba2Config,
    NemotronHConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    RwkvConfig,
)

from groupwise.core.errors import ModelError
from groupwise.core.types import Row
from groupwise.engine.learner.forward import Paths, choose_paths
from groupwise.engine.models.config import LoraConfig
from groupwise.engine.models.decoder import Decoder
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.sampler.transformers_engines import RowEngine
from groupwise.engine.sampler.weights import ServedModel
from tests.unit.engine.models.native.families import SMALL, made, randomised

HEADS: dict[str, Any] = {"head_dim": 8}
LAYERS: dict[str, Any] = {"layer_types": ["mamba", "attention"]}
MIXED = ["linear_attention", "full_attention"]
GATED: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": MIXED, "head_dim": 8,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16,
}  # fmt: skip
CONFIGS = {
    "qwen3_next": lambda: Qwen3NextConfig(
        **SMALL, **GATED, **EXPERTS, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(**SMALL, **GATED),
    "falcon_h1": lambda: FalconH1Config(**SMALL, **MAMBA, mamba_d_ssm=64, **HEADS),
    "bamba": lambda: BambaConfig(**SMALL, **MAMBA, attn_layer_indices=[1]),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **SMALL, **MAMBA, layer_types=["mamba", "attention"], num_local_experts=4,
        num_experts_per_tok=2, shared_intermediate_size=16,
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **SMALL, **HEADS, **LAYERS, mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8,
        n_groups=1, chunk_size=16,
    ),
    "jamba": lambda: JambaConfig(
        **SMALL, **EXPERTS, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False
    ),
    "lfm2": lambda: Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
    "mamba2": lambda: Mamba2Config(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8,
        n_groups=1, chunk_size=16,
    ),
}  # fmt: skip
SINCE = {"nemotron_h": "5.23", "mamba2": "5.24"}
"""The first releases of transformers whose configuration and forward pass of a model are as in most others."""
IDS = torch.randint(3, 96, (30,), generator=torch.Generator().manual_seed(0))
START = 9


def row(prompt: int, end: int) -> Row:
    count = end - prompt
    completion = tuple(IDS[prompt:end].tolist())
    return Row(tuple(IDS[:prompt].tolist()), completion, (1,) * count, (0.0,) * count, 0.0, 1.0)


@pytest.fixture(params=CONFIGS)
def model(request) -> Any:
    if version("transformers") < SINCE.get(request.param, ""):
        pytest.skip("older releases compute it in another way")
    return made(CONFIGS[request.param](), noise=0.05).requires_grad_(False)


@torch.no_grad()
def test_rows_of_one_prompt_are_decoded_as_in_a_whole_pass(model):
    wanted = model(input_ids=IDS[None], use_cache=False).logits[0].float()
    within: Any = {"atol": 2e-5 * float(wanted.abs().max()), "rtol": 1e-4}
    engine = RowEngine(ServedModel(model))
    torch.testing.assert_close(torch.cat([*engine.prompt_logits(IDS.tolist())]), wanted, **within)
    prompt = engine.prefill(IDS[:START].tolist())
    torch.testing.assert_close(prompt.logits_V, wanted[START - 1], **within)
    _, other = engine.add_row(prompt), engine.add_row(prompt)
    for place in range(START, 20):
        found = engine.decode([int(IDS[place]), 5])[0]
        torch.testing.assert_close(found, wanted[place], **within)
    engine.remove_rows([other])
    torch.testing.assert_close(engine.decode([int(IDS[20])])[0], wanted[20], **within)
    engine.free_cache()
    assert engine.rows == []
    engine.add_row(prompt)
    torch.testing.assert_close(engine.decode([int(IDS[START])])[0], wanted[START], **within)


def test_gradients_are_those_of_a_plain_pass(model):
    """Rows of one prompt and of another, padded at their ends."""
    adapted = AdaptedModel(model, new_lora_config(LoraConfig(r=2, alpha=4)))
    adapted.add("policy", trainable=True, seed=0)
    randomised(adapted, "policy")
    parameters = [*adapted.parameters("policy").values()]
    decoder = Decoder(model)
    paths = choose_paths(decoder, packing=True, sharing=True)
    assert paths == Paths(packing=False, sharing=False)
    rows = [row(START, 20), row(START, 14), row(5, 30)]
    with adapted.using("policy"):
        plain = [
            model(
                input_ids=IDS[None, : len(each.prompt_ids) + len(each.completion_ids)],
                use_cache=False,
            )
            .logits[0, len(each.prompt_ids) - 1 : -1]
            .log_softmax(-1)
            .gather(-1, torch.tensor(each.completion_ids)[:, None])
            .sum()
            for each in rows
        ]
        batches = paths.cut(rows, 1000)
        ours = [paths.forward(decoder, batch).logprobs_BT.sum() for batch in batches]
    assert sorted(index for batch in batches for index in batch.indices) == [0, 1, 2]
    wanted, found = (
        torch.autograd.grad(torch.stack(each).sum(), parameters) for each in (plain, ours)
    )
    for name, mine, theirs in zip(adapted.parameters("policy"), found, wanted, strict=True):
        most = float(theirs.abs().max())
        assert most > 0, name
        torch.testing.assert_close(mine, theirs, atol=1e-4 * most, rtol=1e-3, msg=name)


def test_a_forward_pass_of_another_kind_is_refused():
    config = RwkvConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32
    )
    with pytest.raises(ModelError, match=r"rwkv.*no keys"):
        Decoder(AutoModelForCausalLM.from_config(config).eval())


def test_a_layer_whose_weight_is_used_without_it_has_no_adapter():
    base = made(CONFIGS["jamba"]())
    config = new_lora_config(LoraConfig(target_modules=("q_proj", "dt_proj")))
    with pytest.raises(ModelError, match="dt_proj has no effect"):
        AdaptedModel(base, config).add("policy", trainable=True, seed=0)
