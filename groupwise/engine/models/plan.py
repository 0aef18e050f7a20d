"""Estimates what a model will need, from its config alone: room for prompts, parameters, memory. No weights are loaded.

Memory is that of the engines that will compute the model: our own if it has a native form, else those over transformers' modules
(`groupwise.engine.models.footprint`). If a run has several processes, it is that of all of them together: they share what the first one
built before the fork as long as none of them writes to it.

Most models are counted by arithmetic (`groupwise.engine.models.decoder_shapes`). Only for the others torch, transformers' models and peft
are imported, which takes seconds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.decoder_shapes import read_decoder
from groupwise.engine.models.footprint import (
    Counts,
    Sizes,
    bytes_of,
    footprint_of,
    saved_by_bits,
    sizes_of,
    slot_cache,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MIB = 2**20
PROCESS_MIB = 600.0
"""MiB of a process that has imported torch and transformers and has computed something."""
RANK_MIB = 150.0
"""MiB of that which each rank has for itself once it has computed; the rest is shared."""
MAIN_MIB = 150.0
"""MiB of the main process beside ranks: there it imports no torch."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Estimated memory of a run on its device, in MiB."""

    process: float
    """The interpreter and its libraries, if the device is the processor."""
    weights: float
    """Weights of the sampled model, and the native engines' copies of them in other orders."""
    trained: float
    """Trained weights, their gradient, both moments of AdamW, and of an adapter the copies of sampler and native engines."""
    reference: float
    """The frozen copy that full fine-tuning with beta > 0 needs."""
    keys_and_values: float
    """Keys and values of all slots and their prompts."""
    activations: float
    """Activations of one micro-batch, kept for its backward pass; the largest part for long texts. With gradient checkpointing the inputs
    of all layers, and what one of them computes again."""
    update: float
    """Temporary numbers of AdamW; or, if all weights are trained, the second copy that the sampler has while it takes new ones. There are
    no activations then, so that only the larger one counts."""

    @property
    def total(self) -> float:
        """MiB at the most expensive moment."""
        idle = min(self.activations, self.update)
        return sum(asdict(self).values()) - idle


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Sizes of a model, and how much of it is trained."""

    parameters: int
    trained_parameters: int
    memory: MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """The most that a process decodes at once."""

    slots: int
    key_length: int
    """Tokens of a prompt with its completion."""
    completion: int
    """Tokens of the longest completion."""
    prompts: int
    """Number of prompts of the slots; members of a group share one."""
    prompt: int
    """Tokens of the longest one."""


def prompt_room(config: ModelConfig, completion: int) -> int:
    """Most tokens that a prompt may have beside a completion of the given length."""
    shapes = read_decoder(config)
    longest = (
        getattr(_text_config(config), "max_position_embeddings", None)
        if shapes is None
        else shapes.longest
    )
    limits = [longest, config.max_seq_length]
    return min((limit for limit in limits if limit), default=1 << 30) - completion


def vocabulary(config: ModelConfig) -> int:
    """Number of token ids with an embedding; ids run from 0 to one less."""
    return _sizes(config).vocabulary


def plan_model(
    config: ModelConfig,
    lora: LoraConfig | None,
    *,
    dtype: str,
    decoding: Decoding | None,
    microbatch: int,
    needs_reference: bool,
    device: str,
    gradient_checkpointing: bool = False,
    processes: int = 1,
    parts: int = 1,
) -> ModelPlan:
    """Count parameters, and estimate the memory of a run.

    `decoding` and `microbatch` (tokens) are those of each of the `processes`; without `decoding` nothing is sampled. The processes share
    frozen weights; each has its own trained weights, beside those that they were forked from. `parts`: number of parts that the weights are
    divided into, of which a process has one; they are then computed by modules.
    """
    counts = count(config, lora)
    trained, total = counts.trained, counts.parameters
    held = footprint_of(
        counts,
        dtype=dtype,
        device=device,
        full=lora is None,
        by_modules=parts > 1 or config.backend == "unsloth",
        samples=decoding is not None,
    )
    copies = 1 if lora else processes + (processes > 1)
    full = parts if lora is None else 1
    of_one = held.activations(microbatch, recompute=gradient_checkpointing)
    interpreters = PROCESS_MIB
    if processes > 1:  # the loop's, the zygote's, and what each rank does not share with the zygote
        interpreters = MAIN_MIB + PROCESS_MIB + (processes - 1) * RANK_MIB
    memory = MemoryPlan(
        process=interpreters if device == "cpu" else 0.0,
        weights=copies
        * (held.served(total) - saved_by_bits(config, counts.linear, dtype))
        / parts
        / MIB,
        trained=held.trained(trained, processes) / full / MIB,
        reference=held.plain(total) / parts / MIB if needs_reference and lora is None else 0.0,
        keys_and_values=processes * held.cache(decoding) / MIB if decoding else 0.0,
        activations=processes * of_one / MIB,
        update=processes * held.update(trained) / full / MIB,
    )
    return ModelPlan(total, trained, memory)


def largest_microbatch(budget: int, longest: int, everything: int) -> int:
    """Tokens of the largest micro-batch: the budget, or the longest row if that is longer, but at most `everything`."""
    return min(max(budget, longest), everything)


def cache_bytes(config: ModelConfig, dtype: str, tokens: int) -> int:
    """Bytes that the sampler holds of so many tokens on a GPU: their keys and values in all layers."""
    return slot_cache(_sizes(config), bytes_of(dtype), tokens)


def all_parameters(config: ModelConfig) -> int:
    """Number of the model's parameters."""
    return count(config, None).parameters


def trained_parameters(config: ModelConfig, lora: LoraConfig | None) -> int:
    """Number of trained parameters: those of the adapter (the given one or a new one), or all."""
    return count(config, lora).trained


def count(config: ModelConfig, lora: LoraConfig | None) -> Counts:
    """Count by arithmetic if the model's config.json allows it, else on a model without storage."""
    shapes = read_decoder(config)
    counted = None if shapes is None else shapes.counts(config, lora)
    if counted is not None:
        return counted
    import torch
    from torch import nn

    from groupwise.engine.models.adapters import hollow_adapter, starting_config
    from groupwise.engine.models.load import hollow_model
    from groupwise.engine.models.native.weights import refusal

    model = hollow_model(config)
    parameters = sum(each.numel() for each in model.parameters())
    trained, dropout = parameters, 0.0
    if lora is not None:
        adapted = hollow_adapter(config, starting_config(config, lora))
        model, dropout = adapted.base, adapted.config.lora_dropout
        trained = sum(each.numel() for each in adapted.parameters("hollow").values())
    head = model.get_output_embeddings()
    linear = sum(
        module.weight.numel()
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and ".lora_" not in path
    )
    described = _text_config(config)
    return Counts(
        sizes=sizes_of(described),
        parameters=parameters,
        trained=trained,
        linear=linear,
        native=refusal(model) is None,
        in_bfloat16=described.dtype == torch.bfloat16,
        dropout=dropout,
    )


def _sizes(config: ModelConfig) -> Sizes:
    shapes = read_decoder(config)
    return sizes_of(_text_config(config)) if shapes is None else shapes.sizes


def _text_config(config: ModelConfig) -> PreTrainedConfig:
    """The config of the model's text part."""
    from groupwise.engine.models.load import read_model_config

    return read_model_config(config).get_text_config()
