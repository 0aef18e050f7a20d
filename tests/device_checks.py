"""Checks of sampler and learner that take the device as a parameter.

`tests/gpu` runs them on a GPU. `tests/integration/test_on_device.py` runs them on a CPU that computes as a GPU would, which tests the
checks themselves.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GemmaConfig, Qwen3Config, Qwen3MoeConfig

import groupwise
from benchmarks.gpu import SIZES
from groupwise.algorithms.sft import Sft
from groupwise.core.types import (
    Completion,
    GroupRequest,
    LogitsProcessing,
    OptimiserParams,
    Policy,
    Row,
    SamplingParams,
)
from groupwise.engine.learner.gradient_flow import trained_slopes
from groupwise.engine.learner.native.attention import rotated_attention
from groupwise.engine.learner.native.body import residual_stream
from groupwise.engine.learner.native.layout import Texts, cut
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedAdapter, TrainedModel
from groupwise.engine.models import fused_modules
from groupwise.engine.models.bundled import bundled_folder
from groupwise.engine.models.config import Dtype, LoraConfig, ModelConfig
from groupwise.engine.models.decoder import Decoder
from groupwise.engine.models.experts import experts_of
from groupwise.engine.models.files import write_tensors
from groupwise.engine.models.fused_modules import fuse
from groupwise.engine.models.load import load_model
from groupwise.engine.models.lora import AdaptedModel, fingerprint
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.models.machine import set_tf32
from groupwise.engine.models.native.weights import Shape, native_model
from groupwise.engine.models.tiny import tiny_tokenizer
from groupwise.engine.models.tokenizer import load_tokenizer
from groupwise.engine.sampler.draw import draw_tokens
from groupwise.engine.sampler.native.graph_engine import GraphEngine
from groupwise.engine.sampler.native.recording import Record
from groupwise.engine.sampler.queued import DecodeLayout
from groupwise.engine.sampler.torch_sampler import Drawing, TorchSampler
from groupwise.engine.sampler.weights import ServedAdapter, ServedModel, ServedWeights
from groupwise.runs.store import Store
from tests.integration import toy_run
from tests.processes import wait_until_async
from tests.unit.engine.learner import test_routing_replay
from tests.unit.engine.learner.native import test_attention
from tests.unit.engine.learner.native.test_engine import EVERYTHING, TOTALS, rows_of
from tests.unit.engine.models.native.families import (
    SMALL,
    adapted,
    family,
    made,
    own_logits,
    randomised,
    text,
)

_NORM_AND_ROTARY = {"normed", "norm_gradients", "rotary_halves"}
_ALL_FUSED = _NORM_AND_ROTARY | {"swiglu_pair", "swiglu_pair_gradient"}
_SMALLEST: dict[str, Any] = SMALL | {"num_hidden_layers": 1, "head_dim": 8}
FUSED_MODELS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "qwen3": (lambda: Qwen3Config(**_SMALLEST), _ALL_FUSED),
    "qwen3_moe": (  # each token takes all experts, so that rounding changes no choice
        lambda: Qwen3MoeConfig(
            **_SMALLEST, num_experts=4, num_experts_per_tok=4, moe_intermediate_size=24
        ),
        _ALL_FUSED,
    ),
    "gemma": (lambda: GemmaConfig(**_SMALLEST), _NORM_AND_ROTARY),  # its gate is a GELU
}
"""Models that transformers computes, and the kernels that its modules then take."""
BUNDLED = ModelConfig(name="smollm2-135m-instruct")
LAYOUT = DecodeLayout(slots=16, key_length=640)


@dataclass(frozen=True)
class DeviceCase:
    """A device, and what the checks need on it."""

    device: torch.device
    make_record: Callable[[], Record]
    folder: Path
    """An empty folder."""
    held: Callable[[], int]
    """Returns the bytes of all tensors on the device."""


def served(name: str, device: torch.device, dtype: torch.dtype, *, adapter: bool) -> ServedWeights:
    """Weights of a small model on the device; the same ones each time."""
    model = family(name, dtype=dtype).to(device)
    if not adapter:
        return ServedModel(model)
    weights = ServedAdapter(adapted(model))
    randomised(weights.adapted, weights.name, seed=5)
    return weights


def engine_of(weights: ServedWeights, make_record: Callable[[], Record]) -> GraphEngine:
    model = weights.native()
    assert model is not None
    return GraphEngine(model, weights, LAYOUT.slots, LAYOUT.key_length, make_record())


def sampler_of(
    case: DeviceCase, weights: ServedWeights, tokenizer: Any = None, *, frees_cache: bool = False
) -> TorchSampler:
    sampler = TorchSampler(weights, tokenizer or tiny_tokenizer(), LAYOUT, frees_cache=frees_cache)
    if not isinstance(sampler._engine, GraphEngine):  # on a processor
        sampler._engine = engine_of(weights, case.make_record)
    return sampler


def generated(sampler: TorchSampler, asked: Sequence[GroupRequest]) -> list[Completion]:
    async def ask() -> list[tuple[Completion, ...]]:
        return await asyncio.gather(*map(sampler.generate, asked))

    return [each for group in asyncio.run(ask()) for each in group]


# The sampler


def greedy_tokens_are_those_of_transformers(case: DeviceCase, name: str, *, adapter: bool) -> None:
    """In float32, token by token, with log-probabilities that differ by rounding."""
    weights = served(name, case.device, torch.float32, adapter=adapter)
    asked = [
        GroupRequest(n, tuple(text(length).tolist()), (1, 2), SamplingParams(40, temperature=0.0))
        for n, length in enumerate((1, 2, 17, 65, 230, 300))
    ]
    ours = generated(sampler_of(case, weights), asked)
    theirs = generated(TorchSampler(weights, tiny_tokenizer(), LAYOUT, native=False), asked)
    assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


@torch.inference_mode()
def logits_are_near_those_of_transformers(case: DeviceCase, name: str, dtype: torch.dtype) -> None:
    """Given the same tokens, beyond the first step of keys."""
    weights = served(name, case.device, dtype, adapter=True)
    engine = engine_of(weights, case.make_record)
    ids, tokens = text(230).tolist(), text(40).tolist()
    engine.add_row(engine.prefill(ids))
    found = torch.stack([engine.decode([token])[0].clone() for token in tokens]).float()
    with weights.acting():
        wanted = own_logits(weights.model, torch.tensor([*ids, *tokens], device=case.device))
    wanted = wanted[len(ids) :].log_softmax(-1)
    differences = found.log_softmax(-1) - wanted
    close = 1e-4 if dtype == torch.float32 else 0.05
    assert float(differences.abs().mean() / wanted.std()) < close


@torch.inference_mode()
def decoded(engine: GraphEngine, seed: int = 0, steps: int = 60) -> list[tuple[int, Tensor]]:
    """Decode rows that come and go at random; returns each row's tokens with their logits."""
    rng = random.Random(seed)
    engine.reset()
    prompts = [engine.prefill(text(length).tolist()) for length in (1, 9, 64, 65, 236)]
    found: list[tuple[int, Tensor]] = []
    for _ in range(steps):
        while len(engine.rows) < 12 and rng.random() < 0.7:
            engine.add_row(rng.choice(prompts))
        if engine.rows:
            tokens = [rng.randrange(3, 90) for _ in engine.rows]
            found += zip(tokens, engine.decode(tokens), strict=True)
            engine.remove_rows([row for row in engine.rows if rng.random() < 0.03])
    return found


def recordings_change_no_bit(case: DeviceCase, name: str, dtype: torch.dtype) -> None:
    """Recorded CUDA graphs give the same bits for every token, whichever rows come and go, also after a new adapter."""
    weights = served(name, case.device, dtype, adapter=True)
    recorded = engine_of(weights, case.make_record)
    plain = engine_of(weights, lambda: lambda compute: compute)
    for seed in (7, 8):
        ours, theirs = decoded(recorded), decoded(plain)
        assert len(ours) == len(theirs) > 300
        assert all(torch.equal(mine[1], other[1]) for mine, other in zip(ours, theirs, strict=True))
        assert isinstance(weights, ServedAdapter)
        randomised(weights.adapted, weights.name, seed=seed)
        with torch.inference_mode():
            recorded.refresh()
            plain.refresh()


@torch.inference_mode()
def a_row_does_not_depend_on_the_others(
    case: DeviceCase, name: str, dtype: torch.dtype, *, longest: int
) -> None:
    """To the bit: alone, and beside rows that come and go, one of which has `longest` tokens."""
    weights = served(name, case.device, dtype, adapter=False)
    ids, tokens = text(20).tolist(), text(30).tolist()

    def histories(mates: Sequence[int]) -> Tensor:
        engine = engine_of(weights, case.make_record)
        others = [engine.prefill(text(length).tolist()) for length in mates]
        for prompt in others:
            engine.add_row(prompt)
        row = engine.add_row(engine.prefill(ids))
        found: list[Tensor] = []
        for number, token in enumerate(tokens):
            given = [token if each is row else number + 3 for each in engine.rows]
            found.append(engine.decode(given)[engine.rows.index(row)].clone())
            if mates and number % 5 == 4:
                engine.remove_rows([each for each in engine.rows if each is not row][:1])
                engine.add_row(others[number % len(others)])
        return torch.stack(found)

    alone = histories(())
    assert torch.equal(histories((3, 9, 100)), alone)
    assert torch.equal(histories((longest, 9, 9, 5)), alone)


def sampling_again_gives_the_same(case: DeviceCase, name: str, dtype: torch.dtype) -> None:
    """Tokens and log-probabilities, to the bit: by the same sampler and by another, whatever it sampled before."""
    weights = served(name, case.device, dtype, adapter=True)
    asked = [
        GroupRequest(n, tuple(text(length).tolist()), (1, 2, 3), SamplingParams(40))
        for n, length in enumerate((1, 17, 100, 236))
    ]
    first, second = (sampler_of(case, weights) for _ in range(2))
    wanted = generated(first, asked)
    assert generated(first, asked) == wanted
    generated(second, asked[::-1][:2])
    assert generated(second, asked) == wanted


def looking_ahead_draws_the_same(case: DeviceCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that stop, reach their length, wait for a slot, are cancelled, or need each token before the next."""
    weights = served("llama", case.device, torch.float32, adapter=True)
    penalised = LogitsProcessing(frequency_penalty=0.5)
    asked = [
        GroupRequest(
            number,
            tuple(text(3 + 60 * (number % 3)).tolist()),
            tuple(range(10 * number, 10 * number + 4)),
            SamplingParams(
                (1, 2, 20, 90)[number % 4],
                stop_token_ids=tuple(range(10)),
                processing=penalised if number == 6 else None,
            ),
        )
        for number in range(12)
    ]
    given_up = GroupRequest(99, (5, 6, 7), (1, 2), SamplingParams(200))
    order: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            order.append(name)
            return function(*args)

        return call

    async def ask(sampler: TorchSampler) -> list[tuple[Completion, ...]]:
        lost = asyncio.create_task(sampler.generate(given_up))
        others = [asyncio.create_task(sampler.generate(each)) for each in asked]
        await wait_until_async(lambda: any(len(each) > 4 for each in sampler.so_far(99)))
        lost.cancel()
        return await asyncio.gather(*others)

    with monkeypatch.context() as patched:
        patched.setattr(GraphEngine, "prefill_all", noted("prompts", GraphEngine.prefill_all))
        patched.setattr(GraphEngine, "decode_rows", noted("begin", GraphEngine.decode_rows))
        patched.setattr(Drawing, "read", noted("read", Drawing.read))
        found = asyncio.run(ask(sampler_of(case, weights)))
        letters = "".join(each[0] for each in order)
        assert "brbrbr" in letters
        assert "rpbrr" in letters, "new rows are begun before their first tokens are read"
    monkeypatch.setattr(TorchSampler, "_looks_ahead", lambda sampler, beginning=(): False)
    wanted = asyncio.run(ask(sampler_of(case, weights)))
    assert found == wanted
    assert {each.finish_reason for group in found for each in group} == {"stop", "length"}


def what_is_drawn_does_not_depend_on_the_device(case: DeviceCase) -> None:
    """The same logits give the same tokens at any temperature."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(32, 49152, generator=generator) * 4
    temperatures = torch.tensor([0.0, 0.5, 1.0, 1.7]).repeat(8)
    uniforms = torch.rand(32, generator=generator, dtype=torch.float64)
    given = logits, temperatures, uniforms
    tokens, logprobs = draw_tokens(*(each.to(case.device) for each in given))
    wanted, wanted_logprobs = draw_tokens(*given)
    assert tokens.tolist() == wanted.tolist()
    torch.testing.assert_close(logprobs.cpu(), wanted_logprobs, rtol=1e-5, atol=1e-5)


def changed(weights: ServedWeights, seed: int, size: float = 0.1) -> dict[str, Tensor]:
    """Weights of the same shapes with noise added, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (value.detach().cpu() + size * torch.randn(value.shape, generator=generator)).to(
            value.dtype
        )
        for name, value in weights.tensors().items()
    }


def published(
    weights: ServedWeights, tensors: dict[str, Tensor], folder: Path, version: int
) -> Policy:
    """A policy of these tensors, as a learner publishes it."""
    is_adapter = isinstance(weights, ServedAdapter)
    place = folder / str(version)
    place.mkdir()
    file = "adapter_model.safetensors" if is_adapter else "model.safetensors"
    write_tensors(tensors, place / file)
    kind: Any = "adapter" if is_adapter else "full"
    return Policy("r", version, fingerprint(tensors), kind, str(place))


def memory_does_not_grow(case: DeviceCase, *, adapter: bool) -> None:
    """However often weights are refreshed."""
    weights = served("llama", case.device, torch.float32, adapter=adapter)
    sampler = sampler_of(case, weights)
    asked = [GroupRequest(0, tuple(text(230).tolist()), (1, 2, 3), SamplingParams(40))]
    seen: list[int] = []
    for version in range(1, 8):
        asyncio.run(
            sampler.load(published(weights, changed(weights, version, 0.01), case.folder, version))
        )
        generated(sampler, asked)
        seen.append(case.held())
    assert 0 < max(seen[2:]) <= seen[1], seen


def a_cache_is_freed_while_nothing_is_sampled(case: DeviceCase, *, frees_cache: bool) -> None:
    """The cache is freed if that is configured; afterwards the same tokens are drawn, and the memory is what it was before."""
    weights = served("llama", case.device, torch.bfloat16, adapter=True)
    sampler = sampler_of(case, weights, frees_cache=frees_cache)
    engine = sampler._engine
    assert isinstance(engine, GraphEngine)
    cache = 2 * engine._keys_LGJTD.untyped_storage().nbytes()
    asked = [GroupRequest(0, tuple(text(230).tolist()), (1, 2, 3), SamplingParams(40))]
    wanted = generated(sampler, asked)
    for _ in range(3):
        full = case.held()
        asyncio.run(sampler.release_memory())
        freed = full - case.held()
        assert freed >= cache if frees_cache else freed == 0
        assert generated(sampler, asked) == wanted
        assert case.held() == full


# The learner


def learner_of(
    name: str, device: torch.device, folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[TrainedAdapter, TorchLearner]:
    """A learner with an adapter that is the same each time."""
    adapter = AdaptedModel(family(name, dtype=dtype).to(device), new_lora_config(LoraConfig(r=4)))
    weights = TrainedAdapter(adapter, seed=1)
    randomised(adapter, weights.name)
    return weights, TorchLearner(
        weights, run="r", publish_folder=folder, max_tokens_per_microbatch=200, seed=0
    )


def updates_are_those_of_a_processor(case: DeviceCase) -> None:
    """Three updates from given gradients; before the last one another learner reads a checkpoint."""
    weights, learner = learner_of("llama", case.device, case.folder)
    wanted = {key: value.detach().cpu().clone() for key, value in weights.parameters().items()}
    reference = torch.optim.AdamW(wanted.values(), lr=0.01, weight_decay=0.1, foreach=True)
    step = OptimiserParams(learning_rate=0.01, weight_decay=0.1, max_grad_norm=None)
    for number in range(3):
        if number == 2:
            asyncio.run(learner.save(str(case.folder)))
            weights, learner = learner_of("llama", case.device, case.folder)
            learner.load(str(case.folder))
        generator = torch.Generator().manual_seed(number)
        for key, parameter in weights.parameters().items():
            wanted[key].grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad = wanted[key].grad.to(case.device)
        asyncio.run(learner.update(step))
        reference.step()
    for key, parameter in weights.parameters().items():
        torch.testing.assert_close(parameter.detach().cpu(), wanted[key], rtol=1e-5, atol=1e-6)


def gradients(
    name: str, device: torch.device, folder: Path, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Gradients of a whole loss with respect to an adapter, moved to the CPU."""
    weights, learner = learner_of(name, device, folder, dtype)
    asyncio.run(learner.forward_backward(rows_of(below=90), EVERYTHING, TOTALS))
    return {
        key: value.grad.cpu()
        for key, value in weights.parameters().items()
        if value.grad is not None
    }


def gradients_are_those_of_a_processor(case: DeviceCase, name: str) -> None:
    """Gradients of every factor, in float32."""
    places = case.device, torch.device("cpu")
    found, wanted = (gradients(name, each, case.folder) for each in places)
    assert found.keys() == wanted.keys()
    assert len(wanted) > 10
    for key, expected in wanted.items():
        size = float(expected.abs().max())
        assert size > 0
        torch.testing.assert_close(found[key], expected, rtol=1e-3, atol=1e-4 * size)


def all_weights_have_the_gradients_of_a_processor(case: DeviceCase, name: str) -> None:
    """Gradients with products in bfloat16 agree with those of float32, within bfloat16's eight bits."""

    def computed(device: torch.device, dtype: Dtype) -> dict[str, Tensor]:
        weights = TrainedModel(family(name).to(device), dtype=dtype)
        learner = TorchLearner(
            weights, run="r", publish_folder=case.folder, max_tokens_per_microbatch=200, seed=0
        )
        asyncio.run(learner.forward_backward(rows_of(below=90), EVERYTHING, TOTALS))
        found = ((key, each.grad) for key, each in weights.parameters().items())
        return {key: each.cpu() for key, each in found if each is not None}

    found, wanted = computed(case.device, "bfloat16"), computed(torch.device("cpu"), "float32")
    assert found.keys() == wanted.keys()
    for key, expected in wanted.items():
        assert float((found[key] - expected).norm()) < 0.1 * float(expected.norm()), key


def gradients_repeat_to_the_bit(case: DeviceCase, dtype: Dtype, *, adapter: bool) -> None:
    """Texts are so long that several parts of a kernel add to one query's gradient."""
    ids = text(450).tolist()

    def row_of(length: int, advantage: float) -> Row:
        logprobs = (-5.0,) * length
        return Row(
            prompt_ids=tuple(ids[:150]),
            completion_ids=tuple(ids[-length:]),
            mask=(1,) * length,
            sampling_logprobs=logprobs,
            reference_logprobs=logprobs,
            advantage=advantage,
            scale=1 / length,
        )

    rows = [row_of(300, 1.0), row_of(290, -0.5), row_of(250, 0.3), row_of(1, 0.1)]

    def computed() -> list[Tensor]:
        if adapter:
            weights, _ = learner_of("llama", case.device, case.folder, getattr(torch, dtype))
        else:
            weights = TrainedModel(family("llama").to(case.device), dtype=dtype)
        learner = TorchLearner(
            weights, run="r", publish_folder=case.folder, max_tokens_per_microbatch=4096, seed=0
        )
        asyncio.run(learner.forward_backward(rows, EVERYTHING, TOTALS))
        return [each.grad for each in weights.parameters().values() if each.grad is not None]

    first = computed()
    assert any(each.any() for each in first)
    for _ in range(4):
        assert all(map(torch.equal, computed(), first))


def adapters_of_experts_have_the_gradients_of_a_processor(
    case: DeviceCase, dtype: torch.dtype
) -> None:
    """Products are grouped by expert, and the ranks are no multiples of a tile."""
    chosen_NK = torch.randint(4, (33, 2), generator=torch.Generator().manual_seed(1))
    x_NH = torch.randn(33, SMALL["hidden_size"], generator=torch.Generator().manual_seed(2))

    def computed(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        sizes: dict[str, Any] = {**SMALL, "moe_intermediate_size": 24, "head_dim": 8}
        model = made(Qwen3MoeConfig(**sizes, num_experts=4))
        targets = ("experts.gate_up_proj", "experts.down_proj")
        settings = LoraConfig(r=3, alpha=6, target_parameters=targets)
        policy = AdaptedModel(model.to(device, dtype), new_lora_config(settings))
        policy.add("policy", trainable=True, seed=0)
        randomised(policy, "policy", size=0.3)
        (path, _), *_ = experts_of(policy.base).items()
        factors = [each for name, each in policy.parameters("policy").items() if path in name]
        x = x_NH.to(device, dtype).requires_grad_()
        shares_NK = torch.full(chosen_NK.shape, 0.5, device=device, dtype=dtype)
        with policy.using("policy"):
            y_NH = policy.base.get_submodule(path)(x, chosen_NK.to(device), shares_NK)
        weights_N1 = torch.linspace(-1, 1, len(x), device=device)[:, None]
        gradients = torch.autograd.grad((y_NH.float() * weights_N1).sum(), [x, *factors])
        return [each.detach().cpu().float() for each in (y_NH, *gradients)]

    found, wanted = computed(case.device, dtype), computed(torch.device("cpu"), torch.float32)
    near = 1e-3 if dtype == torch.float32 else 0.1
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine - theirs).norm()) < near * float(theirs.norm())


def replayed_experts_have_the_gradients_of_a_processor(case: DeviceCase, dtype: Dtype) -> None:
    """Gradients agree up to rounding, because both use the same experts; those of the routers, too."""
    config = Qwen3MoeConfig(**{**SMALL, **test_routing_replay.QWEN, "head_dim": 8})
    rows = [
        test_routing_replay.with_choices(
            row, test_routing_replay.random_choices(row, config.num_hidden_layers, number)
        )
        for number, row in enumerate(rows_of(below=90))
    ]

    def computed(device: torch.device, dtype: Dtype) -> dict[str, Tensor]:
        learner = TorchLearner(
            TrainedModel(made(config).to(device), dtype=dtype),
            run="r",
            publish_folder=case.folder,
            max_tokens_per_microbatch=200,
            seed=0,
            routing_replay=True,
        )
        asyncio.run(learner.forward_backward(rows, Sft().loss_spec(), {"sft": 40.0}))
        found = ((key, each.grad) for key, each in learner._weights.parameters().items())
        return {key: each.cpu() for key, each in found if each is not None}

    found, wanted = computed(case.device, dtype), computed(torch.device("cpu"), "float32")
    near = 1e-3 if dtype == "float32" else 0.1
    assert float(wanted["model.layers.1.mlp.gate.weight"].norm()) > 0
    for key, expected in wanted.items():
        assert float((found[key] - expected).norm()) < near * float(expected.norm()), key


def one_head_of_keys_is_that_of_a_processor(case: DeviceCase, dtype: torch.dtype) -> None:
    """With a dense mask, at the lengths at which a kernel of torch was wrong."""
    ids_1T = torch.tensor([[5 + place % 80 for place in range(257)]])

    @torch.no_grad()
    def computed(device: torch.device, dtype: torch.dtype, length: int) -> Tensor:
        decoder = Decoder(family("llama-mqa", dtype=dtype).to(device))
        positions_1T = torch.arange(length, device=device)[None]
        seen_1TK = torch.ones(1, length, length, dtype=torch.bool, device=device).tril()
        ids = ids_1T[:, :length].to(device)
        return decoder.hidden(ids, positions_1T, seen_1TK, None)[0].cpu().float()

    near = 1e-3 if dtype == torch.float32 else 0.1
    for length in (65, 129, 257):
        found = computed(case.device, dtype, length)
        wanted = computed(torch.device("cpu"), torch.float32, length)
        assert float((found - wanted)[-1].norm()) < near * float(wanted[-1].norm())


def tf32_rounds_gradients_only_a_little(case: DeviceCase, name: str) -> None:
    """Every factor's gradient is near that of a CPU, but not as near as with exact products."""
    wanted = gradients(name, torch.device("cpu"), case.folder)

    def distances() -> dict[str, float]:
        found = gradients(name, case.device, case.folder)
        assert found.keys() == wanted.keys()
        return {
            key: float((found[key] - expected).norm() / expected.norm())
            for key, expected in wanted.items()
        }

    exact = distances()
    set_tf32(True)
    try:
        rounded = distances()
    finally:
        set_tf32(False)
    assert max(rounded.values()) < 1e-2
    assert sum(rounded.values()) > 3 * sum(exact.values()), "nothing was rounded"


def attention_is_that_of_a_processor(
    case: DeviceCase, name: str, size: int, kv_heads: int, dtype: torch.dtype
) -> None:
    """Values and gradients of a device's own kernels against plain attention on the processor in float32."""
    texts: list[Texts] = test_attention.LAYOUTS[name]
    shape = Shape(
        hidden=24, heads=4, kv_heads=kv_heads, head_size=size, vocabulary=10, epsilon=1e-5
    )
    tokens = texts[-1].end
    generator = torch.Generator().manual_seed(0)
    heads = shape.heads

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(tokens, *sizes, generator=generator).to(dtype).float()

    given = drawn(heads, size), drawn(shape.kv_heads, size), drawn(shape.kv_heads, size)
    d_out = drawn(heads * size)
    leaves = [each.clone().requires_grad_() for each in given]
    wanted = test_attention.plain(texts, *leaves)
    wanted_gradient = torch.cat(torch.autograd.grad(wanted, leaves, d_out), dim=1)
    wanted = wanted.detach()

    queries, keys, values = (each.to(case.device) for each in given)
    values, d_out = values.to(dtype), d_out.to(case.device, dtype)
    found = torch.full_like(d_out, torch.nan)
    gradient = queries.new_full((tokens, heads + 2 * shape.kv_heads, size), torch.nan)
    sets = rotated_attention(shape, texts, dtype, case.device)
    for each in sets:
        each.forward(queries, keys, values, found)
    for each in sets:
        each.backward(d_out, queries, keys, values, gradient)
    close = 1e-4 if dtype == torch.float32 else 0.02
    for mine, expected in ((found, wanted), (gradient, wanted_gradient)):
        difference = (mine.float().cpu() - expected).abs().mean()
        assert float(difference / expected.abs().mean()) < close


@torch.no_grad()
def kernels_between_products_are_those_of_torch(device: torch.device, dtype: torch.dtype) -> None:
    """Norm, SwiGLU, rotary positions and their gradients, in rows that no block of numbers fits."""
    kernels: Any = import_module("groupwise.engine.models.native.triton_kernels")

    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(size, generator=generator).to(device, of)

    def close(found: Tensor, wanted: Tensor) -> None:
        within = 1e-5 if dtype == torch.float32 else 0.01
        torch.testing.assert_close(found.float(), wanted, rtol=within, atol=within)

    rows, weight = drawn(5, 72, of=torch.float32), drawn(72, of=torch.float32)
    gradient, into = drawn(5, 72), drawn(5, 72, of=torch.float32)
    both, d_gated = drawn(5, 2 * 1500), drawn(5, 1500)
    with torch.enable_grad():
        leaves = [each.float().requires_grad_() for each in (rows, both)]
        normed = F.rms_norm(leaves[0], (72,), weight, 1e-5)
        gate, up = leaves[1].chunk(2, dim=-1)
        gated = F.silu(gate) * up
        d_rows, d_both = torch.autograd.grad(
            (normed, gated), leaves, (gradient.float(), d_gated.float())
        )
    before = into.clone()
    close(kernels.normed(rows, weight, 1e-5, dtype), normed)
    close(kernels.norm_with_gradient(rows, weight, 1e-5, dtype, gradient, into), normed)
    close(into - before, d_rows)
    close(kernels.swiglu(both, dtype), gated)
    for found, wanted in zip(
        kernels.swiglu_with_gradient(both, d_gated), (gated, d_both), strict=True
    ):
        close(found, wanted)
    heads = drawn(5, 10, 16)[:, 2:6]
    turns = torch.polar(torch.ones(5, 1, 8), torch.randn(5, 1, 8, generator=generator)).to(device)
    for norm in (None, drawn(16, of=torch.float32)):
        x = heads.float() if norm is None else F.rms_norm(heads.float(), (16,), norm, 1e-5)
        pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
        wanted = torch.view_as_real(pairs * turns).flatten(-2)
        close(kernels.rotary(heads, norm, turns, 1e-5, dtype), wanted)
        d_wider = drawn(5, 7, 16, of=torch.float32)
        with torch.enable_grad():
            leaf = heads.float().requires_grad_()
            x = leaf if norm is None else F.rms_norm(leaf, (16,), norm, 1e-5)
            pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
            turned = torch.view_as_real(pairs * turns).flatten(-2)
            (d_heads,) = torch.autograd.grad(turned, leaf, d_wider[:, 3:])
        before = d_wider[:, :3].clone()
        kernels.rotary_gradient_(d_wider[:, 3:], heads, norm, turns, 1e-5)
        close(d_wider[:, 3:], d_heads)
        assert torch.equal(d_wider[:, :3], before), "its neighbours stay as they are"


def fused_modules_are_those_of_transformers(
    device: torch.device, dtype: torch.dtype, name: str
) -> None:
    """Logits and all gradients of a small model of transformers, which computes its norms, SwiGLUs and rotary positions by the kernels that
    `FUSED_MODELS` says. A second model of the process keeps its own forward passes."""
    config, kernels = FUSED_MODELS[name]
    plain = made(config()).to(device, dtype).requires_grad_(True)
    fused = copy.deepcopy(plain)
    real: Any = import_module("groupwise.engine.models.native.triton_kernels")
    called: set[str] = set()

    class Counted:
        def __getattr__(self, name: str) -> Any:
            called.add(name)
            return getattr(real, name)

    ids = torch.arange(3, 13, device=device).view(2, 5)
    with patch.object(fused_modules, "kernels_for", lambda tensor: Counted()):
        fuse(fused)
        fuse(fused)
        found = fused(input_ids=ids, use_cache=False).logits
        weights = torch.linspace(-1, 1, found.shape[-1], device=device)
        (found.float() * weights).sum().backward()
        assert called == kernels
        called.clear()
        wanted = plain(input_ids=ids, use_cache=False).logits
        assert not called
    (wanted.float() * weights).sum().backward()
    close = 1e-4 if dtype == torch.float32 else 0.1
    theirs = dict(plain.named_parameters())
    pairs = {name: (each.grad, theirs[name].grad) for name, each in fused.named_parameters()}
    for part, (one, other) in {"logits": (found, wanted), **pairs}.items():
        largest = float(other.detach().abs().max())
        assert largest > 0, part
        torch.testing.assert_close(one, other, atol=close * largest, rtol=0, msg=part)


HEADS = ((6, 2, 16, True), (3, 1, 24, False), (2, 2, 128, False))
"""Number of query heads and of key heads, their size, and whether they are normed."""


@torch.no_grad()
def kernels_with_products_are_those_of_torch(
    device: torch.device, dtype: torch.dtype, heads: Sequence[tuple[int, int, int, bool]] = HEADS
) -> None:
    """An adapter's share of a SwiGLU, and attention to pages."""
    kernels: Any = import_module("groupwise.engine.models.native.triton_kernels")

    generator = torch.Generator().manual_seed(0)
    both = torch.randn(19, 2 * 150, generator=generator)
    low, up = (torch.randn(n, 8, generator=generator).to(dtype) for n in (19, 2 * 150))
    gate, value = (both + low.float() @ up.float().t()).chunk(2, dim=-1)
    found = kernels.swiglu_with_low_rank(both.to(device), low.to(device), up.to(device), dtype)
    close = 1e-4 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found.cpu().float(), F.silu(gate) * value, rtol=close, atol=close)
    attention_to_pages_is_that_of_torch(device, dtype, heads)


def tokens_are_drawn_as_torch_does(device: torch.device, dtype: torch.dtype) -> None:
    """The same tokens at any temperature; NaN logits give a NaN log-probability."""
    kernels: Any = import_module("groupwise.engine.models.native.triton_kernels")

    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(12, 2999, generator=generator) * 4).to(dtype)
    logits[3, 5:2900] = -torch.inf
    temperatures = torch.tensor([0.5, 1.0, 1.7]).repeat(4)
    uniforms = torch.rand(12, generator=generator, dtype=torch.float64)
    uniforms[:2] = torch.tensor([0.0, 1 - 2**-53])
    wanted, wanted_logprobs = draw_tokens(logits, temperatures, uniforms)
    given = (each.to(device) for each in (logits, temperatures, uniforms))
    tokens, logprobs = kernels.draw(*given)
    assert tokens.tolist() == wanted.tolist()
    torch.testing.assert_close(logprobs.cpu(), wanted_logprobs, rtol=1e-5, atol=1e-5)
    for number in (torch.nan, torch.inf):
        logits[7, 2500] = number
        given = (each.to(device) for each in (logits, temperatures, uniforms))
        finite = kernels.draw(*given)[1].cpu().isfinite()
        assert finite.tolist() == [n != 7 for n in range(12)]


@torch.no_grad()
def numbers_of_the_head_are_those_of_torch(device: torch.device, dtype: torch.dtype) -> None:
    """Log-probabilities, entropies, the most likely tokens, and what becomes of the logits, over several pieces of the vocabulary."""
    kernels: Any = import_module("groupwise.engine.models.native.triton_kernels")

    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(6, 9001, generator=generator) * 4).to(dtype)
    logits[1, :5000] = -torch.inf
    logits[2, [70, 8000]] = 30.0  # of equal ones the first
    temperatures = torch.tensor([0.5, 1.0, 1.7] * 2)
    targets = torch.randint(5000, 9001, (6,), generator=generator)
    scaled = logits.float() / temperatures[:, None]
    logprobs = scaled.log_softmax(-1)
    p = logprobs.exp()
    entropies = -(p * logprobs.nan_to_num(neginf=0.0)).sum(-1)
    slopes = p * (logprobs.nan_to_num(neginf=0.0) + entropies[:, None])
    close = {torch.float32: 1e-5, torch.float16: 2e-3}.get(dtype, 0.01)
    for single in (True, False):
        given, found_slopes = logits.clone().to(device), torch.empty_like(logits, device=device)
        normalisers, *found = kernels.head_numbers(
            given, temperatures.to(device), targets.to(device) if single else None, gradient=True, entropy_CV=found_slopes
        )  # fmt: skip
        assert found[1].tolist() == scaled.argmax(-1).tolist()
        torch.testing.assert_close(normalisers.cpu(), scaled.logsumexp(-1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[0].cpu(), entropies, rtol=1e-4, atol=1e-4)
        wanted = p - F.one_hot(targets, 9001) if single else p
        torch.testing.assert_close(given.cpu().float(), wanted, rtol=close, atol=1e-5)
        torch.testing.assert_close(found_slopes.cpu().float(), slopes, rtol=close, atol=1e-5)
    plain = logits.to(device)
    kernels.head_numbers(plain, temperatures.to(device), None, gradient=False, entropy_CV=None)
    assert torch.equal(plain.cpu(), logits)


def attention_to_pages_is_that_of_torch(
    device: torch.device, dtype: torch.dtype, cases: Sequence[tuple[int, int, int, bool]]
) -> None:
    """One more token of rows that share the pages of a prompt, or have it to themselves; an empty place disturbs none. All pages of a row
    are attended to at once, or some at a time, in parts that are joined.
    """
    kernels: Any = import_module("groupwise.engine.models.native.triton_kernels")

    generator = torch.Generator().manual_seed(0)
    for heads, kv_heads, size, normed in cases:
        page, epsilon = 16, 1e-5

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        texts = [(drawn(20, kv_heads, size), drawn(20, kv_heads, size))] * 2
        texts += [(drawn(n, kv_heads, size), drawn(n, kv_heads, size)) for n in (16, 1)]
        prompts, written = [20, 20, 16, 1], [0, 18, 16, 5]
        own = [(drawn(n, kv_heads, size), drawn(n, kv_heads, size)) for n in written]
        pages = [[3, 7, 1, 0], [3, 7, 5, 2], [9, 4, 6, 0], [8, 10, 0, 0], [0, 0, 0, 0]]
        caches = torch.full((2, 11, kv_heads, page, size), torch.nan, dtype=dtype)
        for row, (text_of_row, own_of_row) in enumerate(zip(texts, own, strict=True)):
            first = -(-prompts[row] // page)
            for cache, prompt, more in zip(caches, text_of_row, own_of_row, strict=True):
                for numbers, tensor in ((pages[row][:first], prompt), (pages[row][first:], more)):
                    for at in range(len(tensor)):
                        cache[numbers[at // page], :, at % page] = tensor[at]
        qkv = drawn(5, (heads + 2 * kv_heads) * size)
        norms = [torch.rand(size, generator=generator) + 0.5 if normed else None for _ in range(2)]
        turns = torch.polar(
            torch.ones(5, 1, size // 2), torch.randn(5, 1, size // 2, generator=generator)
        )
        positions = [a + b for a, b in zip(prompts, written, strict=True)]
        given = [torch.tensor(each, device=device) for each in ([*positions, 0], [*prompts, 0])]
        keys, values = caches.to(device)
        attend = partial(
            kernels.paged_attention,
            qkv.to(device), tuple(each if each is None else each.to(device) for each in norms), turns.to(device),
            keys, values, torch.tensor(pages, dtype=torch.int32, device=device), *given, epsilon,
        )  # fmt: skip
        with patch.object(kernels, "PARTS", 2):
            found = torch.stack([attend(None), attend(1), attend(3)]).cpu()
        queries, *new = qkv.float().view(5, -1, size).split([heads, kv_heads, kv_heads], dim=1)
        for number, (each, norm) in enumerate(zip((queries, new[0]), norms, strict=True)):
            x = each if norm is None else F.rms_norm(each, (size,), norm, epsilon)
            pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
            turned = torch.view_as_real(pairs * turns).flatten(-2).to(dtype)
            if number == 0:
                queries = turned
            else:
                new[0] = turned
        for row in range(4):
            k, v = (
                torch.cat([*parts, each[row : row + 1].to(dtype)]).float().transpose(0, 1)
                for *parts, each in zip(texts[row], own[row], new, strict=True)
            )
            wanted = F.scaled_dot_product_attention(
                queries[row][:, None].float(), k, v, enable_gqa=True
            )
            close = 1e-5 if dtype == torch.float32 else 0.02
            wanted = wanted.flatten().to(dtype).expand_as(found[:, row])
            torch.testing.assert_close(found[:, row], wanted, rtol=close, atol=close)


# Both together


def gaps(
    case: DeviceCase, trained: TrainedAdapter, tokenizer: Any, asked: Sequence[GroupRequest]
) -> Tensor:
    """For every sampled token, the sampler's log-probability minus the learner's."""
    weights = ServedAdapter(trained.adapted)
    learner = TorchLearner(
        trained, run="r", publish_folder=case.folder, max_tokens_per_microbatch=2000, seed=0
    )
    sampler = sampler_of(case, weights, tokenizer)
    asyncio.run(sampler.load(asyncio.run(learner.publish(1))))
    groups = [generated(sampler, [each]) for each in asked]
    rows = [
        Row(each.prompt_ids, one.token_ids, (1,) * len(one.token_ids), one.logprobs, 0.0, 1.0)
        for each, group in zip(asked, groups, strict=True)
        for one in group
    ]
    wanted = asyncio.run(learner.logprobs(rows))
    ours = torch.tensor([value for row in rows for value in row.sampling_logprobs])
    return ours - torch.tensor([value for row in wanted for value in row])


def sampler_and_learner_agree_on_a_small_model(
    case: DeviceCase, name: str, dtype: torch.dtype, most: float
) -> None:
    """The mean gap of log-probabilities is at most so much; with heads of any size, and as many of keys as of queries or fewer."""
    adapter = AdaptedModel(
        family(name, dtype=dtype).to(case.device), new_lora_config(LoraConfig(r=4))
    )
    trained = TrainedAdapter(adapter, seed=1)
    randomised(adapter, trained.name)
    asked = [
        GroupRequest(n, tuple(text(length).tolist()), (1, 2, 3, 4), SamplingParams(40))
        for n, length in enumerate((3, 17, 70))
    ]
    found = gaps(case, trained, tiny_tokenizer(), asked)
    assert len(found) == 480
    assert float(found.abs().mean()) < most


def bundled(device: torch.device, dtype: Dtype) -> tuple[TrainedAdapter, Any]:
    """The bundled model with a new adapter, and its tokenizer; random weights of its sizes where it is not installed."""
    if bundled_folder(BUNDLED.name) is None:
        model: Any = SIZES["135M"].model(str(device)).to(getattr(torch, dtype))
        tokenizer = tiny_tokenizer()
    else:
        model, tokenizer = load_model(BUNDLED, dtype, str(device)), load_tokenizer(BUNDLED)
    adapter = AdaptedModel(model, new_lora_config(LoraConfig(r=16, alpha=32)))
    return TrainedAdapter(adapter, seed=0), tokenizer


def sampler_and_learner_agree(
    case: DeviceCase, dtype: Dtype, most: float, *, members: int = 8, tokens: int = 24
) -> None:
    """The mean gap of log-probabilities of sampled tokens is at most so much, and on neither side, with an adapter that changes a lot."""
    trained, tokenizer = bundled(case.device, dtype)
    randomised(trained.adapted, trained.name, size=0.02)
    prompts = ("Sort these words: pear apple fig", "Once upon a time, in a small house by the sea")
    asked = [
        GroupRequest(
            n, tuple(tokenizer(prompt)["input_ids"]), tuple(range(members)), SamplingParams(tokens)
        )
        for n, prompt in enumerate(prompts)
    ]
    found = gaps(case, trained, tokenizer, asked)
    assert len(found) > members * tokens
    gap = float(found.abs().mean())
    assert gap < most, gap
    assert abs(float(found.mean())) < most / 4


def small_steps_act_in_full(case: DeviceCase, rate: float, within: float = 0.05) -> None:
    """The slope of the realised on the exact change of every kind of layer, in bfloat16.

    Its noise falls with the number of tokens: of the keys, whose outputs are large, it is up to 30 % at 1e-6 with 1,024 of them, and
    each kind of processor draws another.
    """
    weights, _ = bundled(case.device, "bfloat16")
    assert native_model(weights.model) is not None
    for slope in trained_slopes(weights, rate):
        assert abs(slope.value - 1) < max(within, 3 * slope.error), slope


def a_short_run_goes_through(
    case: DeviceCase, *, lora: dict[str, Any] | None, enforce_eager: bool
) -> None:
    """From beginning to end, with evaluations and checkpoints, on this device."""
    settings = {**toy_run.config(case.folder), "lora": lora}
    settings["sampler"] = {**settings["sampler"], "enforce_eager": enforce_eager}
    assert groupwise.rl(settings, toy_run.TOY).exit_code == 0
    with Store.open(case.folder / "toy" / "run.db", readonly=True) as store:
        assert store.get_meta()["layout"]["device"] == case.device.type
    assert [*(case.folder / "toy" / "final").glob("*.safetensors")]


def a_sampler_beside_the_learner_draws_the_same(case: DeviceCase) -> None:
    """In a process of its own on the same device, a step ahead: what the policy at the start draws, to the bit."""
    drawn: list[Any] = []
    for name, samplers in (("alone", 0), ("beside", 1)):
        settings = toy_run.config(case.folder / name)
        settings["training"] = {**settings["training"], "max_off_policy_steps": 1}
        settings["distributed"] = {"samplers": samplers}
        settings["run"]["threads"] = 1 + samplers
        assert groupwise.rl(settings, toy_run.TOY).exit_code == 0
        with Store.open(case.folder / name / "toy" / "run.db", readonly=True) as store:
            layout = store.get_meta()["layout"]
            assert layout["shares_gpus"] == (samplers > 0 and case.device.type == "cuda")
            drawn.append(
                [
                    (segment.token_ids, segment.sampling_logprobs)
                    for group in store.groups(0)
                    for rollout in group.rollouts
                    for segment in rollout.segments
                ]
            )
    assert drawn[0] == drawn[1]
    assert drawn[0]


def nothing_is_left_of_a_gradient(case: DeviceCase) -> None:
    """Memory after a forward and backward pass by hand is what it was."""
    adapter = AdaptedModel(family("qwen3").to(case.device), new_lora_config(LoraConfig(r=4)))
    weights = TrainedAdapter(adapter, seed=1)
    model = weights.native()
    assert model is not None
    seen: list[int] = []
    for _ in range(5):
        for batch in cut(rows_of(below=90), 200):
            stream = residual_stream(model, batch, weights.factors("policy"), recompute=False)
            stream.sum().backward()
            del stream
        seen.append(case.held())
    assert 0 < max(seen[2:]) <= seen[1], seen
