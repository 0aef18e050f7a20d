"""What does not go with the backends unsloth and tinker, and what goes with them alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import ConfigError
from groupwise.engine.backends.conflicts import trained_layers
from groupwise.engine.sampler.servers.spawned_server import ServerSpec
from groupwise.training.config import load_config
from groupwise.training.sft_config import load_sft_config

BACKEND = "model.backend=unsloth"


@pytest.mark.parametrize("load", [load_config, load_sft_config])
@pytest.mark.parametrize(("word", "told"), [
    ("lora.target_parameters=[experts.down_proj]", "does not adapt experts"),
    ("lora=null", "the backend unsloth trains adapters"), ("lora.dropout=0.1", "Unsloth computes without its own kernels"),
    ("run.server=http://127.0.0.1:1", "one process samples and learns"), ("run.processes=2", "one process samples and learns"),
    ("distributed.learners=2", "one process samples and learns"), ("model.load_in_8bit=true",
    "load_in_4bit and load_in_8bit are both true"), ("model.mesh=[1,1]", "no effect with the backend unsloth"),
    ("model.dtype=tf32", r"model\.dtype is tf32"),
])  # fmt: skip
def test_settings_that_unsloth_ignores_are_refused(load: Any, word: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load({"model": {"name": "tiny"}}, [BACKEND, "model.load_in_4bit=true", word])


@pytest.mark.parametrize("load", [load_config, load_sft_config])
@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit"])
def test_fewer_bits_are_for_this_backend(load: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is true"):
        load({"model": {"name": "tiny", key: True}})
    assert load({"model": {"name": "tiny", "backend": "unsloth", key: True}}).config


def test_a_vllm_of_its_own_holds_as_many_bits() -> None:
    words = [BACKEND, "sampler.engine=vllm"]
    served = [*words, "sampler.url=http://127.0.0.1:8000"]
    assert load_config({"model": {"name": "tiny"}}, served).config.sampler.urls
    words = [*words, "sampler.vllm_python=/opt/vllm/bin/python"]
    assert load_config({"model": {"name": "tiny"}}, [*words, "model.load_in_4bit=true"])
    with pytest.raises(ConfigError, match="load_in_4bit instead"):
        load_config({"model": {"name": "tiny"}}, [*words, "model.load_in_8bit=true"])
    wanted = ServerSpec(
        python="python",
        location="tiny",
        revision=None,
        name="tiny",
        dtype="bfloat16",
        rank=8,
        longest=64,
        memory=0.5,
        gpus=None,
    )
    four = "--quantization=bitsandbytes"
    assert four not in wanted.arguments(Path("socket"))
    assert four in replace(wanted, in_4bit=True).arguments(Path("socket"))
    precision = "VLLM_FLOAT32_MATMUL_PRECISION"
    assert precision not in wanted.environment(None)
    assert replace(wanted, tf32=True).environment(None)[precision] == "high"


@pytest.mark.parametrize("load", [load_config, load_sft_config])
@pytest.mark.parametrize("word", [
    "lora=null", "lora.alpha=16", "lora.rslora=true", "lora.dropout=0.1", "lora.target_modules=[q_proj]", "model.dtype=tf32",
    "model.revision=main", "model.mesh=[1,1]", "training.packing=false", "training.gradient_checkpointing=true", "run.processes=2",
    "run.server=http://127.0.0.1:1", "run.profile=1", "distributed.learners=2",
])  # fmt: skip
def test_a_tinker_service_decides_how_it_computes(load: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[0].rpartition(".")[2]):
        load({"model": {"name": "tiny", "backend": "tinker"}}, [word])


@pytest.mark.parametrize("word", [
    "sampler.temperature=0.7", "sampler.temperature_schedule={}", "sampler.min_completion_length=2", "sampler.max_num_seqs=8",
    "algorithm.entropy_coef=0.1", "algorithm.entropy_advantage=0.1", "algorithm.top_entropy_quantile=0.5", "sampler.enforce_eager=true",
    "sampler.quantization=int8",
])  # fmt: skip
def test_settings_that_tinker_does_not_support_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[0].rpartition(".")[2]):
        load_config({"model": {"name": "tiny", "backend": "tinker"}}, [word])


def test_a_kl_penalty_of_a_tinker_service_is_to_its_base() -> None:
    model = {"name": "tiny", "backend": "tinker"}
    assert load_config({"model": model}, ["algorithm.beta=0.1"])
    with pytest.raises(ConfigError, match="base alone"):
        load_config({"model": model}, ["algorithm.beta=0.1", "model.adapter=tinker://m/weights/a"])


@pytest.mark.parametrize("key", ["base_url", "api_key_env", "tokenizer"])
def test_a_services_keys_are_for_this_backend(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is 'x'"):
        load_config({"model": {"name": "tiny", key: "x"}})
    assert load_config({"model": {"name": "tiny", "backend": "tinker", key: "x"}})


def test_layers_of_a_tinker_service_are_chosen_by_kind() -> None:
    everything = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "lm_head",
    )
    kinds = ("train_attn", "train_mlp", "train_unembed")
    assert trained_layers("all-linear") == dict(zip(kinds, (True, True, False), strict=True))
    assert trained_layers(everything) == dict.fromkeys(kinds, True)
    assert trained_layers(everything[:4]) == dict(zip(kinds, (True, False, False), strict=True))
    with pytest.raises(ValueError, match="by kind"):
        trained_layers(everything[:3])
