"""The low-rank adapter: qwix adds parameters for its factors to Tunix's model; in files they have peft's names and shapes.

qwix computes a product over several axes as one einsum, so A is [inputs…, rank] and B is [rank, outputs…]. If Tunix stores several layers
in one weight (keys and values of Gemma), they share one A; in the file each of them has a copy.

The adapter's product is computed in float32 and added before the layer's output is rounded (`ExactLora`). qwix itself adds it to an output
that is already rounded, so on a bfloat16 base a small update changes nothing (docs/decisions/0007-exact-lora-before-rounding.md).
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from qwix._src.utils import flax_util
from safetensors.numpy import load_file, save_file

from groupwise.core.errors import ModelError
from groupwise.engine.backends.tunix.worker.families import Family
from groupwise.engine.backends.tunix.worker.head import Product, in_float32
from groupwise.engine.models.fingerprint import tree_hash
from groupwise.engine.models.machine import available_cores

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")

Factors = dict[str, jax.Array]
"""The trained factors in float32, named `<layer>.<weight>.a` and `….b`."""


class Adapted:
    """A frozen model with one set of parameters for factors; each call passes the factors to use."""

    def __init__(
        self, model: nnx.Module, family: Family, layers: Sequence[str], rank: int, alpha: float
    ) -> None:
        """`layers`: transformers' names of the layers that get an adapter."""
        weights = [_weight_name(path) for path, _ in nnx.to_flat_state(nnx.state(model))]
        by_part = {
            f"{match[1]}.{match[2]}": layer_name
            for layer_name in layers
            if (match := _LAYER.fullmatch(layer_name))
        }
        self.layers: dict[str, tuple[str, ...]] = {}
        """For each adapted weight (layer number and Tunix's name) the transformers layers that it consists of, in its order."""
        for weight in weights:
            number, _, name = weight.partition(".")
            parts = [f"{number}.{part}" for part in family.weights.get(name, ())]
            if parts and parts[0] in by_part:  # `fits.check_layers`: then all are
                self.layers[weight] = tuple(by_part[part] for part in parts)
        adapted_layers = {layer for group in self.layers.values() for layer in group}
        assert {*layers} == adapted_layers, "they are checked"
        self.number: Any = jax.tree.leaves(nnx.state(model))[0].dtype
        paths = [f"layers.{weight.rpartition('.')[0]}" for weight in self.layers]
        rule = "|".join(re.escape(path.replace(".", "/")) for path in paths)
        provider = ExactLora(module_path=rule, rank=rank, alpha=alpha)
        # Outside of the mesh, layers do not split their rows: qwix runs the model once, with too few rows for many devices.
        with jax.sharding.Mesh(np.empty((), object), ()):
            adapted = qwix.apply_lora_to_model(
                model, provider, **model.get_model_input(), rngs=nnx.Rngs(params=0)
            )
        self.graph, adapter_state, self.base = nnx.split(adapted, nnx.LoRAParam, ...)
        self._variables = {
            _weight_name(path): (path, variable)
            for path, variable in nnx.to_flat_state(adapter_state)
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the factors, by name."""
        return {name: variable.get_value().shape for name, (_, variable) in self._variables.items()}

    def init_factors(self, seed: int) -> Factors:
        """Factors that change nothing yet: A is uniform within ±1/√inputs, as in peft, and B is zero (Hu et al. 2021, §4.1)."""
        factors: Factors = {}
        for name, shape in sorted(self.shapes.items()):
            value = np.zeros(shape, np.float32)
            if name.endswith(".a"):
                digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
                bound = 1 / np.sqrt(np.prod(shape[:-1]))
                generator = np.random.default_rng(int.from_bytes(digest[:8], "big"))
                value = generator.uniform(-bound, bound, shape).astype(np.float32)
            factors[name] = self._on_devices(name, value)
        return factors

    def with_factors(self, factors: Factors, base: Any) -> nnx.Module:
        """The model with these factors."""
        flat = [
            (path, variable.replace(factors[name]))
            for name, (path, variable) in self._variables.items()
        ]
        return nnx.merge(self.graph, nnx.from_flat_state(flat), base)

    def read(self, folder: Path) -> Factors:
        """Read factors from peft's files. Raises `ModelError` for files that do not match, or that Tunix's shapes cannot express."""
        return self.from_peft(load_file(folder / WEIGHTS), str(folder))

    def write(self, factors: Factors, folder: Path, adapter_config: Mapping[str, Any]) -> str:
        """Write the factors as peft does; returns their fingerprint."""
        tensors = self.to_peft(factors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(adapter_config, indent=2, sort_keys=True))
        return fingerprint(tensors)

    def to_peft(self, factors: Factors) -> dict[str, np.ndarray]:
        """A [rank, in] and B [out, rank] for each transformers layer."""
        tensors: dict[str, np.ndarray] = {}
        for weight, layers in self.layers.items():
            down, up = (np.asarray(factors[f"{weight}.{factor}"]) for factor in "ab")
            rank = down.shape[-1]
            ups = [up[:, index] for index in range(len(layers))] if len(layers) > 1 else [up]
            for layer, part in zip(layers, ups, strict=True):
                name = f"{PREFIX}{layer}.lora_"
                tensors[f"{name}A.weight"] = np.ascontiguousarray(down.reshape(-1, rank).T)
                tensors[f"{name}B.weight"] = np.ascontiguousarray(part.reshape(rank, -1).T)
        return dict(sorted(tensors.items()))

    def from_peft(self, tensors: Mapping[str, np.ndarray], origin: str) -> Factors:
        """The inverse of `to_peft`."""
        shapes, factors = self.shapes, Factors()
        layers = [layer for group in self.layers.values() for layer in group]
        names = {f"{PREFIX}{layer}.lora_{factor}.weight" for layer in layers for factor in "AB"}
        if missing := names ^ set(tensors):
            raise ModelError(
                f"The adapter in {origin} has other layers than the one that is trained: {', '.join(sorted(missing)[:4])}."
            )
        for weight, layers in self.layers.items():
            downs = [tensors[f"{PREFIX}{layer}.lora_A.weight"] for layer in layers]
            if any(not np.array_equal(downs[0], down) for down in downs[1:]):
                raise ModelError(
                    f"The adapter in {origin} has different A factors for {' and '.join(layers)}, which are one weight in Tunix "
                    "and share theirs. Start from one that was trained by the backend tunix, or merge it into its base."
                )
            ups = [tensors[f"{PREFIX}{layer}.lora_B.weight"].T for layer in layers]
            up = ups[0] if len(ups) == 1 else np.stack(ups, 1)
            for factor, value in (("a", downs[0].T), ("b", up)):
                name = f"{weight}.{factor}"
                if value.size != np.prod(shapes[name]):
                    raise ModelError(f"The adapter in {origin} has another rank than lora.r says.")
                factors[name] = self._on_devices(
                    name, value.reshape(shapes[name]).astype(np.float32)
                )
        return factors

    def _on_devices(self, name: str, value: np.ndarray) -> jax.Array:
        """Put a factor on the devices that hold its parameter in the model."""
        _, variable = self._variables[name]
        return jax.device_put(jnp.asarray(value), variable.get_value().sharding)


class ExactLora(qwix.LoraProvider):
    """qwix's adapter, except that its product is added in float32 and the sum is rounded once."""

    def dot_general(
        self, lhs: Any, rhs: Any, dimension_numbers: Any, *formats: Any, **options: Any
    ) -> Any:
        """See `jax.lax.dot_general`. For an adapted weight [inputs, outputs], add the adapter."""
        adapter = self._find_adapter("dot_general", rhs)
        if adapter is None:
            return super().dot_general(lhs, rhs, dimension_numbers, *formats, **options)
        product = functools.partial(jax.lax.dot_general, dimension_numbers=dimension_numbers)
        return self._add_adapter(product, lhs, rhs, "...i,ir,ro->...o", adapter)

    def einsum(self, einsum_str: str, *operands: Any, **options: Any) -> Any:
        """See `jax.numpy.einsum`. For an adapted weight, add the adapter."""
        adapter = self._find_adapter("einsum", operands[-1])
        if adapter is None:
            return super().einsum(einsum_str, *operands, **options)
        product = functools.partial(jnp.einsum, einsum_str)
        module, name, _ = adapter
        return self._add_adapter(
            product, *operands, getattr(module, f"{name}_lora_einsum_str"), adapter
        )

    def _find_adapter(self, kind: str, weight: Any) -> tuple[Any, str, Any] | None:
        """The layer being computed, the name of its weight, and its rule; None if it has no parameters for factors (yet)."""
        rule, _ = self._get_current_rule_and_op_id(kind, only_rule=True)
        name = None if rule is None else flax_util.find_param(weight)
        module = flax_util.get_current_module()
        return (module, name, rule) if name and hasattr(module, f"{name}_lora_b") else None

    def _add_adapter(
        self, product: Product, inputs: Any, weight: Any, words: str, adapter: tuple[Any, str, Any]
    ) -> Any:
        """`words`: the adapter as an einsum of inputs, A and B. It is computed in full precision; devices would round the factors."""
        module, name, rule = adapter
        down, up = (getattr(module, f"{name}_lora_{factor}").get_value() for factor in "ab")
        wide = inputs.astype(jnp.float32)
        added = jnp.einsum(words, wide, down, up, precision=jax.lax.Precision.HIGHEST)
        total = in_float32(product, inputs, weight) + added * (rule.alpha / rule.rank)
        return total.astype(inputs.dtype)


def _weight_name(path: tuple[Any, ...]) -> str:
    """`layers, 3, attn, q_einsum, w_lora_a` as `3.attn.q_einsum.w.a`."""
    name = ".".join(map(str, path)).removeprefix("layers.")
    return re.sub(r"_lora_([ab])$", r".\1", name)


def fingerprint(tensors: Mapping[str, np.ndarray]) -> str:
    """The same value as `groupwise.engine.models.lora.fingerprint` gives for these tensors in torch."""
    arrays = {key: np.ascontiguousarray(tensors[key]) for key in sorted(tensors)}
    contents = (
        (f"{key}|torch.{array.dtype}|{array.shape}|", array.reshape(-1).view(np.uint8).data)
        for key, array in arrays.items()
    )
    return tree_hash(contents, available_cores())
