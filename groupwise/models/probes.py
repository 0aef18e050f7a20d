"""Measurements that need tensors: how much of a small change reaches a layer's output, what the device has and has used.

They change nothing: an adapter is put back as it was, bit for bit.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from groupwise.models.lora import AdaptedModel, ExactLoraLinear
from groupwise.runs import publications

TOKENS = 1024
"""Random inputs of a layer; so many make the slope sure to about 1 %."""


@dataclass(frozen=True, slots=True)
class Slope:
    """Of the realised on the exact change of a layer's output: 1 where the change acts in full."""

    layer: str
    value: float


def adapter_slopes(adapted: AdaptedModel, name: str, learning_rate: float) -> list[Slope]:
    """After an AdamW step every entry of B has moved by the learning rate: how much of that reaches the outputs?

    One layer of each kind (`q_proj`, `down_proj` …) is tried, in the number format of its base, with inputs of unit variance.
    """
    kinds = {path.rpartition(".")[2]: path for path in reversed(adapted.layers)}
    with torch.no_grad(), adapted.using(name):
        return [
            Slope(path, _slope(adapted.layers[path], name, learning_rate))
            for path in sorted(kinds.values())
        ]


def _slope(layer: ExactLoraLinear, name: str, learning_rate: float) -> float:
    down, up = layer.factors(name)
    weight = cast("nn.Linear", layer.get_base_layer()).weight
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(TOKENS, weight.shape[1], generator=generator).to(weight)
    step = learning_rate * torch.sign(torch.randn(up.shape, generator=generator)).to(up)
    exact = layer.scaling[name] * (inputs.double() @ down.double().t()) @ step.double().t()
    kept, before = up.clone(), layer(inputs)
    try:
        up.add_(step)
        realised = layer(inputs).double() - before.double()
    finally:
        up.copy_(kept)
    return _regressed(realised, exact)


def _regressed(realised: Tensor, exact: Tensor) -> float:
    return float((realised * exact).sum() / (exact * exact).sum())


def trained_adapter(weights: Any) -> tuple[AdaptedModel, str] | None:
    """The adapter in a learner's weights, with its name; None where all weights are trained."""
    adapted = getattr(weights, "adapted", None)
    return (adapted, weights.name) if isinstance(adapted, AdaptedModel) else None


def free_memory(device: str) -> int | None:
    """Bytes that can still be had on the device, also within a container's limit; None where the system does not tell."""
    if device != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return publications.free_memory()
    except OSError:
        return None


def peak_memory(device: str) -> int:
    """Most bytes that were held so far: of the device by torch, on a CPU of the whole process."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def random_start(seed: int, count: int) -> list[float]:
    """The first numbers of the generator from which an adapter's start is drawn."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator).tolist()
