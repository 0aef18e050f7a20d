"""Turns a quantised GGUF file into a folder that transformers loads like any other model."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from groupwise.core.errors import ModelError
from groupwise.engine.models.transformers_log import quiet


def write_dequantised(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF file into a folder of safetensors, config and tokenizer."""
    if not gguf.is_file():
        raise ModelError(f"There is no file {str(gguf)!r}.")
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        try:
            model = AutoModelForCausalLM.from_pretrained(
                str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
            )
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        except (ValueError, OSError, KeyError, ImportError) as error:
            raise ModelError(f"{gguf} cannot be read as a GGUF model: {error}") from error
        # The loaded model is still marked as GGUF, and could not be saved.
        config = {**model.config.to_dict(), "_name_or_path": ""}
        config.pop("quantization_config", None)
        clean = type(model)(type(model.config)(**config))
        clean.load_state_dict(model.state_dict())
        clean.tie_weights()
        clean.generation_config = model.generation_config or GenerationConfig()
        clean.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
