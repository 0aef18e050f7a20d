"""The model `tiny`: deterministic, complete, and in the format of everything else."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise.engine.models.tiny import (
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


@given(st.text(alphabet=CHARACTERS, max_size=60))
def test_every_character_is_a_token_that_comes_back(text):
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_transformers_reads_the_written_tiny_model_with_equal_logits(tmp_path):
    write_tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = torch.tensor([tokenizer("write a3:")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, tiny_model()(ids).logits)
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 1
    assert len(tokenizer) == model.config.vocab_size == len(SPECIAL) + len(CHARACTERS)
