"""Sampler and learner on a non-CPU device: no tensor is mixed with the CPU, and decoding never waits for the device.

Numbers are compared where there is a GPU, in `tests/gpu`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

from groupwise.core.types import Row, SamplingParams
from groupwise.engine.learner import forward, head
from groupwise.engine.learner.engine import TransformersEngine
from groupwise.engine.learner.layout import PackedBatch, PackedGroups
from groupwise.engine.learner.native import fused_attention
from groupwise.engine.learner.native.body import residual_stream
from groupwise.engine.learner.native.head import token_numbers
from groupwise.engine.learner.native.layout import FlatBatch, Texts, cut
from groupwise.engine.learner.targets import ForwardOutputs, Targets
from groupwise.engine.learner.weights import TrainedModel
from groupwise.engine.models import text_mask, varlen
from groupwise.engine.models.decoder import Decoder
from groupwise.engine.models.native.linear import Factors
from groupwise.engine.models.native.weights import NativeModel
from groupwise.engine.sampler import torch_sampler
from groupwise.engine.sampler.draw import draw_tokens, mask_early_stops, truncate
from groupwise.engine.sampler.native.graph_engine import GraphEngine
from groupwise.engine.sampler.native.recording import run_eagerly
from groupwise.engine.sampler.transformers_engines import SlotEngine
from groupwise.engine.sampler.weights import ServedModel
from tests.fake_device import DEVICE, FakeDevice
from tests.unit.engine.models.native.families import FAMILIES

SOAK = pytest.mark.soak(suite="engine")
F32, BF16 = torch.float32, torch.bfloat16
pytestmark = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-biases", F32),
        ("qwen3", BF16),
        *(
            pytest.param(*each, marks=SOAK)
            for each in (
                ("llama-biases", BF16), ("qwen2-tied", F32), ("qwen2-tied", BF16), ("qwen3", F32),
            )
        ),
    ],
)  # fmt: skip
RANK = 4


@pytest.fixture
def device(monkeypatch) -> FakeDevice:
    def shift_head(self: NativeModel, logits_NV: Tensor) -> None:
        """Depends on numbers, which there are none of; happens once for each model."""
        self.head.bias_O = self.head.weight_OI.new_zeros(len(self.head.weight_OI))

    def real_places(texts: Any, device: torch.device) -> Tensor | None:
        """Their number depends on lengths; once for each micro-batch."""
        longest = texts.lengths[0]
        places = [m * longest + n for m, each in enumerate(texts.lengths) for n in range(each)]
        even = longest == texts.lengths[-1]
        return None if even else torch.tensor(places, device=device)

    monkeypatch.setattr(NativeModel, "_shift_head", shift_head)

    def causal_lower_right(queries: int, keys: int) -> Tensor:
        """The mask itself, of which torch's class only knows."""
        everywhere = torch.ones(queries, keys, dtype=torch.bool, device=DEVICE)
        return everywhere.tril(keys - queries)

    monkeypatch.setattr(fused_attention, "causal_lower_right", causal_lower_right)
    for lengths in ((3, 3), (5, 4, 2)):
        given = Texts(0, lengths), torch.device("cpu")
        assert str(real_places(*given)) == str(fused_attention.real_places(*given)), (
            "the same by other means"
        )
    monkeypatch.setattr(fused_attention, "real_places", real_places)
    return FakeDevice()


class Adapted:
    """A model on the device with an adapter of all its layers."""

    def __init__(self, device: FakeDevice, name: str, dtype: torch.dtype) -> None:
        self.model = device.model(FAMILIES[name](), dtype)
        assert self.model.device.type == DEVICE.type
        self._native = device.native(self.model)
        with device.here():
            self._factors = {
                part.path: Factors(
                    torch.ones(RANK, linear.weight_OI.shape[1], device=DEVICE, requires_grad=True),
                    torch.ones(part.end - part.start, RANK, device=DEVICE, requires_grad=True),
                    2.0,
                )
                for linear in self._native.products[:-1]
                for part in linear.parts
            }

    def native(self, *, int8: bool = False) -> NativeModel:
        return self._native

    def factors(self) -> dict[str, Factors]:
        return self._factors

    def parameters(self) -> list[Tensor]:
        return [each for f in self._factors.values() for each in (f.down_RI, f.up_OR)]


def test_prompts_and_tokens_are_computed(device, name, dtype):
    weights: Any = Adapted(device, name, dtype)
    with device.here(), torch.inference_mode():
        engine = GraphEngine(weights.native(), weights, 8, 320, run_eagerly)
        prompt = engine.prefill([3, 4, 5])
        assert prompt.logits_V.shape == (96,)
        rows = [engine.add_row(prompt) for _ in range(3)]
        found = engine.decode([3, 4, 5])
        assert (found.device.type, found.shape) == (DEVICE.type, (3, 96))
        engine.remove_rows(rows[:1])
        engine.refresh()
        engine.reset()


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_sampler_takes_the_engine_for_gpus(monkeypatch, device, name, dtype, enforce_eager):
    monkeypatch.setattr(torch_sampler, "cuda_graphs", lambda: "graphs")
    weights: Any = Adapted(device, name, dtype)
    with device.here():
        layout = torch_sampler.DecodeLayout(slots=8, key_length=320)
        engine = torch_sampler._make_engine(
            weights, layout, native=True, enforce_eager=enforce_eager, int8=False
        )
    assert isinstance(engine, GraphEngine)
    assert engine._record == (run_eagerly if enforce_eager else "graphs")


def test_tokens_are_drawn(device, name, dtype):
    plain = SamplingParams(9)
    early = SamplingParams(9, stop_token_ids=(3, 4), min_tokens=5)
    narrow = SamplingParams(9, temperature=0.7, top_k=3, top_p=0.5, min_p=0.1)
    for answer in (True, False):  # to whether one is greedy, whether all temperatures are 1 …
        with device.here(answer), torch.inference_mode():
            logits = torch.zeros(4, 96, device=DEVICE, dtype=dtype)
            temperatures = torch.ones(4, device=DEVICE)
            params = [plain, early, narrow, None]
            logits = mask_early_stops(logits, params, [0, 1, 2, 0])
            if not answer:
                logits = truncate(logits, temperatures, params)
            uniforms = torch.zeros(4, device=DEVICE, dtype=torch.float64)
            for found in draw_tokens(logits, temperatures, uniforms):
                assert (found.device.type, found.shape) == (DEVICE.type, (4,))


def test_a_model_of_transformers_decodes(monkeypatch, device, name, dtype):
    monkeypatch.setattr(Decoder, "_check_head", lambda self: None)  # compares numbers, once
    weights = ServedModel(device.model(FAMILIES[name](), dtype))
    with device.here(answer=False), torch.inference_mode():
        engine = SlotEngine(weights, 8, 64)
        engine.add_row(engine.prefill([3, 4, 5]))
        assert engine.decode([3]).shape == (1, 96)
        engine.reset()


def batch_of() -> FlatBatch:
    """A group of uneven completions, and a row of another prompt."""

    def row(prompt: tuple[int, ...], length: int) -> Row:
        return Row(prompt, (5,) * length, (1,) * length, (0.0,) * length, 1.0, 1.0)

    rows = [row((3, 4, 5), 7), row((3, 4, 5), 6), row((3, 4, 5), 6), row((8, 9), 4)]
    (batch,) = cut(rows, 100)
    return batch


@pytest.mark.parametrize(
    ("recompute", "wanted"),
    [
        (True, ForwardOutputs(entropy_gradient=True, accuracy=True)),
        pytest.param(False, ForwardOutputs(), marks=SOAK),
    ],
)
def test_a_gradient_is_made(monkeypatch, device, name, dtype, recompute, wanted):
    """In float32 with attention of padded texts, in bfloat16 by one kernel for all texts."""
    monkeypatch.setattr(varlen, "suits", lambda size, dtype, device: dtype == BF16)
    monkeypatch.setattr(varlen, "varlen_kernel", lambda: many_texts)
    weights, batch = Adapted(device, name, dtype), batch_of()
    model, parameters = weights.native(), weights.parameters()
    with device.here():
        stream_NH = residual_stream(model, batch, weights.factors(), recompute=recompute)
        before_N = torch.tensor(batch.predictors, device=DEVICE)
        ids_N = torch.zeros_like(before_N)
        targets = Targets(ids_N, torch.ones(len(ids_N), device=DEVICE), None, wanted)
        found = token_numbers(model, stream_NH[before_N], targets)
        (found.logprobs_N + found.entropies_N).sum().backward()
        gradients = [each.grad for each in parameters if each.grad is not None]
        assert [each.shape for each in gradients] == [each.shape for each in parameters]
        assert {each.device.type for each in gradients} == {DEVICE.type}
        torch.optim.AdamW(parameters, foreach=True).step()
        norm = torch.nn.utils.get_total_norm(gradients)
        with pytest.raises(DataDependentOutputException):
            float(norm)


def many_texts(
    queries: Tensor, keys: Tensor, values: Tensor, *ends_longest: Any, **options: Any
) -> Tensor:
    """In place of a GPU's kernel for texts of any length: refuses what that refuses."""
    ends, longest = ends_longest[:2], ends_longest[2:]
    assert {each.dtype for each in (queries, keys, values)} == {BF16}
    assert {(each.dtype, each.device.type) for each in ends} == {(torch.int32, DEVICE.type)}
    assert keys.shape == values.shape
    assert all(isinstance(each, int) for each in longest)
    repeat = queries.shape[1] // keys.shape[1]
    of_keys = (keys + values).sum(0).repeat_interleave(repeat, 0)
    return queries + of_keys


def test_all_weights_have_a_gradient(monkeypatch, device, name, dtype):
    """By transformers' modules: in float32 text by text, in bfloat16 (under autocast) whole groups by one kernel."""
    monkeypatch.setattr(Decoder, "_check_head", lambda self: None)  # compares numbers, once
    monkeypatch.setattr(forward, "packing_is_exact", lambda decoder: True)  # likewise
    monkeypatch.setattr(text_mask, "causal_lower_right", fused_attention.causal_lower_right)
    monkeypatch.setattr(varlen, "suits", lambda size, dtype, device: dtype == BF16)
    monkeypatch.setattr(varlen, "varlen_kernel", lambda: many_texts)

    def at_tokens(decoder: Decoder, rows: Any, hidden_AH: Tensor, outputs: Any) -> Any:
        """Whose places depend on masks; once for each micro-batch."""
        ids_N = torch.zeros(len(hidden_AH), dtype=torch.long, device=DEVICE)
        targets = Targets(ids_N, torch.ones(len(ids_N), device=DEVICE), None, outputs)
        return head.token_numbers(decoder, hidden_AH, targets)

    monkeypatch.setattr(forward, "_at_tokens", at_tokens)
    model = device.model(FAMILIES[name](), F32)
    rounding = device.autocast(BF16) if dtype == BF16 else nullcontext()
    with device.here(answer=True), rounding:
        weights = TrainedModel(model, dtype="bfloat16" if dtype == BF16 else "float32")
        engine = TransformersEngine(
            weights, packing=True, gradient_checkpointing=False, sharing=dtype == BF16
        )
        (batch,) = engine.cut(batch_of().rows, 100, gradient=True)
        assert isinstance(batch, PackedGroups if dtype == BF16 else PackedBatch)
        wanted = ForwardOutputs(entropy_gradient=True, accuracy=True)
        with engine.acting("policy", gradient=True) as compute:
            found: Any = compute(batch, wanted)
            assert len(found.logprobs_N) == sum(len(row.completion_ids) for row in batch.rows)
            (found.logprobs_N + found.entropies_N).sum().backward()
        parameters = [*model.parameters()]
        assert all(each.grad is not None for each in parameters)
        assert {each.grad.dtype for each in parameters if each.grad is not None} == {F32}


def test_mixing_devices_and_waiting_for_numbers_would_fail(device, name, dtype):
    with device.here():
        there = torch.ones(3, device=DEVICE, dtype=dtype)
        with pytest.raises(RuntimeError, match=r"two (different )?devices"):
            there.add(torch.ones(3, dtype=dtype))
        with pytest.raises(DataDependentOutputException):
            bool(there.any())
