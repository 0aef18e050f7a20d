"""The model `tiny`: a real Llama of a few thousand random parameters over single characters.

It needs no download and answers in milliseconds, so every command can be tried on any machine in seconds. It knows nothing: use it to
try the software, and for toy tasks that a random model can learn. Characters other than printable ASCII and newline become `<unk>`.
"""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from groupwise.engine.models.transformers_log import quiet

SPECIAL = ("<pad>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>")
CHARACTERS = string.printable[:95] + "\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character, after the special tokens."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL[3:]),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(
    hidden_size: int = 16,
    layers: int = 2,
    heads: int = 2,
    vocab_size: int | None = None,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A freshly initialised Llama in float32; the same seed gives the same weights."""
    config = LlamaConfig(
        vocab_size=vocab_size or len(SPECIAL) + len(CHARACTERS),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    finally:
        torch.random.set_rng_state(state)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    return model.eval()


def write_tiny_model(folder: Path) -> None:
    """Write model and tokenizer in the format of transformers."""
    with quiet():
        tiny_model().save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
