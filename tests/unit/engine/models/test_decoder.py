"""Hidden states, logits and caches against transformers' own forward, for the families people train."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from groupwise.core.errors import ModelError
from groupwise.engine.models.decoder import (
    Decoder,
    PromptCache,
    SharedPrefixCache,
    SlotCache,
)
from groupwise.engine.models.text_mask import ATTENTION, TextMask
from groupwise.engine.models.tiny import tiny_model
from tests.unit.engine.models.native.families import SMALL, in_own_modules

SIZES = {**SMALL, "head_dim": 8}
MIXED = ["sliding_attention", "full_attention"]
CAPS: dict[str, Any] = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2-window": lambda: Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "llama in our own modules": lambda: LlamaConfig(**SIZES),
    "qwen3 in our own modules": lambda: Qwen3Config(**SIZES),
    "mistral-window": lambda: MistralConfig(**SIZES, sliding_window=5),
    "phi3-window": lambda: Phi3Config(**SIZES, sliding_window=5),
    "gemma2": lambda: Gemma2Config(**SIZES, sliding_window=5, layer_types=MIXED, **CAPS),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, sliding_window=5, layer_types=MIXED),
    "granite": lambda: GraniteConfig(**SIZES, logits_scaling=3.0, embedding_multiplier=2.0),
    "cohere": lambda: CohereConfig(**SIZES, logit_scale=0.3),
    "gpt2": lambda: GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=1),
    "falcon": lambda: FalconConfig(  # computes its attention itself
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    ),
}
LENGTH = 20


@pytest.fixture(params=CONFIGS)
def decoder(request):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # so that attention is far from uniform, and a wrong mask shows
    if "in our own modules" in request.param:
        model = in_own_modules(model)
    return Decoder(model.requires_grad_(False))


def ids(rows: int) -> torch.Tensor:
    return torch.randint(3, 64, (rows, LENGTH), generator=torch.Generator().manual_seed(0))


def own_logits(decoder, ids_BT):
    """By transformers' own forward, mask and head."""
    return decoder.model(input_ids=ids_BT, use_cache=False).logits.float()


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=3e-5 * float(wanted.abs().max()), rtol=1e-4)


def positions(first, last):
    return torch.arange(first, last)[None]


def test_hidden_states_and_logits(decoder):
    batch = ids(3)
    hidden = decoder.hidden(batch, positions(0, LENGTH), TextMask(LENGTH), None)
    close(decoder.logits(hidden.flatten(0, 1)).view(3, LENGTH, -1), own_logits(decoder, batch))


def test_rows_that_share_a_prompt(decoder):
    prompt = 12
    batch = ids(4)
    batch[:, :prompt] = batch[:1, :prompt]
    cache = PromptCache()
    before = decoder.hidden(batch[:1, :prompt], positions(0, prompt), TextMask(prompt), cache)
    after = decoder.hidden(
        batch[:, prompt:],
        positions(prompt, LENGTH),
        TextMask(LENGTH - prompt, past=prompt),
        SharedPrefixCache(cache),
    )
    hidden = torch.cat((before.expand(4, -1, -1), after), dim=1)
    close(decoder.logits(hidden.flatten(0, 1)).view(4, LENGTH, -1), own_logits(decoder, batch))


@torch.no_grad()
def test_slots_at_their_own_positions(decoder):
    """Two rows with prompts of other lengths, decoded side by side between empty slots."""
    batch, starts = ids(2), (4, 11)
    wanted = own_logits(decoder, batch)
    cache = SlotCache(slots=8, key_length=LENGTH + 5)
    slots = (2, 7)
    for row, (slot, start) in enumerate(zip(slots, starts, strict=True)):
        prompt = PromptCache()
        decoder.hidden(batch[row : row + 1, :start], positions(0, start), TextMask(start), prompt)
        cache.place(slot, prompt)
    for step in range(LENGTH - max(starts)):
        tokens, where = torch.zeros(8, dtype=torch.long), torch.zeros(8, dtype=torch.long)
        for row, (slot, start) in enumerate(zip(slots, starts, strict=True)):
            where[slot] = start + step
            tokens[slot] = batch[row, start + step]
        cache.positions = where
        mask = torch.arange(LENGTH + 5) <= where[:, None, None]
        hidden = decoder.hidden(tokens[:, None], where[:, None], mask, cache)
        for row, slot in enumerate(slots):
            close(decoder.logits(hidden[slot]), wanted[row, int(where[slot])][None])


def test_a_used_slot_forgets_its_last_occupant():
    decoder = Decoder(tiny_model())
    cache = SlotCache(slots=8, key_length=16)

    def place(tokens):
        prompt = PromptCache()
        count = len(tokens)
        decoder.hidden(torch.tensor([tokens]), positions(0, count), TextMask(count), prompt)
        cache.place(0, prompt)

    def next_hidden(position):
        cache.positions = torch.full((8,), position)
        mask = torch.arange(16) <= cache.positions[:, None, None]
        return decoder.hidden(
            torch.full((8, 1), 9), cache.positions[:, None], mask, cache
        )[0]  # fmt: skip

    with torch.no_grad():
        place([5, 6, 7])
        alone = next_hidden(3)
        place(list(range(10, 22)))
        next_hidden(12)
        place([5, 6, 7])
        assert torch.equal(next_hidden(3), alone)


def test_other_models_of_the_process_keep_the_attention_of_transformers(tmp_path):
    ours, users = tiny_model(), tiny_model()
    assert Decoder(ours).takes_text_masks
    assert users.config._attn_implementation == "sdpa"
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    ours.config.save_pretrained(tmp_path)
    assert ATTENTION not in (tmp_path / "config.json").read_text()


def test_a_head_that_does_more_is_refused():
    model = tiny_model()
    model.config.logit_scale = 0.5  # as if the model's own head did it, which it does not
    with pytest.raises(ModelError, match="output head"):
        Decoder(model)
