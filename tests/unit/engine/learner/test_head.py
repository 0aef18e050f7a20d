"""The head of transformers' models, against `plain_head`: frozen or trained, with an adapter, scaled or capped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise.engine.learner import head, head_numbers
from groupwise.engine.learner.head import token_numbers
from groupwise.engine.learner.targets import ForwardOutputs, Targets
from groupwise.engine.models.config import LoraConfig
from groupwise.engine.models.decoder import Decoder
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.models.tiny import tiny_model
from tests.unit.engine.learner.plain_head import plain_numbers
from tests.unit.engine.models.native.families import randomised

COUNT, HIDDEN = 37, 16
WITHHELD = torch.tensor([[0, 5], [0, 7], [3, 7], [10, 5], [10, 7], [10, 101], [36, 0], [20, 5000]])
"""Places and tokens, at both ends of chunks; the last pair names a token that the vocabulary does not have."""
KINDS = ("frozen", "trained", "adapted", "scaled", "capped")


class Head(nn.Module):
    """What a decoder has of a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        model = tiny_model(seed=2).requires_grad_(False)
        weight_VH = model.lm_head.weight.detach().clone()
        model.lm_head.weight = nn.Parameter(weight_VH, requires_grad=False)  # untied
        model.config.tie_word_embeddings = False
        self.decoder = Decoder(model)
        if kind == "trained":
            self.decoder.head.requires_grad_(True)
        if kind == "scaled":
            self.decoder.logit_factor = 0.3
        if kind == "capped":
            self.decoder._logit_cap = 2.0
        if kind == "adapted":
            settings = LoraConfig(r=3, alpha=6, target_modules=("lm_head",))
            adapted = AdaptedModel(model, new_lora_config(settings))
            adapted.add("policy", trainable=True, seed=0)
            randomised(adapted, "policy", size=0.3)
            adapted.switch.active = "policy"
            self.decoder.head = model.lm_head

    def trained(self) -> list[Tensor]:
        return [each for each in self.decoder.head.parameters() if each.requires_grad]


@pytest.fixture(params=KINDS)
def made(request):
    return Head(request.param)


def hidden() -> Tensor:
    return (
        torch.randn(COUNT, HIDDEN, generator=torch.Generator().manual_seed(0)) * 3
    ).requires_grad_()


def targets_of(several: int | None = None, *, withheld: bool = False, **outputs: Any) -> Targets:
    shape = (COUNT, *filter(None, [several]))
    return Targets(
        torch.randint(10, 101, shape, generator=torch.Generator().manual_seed(1)),
        torch.linspace(0.3, 2.0, COUNT),
        WITHHELD if withheld else None,
        ForwardOutputs(**outputs),
    )


def gradients(made: Head, input_NH: Tensor, numbers: Any, *, entropy: bool) -> tuple[Tensor, ...]:
    factors = torch.randn(numbers.logprobs_N.shape, generator=torch.Generator().manual_seed(5))
    total = (numbers.logprobs_N * factors).sum()
    if entropy:
        total = total + (numbers.entropies_N * torch.linspace(-1, 1, COUNT)).sum()
    return torch.autograd.grad(total, [input_NH, *made.trained()])


@pytest.mark.parametrize(("chunk", "rows"), [(10, 4), (256, 16)])
@pytest.mark.parametrize("withheld", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("several", [None, 3])
def test_values_and_gradients(monkeypatch, made, several, entropy, withheld, chunk, rows):
    monkeypatch.setattr(head, "CHUNK", chunk)
    monkeypatch.setattr(head_numbers, "CHUNK", chunk)
    monkeypatch.setattr(head_numbers, "ROWS_IN_CACHE", rows)
    wanted = targets_of(several, withheld=withheld, entropy_gradient=entropy, accuracy=True, top=4)
    mine, theirs = hidden(), hidden()
    found: Any = token_numbers(made.decoder, mine, wanted)
    expected: Any = plain_numbers(made.decoder.logits(theirs), wanted)
    torch.testing.assert_close(found.logprobs_N.double(), expected.logprobs_N, atol=4e-6, rtol=1e-5)
    torch.testing.assert_close(
        found.entropies_N.double(), expected.entropies_N, atol=1e-5, rtol=1e-5
    )
    assert found.entropies_N.requires_grad == entropy
    assert torch.equal(found.right_N, expected.right_N)
    assert torch.equal(found.top_ids_NX, expected.top_ids_NX)
    torch.testing.assert_close(found.top_logprobs_NX.double(), expected.top_logprobs_NX, atol=4e-6, rtol=1e-5)  # fmt: skip
    slopes = gradients(made, mine, found, entropy=entropy)
    oracle = gradients(made, theirs, expected, entropy=entropy)
    for one, other in zip(slopes, oracle, strict=True):
        assert float(other.abs().max()) > 0
        torch.testing.assert_close(one, other, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["frozen", "trained"])
def test_without_a_gradient_the_numbers_are_the_same(kind):
    made = Head(kind)
    with torch.no_grad():
        found = token_numbers(made.decoder, hidden(), targets_of())
    same = token_numbers(made.decoder, hidden(), targets_of())
    assert not found.logprobs_N.requires_grad
    assert (found.right_N, found.top_ids_NX) == (None, None)
    torch.testing.assert_close(found.logprobs_N, same.logprobs_N, atol=0, rtol=0)


def test_dropout_of_an_adapter_drops_the_same_in_both_passes():
    made = Head("adapted")
    module: Any = made.decoder.head
    module.dropout["policy"] = 0.5
    module.switch.dropout = True
    torch.manual_seed(3)
    mine = hidden()
    slopes = gradients(made, mine, token_numbers(made.decoder, mine, targets_of()), entropy=False)
    torch.manual_seed(3)
    theirs = hidden()
    plain = plain_numbers(made.decoder.logits(theirs), targets_of())
    for one, other in zip(slopes, gradients(made, theirs, plain, entropy=False), strict=True):
        torch.testing.assert_close(one, other, atol=3e-5, rtol=1e-4)


class LargestFloat(TorchDispatchMode):
    """Numbers of the largest float32 tensor that was made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and each.dtype == torch.float32:
                self.numel = max(self.numel, each.numel())
        return result


@pytest.mark.parametrize("kind", ["frozen", "trained"])
def test_logits_of_a_chunk_are_not_copied_in_float32(monkeypatch, kind):
    monkeypatch.setattr(head_numbers, "ROWS_IN_CACHE", 2)
    made = Head(kind)
    made.decoder.head.bfloat16()
    with LargestFloat() as seen:
        mine = hidden().detach().bfloat16().requires_grad_()
        found = token_numbers(made.decoder, mine, targets_of())
        found.logprobs_N.sum().backward()
    assert seen.numel < COUNT * 102 / 4
