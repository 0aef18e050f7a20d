"""What does not go with the backend unsloth, and what goes with it alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from groupwise.core.errors import ConfigError
from groupwise.engine.sampler.vllm.own import ServerSpec
from groupwise.training.config import load_config
from groupwise.training.sft_config import load_sft_config

BACKEND = "model.backend=unsloth"


@pytest.mark.parametrize("load", [load_config, load_sft_config])
@pytest.mark.parametrize(("word", "told"), [
    ("lora=null", "the backend unsloth trains adapters"), ("lora.dropout=0.1", "Unsloth computes without its own kernels"),
    ("run.server=http://127.0.0.1:1", "one process samples and learns"), ("run.processes=2", "one process samples and learns"),
    ("distributed.learners=2", "one process samples and learns"), ("model.load_in_8bit=true",
    "load_in_4bit and load_in_8bit are both true"), ("model.mesh=[1,1]", "no effect with the backend unsloth"),
])  # fmt: skip
def test_what_cannot_take_effect_is_refused(load: Any, word: str, told: str) -> None:
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
    assert four not in wanted.arguments(1)
    assert four in replace(wanted, in_4bit=True).arguments(1)
