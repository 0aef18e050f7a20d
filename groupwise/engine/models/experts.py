"""The experts of mixture-of-experts models: their products, with an adapter of their own or without.

Transformers keeps the matrices of all experts of a layer in one module with three-dimensional parameters, and has one interface for
functions that compute such modules. This one serves two cases. `ExactLoraExperts` are experts with an adapter: as in linear layers, the
low-rank product is added before the output is rounded. Tokens are sorted by expert, and one grouped product computes all experts. And while
a sampler decodes, each expert computes all rows of the batch, also those that chose others, because a matrix product may round a row
differently among more rows or fewer: with a fixed number, a row's bits do not depend on its neighbours. All other passes are transformers'
own.

The choice of experts depends on a token alone: no expert has a capacity, and no token is dropped. The auxiliary losses of routers belong to
the forward pass of the whole model, which is not used here, so there are none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.core.errors import ModelError
from groupwise.core.types import RouterShape
from groupwise.engine.models.lora_config import AdapterConfig
from groupwise.engine.models.lora_layers import AdapterSwitch, LoraLayer
from groupwise.engine.models.native.linear import adapted_product

ALL_ROWS = "groupwise_all_rows"
"""Name, among transformers' implementations of experts, of the one in which each expert computes all rows."""
RANKS = 8
"""Ranks of adapters are padded to a multiple of this in grouped products, whose rows must be multiples of 16 bytes on a GPU."""
ByExpert = tuple[Tensor, Tensor, float]
"""A [experts, rank, in], B [experts, out, rank] and the scaling of an adapter of experts."""


def are_experts(module: nn.Module) -> bool:
    """True if transformers' interface for experts computes this module."""
    return hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with experts, by their paths, without those of adapters."""
    return {
        path.removesuffix(".base_layer").removesuffix(".base_layer"): module
        for path, module in model.named_modules()
        if are_experts(module)
    }


REPLAYABLE = frozenset(
    {
        "deepseek_v3",
        "glm4_moe",
        "gpt_oss",
        "granitemoe",
        "minimax_m2",
        "mixtral",
        "olmoe",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
    }
)
"""Types of models whose routers choose by one `topk` over all experts of the layer, and weigh the chosen ones by their own scores."""


def routed_blocks(model: nn.Module) -> dict[int, nn.Module]:
    """The modules that hold a router and its experts, by the index of their layer."""
    found: dict[int, nn.Module] = {}
    for path in experts_of(model):
        match = re.search(r"\blayers\.(\d+)\.", path)
        if match:
            found[int(match[1])] = model.get_submodule(path.rpartition(".")[0])
    return found


def router_shape(model: nn.Module) -> RouterShape:
    """What choices of experts of this model look like. Raises ModelError if a sampler's choices cannot be replayed in it."""
    config = cast("Any", model).config.get_text_config()
    blocks = routed_blocks(model)
    if config.model_type not in REPLAYABLE or not blocks:
        raise ModelError(
            f"sampler.routing_replay is true, but the model is a {config.model_type}. The experts that a sampler chose can be replayed in "
            f"the types {', '.join(sorted(REPLAYABLE))}. Leave the key out."
        )
    experts = next(iter(experts_of(model).values()))
    return RouterShape(
        layers=config.num_hidden_layers,
        with_experts=tuple(sorted(blocks)),
        experts=cast("Any", experts).num_experts,
        top_k=config.num_experts_per_tok,
    )


@contextmanager
def all_rows(config: Any) -> Iterator[None]:
    """Context manager in which each expert that is used computes all rows of a batch."""
    previous = config._experts_implementation
    config._experts_implementation = ALL_ROWS
    try:
        yield
    finally:
        config._experts_implementation = previous


def compute_experts(
    experts: nn.Module,
    x_NH: Tensor,
    chosen_NK: Tensor,
    weights_NK: Tensor,
    factors: Mapping[str, ByExpert],
) -> Tensor:
    """The weighted sum [N, H] of the outputs of each token's K experts; `factors`: by the name of the matrices that an adapter changes."""
    layer = cast("Any", experts)
    count, top = chosen_NK.shape
    if layer.config._experts_implementation == ALL_ROWS:
        outputs_NKH = x_NH.new_zeros(count, top, x_NH.shape[1])
        for expert in chosen_NK.unique().tolist():
            here_NK1 = (chosen_NK == expert)[:, :, None]
            output_NH = _output(layer, _OneExpert(layer, expert, factors), x_NH)
            outputs_NKH = torch.where(here_NK1, output_NH[:, None], outputs_NKH)
    else:
        experts_A, order_A = torch.sort(chosen_NK.flatten(), stable=True)
        grouped = _SortedByExpert(layer, experts_A, factors)
        output_AH = _output(layer, grouped, x_NH[order_A // top])
        outputs_NKH = output_AH[torch.argsort(order_A)].view(count, top, -1)
    return (outputs_NKH * weights_NK[:, :, None]).sum(dim=1).to(x_NH.dtype)


def _output(layer: Any, product: Callable[[str, Tensor], Tensor], x_AH: Tensor) -> Tensor:
    """What experts make of their tokens, before its weight; `product`: with the matrices of this name."""
    inner = product("gate_up_proj" if layer.has_gate else "up_proj", x_AH)
    inner = layer._apply_gate(inner) if layer.has_gate else layer.act_fn(inner)
    y_AH = product("down_proj", inner)
    # Older releases of transformers have no such norm.
    return layer.post_expert_norm(y_AH) if getattr(layer, "has_post_expert_norm", False) else y_AH


class _OneExpert:
    """Products of a single expert, with all rows."""

    def __init__(self, layer: Any, expert: int, factors: Mapping[str, ByExpert]) -> None:
        self._layer, self._expert, self._factors = layer, expert, factors

    def __call__(self, name: str, x_MI: Tensor) -> Tensor:
        expert = self._expert
        weight_OI = _matrices(self._layer, name)[expert]
        if name in self._factors:
            down_ERI, up_EOR, scaling = self._factors[name]
            low_MR = F.linear(x_MI, down_ERI[expert].to(x_MI.dtype))
            up_OR = (up_EOR[expert] * scaling).to(x_MI.dtype)
            y_MO = adapted_product(x_MI, weight_OI, low_MR, up_OR)
        else:
            y_MO = F.linear(x_MI, weight_OI)
        return y_MO + _biases(self._layer, name)[expert] if self._layer.has_bias else y_MO


class _SortedByExpert:
    """Products of tokens that are sorted by expert, each with its own expert."""

    def __init__(self, layer: Any, experts_A: Tensor, factors: Mapping[str, ByExpert]) -> None:
        self._layer, self._experts_A, self._factors = layer, experts_A, factors
        experts_E = torch.arange(layer.num_experts, device=experts_A.device)
        ends_E = torch.searchsorted(experts_A, experts_E, right=True)
        self._ends_E = ends_E.to(torch.int32)
        """Index after the last token of each expert."""

    def __call__(self, name: str, x_AI: Tensor) -> Tensor:
        weight_EOI = _matrices(self._layer, name)
        if name in self._factors:
            down_ERI, up_EOR, scaling = self._factors[name]
            padding = (0, -down_ERI.shape[1] % RANKS)
            down_ERI = F.pad(down_ERI, (0, 0, *padding)).to(x_AI.dtype)
            up_EOR = F.pad(up_EOR * scaling, padding).to(x_AI.dtype)
            low_AR = F.grouped_mm(x_AI, down_ERI.mT, offs=self._ends_E)
            y_AO = cast("Tensor", _AtOnce.apply(x_AI, weight_EOI, low_AR, up_EOR, self._ends_E))
        else:
            y_AO = cast("Tensor", _Rounded.apply(x_AI, weight_EOI, self._ends_E))
        if not self._layer.has_bias:
            return y_AO
        return y_AO + _biases(self._layer, name)[self._experts_A].to(y_AO.dtype)


class _Rounded(torch.autograd.Function):
    """`x Wᵀ` with each token's expert, where W may be float32 and is then rounded to the format of x, and again for the gradient."""

    @staticmethod
    def forward(ctx: Any, x_AI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_AI, weight_EOI, ends_E)
        return F.grouped_mm(x_AI, weight_EOI.to(x_AI.dtype).mT, offs=ends_E)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x_AI, weight_EOI, ends_E = ctx.saved_tensors
        dy_AO = grad_outputs[0].contiguous()
        for_x, for_weight, _ = ctx.needs_input_grad
        dx_AI = d_EOI = None
        if for_x:
            dx_AI = F.grouped_mm(dy_AO, weight_EOI.to(dy_AO.dtype), offs=ends_E)
        if for_weight:
            d_EOI = F.grouped_mm(dy_AO.t(), x_AI, offs=ends_E).to(weight_EOI.dtype)
        return dx_AI, d_EOI, None


class _AtOnce(torch.autograd.Function):
    """`x Wᵀ + t Bᵀ` with each token's expert, as one product `[x t] [W B]ᵀ` that is rounded once. The frozen W has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x_AI: Tensor, weight_EOI: Tensor, low_AR: Tensor, up_EOR: Tensor, ends_E: Tensor
    ) -> Tensor:
        ctx.save_for_backward(weight_EOI, low_AR, up_EOR, ends_E)
        both_EOX = torch.cat((weight_EOI, up_EOR), dim=2)
        return F.grouped_mm(torch.cat((x_AI, low_AR), dim=1), both_EOX.mT, offs=ends_E)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        weight_EOI, low_AR, up_EOR, ends_E = ctx.saved_tensors
        dy_AO = grad_outputs[0].contiguous()
        dx_AI, d_low_AR = (F.grouped_mm(dy_AO, each, offs=ends_E) for each in (weight_EOI, up_EOR))
        return dx_AI, None, d_low_AR, F.grouped_mm(dy_AO.t(), low_AR, offs=ends_E), None


def _matrices(layer: Any, name: str) -> Tensor:
    """The matrices of all experts, [E, O, I]."""
    weight = getattr(layer, name)
    return weight.mT if layer.is_transposed else weight


def _biases(layer: Any, name: str) -> Tensor:
    """The biases of all experts, [E, O]."""
    return getattr(layer, f"{name}_bias")


def _without_adapter(
    experts: nn.Module, x_NH: Tensor, chosen_NK: Tensor, weights_NK: Tensor
) -> Tensor:
    return compute_experts(experts, x_NH, chosen_NK, weights_NK, {})


def register_all_rows() -> None:
    """Add `ALL_ROWS` to transformers' implementations of experts."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(ALL_ROWS, _without_adapter)


class ExactLoraExperts(LoraLayer):
    """Experts, one of whose matrices (`parameter_name`) has adapters; for a second matrix, another one is around it, as peft does it.

    A is [experts · rank, in] and B [out, rank · experts] with the number of the expert last, as peft stores them. An adapter that changes
    several matrices is applied by the outermost of these modules.
    """

    def __init__(self, base_layer: nn.Module, parameter_name: str, switch: AdapterSwitch) -> None:
        super().__init__(base_layer, switch)
        self.parameter_name = parameter_name
        experts = self.get_base_layer()
        self.num_experts, outputs, inputs = getattr(experts, parameter_name).shape
        if experts.is_transposed:
            outputs, inputs = inputs, outputs
        self.in_features, self.out_features = inputs, outputs

    def sizes(self, config: AdapterConfig) -> tuple[tuple[int, int], tuple[int, int]]:
        """See `LoraLayer.sizes`."""
        rows = self.num_experts * config.r
        return (rows, self.in_features), (self.out_features, rows)

    def by_expert(self, name: str) -> ByExpert:
        """The factors of an adapter, and its scaling."""
        down, up = self.factors(name)
        count = self.num_experts
        up_EOR = up.view(up.shape[0], -1, count).permute(2, 0, 1)
        return down.view(count, -1, down.shape[1]), up_EOR, self.scaling[name]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = self.switch.active
        inner = self.base_layer
        if name is None or name not in self.lora_A:
            return inner(x, *args, **kwargs)
        factors = {self.parameter_name: self.by_expert(name)}
        while isinstance(inner, ExactLoraExperts):
            if name in inner.lora_A:
                factors[inner.parameter_name] = inner.by_expert(name)
            inner = inner.base_layer
        return compute_experts(inner, x, *args, **kwargs, factors=factors)


DIVIDED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The matrices of an expert that one parameter of a layer has for all experts, one below the other."""
DIVISIBLE = frozenset({"qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3"})
"""Types of models in whose files each expert has matrices of these names, by which vLLM takes adapters of experts."""


def factors_by_expert(
    layer: ExactLoraExperts, path: str, name: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """A [rank, in] and B [out, rank] of each matrix of each expert, by its path in the files of whole models. `path`: of the experts.

    A parameter without adapter gets factors of zeros, because vLLM requires all three matrices of an expert.
    """
    inner, adapters = cast("nn.Module", layer), dict[str, ByExpert]()
    while isinstance(inner, ExactLoraExperts):
        if name in inner.lora_A:
            adapters[inner.parameter_name] = inner.by_expert(name)
        inner = inner.base_layer
    down_ERI, up_EOR, _ = next(iter(adapters.values()))
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for parameter, matrices in DIVIDED.items():
        weight = cast("Tensor", getattr(inner, parameter))
        experts, width_out, width_in = weight.shape
        down, up = (
            adapters[parameter][:2]
            if parameter in adapters
            else (
                down_ERI.new_zeros(experts, down_ERI.shape[1], width_in),
                up_EOR.new_zeros(experts, width_out, up_EOR.shape[2]),
            )
        )
        for expert in range(experts):
            for matrix, up_OR in zip(matrices, up[expert].chunk(len(matrices)), strict=True):
                found[f"{path}.{expert}.{matrix}"] = down[expert], up_OR
    return found


def add_expert_adapters(
    base: nn.Module, name: str, config: AdapterConfig, switch: AdapterSwitch
) -> None:
    """Add an adapter to the matrices of experts that `config.target_parameters` names. Raises ValueError if it cannot be added."""
    if config.lora_dropout:
        raise ValueError(
            f"lora.target_parameters: an adapter of experts cannot have dropout, but lora.dropout is {config.lora_dropout:g}; set it to 0"
        )
    targets = config.target_parameters or []
    experts = experts_of(base)
    paths = {
        f"{path}.{matrix}": (path, matrix)
        for path, module in experts.items()
        for matrix, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    }
    matched = {
        target: [path for path in paths if f".{path}".endswith(f".{target}")] for target in targets
    }
    unmatched = [target for target, found in matched.items() if not found]
    if unmatched:
        kinds = sorted({".".join(path.split(".")[-3:]) for path in paths})
        raise ValueError(
            f"lora.target_parameters: no experts have {', '.join(unmatched)}; this model has "
            f"{', '.join(kinds) or 'none whose matrices can have an adapter'}"
        )
    chosen = [path for path in paths if any(path in found for found in matched.values())]
    for path in experts:
        matrices = [matrix for each in chosen for owner, matrix in [paths[each]] if owner == path]
        if matrices:
            _adapt(base, path, matrices, name, config, switch)


def _adapt(
    base: nn.Module,
    path: str,
    matrices: list[str],
    name: str,
    config: AdapterConfig,
    switch: AdapterSwitch,
) -> None:
    present: dict[str, ExactLoraExperts] = {}
    module = base.get_submodule(path)
    outermost = module
    while isinstance(module, ExactLoraExperts):
        present[module.parameter_name] = module
        module = module.base_layer
    if present and set(present) != set(matrices):
        raise ValueError(
            f"lora.target_parameters: another adapter over this model changes {', '.join(sorted(present))} of the experts, and this one "
            f"{', '.join(matrices)}; their names in files would differ. Give all adapters the same"
        )
    for matrix in matrices:  # the first one is the innermost, as in peft
        if matrix not in present:
            outermost = present[matrix] = ExactLoraExperts(outermost, matrix, switch)
        present[matrix].add(name, config)
    base.set_submodule(path, outermost)
