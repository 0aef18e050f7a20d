"""Small random models of the families that Tunix has, in transformers' files."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
LITTLE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "sliding_window": 8}  # fmt: skip
"""The keys that the text config of a Gemma 3 with images has, apart from its vocabulary; all others have their defaults."""


def described(family: str) -> Any:
    """The config of a small model; its positions have another base than the family's default."""
    from transformers import (
        Gemma3Config,
        Gemma3TextConfig,
        LlamaConfig,
        Qwen2Config,
        Qwen3Config,
        SiglipVisionConfig,
    )

    from groupwise.engine.models.tiny import tiny_tokenizer

    shape = {**SHAPE, "vocab_size": len(tiny_tokenizer())}
    match family:
        case "gemma3":
            shape["num_key_value_heads"] = 1  # as Gemma 3 1B
            return Gemma3TextConfig(**shape, sliding_window=8, query_pre_attn_scalar=16)
        case "gemma3-all-heads":
            shape["num_key_value_heads"] = shape["num_attention_heads"]
            return Gemma3TextConfig(**shape, sliding_window=8, query_pre_attn_scalar=8)
        case "gemma3-pictures":
            text = Gemma3TextConfig(**LITTLE, vocab_size=shape["vocab_size"])
            eyes = SiglipVisionConfig(
                hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
            )  # fmt: skip
            return Gemma3Config(text_config=text, vision_config=eyes, mm_tokens_per_image=4)
        case "llama":
            return LlamaConfig(
                **shape, rope_parameters=_positions(5000.0), tie_word_embeddings=False
            )
        case "qwen2":
            del shape["head_dim"]
            return Qwen2Config(
                **shape, rope_parameters=_positions(7000.0), tie_word_embeddings=True
            )
        case "qwen3":
            return Qwen3Config(
                **shape, rope_parameters=_positions(3000.0), tie_word_embeddings=True
            )
    raise AssertionError(family)


def _positions(base: float) -> Any:
    return {"rope_type": "default", "rope_theta": base}


def write_model(family: str, folder: Path, layers: int | None = None) -> Path:
    """Write a random model of a family, with the tiny model's tokenizer; `layers` limits the number of layers."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from groupwise.engine.models.tiny import tiny_tokenizer
    from groupwise.engine.models.transformers_log import quiet

    config = described(family)
    if layers is not None:
        config.num_hidden_layers = layers
        config.layer_types = getattr(config, "layer_types", [])[:layers] or None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # those that begin as nothing would hide a mistake
                torch.nn.init.normal_(parameter, std=0.3)
            elif parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.1)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    with quiet():
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    if family == "gemma3-pictures":
        _say_no_more_than_google(folder / "config.json")
    return folder


def _say_no_more_than_google(file: Path) -> None:
    told = json.loads(file.read_bytes())
    kept = {*LITTLE, "model_type", "vocab_size"}
    told["text_config"] = {key: told["text_config"][key] for key in sorted(kept)}
    del told["tie_word_embeddings"]
    file.write_text(json.dumps(told))


@cache
def model_of(family: str, layers: int | None = None) -> Path:
    """The folder of a small model of a family, made once and shared by all processes."""
    folder = Path(tempfile.mkdtemp(prefix="groupwise-tunix-")) / family
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    return write_model(family, folder, layers)
