"""Computing a prompt once for all its completions is the same as computing each row by itself."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig

from groupwise.learner.forward import shared_prompt, whole_rows
from groupwise.learner.layout import MicroBatch, microbatches
from groupwise.models.decoder import Decoder

SIZES: dict[str, Any] = {
    "vocab_size": 102,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "window": lambda: MistralConfig(**SIZES, sliding_window=4),
    "caps": lambda: Gemma2Config(**SIZES, sliding_window=4, final_logit_softcapping=5.0),
}


@pytest.fixture(params=CONFIGS)
def decoder(request):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return Decoder(model)


def gradients(decoder, compute, batch):
    decoder.model.zero_grad()
    found = compute(decoder, batch)
    weights = torch.randn(found.logprobs_BT.shape, generator=torch.Generator().manual_seed(1))
    (found.logprobs_BT * weights).sum().backward()
    return found, {
        name: parameter.grad.clone()
        for name, parameter in decoder.model.named_parameters()
        if parameter.grad is not None
    }


def close(found, wanted):
    found, wanted = found.detach(), wanted.detach()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_shared_prompts_equal_whole_rows_in_values_and_gradients(decoder, make_rows):
    for batch in microbatches(make_rows(), 10_000):
        shared, shared_gradients = gradients(decoder, shared_prompt, batch)
        whole, whole_gradients = gradients(decoder, whole_rows, batch)
        close(shared.logprobs_BT, whole.logprobs_BT)
        close(shared.entropies_BT, whole.entropies_BT)
        assert shared_gradients.keys() == whole_gradients.keys()
        for name, wanted in whole_gradients.items():
            close(shared_gradients[name], wanted)


@pytest.mark.parametrize("compute", [shared_prompt, whole_rows])
def test_values_are_those_of_the_plain_model(decoder, make_rows, compute):
    for batch in microbatches(make_rows(), 10_000):
        with torch.no_grad():
            found = compute(decoder, batch).logprobs_BT
        for row, mine in zip(batch.rows, found, strict=True):
            whole = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
            with torch.no_grad():
                logits = decoder.model(input_ids=whole, use_cache=False).logits[0]
            tail = (logits[len(row.prompt_ids) - 1 : -1] / row.temperature).log_softmax(-1)
            targets = torch.tensor(row.completion_ids)[:, None]
            length = len(row.completion_ids)
            close(mine[:length], tail.gather(1, targets)[:, 0])
            assert not mine[length:].any(), "padding is 0"


@pytest.mark.parametrize("compute", [shared_prompt, whole_rows])
def test_a_row_is_the_same_beside_any_other(decoder, make_rows, compute):
    """So the content of padding plays no part: beside a longer row there is some, alone there is none."""
    (batch,) = microbatches(make_rows(count=6, prompts=1), 10_000)
    together = compute(decoder, batch)
    for place, row in enumerate(batch.rows):
        alone = compute(decoder, MicroBatch(batch.prompt_ids, (row,), (0,)))
        length = len(row.completion_ids)
        close(together.logprobs_BT[place, :length], alone.logprobs_BT[0])
        close(together.entropies_BT[place, :length], alone.entropies_BT[0])


@pytest.mark.parametrize("compute", [shared_prompt, whole_rows])
def test_completions_of_one_token(decoder, make_rows, compute):
    row = make_rows()[1]
    assert len(row.completion_ids) == 1
    batch = MicroBatch(row.prompt_ids, (row, row), (0, 1))
    found, gradient = gradients(decoder, compute, batch)
    assert found.logprobs_BT.shape == (2, 1)
    assert all(bool(torch.isfinite(each).all()) for each in gradient.values())
