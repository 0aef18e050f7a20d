"""Tokenizers for tests without the hub: one token for each character and chat marker, and byte-level ones, as published models have."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
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
    """A tokenizer over single characters with a family's template and special tokens; the last special token ends a turn."""
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


def byte_level_tokenizer(merges: Sequence[tuple[str, str]] = ()) -> Any:
    """A byte-level tokenizer with these merges, special tokens, and one added token that is not special."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    plain = Tokenizer(
        models.BPE({text: n for n, text in enumerate(words)}, [*merges], continuing_subword_prefix="", end_of_word_suffix="")
    )  # fmt: skip
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(["<unk>", "<|im_start|>", "<|im_end|>", "<extra>"])
    plain.add_tokens([AddedToken("<think>", normalized=False)])
    return plain


def piece_tokenizer(special: Sequence[str]) -> Any:
    """A tokenizer of pieces, as SentencePiece makes them, with a token for each byte; special tokens are in the vocabulary."""
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", "▁")]
    letters = [*string.ascii_letters, *string.digits, *".,?!<>|_[]/'", "▁", "\n", "é"]
    words = [*special, *(f"<0x{n:02X}>" for n in range(256)), *letters, *("".join(pair) for pair in merges)]  # fmt: skip
    plain = Tokenizer(
        models.BPE({text: n for n, text in enumerate(words)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )  # fmt: skip
    plain.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    plain.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    plain.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return plain


def starting_with(plain: Any, token: str) -> Any:
    """A post-processor that puts this token before each text, as in published models."""
    return processors.TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token}:1 $B:1",
        special_tokens=[(token, plain.token_to_id(token))],
    )


def write_published_tokenizer(
    folder: Path, plain: Any, config: dict[str, Any], model_type: str
) -> None:
    """Write a tokenizer's files as transformers before version 5 wrote them, like most tokenizers on the hub."""
    tokens = {
        str(number): {
            name: getattr(token, name)
            for name in ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
        }
        for number, token in plain.get_added_tokens_decoder().items()
    }
    special = {name: text for name, text in config.items() if name.endswith("_token") and isinstance(text, str)}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    plain.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("tokenizer_config.json", {"added_tokens_decoder": tokens, **config}),
        ("special_tokens_map.json", special),
        ("config.json", {"model_type": model_type}),
    ):
        (folder / name).write_text(json.dumps(content))


def write_qwen_tokenizer(folder: Path, template: str) -> None:
    """Write a tokenizer's files as the hub has them for Qwen2.5 and Qwen3, with keys that only older releases of transformers write."""
    plain = byte_level_tokenizer([("a", "b"), ("Ġ", "a"), ("1", "2")])
    plain.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False)
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    tokens = {
        str(number): {name: getattr(token, name) for name in names}
        for number, token in plain.get_added_tokens_decoder().items()
    }
    config = {
        "add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": tokens,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<extra>"], "bos_token": None,
        "chat_template": template, "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>",
        "errors": "replace", "model_max_length": 131072, "pad_token": "<unk>",
        "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
    }  # fmt: skip
    plain.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
