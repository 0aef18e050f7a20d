"""Turns a quantised GGUF file into a folder that transformers loads like any other model."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import decoders
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from groupwise.core.errors import ModelError
from groupwise.engine.models.transformers_log import quiet


class _Progress(io.StringIO):
    """Receives the progress bars of transformers, and calls `show` with the share that is done."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show

    def write(self, text: str) -> int:
        """Show the percentage in `text`, if there is one."""
        if found := re.search(r"(\d{1,3})%", text):
            self._show(f"step 2 of 4: {found[1]} % of the weights dequantised")
        return len(text)


SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""What GGUF calls a special token, and what transformers calls it."""


def write_dequantised(
    gguf: Path, folder: Path, show: Callable[[str], None] = lambda stage: None
) -> None:
    """Dequantise a GGUF file into a folder of safetensors, config and tokenizer. `show` gets each stage in words."""
    if not gguf.is_file():
        raise ModelError(f"There is no file {str(gguf)!r}.")
    show("step 1 of 4: reading the file")
    with quiet(), contextlib.redirect_stderr(_Progress(show)):
        try:
            model = AutoModelForCausalLM.from_pretrained(
                str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
            )
            show("step 3 of 4: reading the tokenizer")
            tokenizer = _tokenizer(gguf)
        except (ValueError, OSError, KeyError, ImportError) as error:
            raise ModelError(f"{gguf} cannot be read as a GGUF model: {error}") from error
        show("step 4 of 4: writing the model")
        # The loaded model is still marked as GGUF, and could not be saved.
        config = {**model.config.to_dict(), "_name_or_path": ""}
        config.pop("quantization_config", None)
        clean = type(model)(type(model.config)(**config))
        clean.load_state_dict(model.state_dict())
        clean.tie_weights()
        clean.generation_config = model.generation_config or GenerationConfig()
        clean.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _tokenizer(gguf: Path) -> Any:
    """The file's tokenizer, the same from every release of transformers that is allowed.

    transformers 5.15 takes no special tokens from the file, so that <|im_start|> would end a completion, and decodes tokens that stand for
    bytes by a chain of steps, in which llguidance does not recognise them.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    fields = GGUFReader(gguf).fields
    for theirs, ours in SPECIAL_TOKENS.items():
        if field := fields.get(f"tokenizer.ggml.{theirs}_token_id"):
            token = tokenizer.convert_ids_to_tokens(int(field.contents()))
            setattr(tokenizer, f"{ours}_token", token)
    if fields["tokenizer.ggml.model"].contents() == "gpt2":  # a BPE of bytes
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.clean_up_tokenization_spaces = False  # each decoding would warn that it is ignored
    return tokenizer
