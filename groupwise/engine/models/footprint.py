"""Counts the bytes that sampler and learner hold for a model, from its config alone; `groupwise.engine.models.plan` adds them up.

The engines are in layers above this module. Each documents which tensors it keeps and why: weights in
`groupwise.engine.models.native.weights` and `groupwise.engine.models.native.packed`; keys and values in
`groupwise.engine.sampler.native.cache`, `groupwise.engine.sampler.native.graph_engine` and `groupwise.engine.sampler.engine`;
activations in `groupwise.engine.learner.native.body`. Tests compare the engines' own tensors with these numbers.

A `Footprint` is that of one process whose engines are known. The functions after it count the tensors of one kind of engine. None of this
needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from groupwise.core.errors import ModelError
from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.native.facts import (
    CHUNK,
    KEYS_PER_TOKEN,
    LANES,
    PAGE,
    ROWS,
    STRETCH,
    head_size,
    multiple,
    numba_works,
    pages_of_a_row,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


FLOAT = 4
"""Bytes of a float32 number."""
GROWTH = 64
"""The cache of completion tokens' keys grows by multiples of this many tokens."""
IN_PRODUCTS = 1.5
"""Stored numbers per number of an adapter in the native products' order: a product of several layers pads the blocks between with zeros."""


WITHOUT_KEYS = ("linear_attention", "mamba", "conv", "recurrent", "moe", "mlp")
"""Layer types of transformers' configs that cache no keys and values; a layer of another type is counted as if it does."""
BYTES_IN_4BIT = 4.127 / 8
"""Bytes of a weight in NF4: 4 bits, and 0.127 for the doubly quantised scales of its block of 64 (Dettmers et al. 2023, QLoRA, §3)."""
BYTES_IN_8BIT = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """The most that one process decodes at once."""

    slots: int
    key_length: int
    """Most tokens of a prompt together with its completion."""
    completion: int
    """Tokens of the longest completion."""
    prompts: int
    """Number of distinct prompts in the slots; members of a group share one."""
    prompt: int
    """Tokens of the longest prompt."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    """Width of the MLP's intermediate layer; in a mixture of experts, of all experts of a token together."""
    vocabulary: int
    experts: int = 0
    """Experts that each token chooses in a layer; 0: the model has none."""
    layers_without_keys: int = 0
    """Layers that keep a state of one size for each text instead of keys and values, and layers without either."""
    state: int = 0
    """Numbers in the states of one text in all layers; in float32."""

    @property
    def queries(self) -> int:
        """Numbers in the queries of one token in one layer."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Numbers in the keys of one token in one layer; there are as many values."""
        return self.kv_heads * self.head_size

    @property
    def reordered(self) -> int:
        """Weights of all query and key projections, whose rows the native model reorders."""
        return self.layers * self.hidden * (self.queries + self.keys)

    @property
    def fused(self) -> int:
        """Weights of the products that each compute several of the model's linear layers."""
        return self.reordered + self.layers * self.hidden * (self.keys + 2 * self.inner)

    @property
    def products(self) -> int:
        """Weights of all products, including the output head."""
        unfused = self.layers * (self.queries + self.inner) + self.vocabulary
        return self.fused + unfused * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of a model and of its trained part, without the weights, and which engines can compute it."""

    sizes: Sizes
    parameters: int
    trained: int
    active: int
    """Parameters that compute one token: all but those of the experts that it did not choose."""
    linear: int
    """Weights of all linear layers but the output head."""
    native: bool
    """True if the model has a native form; on a CPU that additionally needs numba."""
    in_bfloat16: bool
    """True if the model was published in bfloat16."""
    dropout: float


def saved_by_bits(config: ModelConfig, linear: int, dtype: str) -> float:
    """Bytes saved by holding `linear`, the number of weights in linear layers, in 4 or 8 bits."""
    if not (config.load_in_4bit or config.load_in_8bit):
        return 0.0
    bytes_per_weight = BYTES_IN_4BIT if config.load_in_4bit else BYTES_IN_8BIT
    return linear * (bytes_of(dtype) - bytes_per_weight)


def sizes_of(config: PreTrainedConfig) -> Sizes:
    """Sizes given by the config of a model's text part. Raises `ModelError` if it has no attention at all."""
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ModelError(
            f"A {config.model_type} has no layers of attention. This version samples and trains models that have some; "
            "docs/how-to/your-own-model.md lists families that work."
        )
    hidden = config.hidden_size
    return Sizes(
        layers=config.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=head_size(config),
        inner=_inner_width(config),
        vocabulary=config.vocab_size,
        experts=experts_of_a_token(config),
        layers_without_keys=sum(
            kind in WITHOUT_KEYS for kind in getattr(config, "layer_types", None) or ()
        ),
    )


def experts_of_a_token(config: PreTrainedConfig) -> int:
    """Experts that each token chooses in a layer; 0 if the config names no such number."""
    names = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
    return next((n for name in names if isinstance(n := getattr(config, name, None), int)), 0)


def _inner_width(config: PreTrainedConfig) -> int:
    dense = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    experts = experts_of_a_token(config)
    if not experts:
        return dense
    width = getattr(config, "moe_intermediate_size", None)
    if not isinstance(width, int):
        return experts * dense
    shared = getattr(config, "n_shared_experts", None) or getattr(
        config, "moe_num_shared_experts", 0
    )
    shared_width = getattr(config, "shared_expert_intermediate_size", None) or shared * width
    return max(dense, experts * width + shared_width)  # some layers may be dense


def bytes_of(dtype: str) -> int:
    """Bytes of one number in this format."""
    return 2 if dtype == "bfloat16" else FLOAT


# --- a process -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory that one process needs for a model, depending on the engines that compute it."""

    sizes: Sizes
    size: int
    """Bytes per number."""
    full: bool
    """True if all weights are trained, False if an adapter is."""
    on_cpu: bool
    samples: bool
    native_sampler: bool
    native_learner: bool
    packed: int
    """Bytes per number in the order for decoding; 0 if there is no such copy."""

    def served_bytes(self, parameters: int) -> int:
        """Bytes of the sampled model, or of an adapter's base; 0 if all weights are trained and this process does not sample."""
        if self.full and not self.samples:
            return 0
        native = self.native_sampler or self.native_learner
        copies = native_copies(self.sizes, self.size, self.packed) if native else 0
        return parameters * self.size + copies

    def trained_bytes(self, parameters: int, processes: int) -> int:
        """Bytes of trained weights, gradient and two moments in all processes. With several processes, each also needs a buffer to add up
        gradients; if all weights are trained, the weights before the fork count once more."""
        copies = 0.0
        if not self.full:  # an adapter's copies: the sampler's and the native engines'
            computed = (self.native_learner + self.native_sampler) * self.size
            decoding = FLOAT if self.packed else 0
            copies = self.samples * FLOAT + IN_PRODUCTS * (computed + decoding)
        per_parameter = FLOAT * (4 + (processes > 1)) + copies
        forked = FLOAT if self.full and processes > 1 else 0
        return int(parameters * (processes * per_parameter + forked))

    def cache(self, decoding: Decoding) -> int:
        """Bytes of keys and values. On a GPU they include the native sampler's logits, which stay allocated between tokens."""
        if self.native_sampler and self.on_cpu:
            return native_cache(self.sizes, self.size, decoding)
        of_a_row, logits = decoding.key_length, 0
        if self.native_sampler:
            of_a_row = pages_of_a_row(decoding.key_length) * PAGE
            logits = decoding.slots * self.sizes.vocabulary * self.size
        tokens = decoding.slots * of_a_row + decoding.prompts * decoding.prompt
        states = (decoding.slots + decoding.prompts) * self.sizes.state * FLOAT
        return slot_cache(self.sizes, self.size, tokens) + states + logits

    def activations(self, tokens: int, *, recompute: bool) -> int:
        """Bytes of a micro-batch's activations and logits.

        The native engine keeps for each token and layer the residual stream in float32, the results of three products, and of attention.
        The backward pass of one layer needs further temporaries, in bfloat16 on a GPU also copies of keys, values and their gradients for
        all texts that see them (`KEYS_PER_TOKEN`). With `recompute` it keeps one residual stream per layer, and all of these for a single
        layer. Its head computes the logits of `CHUNK` tokens at once; float32 copies exist for a few of these at most.

        Transformers' modules with torch's graph keep about twelve hidden states and four feed-forward states per layer, for each expert of
        a token its input and output, and on a GPU copies of prompts' keys and values. Logits are as in the native engine.
        """
        sizes, size = self.sizes, self.size
        if self.native_learner:
            residual = sizes.hidden * FLOAT
            of_products = sizes.hidden + 2 * (sizes.queries + sizes.keys + sizes.inner)
            per_layer = residual + of_products * size
            layers = sizes.layers * residual + per_layer if recompute else sizes.layers * per_layer
            per_token = layers + 4 * residual + (2 * sizes.hidden + 4 * sizes.inner) * size
            if not self.on_cpu and size < FLOAT:
                per_token += KEYS_PER_TOKEN * 2 * sizes.keys * (3 * size + FLOAT)
        else:
            copied = 0 if self.on_cpu else (KEYS_PER_TOKEN - 1) * 2 * sizes.keys
            states = (12 + 2 * sizes.experts) * sizes.hidden
            of_a_layer = (states + 4 * sizes.inner + copied) * size
            per_token = sizes.layers * of_a_layer
            if recompute:
                per_token = sizes.layers * sizes.hidden * size + of_a_layer
        return tokens * per_token + CHUNK * sizes.vocabulary * size


def footprint_of(
    counts: Counts, *, dtype: str, device: str, full: bool, by_modules: bool, samples: bool
) -> Footprint:
    """The footprint of the engines that `groupwise.engine.models.native.weights.native_model` would choose for these weights.

    With `by_modules`, or if an adapter has dropout, the learner uses transformers' modules.
    """
    size, on_cpu = bytes_of(dtype), device == "cpu"
    native = counts.native and (not on_cpu or numba_works())
    # Frozen weights that were published in bfloat16 are packed in bfloat16, even if they are computed in float32.
    packed = 2 if counts.in_bfloat16 and not full else size
    return Footprint(
        sizes=counts.sizes,
        size=size,
        full=full,
        on_cpu=on_cpu,
        samples=samples,
        native_sampler=native and samples,
        native_learner=native and not full and not by_modules and counts.dropout == 0,
        packed=packed if native and samples and on_cpu else 0,
    )


# --- weights -------------------------------------------------------------------------------------


def native_copies(sizes: Sizes, size: int, packed: int) -> int:
    """Bytes that a native model holds in addition to the model's own weights: queries and keys with reordered rows, and all products in the
    order for decoding, with `packed` bytes per number; 0 if there is no such copy."""
    return sizes.reordered * size + sizes.products * packed


# --- keys and values -----------------------------------------------------------------------------


def grown_capacity(room: int, needed: int) -> int:
    """Capacity in tokens of the cache of completion tokens after it grew. It grows by half, because growing copies everything."""
    return multiple(max(needed, room * 3 // 2), GROWTH)


def cache_capacities(tokens: int) -> tuple[int, int]:
    """Capacity before and after the last growth of a cache that was filled token by token up to `tokens`."""
    before = after = 0
    while after < tokens:
        before, after = after, grown_capacity(after, after + 1)
    return before, after


def native_cache(sizes: Sizes, size: int, decoding: Decoding) -> int:
    """Bytes on a CPU: keys in float32, values padded to whole vectors. Those of completion tokens exist twice while the cache grows."""
    per_token = sizes.kv_heads * (sizes.head_size * FLOAT + multiple(sizes.head_size, LANES) * size)
    tokens = decoding.completion - 1  # the last token is never an input
    completions = multiple(decoding.slots, ROWS) * sum(cache_capacities(tokens))
    prompts = decoding.prompts * multiple(decoding.prompt, STRETCH)
    return sizes.layers * per_token * (completions + prompts)


def slot_cache(sizes: Sizes, size: int, tokens: int) -> int:
    """Bytes of the other engines' caches: keys and values of `tokens` tokens in the model's number format."""
    return cached_numbers(sizes) * size * tokens


def cached_numbers(sizes: Sizes) -> int:
    """Numbers in the keys and values of one token in all layers."""
    return 2 * (sizes.layers - sizes.layers_without_keys) * sizes.keys
