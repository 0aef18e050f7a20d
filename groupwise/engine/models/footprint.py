"""Counts the bytes that sampler and learner hold of a model, from its config alone; `groupwise.engine.models.plan` adds them up.

The engines are in layers above this module, and each documents what it keeps and why: weights in
`groupwise.engine.models.native.weights` and `groupwise.engine.models.native.packed`; keys and values in
`groupwise.engine.sampler.native.cache`, `groupwise.engine.sampler.native.graph_engine` and `groupwise.engine.sampler.engine`;
activations in `groupwise.engine.learner.native.body`. Tests compare the engines' own tensors with these numbers.

A `Footprint` is that of one process whose engines are known. The functions below count what one kind of engine holds. None of this
needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.native.facts import (
    CHUNK,
    LANES,
    PAGE,
    ROWS,
    STRETCH,
    head_size,
    multiple,
    pages_of_a_row,
    without_numba,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from groupwise.engine.models.plan import Decoding

FLOAT = 4
"""Bytes of a float32 number."""
GROWTH = 64
"""The cache of own keys grows by multiples of this many tokens."""
IN_PRODUCTS = 1.5
"""Stored numbers per number of an adapter in the order of the native products: products of several layers hold zeros."""


BYTES_IN_4BIT = 4.127 / 8
"""Bytes of a weight in NF4: 4 bits, and 0.127 for the doubly quantised scales of its block of 64 (Dettmers et al. 2023, QLoRA, §3)."""
BYTES_IN_8BIT = 1.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    """Width between the products of the MLP."""
    vocabulary: int

    @property
    def queries(self) -> int:
        """Numbers in the queries of one token in one layer."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Numbers in the keys of one token in one layer; there are as many values."""
        return self.kv_heads * self.head_size

    @property
    def turned(self) -> int:
        """Weights of all queries and keys."""
        return self.layers * self.hidden * (self.queries + self.keys)

    @property
    def fused(self) -> int:
        """Weights of the products that are several of the model's layers."""
        return self.turned + self.layers * self.hidden * (self.keys + 2 * self.inner)

    @property
    def products(self) -> int:
        """Weights of all products, the head's too."""
        others = self.layers * (self.queries + self.inner) + self.vocabulary
        return self.fused + others * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """A model as it is trained, without its weights: how many numbers it has, and which engines can compute it."""

    sizes: Sizes
    parameters: int
    trained: int
    linear: int
    """Weights of all linear layers but the output head."""
    native: bool
    """True if the model has a native form; on a processor that needs numba, too."""
    in_bfloat16: bool
    """True if the model was published in bfloat16."""
    dropout: float


def saved_by_bits(config: ModelConfig, linear: int, dtype: str) -> float:
    """Bytes saved if the weights of `linear` layers are held in 4 or 8 bits."""
    if not (config.load_in_4bit or config.load_in_8bit):
        return 0.0
    each = BYTES_IN_4BIT if config.load_in_4bit else BYTES_IN_8BIT
    return linear * (bytes_of(dtype) - each)


def sizes_of(config: PreTrainedConfig) -> Sizes:
    """Sizes given by the config of a model's text part."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    return Sizes(
        layers=config.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=head_size(config),
        inner=getattr(config, "intermediate_size", None) or 4 * hidden,
        vocabulary=config.vocab_size,
    )


def bytes_of(dtype: str) -> int:
    """Bytes of one number in this format."""
    return 2 if dtype == "bfloat16" else FLOAT


# --- a process -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory that one process needs for a model, depending on the engines that compute it."""

    sizes: Sizes
    size: int
    """Bytes of a number."""
    full: bool
    """True if all weights are trained, not an adapter."""
    on_cpu: bool
    samples: bool
    native_sampler: bool
    native_learner: bool
    packed: int
    """Bytes of a number in the order of decoding; 0 if there is no such order."""

    def plain(self, parameters: int) -> int:
        """Bytes of a model's weights alone."""
        return parameters * self.size

    def served(self, parameters: int) -> int:
        """Bytes of the sampled model, or of an adapter's base; 0 if all weights are trained and the process does not sample."""
        if self.full and not self.samples:
            return 0
        native = self.native_sampler or self.native_learner
        copies = native_copies(self.sizes, self.size, self.packed) if native else 0
        return self.plain(parameters) + copies

    def trained(self, parameters: int, processes: int) -> int:
        """Bytes of trained weights, gradient and two moments in all processes. Several processes also each need a buffer to add gradients,
        and, if all weights are trained, the weights that they were forked from."""
        copies = 0.0  # of an adapter: the sampler's, and the native engines' for learning, prompts and decoding
        if not self.full:
            computed = (self.native_learner + self.native_sampler) * self.size
            decoding = FLOAT if self.packed else 0
            copies = self.samples * FLOAT + IN_PRODUCTS * (computed + decoding)
        each = FLOAT * (4 + (processes > 1)) + copies
        forked = FLOAT if self.full and processes > 1 else 0
        return int(parameters * (processes * each + forked))

    def cache(self, decoding: Decoding) -> int:
        """Bytes of keys and values; on a GPU the native sampler's logits, which stay after each token, are included."""
        if self.native_sampler and self.on_cpu:
            return native_cache(self.sizes, self.size, decoding)
        of_a_row, logits = decoding.key_length, 0
        if self.native_sampler:
            of_a_row = pages_of_a_row(decoding.key_length) * PAGE
            logits = decoding.slots * self.sizes.vocabulary * self.size
        tokens = decoding.slots * of_a_row + decoding.prompts * decoding.prompt
        return slot_cache(self.sizes, self.size, tokens) + logits

    def activations(self, tokens: int, *, recompute: bool) -> int:
        """Bytes of a micro-batch's activations and logits.

        The native engine keeps for each token two residual streams in float32 and the results of three products and of attention in each
        layer, beside what the backward pass of one layer computes with; with `recompute` one residual stream of each layer, and all of a
        single one. Its head computes `CHUNK` tokens at once; a processor has the float32 numbers beside them for only a few of these.

        Transformers' modules with torch's graph keep about twelve hidden states and four feed-forward states in a layer; and of `CHUNK`
        tokens logits, at their temperature, probabilities, and a gradient.
        """
        sizes, size = self.sizes, self.size
        if self.native_learner:
            residual = sizes.hidden * FLOAT
            kept = 2 * residual + 2 * (sizes.queries + sizes.keys + sizes.inner) * size
            layers = sizes.layers * residual + kept if recompute else sizes.layers * kept
            each = layers + 4 * residual + (2 * sizes.hidden + 4 * sizes.inner) * size
            logits = size if self.on_cpu else size + 2 * FLOAT
        else:
            of_a_layer = (12 * sizes.hidden + 4 * sizes.inner) * size
            each = sizes.layers * of_a_layer
            if recompute:
                each = sizes.layers * sizes.hidden * size + of_a_layer
            logits = 4 * FLOAT
        return tokens * each + CHUNK * sizes.vocabulary * logits

    def update(self, parameters: int) -> int:
        """Bytes of AdamW's temporary numbers, one for each trained one; or of a native model beside the one that it replaces, if larger."""
        renewed = 0
        if self.full and self.native_sampler:
            # Built when all weights are published, while the sampler still has the previous ones.
            renewed = self.sizes.fused * self.size + self.sizes.products * self.packed
        return max(FLOAT * parameters, renewed)


def footprint_of(
    counts: Counts, *, dtype: str, device: str, full: bool, by_modules: bool, samples: bool
) -> Footprint:
    """The footprint of the engines that `groupwise.engine.models.native.weights.native_model` would choose for these weights.

    With `by_modules`, or if an adapter has dropout, transformers' modules learn.
    """
    size, on_cpu = bytes_of(dtype), device == "cpu"
    native = counts.native and (not on_cpu or without_numba() is None)
    # Frozen weights that were published in bfloat16 are packed as that, whatever they are computed in.
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
    """Bytes that a native model has beside the model's own weights: queries and keys with their rows in another order, and all products in
    the order of decoding, `packed` bytes for each number; 0 if they are not ordered."""
    return sizes.turned * size + sizes.products * packed


# --- keys and values -----------------------------------------------------------------------------


def grown(room: int, needed: int) -> int:
    """Tokens that the cache of own keys has room for after it grew: by half, because growing copies everything."""
    return multiple(max(needed, room * 3 // 2), GROWTH)


def rooms(tokens: int) -> tuple[int, int]:
    """Room before and after the cache last grew, if its rows reach so many tokens one by one."""
    before = after = 0
    while after < tokens:
        before, after = after, grown(after, after + 1)
    return before, after


def native_cache(sizes: Sizes, size: int, decoding: Decoding) -> int:
    """Bytes on a processor: keys in float32, values in rows of whole vectors. Those of own tokens exist twice while the cache grows."""
    per_token = sizes.kv_heads * (sizes.head_size * FLOAT + multiple(sizes.head_size, LANES) * size)
    tokens = decoding.completion - 1  # nothing follows the last one
    own = multiple(decoding.slots, ROWS) * sum(rooms(tokens))
    prompts = decoding.prompts * multiple(decoding.prompt, STRETCH)
    return sizes.layers * per_token * (own + prompts)


def slot_cache(sizes: Sizes, size: int, tokens: int) -> int:
    """Bytes of other caches: keys and values of so many tokens in the model's number format."""
    return cached_numbers(sizes) * size * tokens


def cached_numbers(sizes: Sizes) -> int:
    """Number of keys and values of a token in all layers."""
    return 2 * sizes.layers * sizes.keys
