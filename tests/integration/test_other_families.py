"""Runs with models that transformers' modules compute: mixtures of experts, and models with other layers than attention."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
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
from groupwise.core.errors import ConfigError, UsageError
from groupwise.engine.models.tiny import CHARACTERS, SPECIAL, tiny_tokenizer
from groupwise.runs.store import Store
from tests.fake_vllm_server import VllmServer
from tests.forked_zygote import fork_peers
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
    assert ratios[-1] < 1e-3


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


def replaying(folder: Path, server: VllmServer, max_steps: int = 2, **more: Any) -> dict[str, Any]:
    """A run of a mixture of experts whose choices by a server are replayed."""
    given = settings(
        "qwen3_moe", folder, {"r": 4, "alpha": 64, **EXPERTS}, max_steps=max_steps, **more
    )
    given["eval"] = {"before_and_after": False}
    given["sampler"] = {
        "engine": "vllm", "url": server.url, "served_model": "moe", "max_completion_length": 6,
        "logprob_tolerance": 1e-3, "routing_replay": True,
    }  # fmt: skip
    return given


def serving(folder: Path, **more: Any) -> VllmServer:
    model_of("qwen3_moe", folder / "model")
    return VllmServer(
        folder=folder / "model", name="moe", logprobs_mode="processed_logprobs", **more
    )


def with_experts(change: Callable[[int, numpy.ndarray], numpy.ndarray]) -> Callable[[Any], Any]:
    """Changes the experts in an answer to anything but a probe; `change` gets the index of the choice."""

    def spoil(answer: Any) -> Any:
        for number, choice in enumerate(answer["choices"]):
            if len(choice["token_ids"]) < 16:
                file = BytesIO()
                found = numpy.load(BytesIO(b64decode(choice["routed_experts"])))
                numpy.save(file, change(number, found))
                choice["routed_experts"] = b64encode(file.getvalue()).decode()
        return answer

    return spoil


def test_the_learner_uses_the_experts_that_the_server_chose(tmp_path, monkeypatch):
    """So do two that divide the rows."""
    with serving(tmp_path, returns_experts=True) as server:
        assert groupwise.rl(replaying(tmp_path / "right", server), TOY).exit_code == 0
        server.spoil = with_experts(lambda _, found: (found + 1) % 4)
        fork_peers(monkeypatch)
        other = replaying(tmp_path / "other", server, 1) | {"distributed": {"learners": 2}}
        other["run"]["threads"] = 2
        assert groupwise.rl(other, TOY).exit_code == 0
    right, other = (tmp_path / name / "runs/toy" for name in ("right", "other"))
    assert max(step_values(right, "sampling/logprob_gap")) < 1e-4
    assert min(step_values(other, "sampling/logprob_gap")) > 1e-2
    assert {*step_values(right, "sampling/routing_lost")} == {0.0}
    assert {*step_values(other, "sampling/routing_lost")} == {0.0}


def test_wrong_experts_cost_a_rollout_its_choices_alone(tmp_path, caplog):
    """One in four of each kind; the rest of an answer is taken."""
    wrong = {0: lambda found: found * 0, 1: lambda found: found[1:], 2: lambda found: found + 4}
    with serving(tmp_path, returns_experts=True) as server:
        given = replaying(tmp_path, server)
        given["sampler"]["seeded"] = False  # a group is one request
        server.spoil = with_experts(lambda number, found: wrong.get(number, lambda x: x)(found))
        assert groupwise.rl(given, TOY).exit_code == 0
        server.spoil, server.set = None, replace(server.set, returns_experts=False)
        with pytest.raises(UsageError, match="--enable-return-routed-experts"):
            groupwise.rl(given | {"run": {**given["run"], "name": "none"}}, TOY)
    folder = tmp_path / "runs/toy"
    assert {*step_values(folder, "sampling/routing_lost")} == {6.0}
    assert max(step_values(folder, "sampling/logprob_gap")) < 1e-4
    assert sum("returned an expert twice" in text for text in caplog.messages) == 1


def test_choices_of_completions_that_are_trained_again_are_found_after_a_crash(tmp_path):
    """They are another policy's than the learner would choose, so a lost one would be seen in the gap."""
    with serving(tmp_path, returns_experts=True) as server:
        given = replaying(tmp_path, server, 6, learning_rate=1e-9)
        given["data"] = {
            "replay": {
                "mode": "completions", "warmup_entries": 1, "max_share": 0.5, "capacity": 3,
                "success_threshold": 0.0,
            }
        }  # fmt: skip
        server.spoil = with_experts(lambda _, found: (found + 1) % 4)
        assert crash_at(30, lambda: groupwise.rl(given, TOY)) == 17
        go_on(given)
    folder = tmp_path / "runs/toy"
    with Store.open(folder / "run.db", readonly=True) as store:
        (resume,) = store.resumes()
    assert 0 < resume.step < 5
    assert max(step_values(folder, "data/replay_share")[resume.step :]) > 0
    assert {*step_values(folder, "sampling/routing_lost")} == {0.0}
    assert min(step_values(folder, "sampling/logprob_gap")) > 1e-2
    assert 0 < len([*folder.glob("routed_experts/*")]) <= 3
