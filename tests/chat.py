"""Tokenizers for tests of chat templates: one token for each character and each marker of the templates, no hub."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).with_name("fixtures") / "chat_templates"
SPECIAL = {
    "chatml": ("<|im_start|>", "<|im_end|>"), "marked": ("<|im_start|>", "<|im_end|>"), "qwen3": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<bos>", "<start_of_turn>", "<end_of_turn>"), "mistral": ("<s>", "</s>"),
    "deepseek_r1": ("<s>", "<|User|>", "<|Assistant|>", "</s>"),
}  # fmt: skip
BOS = {"llama3": "<|begin_of_text|>", "gemma": "<bos>", "mistral": "<s>", "deepseek_r1": "<s>"}


def chat_tokenizer(family: str) -> Any:
    """A tokenizer over single characters with the template and special tokens of a family; its last one ends a turn."""
    special = SPECIAL[family]
    vocabulary = {token: number for number, token in enumerate(string.printable)}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="\x0c"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    plain.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token=special[-1],
        pad_token=special[-1],
        bos_token=BOS.get(family),
        additional_special_tokens=list(special),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text().rstrip("\n")
    return tokenizer
