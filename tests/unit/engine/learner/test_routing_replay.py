"""The learner uses the experts that a sampler chose: the same results as a model whose experts are forced from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from groupwise.core.errors import ModelError
from groupwise.core.types import RoutedExperts, Row
from groupwise.engine.models.experts import REPLAYABLE, experts_of, routed_blocks
from tests.unit.engine.learner.test_torch_learner import DR_GRPO, SFT, close, computed
from tests.unit.engine.models.native.families import SMALL, made

SIZES: dict[str, Any] = {**SMALL, "vocab_size": 102, "num_hidden_layers": 3}
HEADS: dict[str, Any] = {"head_dim": 8}
EXPERTS, TOP_K = 6, 2
QWEN: dict[str, Any] = {
    "num_experts_per_tok": TOP_K, "num_experts": EXPERTS, "moe_intermediate_size": 24,
}  # fmt: skip
LOCAL: dict[str, Any] = {"num_experts_per_tok": TOP_K, "num_local_experts": EXPERTS}
SHARED: dict[str, Any] = {
    "num_experts_per_tok": TOP_K, "n_routed_experts": EXPERTS, "moe_intermediate_size": 24,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
GATED: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "full_attention"], "shared_expert_intermediate_size": 24,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_shared_experts": 1,
}  # fmt: skip


def softmax(logits_NE: Tensor, chosen_NK: Tensor) -> Tensor:
    return logits_NE.softmax(-1).gather(-1, chosen_NK)


def normalised(logits_NE: Tensor, chosen_NK: Tensor) -> Tensor:
    return logits_NE.gather(-1, chosen_NK).softmax(-1)


def sigmoid(logits_NE: Tensor, chosen_NK: Tensor) -> Tensor:
    scores_NK = logits_NE.sigmoid().gather(-1, chosen_NK)
    return scores_NK / scores_NK.sum(-1, keepdim=True)


FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "qwen3_moe": (lambda: Qwen3MoeConfig(**SIZES, **QWEN, **HEADS, mlp_only_layers=[1]), softmax),
    "qwen2_moe": (
        lambda: Qwen2MoeConfig(**SIZES, **QWEN, shared_expert_intermediate_size=24),
        softmax,
    ),
    "qwen3_next": (lambda: Qwen3NextConfig(**SIZES, **QWEN, **GATED, **HEADS), normalised),
    "olmoe": (
        lambda: OlmoeConfig(**SIZES, num_experts_per_tok=TOP_K, num_experts=EXPERTS),
        softmax,
    ),
    "mixtral": (lambda: MixtralConfig(**SIZES, **LOCAL), normalised),
    "granitemoe": (lambda: GraniteMoeConfig(**SIZES, **LOCAL), normalised),
    "gpt_oss": (lambda: GptOssConfig(**SIZES, **LOCAL, **HEADS), normalised),
    "minimax_m2": (lambda: MiniMaxM2Config(**SIZES, **LOCAL, **HEADS), sigmoid),
    "glm4_moe": (lambda: Glm4MoeConfig(**SIZES, **SHARED, **HEADS), sigmoid),
    "deepseek_v3": (
        lambda: DeepseekV3Config(**{**SIZES, **LATENT}, **SHARED, routed_scaling_factor=1.0),
        sigmoid,
    ),
}
"""A small config of each type, one with a layer without experts, and how its routers weigh the experts that were chosen."""


def inputs(row: Row) -> list[int]:
    return [*row.prompt_ids, *row.completion_ids[:-1]]


def with_choices(row: Row, chosen_TLK: Tensor, dtype: torch.dtype = torch.uint8) -> Row:
    tokens, layers, top_k = chosen_TLK.shape
    indices = chosen_TLK.to(dtype).numpy().tobytes()
    return replace(row, routed_experts=(RoutedExperts(0, (tokens, layers, top_k), indices),))


def random_choices(row: Row, layers: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(inputs(row)), layers, EXPERTS)
    return torch.rand(shape, generator=generator).argsort(-1)[..., :TOP_K]


def router_logits(block: Any, x_NH: Tensor) -> Tensor:
    router = block.gate if hasattr(block, "gate") else block.router
    router = getattr(router, "layer", router)
    return functional.linear(x_NH, router.weight, getattr(router, "bias", None))


class Forced:
    """A plain model, in which experts get their choices and weights from outside."""

    def __init__(self, model: Any, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.model, self.weigh = model, weigh
        self.chosen_TLK: Tensor | None = None
        self.found: dict[int, Tensor] = {}
        for layer, block in routed_blocks(model).items():
            experts = next(iter(experts_of(block).values()))
            experts.register_forward_pre_hook(self._hook(layer, block))

    def _hook(self, layer: int, block: Any) -> Any:
        def change(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x_NH, chosen_NK, weights_NK = given
            self.found[layer] = chosen_NK
            if self.chosen_TLK is None:
                return given
            chosen_NK = self.chosen_TLK[:, layer]
            weights_NK = self.weigh(router_logits(block, x_NH).float(), chosen_NK)
            return x_NH, chosen_NK, weights_NK

        return change

    def logprobs(self, row: Row, chosen_TLK: Tensor | None) -> Tensor:
        self.chosen_TLK = chosen_TLK
        logits_TV = self.model(input_ids=torch.tensor([inputs(row)]), use_cache=False).logits[0]
        logprobs_TV = (logits_TV[len(row.prompt_ids) - 1 :] / row.temperature).log_softmax(-1)
        return logprobs_TV.gather(-1, torch.tensor(row.completion_ids)[:, None])[:, 0]

    def own_choices(self, row: Row) -> Tensor:
        with torch.no_grad():
            self.logprobs(row, None)
        layers = self.model.config.num_hidden_layers
        nothing = torch.zeros(len(inputs(row)), TOP_K, dtype=torch.long)
        return torch.stack([self.found.get(layer, nothing) for layer in range(layers)], dim=1)


@pytest.mark.parametrize("family", FAMILIES)
async def test_replayed_choices_act_as_those_that_are_forced(family, make_rows, make_learner):
    config, weigh = FAMILIES[family]
    forced = Forced(made(config()), weigh)
    rows = [
        with_choices(row, random_choices(row, 3, index)) for index, row in enumerate(make_rows())
    ]
    learner = make_learner("full", model=made(config()), routing_replay=True, max_tokens=60)
    found = await learner.logprobs(rows)
    for index, (row, logprobs) in enumerate(zip(rows, found, strict=True)):
        expected = forced.logprobs(row, random_choices(row, 3, index))
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=1e-4)
        own = forced.logprobs(row, None)
        assert float((own - expected).detach().abs().max()) > 1e-2, "the choices make a difference"


def test_all_types_are_tested():
    assert {*FAMILIES} == REPLAYABLE


WAYS: dict[str, dict[str, Any]] = {
    "packed": {"packing": True},
    "padded": {"packing": False},
    "recomputed": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("way", WAYS)
async def test_own_choices_change_neither_loss_nor_gradient(way, make_rows, make_learner):
    config, weigh = FAMILIES["qwen3_moe"]
    plain, rows = Forced(made(config()), weigh), make_rows()
    own = [with_choices(row, plain.own_choices(row), torch.uint16) for row in rows]
    without, with_own = (
        make_learner(
            "full", model=made(config()), routing_replay=replays, max_tokens=60, **WAYS[way]
        )
        for replays in (False, True)
    )
    sums, wanted = await computed(without, rows, DR_GRPO)
    found_sums, found = await computed(with_own, own, DR_GRPO)
    assert found_sums == pytest.approx(sums, rel=1e-5)
    close(found, wanted)


@pytest.mark.parametrize("way", WAYS)
async def test_gradients_are_those_of_forced_experts(way, make_rows, make_learner):
    """Those of the routers among them, through the weights of experts that they would not have chosen."""
    config, weigh = FAMILIES["qwen3_moe"]
    forced, rows = Forced(made(config()), weigh), make_rows()
    chosen = [random_choices(row, 3, index) for index, row in enumerate(rows)]
    learner = make_learner(
        "full", model=made(config()), routing_replay=True, max_tokens=60, **WAYS[way]
    )
    given = [with_choices(row, each) for row, each in zip(rows, chosen, strict=True)]
    _, found = await computed(learner, given, SFT, {"sft": 40.0})
    for row, each in zip(rows, chosen, strict=True):
        logprobs = forced.logprobs(row, each)
        (-(logprobs * torch.tensor(row.mask)).sum() * row.scale / 40.0).backward()
    wanted = {name: each.grad for name, each in forced.model.named_parameters()}
    close(found, {name: each for name, each in wanted.items() if each is not None})
    assert float(found["model.layers.0.mlp.gate.weight"].abs().max()) > 1e-3


async def test_tokens_without_a_choice_use_the_routers_own(make_rows, make_learner):
    """Here those of the prompt, which see nothing of later ones; so do all tokens where another policy computes."""
    config, weigh = FAMILIES["qwen3_moe"]
    forced = Forced(made(config()), weigh)
    row = make_rows()[4]
    first, random = len(row.prompt_ids), random_choices(row, 3, 0)
    (whole,) = with_choices(row, random).routed_experts
    given = replace(row, routed_experts=(whole.part(first, whole.end),))
    expected_TLK = torch.cat((forced.own_choices(row)[:first], random[first:]))
    learner = make_learner("adapter", model=made(config()), routing_replay=True)
    with torch.no_grad():
        for parameter in learner._parameters.values():
            parameter.zero_()
    (found,) = await learner.logprobs([given])
    torch.testing.assert_close(
        torch.tensor(found), forced.logprobs(row, expected_TLK).detach(), atol=1e-4, rtol=1e-4
    )
    (reference,) = await learner.logprobs([given], "reference")
    own = forced.logprobs(row, None).detach()
    torch.testing.assert_close(torch.tensor(reference), own, atol=1e-4, rtol=1e-4)


def test_a_model_without_routers_that_can_replay_is_refused(make_learner):
    with pytest.raises(ModelError, match="qwen3_moe"):
        make_learner("adapter", routing_replay=True)
