"""A decoder of the Llama family as plain matrices: Llama, Mistral, Qwen2 and Qwen3.

These families differ in biases, in norms of queries and keys, and in sizes, but not in structure: norm, attention with rotary positions,
norm, SwiGLU. Sampler and learner compute them without transformers' modules, in the same arithmetic: the residual stream and norms in
float32, products in the model's number format, an adapter added before rounding. `refusal` gives the reason if a model cannot be computed
this way. At the end of its construction, `NativeModel` compares its logits with the model's own.

The rows of queries and keys are interleaved, so that the two numbers that a rotary position rotates are adjacent and the rotation is one
complex product. Scores do not change, because both are permuted in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.engine.models.machine import exact_products
from groupwise.engine.models.native import compiled
from groupwise.engine.models.native.causal_lm import CausalLM
from groupwise.engine.models.native.facts import FAMILIES, head_size
from groupwise.engine.models.native.forward import plain_logits
from groupwise.engine.models.native.fused import kernels_for
from groupwise.engine.models.native.linear import Layer, Linear, Part

if TYPE_CHECKING:
    from groupwise.engine.models.native.causal_lm import CausalModel
    from groupwise.engine.models.native.weight_cache import Kind

logger = logging.getLogger(__name__)

FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Types of rotary positions whose frequencies do not depend on the length of the text."""
PRODUCTS = {
    "qkv": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "output": ("self_attn", ("o_proj",)),
    "gate_up": ("mlp", ("gate_proj", "up_proj")),
    "down": ("mlp", ("down_proj",)),
}
"""Transformers' names for the matrices of each product of a layer; the product stacks them in this order."""

_native_models: WeakKeyDictionary[CausalModel, NativeModel | None] = WeakKeyDictionary()

PROBE = 32
"""Tokens of the text on which native and transformers' logits are compared."""
SHARE_OF_PEAK = 0.85
"""Logits are shifted by this share of the probe's peaks, since logits of real texts are lower, and those of drawn tokens lower still."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    epsilon: float
    """Added to the mean square in norms."""

    @property
    def queries_per_key(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads


class NativeModel:
    """The weights of a transformers model, grouped and ordered for computation.

    The model's own modules share memory with these matrices, except for queries and keys. The logits that `head` gives are lower than the
    model's by `shift`.
    """

    def __init__(self, model: CausalModel, *, check: bool = True) -> None:
        """Raise ValueError if `refusal` gives a reason, or, with `check`, if the logits differ from the model's own."""
        reason = refusal(model)
        if reason:
            raise ValueError(reason)
        config: Any = model.config
        body: Any = model.get_decoder()
        self.shape = Shape(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=head_size(config),
            vocabulary=config.vocab_size,
            epsilon=config.rms_norm_eps,
        )
        self.packed = False
        self._decoding: Kind = "decoding"
        cache = model.weight_cache if isinstance(model, CausalLM) else None
        self._cache = cache if cache is not None and cache.is_current() else None
        self.dtype = model.dtype
        self.device = model.device
        self.compiled = self.device.type == "cpu"
        """True if our own CPU kernels may compute the steps between products."""
        self.embedding_VH = cast("Tensor", model.get_input_embeddings().weight)
        path = next(path for path, module in model.named_modules() if module is body)
        self.layers = [
            self._native_layer(f"{path}.layers.{index}", layer)
            for index, layer in enumerate(body.layers)
        ]
        self.norm_H = body.norm.weight.detach().float()
        head = _base_layer(cast("nn.Module", model.get_output_embeddings()))
        rounded = self.dtype != torch.float32
        bias_V = None if head.bias is None else head.bias.detach().clone()
        if rounded and bias_V is None:  # `_shift_head` needs one
            bias_V = head.weight.new_zeros(len(head.weight)).detach()
        self.head = Linear((), head.weight.detach(), bias_V)
        self._frequencies_C = body.rotary_emb.inv_freq.detach().float().clone()
        self._magnitude = float(body.rotary_emb.attention_scaling)
        self.shift = 0.0
        if check or rounded:  # the probe's result is needed
            logits_NV = self._probe_logits(model if check else None)
            if rounded:
                self._shift_head(logits_NV)

    @torch.no_grad()
    def take_weights(self, model: CausalModel) -> None:
        """Copy the model's weights of now into the same memory, which recordings read; views of its modules' weights need no copy."""
        self._cache = None
        modules, body = dict(model.named_modules()), cast("Any", model.get_decoder())
        for linear in self.products:
            for part in linear.parts:
                module, rows = _base_layer(modules[part.path]), slice(part.start, part.end)
                if part.order is not None:
                    linear.weight_OI[rows] = _permute(module.weight, part.order)
                if linear.bias_O is not None and module.bias is not None:
                    linear.bias_O[rows] = _permute(module.bias, part.order)
        norms = [(self.norm_H, body.norm.weight.float())]
        for ours, theirs in zip(self.layers, body.layers, strict=True):
            norms += [(getattr(ours, name), norm) for name, norm in self._norms(theirs).items()]
        for mine, norm in norms:
            if norm is not None:
                mine.copy_(norm)
        if self.head.bias_O is not None:
            bias_V = _base_layer(cast("nn.Module", model.get_output_embeddings())).bias
            self.head.bias_O.copy_(torch.zeros_like(self.head.bias_O) if bias_V is None else bias_V)
        self.shift = 0.0
        if self.dtype != torch.float32:
            self._shift_head(self._probe_logits(None))
        self.packed = False

    def pack(self, *, int8: bool = False) -> None:
        """Also keep all weights in the order for decoding on a CPU, unless that has been done; with `int8` the layers' as whole numbers."""
        if self.packed or not self.compiled:
            return
        self._decoding = "int8" if int8 else "decoding"
        cached = {} if self._cache is None else self._cache.tensors(self._decoding)
        for linear in self.products:
            linear.pack(cached, int8=int8 and linear is not self.head)
        self.packed = True

    def release_decoding(self) -> None:
        """Call when nothing is decoded for a while: see `WeightCache.release`."""
        if self._cache is not None:
            self._cache.release(self._decoding)

    def write_cache(self) -> None:
        """Write what was computed of the model's files for later processes, if it is not cached yet."""
        if self._cache is None or not self._cache.is_current():
            return
        matrices = {linear.cache_name: linear.weight_OI for linear in self.products}
        wrote = self._cache.write("matrices", {**self._cache.parameters, **matrices})
        if wrote and self.packed:
            tensors: dict[str, Tensor] = {}
            for linear in self.products:
                tensors |= linear.packed_tensors
            self._cache.write(self._decoding, tensors)

    @property
    def products(self) -> list[Linear]:
        """All matrix products, the head's last."""
        return [*(linear for layer in self.layers for linear in layer.products), self.head]

    def rotations(self, positions_N: Tensor) -> Tensor:
        """Complex factors [N, 1, D / 2] that rotate queries and keys to these positions, the same for every head."""
        angles_NC = positions_N[:, None].float() * self._frequencies_C
        return torch.polar(torch.full_like(angles_NC, self._magnitude), angles_NC)[:, None]

    def embedded(self, ids_N: Tensor) -> Tensor:
        """The residual stream [N, H] before the first layer, in float32."""
        return F.embedding(ids_N, self.embedding_VH).float()

    def normed(self, x_NH: Tensor, weight_H: Tensor, *, few: bool = False) -> Tensor:
        """The root-mean-square norm of the residual stream, in the model's number format; `few`: the result is passed to `Linear.few`."""
        shape = self.shape
        if self._by_kernels(x_NH, few=few):
            return compiled.normed(x_NH, weight_H, shape.epsilon, self.dtype)
        kernels = kernels_for(x_NH)
        if kernels is not None:
            return kernels.normed(x_NH, weight_H, shape.epsilon, self.dtype)
        return F.rms_norm(x_NH, (shape.hidden,), weight_H, shape.epsilon).to(self.dtype)

    def swiglu(self, gate_up_N2F: Tensor, *, few: bool = False) -> Tensor:
        """`silu(gate) · up`, [N, F], computed in float32 and rounded once; `few` as in `normed`."""
        if self._by_kernels(gate_up_N2F, few=few):
            return compiled.swiglu(gate_up_N2F, self.dtype)
        kernels = kernels_for(gate_up_N2F)
        if kernels is not None:
            return kernels.swiglu(gate_up_N2F, self.dtype)
        gate_NF, up_NF = gate_up_N2F.float().chunk(2, dim=-1)
        return (F.silu(gate_NF) * up_NF).to(self.dtype)

    def logits(self, residual_NH: Tensor) -> Tensor:
        """Logits of a few rows [N, V], lower than the model's by `shift`, in the model's number format or float32."""
        return self.head.few(self.normed(residual_NH, self.norm_H, few=True))

    def rotary(self, heads_NJD: Tensor, norm_D: Tensor | None, rotations_N1C: Tensor) -> Tensor:
        """Queries or keys after their norm and rotation; in float32, or in the model's number format if GPU kernels compute them."""
        kernels = kernels_for(heads_NJD)
        if kernels is not None:
            arguments = heads_NJD, norm_D, rotations_N1C, self.shape.epsilon
            return kernels.rotary(*arguments, self.dtype)
        x = heads_NJD.float()
        if norm_D is not None:
            x = F.rms_norm(x, (self.shape.head_size,), norm_D, self.shape.epsilon)
        pairs_NJC = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs_NJC * rotations_N1C).flatten(-2)

    def heads(
        self, layer: Layer, qkv_NO: Tensor, rotations_N1C: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: `split`, then `rotary`."""
        queries, keys, values = self.split(qkv_NO)
        return (
            self.rotary(queries, layer.query_norm_D, rotations_N1C),
            self.rotary(keys, layer.key_norm_D, rotations_N1C),
            values,
        )

    def split(self, qkv_NO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, heads, D], keys and values [N, kv_heads, D] of the first product of a layer."""
        shape = self.shape
        heads_NJD = qkv_NO.view(len(qkv_NO), -1, shape.head_size)
        return cast(
            "tuple[Tensor, Tensor, Tensor]",
            heads_NJD.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1),
        )

    def _by_kernels(self, x: Tensor, *, few: bool) -> bool:
        """True if our own kernels compute the steps between products.

        In decoding they do so for any number of rows, because torch may change a row's last bits when the number of rows changes.
        """
        return (few and self.packed) or (self.compiled and compiled.suits(x))

    def _native_layer(self, path: str, layer: Any) -> Layer:
        return Layer(
            **self._norms(layer),
            qkv=self._fused_linear(path, layer, "qkv", interleaved=2),
            output=self._fused_linear(path, layer, "output"),
            gate_up=self._fused_linear(path, layer, "gate_up"),
            down=self._fused_linear(path, layer, "down"),
        )

    def _norms(self, layer: Any) -> dict[str, Any]:
        """The weights of a layer's norms in float32, by the names of `Layer`; those within heads are None in most models."""
        order_D = _interleaved_order(self.shape.head_size, self.device)
        return {
            "attention_norm_H": layer.input_layernorm.weight.detach().float(),
            "query_norm_D": _head_norm(layer.self_attn, "q_norm", order_D),
            "key_norm_D": _head_norm(layer.self_attn, "k_norm", order_D),
            "mlp_norm_H": layer.post_attention_layernorm.weight.detach().float(),
        }

    def _fused_linear(self, path: str, layer: Any, product: str, interleaved: int = 0) -> Linear:
        """One of `PRODUCTS` as a `Linear`; the first `interleaved` of its matrices get their rows interleaved within each head."""
        name, children = PRODUCTS[product]
        modules = [_base_layer(getattr(getattr(layer, name), child)) for child in children]
        size = self.shape.head_size
        orders: list[Tensor | None] = [None] * len(modules)
        for number, module in enumerate(modules[:interleaved]):
            starts = torch.arange(0, module.out_features, size, device=self.device)
            orders[number] = (starts[:, None] + _interleaved_order(size, self.device)).flatten()
        cached = {} if self._cache is None else self._cache.tensors("matrices")
        weight = cached.get(f"{path}.{name}.{children[0]}")
        if weight is None:
            weights = [
                _permute(module.weight.detach(), order)
                for module, order in zip(modules, orders, strict=True)
            ]
            weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        parts: list[Part] = []
        start = 0
        for child, module, order in zip(children, modules, orders, strict=True):
            end = start + module.out_features
            parts.append(Part(f"{path}.{name}.{child}", start, end, order))
            if order is None:
                module.weight.data = weight[start:end]
            start = end
        if all(module.bias is None for module in modules):
            return Linear(parts, weight, None)
        biases = [
            module.weight.new_zeros(module.out_features)
            if module.bias is None
            else _permute(module.bias.detach(), order)
            for module, order in zip(modules, orders, strict=True)
        ]
        return Linear(parts, weight, torch.cat(biases))

    @torch.no_grad()
    def _probe_logits(self, model: CausalModel | None) -> Tensor:
        """Logits of a fixed text; raises ValueError if `model` is given and its logits differ."""
        ids_N = (torch.arange(PROBE, device=self.device) * 7919 + 11) % self.shape.vocabulary
        ours_NV = plain_logits(self, ids_N)
        if model is None:
            return ours_NV
        theirs_NV = model(input_ids=ids_N[None]).logits[0].float()
        close = 1e-3 if exact_products(self.dtype) else 0.2  # bfloat16's noise alone makes 0.07
        difference = float((ours_NV - theirs_NV).abs().mean() / theirs_NV.std())
        # NaN logits show no difference between the two, and a sampler that draws from them raises an error anyway.
        if theirs_NV.isfinite().all() and not difference <= close:
            raise ValueError(
                f"its logits differ, by {difference:.3g} of their spread, from what its weights give in a plain "
                f"{model.config.model_type}"
            )
        return ours_NV

    def _shift_head(self, logits_NV: Tensor) -> None:
        """Move the logits of the most likely tokens near 0, where bfloat16 is finest, by a bias that is added before rounding.

        Log-probabilities do not change by a common shift, but their noise falls by a third.
        """
        assert self.head.bias_O is not None
        if logits_NV.isfinite().all():
            self.shift = float((SHARE_OF_PEAK * logits_NV.amax(-1).mean()).to(self.dtype))
        self.head.bias_O.sub_(self.shift)


def native_model(model: CausalModel, *, anew: bool = False) -> NativeModel | None:
    """The model as plain matrices; None, with the reason in the log, if it has no such form.

    It is built once for each model. With `anew` it takes the model's weights, which have changed since.
    """
    if model not in _native_models:
        try:
            # Our own modules are tested to compute what transformers' do, and their forward pass would import these.
            _native_models[model] = NativeModel(model, check=not isinstance(model, CausalLM))
        except ValueError as error:
            logger.warning(
                "this model is sampled and trained by transformers' modules, which is slower: %s",
                str(error),
            )
            _native_models[model] = None
    elif anew and (native := _native_models[model]) is not None:
        native.take_weights(model)
    return _native_models[model]


def write_weight_caches() -> None:
    """Call `NativeModel.write_cache` of all models of this process."""
    for native in list(_native_models.values()):
        if native is not None:
            native.write_cache()
            native.release_decoding()


def refusal(model: CausalModel) -> str | None:
    """Why this model cannot be computed natively; None if it can."""
    config: Any = model.config
    if model.device.type == "cpu" and (reason := compiled.refusal(model.dtype)):
        return reason
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is none of {', '.join(FAMILIES)}"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if kinds != {"full_attention"} or (config.model_type == "mistral" and window is not None):
        return "some of its layers see a window of the text only"
    body: Any = model.get_decoder()
    rotary = body.rotary_emb
    if getattr(rotary, "rope_type", "default") not in FIXED_ROTATIONS:
        return f"its rotary positions ({rotary.rope_type}) depend on the length of the text"
    if 2 * len(rotary.inv_freq) != head_size(config):
        return "its rotary positions turn a part of each head only"
    if hasattr(model.get_input_embeddings(), "base_layer"):
        return "an adapter changes its embeddings"
    return _unreadable(model)


def _unreadable(model: CausalModel) -> str | None:
    """Why one of its weights is not a plain matrix in the model's number format, e.g. in a quantised model; None if all are."""
    for name, module in _matrices(model):
        if type(module) not in (nn.Linear, nn.Embedding):
            return f"{name} is a {type(module).__name__}, whose weights are not a plain matrix"
        if module.weight.dtype != model.dtype:
            reason = f"{name} is kept in {module.weight.dtype}, the model in {model.dtype}"
            return reason.replace("torch.", "")
    return None


def _matrices(model: CausalModel) -> Iterator[tuple[str, Any]]:
    """Modules that hold the weights of all products and of the embeddings, without adapters, each with a name for messages."""
    body: Any = model.get_decoder()
    for number, layer in enumerate(body.layers):
        for owner, children in PRODUCTS.values():
            for child in children:
                yield (
                    f"{child} of layer {number}",
                    _base_layer(getattr(getattr(layer, owner), child)),
                )
    yield "its head", _base_layer(cast("nn.Module", model.get_output_embeddings()))
    yield "its table of embeddings", model.get_input_embeddings()


def _base_layer(module: nn.Module) -> nn.Linear:
    """The linear layer inside an adapter layer, or the module itself if it is none."""
    return cast("nn.Linear", getattr(module, "base_layer", module))


def _interleaved_order(size: int, device: torch.device) -> Tensor:
    """The order that makes i and i + size / 2 adjacent."""
    return torch.arange(size, device=device).view(2, -1).t().flatten()


def _permute(tensor: Tensor, order: Tensor | None) -> Tensor:
    return tensor if order is None else tensor[order]


def _head_norm(attention: Any, name: str, order_D: Tensor) -> Tensor | None:
    norm = getattr(attention, name, None)
    return None if norm is None else norm.weight.detach().float()[order_D]
