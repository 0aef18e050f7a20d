"""What a Tinker service computes, as far as services differ: most do not report it, and are assumed to do what Tinker's documentation says.

SkyRL's server publishes the schema of its bodies (`/openapi.json`), which names its losses and the fields that it reads. It is known by the
title of that document. Its engine `jax` divides the loss of a datum by the sum of its weights, 1 for each target where a loss has none, and
the gradient by the number of datums since the last update; its other engines add up, as Tinker does. The schema does not tell which one
computes, so `model.loss_reduction` says it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import httpx2

from groupwise.core.errors import UsageError
from groupwise.core.loopback import direct_transport
from groupwise.engine.models.config import ModelConfig

SCHEMA = "/openapi.json"
SKYRL = "Tinker API Mock"
"""The title of the schema of SkyRL's server."""
LOSSES = {
    "log_probability": "cross_entropy",
    "ratio": "importance_sampling",
    "clipped_ratio": "ppo",
    "clipped_weight": "cispo",
}
"""The losses that Tinker's documentation names, by our name for what each sums up."""
USUAL_CLIP = (0.8, 1.2)
"""Bounds of the ratio in `ppo`, where nothing else is asked for."""
TIMEOUT = 20.0
"""Seconds to wait for the schema."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The losses and options that a service has."""

    name: str = "The service"
    losses: frozenset[str] = frozenset(LOSSES.values())
    sets_clips: bool = True
    """`ppo` takes bounds of the ratio; False: it always has `USUAL_CLIP`."""
    averages: bool = False
    """Losses are means over targets and datums, as SkyRL's engine `jax` makes them; False: sums."""
    knows_reduction: bool = True
    """False: whether it averages must be said in `model.loss_reduction`."""
    clips_gradients: bool = True
    chooses_layers: bool = True
    """`train_attn`, `train_mlp` and `train_unembed` are read; False: attention and MLP are trained."""
    samples_unloaded: bool = True
    """Saved weights can be sampled after their model's session has ended; False: only a model that is loaded can."""
    largest_seed: int = 2**63
    """Seeds are below it; ours have 64 bits and are taken modulo it."""

    def computes(self, loss: str, settings: Mapping[str, float]) -> bool:
        """True if the service has this loss with these bounds of the ratio, lower first."""
        if loss not in self.losses:
            return False
        return self.sets_clips or loss != "ppo" or tuple(settings.values()) == USUAL_CLIP


def capabilities_of(model: ModelConfig, url: str | None) -> Capabilities:
    """The capabilities of the service at this URL; None: the service of the tinker package."""
    return capabilities_from({} if url is None else read_schema(url), model.loss_reduction)


@cache
def read_schema(url: str) -> dict[str, Any]:
    """The schema that the service publishes; empty if it has none. Read once in a process."""
    try:
        with httpx2.Client(transport=direct_transport(url), timeout=TIMEOUT) as http:
            answer: Any = http.get(f"{url.rstrip('/')}{SCHEMA}").json()
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError):
        return {}
    return cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}


def capabilities_from(schema: Mapping[str, Any], reduction: str | None) -> Capabilities:
    """The capabilities of a service with this schema. `reduction` is `model.loss_reduction`."""
    if schema.get("info", {}).get("title") != SKYRL:
        return Capabilities(averages=reduction == "mean")
    losses = _fields(schema, "ForwardBackwardInput").get("loss_fn", {}).get("enum", ())
    return Capabilities(
        name="SkyRL's server",
        losses=frozenset(LOSSES.values()) & frozenset(losses),
        # Its releases without cispo read no bounds.
        sets_clips="cispo" in losses,
        averages=reduction == "mean",
        knows_reduction=reduction is not None,
        clips_gradients="grad_clip_norm" in _fields(schema, "AdamParams"),
        chooses_layers="train_attn" in _fields(schema, "LoRAConfig"),
        samples_unloaded=False,
        largest_seed=2**31
        - 2**16,  # members of a group have the numbers after it, and JAX takes 32 bits
    )


def _fields(schema: Mapping[str, Any], body: str) -> Mapping[str, Any]:
    return schema.get("components", {}).get("schemas", {}).get(body, {}).get("properties", {})


def check(config: Any, capabilities: Capabilities) -> None:
    """Raise UsageError with all keys of a `RunConfig` or `SftConfig` that cannot have an effect at this service."""
    conflicts = [*_conflicts(config, capabilities)]
    if conflicts:
        raise UsageError("\n".join(conflicts))


def _conflicts(config: Any, capabilities: Capabilities) -> Iterator[str]:
    if not capabilities.knows_reduction:
        yield (
            f"model.loss_reduction is needed with {capabilities.name}, which does not tell how it adds up a loss: mean with its engine jax "
            "(--backend jax), sum with its engines fsdp and megatron."
        )
    norm = config.training.max_grad_norm
    if norm is not None and not capabilities.clips_gradients:
        yield (
            f"training.max_grad_norm is {norm:g}, but {capabilities.name} clips no gradients. Set training.max_grad_norm to null; "
            "the norm is still recorded where the service reports it."
        )
    layers = config.lora.target_modules
    if layers != "all-linear" and not capabilities.chooses_layers:
        yield (
            f"lora.target_modules is {layers}, but {capabilities.name} always adapts attention and MLP. Leave it out."
        )
