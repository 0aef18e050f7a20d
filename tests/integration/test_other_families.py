"""Runs with models that transformers' modules compute: mixtures of experts, and what has other layers than attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GenerationConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

import groupwise
from benchmarks.learning import step_values
from groupwise.core.errors import ConfigError
from groupwise.engine.models.tiny import CHARACTERS, SPECIAL, tiny_tokenizer
from tests.fake_vllm_server import VllmServer
from tests.integration.toy_run import TOY, config, crash_at, go_on, ratios_of, what_must_be_equal
from tests.rotation import rotating_params

SIZES: dict[str, Any] = {
    "vocab_size": len(SPECIAL) + len(CHARACTERS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": True,
}  # fmt: skip
HEADS: dict[str, Any] = {"head_dim": 8}
QWEN: dict[str, Any] = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 24}
GATED: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 24,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16,
}  # fmt: skip
CONFIGS = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **QWEN, **HEADS),
    "mixtral": lambda: MixtralConfig(**SIZES, num_experts_per_tok=2, num_local_experts=4),
    "qwen3_next": lambda: Qwen3NextConfig(**SIZES, **QWEN, **GATED, **HEADS),
    "falcon_h1": lambda: FalconH1Config(**SIZES, **MAMBA, **HEADS),
}
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def model_of(family: str, folder: Path) -> str:
    """A model of this family with the tiny model's characters, written into a folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]())
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def settings(family: str, folder: Path, lora: Any, **training: Any) -> dict[str, Any]:
    made = config(folder / "runs", **training)
    made["model"] = {"name": model_of(family, folder / "model"), "dtype": "float32"}
    made["lora"] = lora
    return made


CASES: dict[str, tuple[str, Any]] = {
    "qwen3_moe": ("qwen3_moe", {"r": 4, "alpha": 64, **EXPERTS}),
    "full": ("qwen3_moe", None),
    "mixtral": ("mixtral", {"r": 4, "alpha": 64, **EXPERTS}),
    "attention": ("qwen3_moe", {"r": 4, "alpha": 64}),
    "qwen3_next": ("qwen3_next", {"r": 4, "alpha": 64, **EXPERTS}),
    "falcon_h1": ("falcon_h1", {"r": 4, "alpha": 64}),
}
EACH = ["qwen3_moe", "full", *rotating_params([*CASES][2:], 4, "engine", str)]
"""CI also runs one of the others, which the commit hash chooses."""


@pytest.mark.parametrize("case", EACH)
def test_it_learns_what_it_sampled(tmp_path, case):
    """Sampler and learner agree, though one computes token by token, and the other whole rows."""
    family, lora = CASES[case]
    many = {"max_steps": 20, "prompts_per_step": 4, "num_generations": 8}
    rate = 0.01 if lora is None else 0.02
    made = settings(family, tmp_path, lora, **many, learning_rate=rate)
    assert groupwise.rl(made, TOY).exit_code == 0
    rewards = step_values(tmp_path / "runs/toy", "reward")
    assert sum(rewards[-4:]) > 1.5 * sum(rewards[:4])
    # Float32's rounding: most tokens agree to its last bits, and all do in float64, to 1e-12 (lab notes, 2026-11-29). Weights as large as
    # these multiply a few tokens' rounding by up to a thousand.
    ratios = sorted(map(abs, ratios_of(tmp_path / "runs/toy")))
    assert ratios[len(ratios) // 2] < 2e-6
    assert ratios[-1] < 5e-4


@pytest.mark.parametrize("lora", [{"r": 4, "alpha": 64, **EXPERTS}, None], ids=["adapter", "full"])
def test_a_run_that_is_killed_is_resumed_to_the_bit(tmp_path, lora):
    whole, killed = (settings("qwen3_moe", tmp_path / name, lora) for name in ("whole", "killed"))
    killed["model"] = whole["model"]
    assert groupwise.rl(whole, TOY).exit_code == 0
    assert crash_at(30, lambda: groupwise.rl(killed, TOY)) == 17
    go_on(killed)
    found, wanted = (what_must_be_equal(tmp_path / n / "runs/toy") for n in ("killed", "whole"))
    assert found == wanted


def test_a_server_of_vllm_gets_adapters_of_experts_in_its_own_files(tmp_path):
    given = settings("qwen3_moe", tmp_path, {"r": 4, "alpha": 64, **EXPERTS})
    with VllmServer(
        folder=tmp_path / "model", name="moe", logprobs_mode="processed_logprobs"
    ) as server:
        given["sampler"] = {
            "engine": "vllm", "url": server.url, "served_model": "moe", "max_completion_length": 6, "logprob_tolerance": 1e-3
        }  # fmt: skip
        assert groupwise.rl(given, TOY).exit_code == 0
        loaded = [Path(body["lora_path"]) for body in server.bodies("/load_lora_adapter")]
        assert len(loaded) > 2
        assert server.adapters == []
    assert {folder.name.startswith("groupwise-toy-v") for folder in loaded} == {True}
    assert not any(folder.parent.exists() for folder in loaded)
    given["sampler"]["engine"] = "sglang"
    with pytest.raises(ConfigError, match="only vLLM is given adapters of experts"):
        groupwise.rl(given, TOY)
