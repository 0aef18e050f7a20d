"""Layers with adapters: a frozen base layer, and the factors A and B of each adapter that changes it.

Their parameters have the names of peft's layers. The arithmetic is our own: the low-rank product is added *before* the base output is
rounded.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.engine.models.lora_config import AdapterConfig, scaling_of
from groupwise.engine.models.native.linear import adapted_product


class AdapterSwitch:
    """Shared by all adapted layers of a model: the active adapter, and whether dropout is on."""

    def __init__(self) -> None:
        self.active: str | None = None
        self.dropout = False


class LoraLayer(nn.Module):
    """A layer of the base with the factors of its adapters, by the adapters' names."""

    def __init__(self, base_layer: nn.Module, switch: AdapterSwitch) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.switch = switch
        self.lora_A = nn.ModuleDict()
        self.lora_B = nn.ModuleDict()
        self.scaling: dict[str, float] = {}

    def sizes(self, config: AdapterConfig) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of A and B of an adapter."""
        raise NotImplementedError

    def add(self, name: str, config: AdapterConfig) -> None:
        """Add an adapter with factors in float32 that are not initialised yet."""
        device = next(self.get_base_layer().parameters()).device
        for factors, shape in zip((self.lora_A, self.lora_B), self.sizes(config), strict=True):
            factors[name] = _Factor(shape, device)
        self.scaling[name] = scaling_of(config)

    def remove(self, name: str) -> None:
        """Remove an adapter, if it changes this layer."""
        if name in self.lora_A:
            del self.lora_A[name], self.lora_B[name], self.scaling[name]

    def factors(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        """A and B of an adapter."""
        down, up = self.lora_A[name], self.lora_B[name]
        return cast("nn.Parameter", down.weight), cast("nn.Parameter", up.weight)

    def get_base_layer(self) -> nn.Module:
        """The base's own layer; of nested layers with adapters, what the innermost is around."""
        inner = self.base_layer
        return inner.get_base_layer() if isinstance(inner, LoraLayer) else inner


class _Factor(nn.Linear):
    """A factor in float32 whose weight is not initialised, so that it draws no random numbers."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        outputs, inputs = shape
        super().__init__(inputs, outputs, bias=False, device=device, dtype=torch.float32)

    def reset_parameters(self) -> None:
        """Leave the weight as it is in memory."""


class ExactLoraLinear(LoraLayer):
    """`y = round(x Wᵀ + scaling · (x Aᵀ) Bᵀ)`: one rounding, after the sum. A is [rank, in], B [out, rank]."""

    def __init__(self, base_layer: nn.Linear, switch: AdapterSwitch) -> None:
        super().__init__(base_layer, switch)
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        self.dropout: dict[str, float] = {}
        """Share of the inputs that each adapter drops while dropout is on."""

    @property
    def weight(self) -> nn.Parameter:
        """The base's weight, which some models read from a layer."""
        return cast("nn.Parameter", self.base_layer.weight)

    @property
    def bias(self) -> nn.Parameter | None:
        """The base's bias."""
        return cast("nn.Linear", self.base_layer).bias

    def sizes(self, config: AdapterConfig) -> tuple[tuple[int, int], tuple[int, int]]:
        """See `LoraLayer.sizes`."""
        return (config.r, self.in_features), (self.out_features, config.r)

    def add(self, name: str, config: AdapterConfig) -> None:
        """See `LoraLayer.add`."""
        super().add(name, config)
        self.dropout[name] = config.lora_dropout

    def forward(self, x: Tensor) -> Tensor:
        base = cast("nn.Linear", self.base_layer)
        name = self.switch.active
        if name is None or name not in self.lora_A:  # the active adapter does not change this layer
            return base(x)
        down, up = self.factors(name)
        up = up * self.scaling[name]
        dropped = self.dropout[name] if self.switch.dropout else 0.0
        inputs = F.dropout(x, dropped) if dropped else x
        low = F.linear(inputs, down.to(x.dtype)).flatten(0, -2)
        flat = adapted_product(x.flatten(0, -2), base.weight, low, up.to(x.dtype))
        if base.bias is not None:  # added last: in `low @ up` it would take part in the rounding
            flat = flat + base.bias
        return flat.view(*x.shape[:-1], -1)
