"""The model `tiny`: deterministic, complete, and in the format of everything else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise.models.tiny import (
    CHARACTERS,
    SPECIAL,
    tiny_model,
    tiny_tokenizer,
    write_tiny_model,
)

TOKENIZER = tiny_tokenizer()


def weights(model):
    return torch.cat([parameter.flatten() for parameter in model.parameters()])


def test_the_seed_decides_the_weights_and_leaves_chance_alone():
    torch.manual_seed(3)
    undisturbed = torch.rand(4)
    torch.manual_seed(3)
    first = tiny_model(seed=5)
    assert torch.equal(torch.rand(4), undisturbed)
    assert torch.equal(weights(first), weights(tiny_model(seed=5)))
    assert not torch.equal(weights(first), weights(tiny_model(seed=6)))


def test_it_is_small():
    assert sum(parameter.numel() for parameter in tiny_model().parameters()) < 10_000


@given(st.text(alphabet=CHARACTERS, max_size=60))
def test_every_character_is_a_token_that_comes_back(text):
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_other_characters_are_unknown():
    ids = TOKENIZER("aéb\t")["input_ids"]
    assert TOKENIZER.convert_ids_to_tokens(ids) == ["a", "<unk>", "b", "<unk>"]


def test_special_tokens_are_parsed_and_left_out_on_request():
    ids = TOKENIZER("a<eos><|user|>b")["input_ids"]
    assert TOKENIZER.convert_ids_to_tokens(ids) == ["a", "<eos>", "<|user|>", "b"]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "ab"


def test_the_chat_template_opens_the_answer_and_closes_what_was_said():
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    text = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|user|>one<|assistant|>two<eos><|user|>three<|assistant|>"


def test_what_is_written_is_what_transformers_reads(tmp_path):
    write_tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = torch.tensor([tokenizer("write a3:")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, tiny_model()(ids).logits)
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 1
    assert len(tokenizer) == model.config.vocab_size == len(SPECIAL) + len(CHARACTERS)


@pytest.mark.parametrize("size", [16, 32])
def test_other_sizes_run(size):
    model = tiny_model(hidden_size=size, heads=4, vocab_size=30)
    assert model(torch.tensor([[1, 2, 29]])).logits.shape == (1, 3, 30)
