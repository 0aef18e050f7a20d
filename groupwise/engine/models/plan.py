"""Estimates what a model will need, from its config alone: room for prompts, parameters, memory. No weights are loaded.

Memory is that of the engines that will compute the model: our own if it has a native form, otherwise those over transformers' modules
(`groupwise.engine.models.footprint`). For a run with several processes it is the total of all of them. Memory that the first process
filled before the fork is shared, as long as none of them writes to it.

Most models are counted by arithmetic (`groupwise.engine.models.decoder_shapes`). Only the other models need an import of torch and
transformers, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.decoder_shapes import read_decoder
from groupwise.engine.models.footprint import (
    FLOAT,
    IN_PRODUCTS,
    Counts,
    Decoding,
    Sizes,
    bytes_of,
    cached_numbers,
    experts_of_a_token,
    footprint_of,
    saved_by_bits,
    sizes_of,
    slot_cache,
)
from groupwise.engine.models.machine import is_gpu_build
from groupwise.engine.models.transformers_log import quiet

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

    from groupwise.engine.models.native.causal_lm import CausalModel

MIB = 2**20
PROCESS_MIB = 600.0
"""MiB of a process that has imported torch and transformers and has computed something."""
GPU_BUILD_MIB = 480.0
"""Further MiB of that process if torch is a build for GPUs, whose libraries are larger, also on a machine without a GPU."""
RANK_MIB = 150.0
"""MiB that each rank does not share with the zygote once it has computed; the rest is shared."""
MAIN_MIB = 150.0
"""MiB of the main process of a run with ranks; it does not import torch."""
GPU_PROCESS_BYTES = 600 << 20
"""Bytes of a GPU that each further process takes for CUDA's context, kernels, and the workspaces of products."""
MICROBATCHES = (65_536, 32_768, 16_384, 8192, 4096)
"""Tokens that a learner on a GPU computes at once, if the config does not say: more would not be faster, fewer are slower."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Estimated memory of a run on its device, in MiB."""

    process: float
    """The interpreter and its libraries; counted only if the device is the CPU."""
    weights: float
    """Weights of the sampled model, and the native engines' reordered copies of them."""
    trained: float
    """Trained weights, their gradient and both moments of AdamW; for an adapter also the copies of the sampler and the native engines."""
    reference: float
    """The frozen copy that full fine-tuning needs with beta > 0, or if it is the teacher."""
    teacher: float
    """Weights of the teacher of a distillation that are in memory in addition to the policy's."""
    keys_and_values: float
    """Keys and values of all slots and their prompts."""
    keys_and_values_learning: float
    """What of them is held while the run learns: the same, unless the sampler frees them then."""
    activations: float
    """Activations of one micro-batch, kept for its backward pass; the largest part for long texts. With gradient checkpointing only the
    inputs of all layers, and the recomputed activations of one layer."""
    update: float
    """Temporary numbers of AdamW, one per trained one. Activations are free at that time, so only the larger of the two counts."""
    server_sampling: float
    """Memory that the run's own vLLM server, or a sampler's process, uses on the learner's GPU while the run samples. Activations and
    updates use none then."""
    server_learning: float
    """What it keeps while the run learns: the same, unless it is a server that sleeps then."""

    @property
    def total(self) -> float:
        """Peak in MiB."""
        learning = max(self.activations, self.update)
        learning += self.server_learning + self.keys_and_values_learning
        sampling = self.server_sampling + self.keys_and_values
        always = self.process + self.weights + self.trained + self.reference + self.teacher
        return always + max(learning, sampling)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Sizes of a model, and how much of it is trained."""

    parameters: int
    trained_parameters: int
    active_parameters: int
    """Parameters that compute one token: of a mixture of experts, all but those of the experts that it did not choose."""
    memory: MemoryPlan


def prompt_room(config: ModelConfig, completion: int) -> int:
    """Most tokens that a prompt may have if the completion may have `completion` tokens."""
    shapes = read_decoder(config)
    longest = (
        getattr(_text_config(config), "max_position_embeddings", None)
        if shapes is None
        else shapes.longest
    )
    limits = [longest, config.max_seq_length]
    return min((limit for limit in limits if limit), default=1 << 30) - completion


def vocabulary(config: ModelConfig) -> int:
    """Number of token ids with an embedding; ids are 0 to this number less one."""
    return _sizes_of_config(config).vocabulary


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
    server: tuple[float, float] = (0.0, 0.0),
    frees_cache: bool = False,
    teacher: float = 0.0,
) -> ModelPlan:
    """Count parameters, and estimate the memory of a run.

    `decoding` and `microbatch` (tokens) are per process, for each of the `processes`; without `decoding` nothing is sampled. The processes
    share frozen weights. Each has its own trained weights, in addition to those that it was forked from. `parts` is the number of parts
    that the weights are divided into; each process holds one, and transformers' modules then compute them. `server`: bytes that the run's
    own vLLM server, or a sampler's process, takes of the learner's GPU while the run samples, and while it learns. `frees_cache`: the
    sampler frees keys and values while the run learns. `teacher`: bytes of a teacher's weights.
    """
    counts = count_parameters(config, lora)
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
    interpreters = PROCESS_MIB + (GPU_BUILD_MIB if is_gpu_build() else 0.0)
    if processes > 1:  # the main process, the zygote, and the memory that each rank does not share
        interpreters += MAIN_MIB + (processes - 1) * RANK_MIB
    cache = processes * held.cache(decoding) / MIB if decoding else 0.0
    memory = MemoryPlan(
        process=interpreters if device == "cpu" else 0.0,
        weights=copies
        * (held.served_bytes(total) - saved_by_bits(config, counts.linear, dtype))
        / parts
        / MIB,
        trained=held.trained_bytes(trained, processes) / full / MIB,
        reference=FLOAT * total / parts / MIB if needs_reference and lora is None else 0.0,
        teacher=teacher / MIB,
        keys_and_values=cache,
        keys_and_values_learning=0.0 if frees_cache else cache,
        activations=processes * of_one / MIB,
        update=processes * FLOAT * trained / full / MIB,
        server_sampling=server[0] / MIB,
        server_learning=server[1] / MIB,
    )
    return ModelPlan(total, trained, counts.active, memory)


def sampler_bytes(
    config: ModelConfig, lora: LoraConfig | None, dtype: str, device: str, decoding: Decoding | None
) -> float:
    """Bytes of a GPU that a process takes which only samples; without `decoding` no keys and values are counted."""
    counts = count_parameters(config, lora)
    full = lora is None
    held = footprint_of(
        counts, dtype=dtype, device=device, full=full, by_modules=False, samples=True
    )
    weights = held.served_bytes(counts.parameters) - saved_by_bits(config, counts.linear, dtype)
    # An adapter is held in float32 and in the order of the native products.
    adapter = 0 if full else counts.trained * (FLOAT + IN_PRODUCTS * held.size)
    return weights + adapter + (held.cache(decoding) if decoding else 0) + GPU_PROCESS_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningProcess:
    """Memory of a process that learns, without that of a micro-batch; see `plan_model`."""

    dtype: str
    device: str
    needs_reference: bool
    gradient_checkpointing: bool
    parts: int
    samples: bool
    """True if it also holds the sampled weights."""


def fitting_microbatch(
    config: ModelConfig, lora: LoraConfig | None, process: LearningProcess, memory: int
) -> int:
    """The largest of `MICROBATCHES` with which the process takes at most `memory` bytes of its device, or the smallest.

    Keys and values are not counted.
    """
    decoding = Decoding(slots=0, key_length=0, completion=1, prompts=0, prompt=0)

    def fits(tokens: int) -> bool:
        plan = plan_model(
            config,
            lora,
            dtype=process.dtype,
            decoding=decoding if process.samples else None,
            microbatch=tokens,
            needs_reference=process.needs_reference,
            device=process.device,
            gradient_checkpointing=process.gradient_checkpointing,
            parts=process.parts,
        )
        return plan.memory.total * MIB <= memory

    return next(filter(fits, MICROBATCHES), MICROBATCHES[-1])


def largest_microbatch(budget: int, longest: int, everything: int) -> int:
    """Tokens of the largest micro-batch: the budget, or the longest row if it is longer, but at most `everything`, all tokens of a step."""
    return min(max(budget, longest), everything)


def cache_bytes(config: ModelConfig, dtype: str, tokens: int) -> int:
    """Bytes of the keys, values and states of a text of `tokens` tokens in all layers, as a sampler caches them on a GPU."""
    shapes = read_decoder(config)
    sizes = count_parameters(config, None).sizes if shapes is None else shapes.sizes
    return slot_cache(sizes, bytes_of(dtype), tokens) + sizes.state * FLOAT


def all_parameters(config: ModelConfig) -> int:
    """Number of the model's parameters."""
    return count_parameters(config, None).parameters


def trained_parameters(config: ModelConfig, lora: LoraConfig | None) -> int:
    """Number of trained parameters: those of the adapter (the configured or a new one), or all without `lora`."""
    return count_parameters(config, lora).trained


def count_parameters(config: ModelConfig, lora: LoraConfig | None) -> Counts:
    """Count by arithmetic if the model's config.json allows it, otherwise on a model without storage (meta tensors)."""
    shapes = read_decoder(config)
    counted = None if shapes is None else shapes.counts(config, lora)
    if counted is not None:
        return counted
    import torch
    from torch import nn

    from groupwise.engine.models.adapters import meta_adapter, starting_config
    from groupwise.engine.models.experts import experts_of
    from groupwise.engine.models.load import meta_model
    from groupwise.engine.models.native.weights import refusal

    model = meta_model(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained, dropout = parameters, 0.0
    if lora is not None:
        adapted = meta_adapter(config, starting_config(config, lora))
        model, dropout = adapted.base, adapted.config.lora_dropout
        trained = sum(parameter.numel() for parameter in adapted.parameters("hollow").values())
    head = model.get_output_embeddings()
    linear = sum(
        module.weight.numel()
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and ".lora_" not in path
    )
    text_config = _text_config(config)
    chosen = experts_of_a_token(text_config)
    idle = sum(
        parameter.numel() * (1 - chosen / parameter.shape[0])
        for module in experts_of(model).values()
        for parameter in module.parameters(recurse=False)
    )
    sizes = sizes_of(text_config)
    return Counts(
        sizes=replace(sizes, state=_state_numbers(model, sizes)),
        parameters=parameters,
        trained=trained,
        active=parameters - round(idle),
        linear=linear,
        native=refusal(model) is None,
        in_bfloat16=text_config.dtype == torch.bfloat16,
        dropout=dropout,
    )


STATE_TOKENS = 16
"""Tokens of the text whose states are measured: more than the kernel of a convolution."""


def _state_numbers(model: CausalModel, sizes: Sizes) -> int:
    """Numbers in the states that this model, which has no storage, keeps of one text beside keys and values; 0 if that cannot be seen."""
    if not sizes.layers_without_keys and "hybrid" not in (
        getattr(model.config.get_text_config(), "layer_types", None) or ()
    ):
        return 0
    import torch

    from groupwise.engine.models.decoder import cache_keyword

    ids_1T = torch.zeros(1, STATE_TOKENS, dtype=torch.long, device="meta")
    # bfloat16 is the format for which all products can be computed on the meta device.
    body = model.bfloat16().get_decoder()
    try:
        with torch.no_grad(), quiet():
            cache = getattr(body(input_ids=ids_1T, use_cache=True), cache_keyword(body))
    except Exception:  # noqa: BLE001 — code of any model, which may look at numbers that there are none of
        return 0
    numbers = sum(tensor.numel() for tensor in _tensors(cache))
    return max(0, numbers - STATE_TOKENS * cached_numbers(sizes))


def _tensors(held: Any) -> Iterator[Tensor]:
    """All tensors in a cache of transformers, which nests lists, dicts and objects of its own."""
    import torch

    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, dict | list | tuple):
        for each in held.values() if isinstance(held, dict) else held:
            yield from _tensors(each)
    elif type(held).__module__.startswith("transformers.cache"):
        yield from _tensors(vars(held))


def _sizes_of_config(config: ModelConfig) -> Sizes:
    shapes = read_decoder(config)
    return sizes_of(_text_config(config)) if shapes is None else shapes.sizes


def _text_config(config: ModelConfig) -> PreTrainedConfig:
    """The config of the model's text part."""
    from groupwise.engine.models.load import read_model_config

    return read_model_config(config).get_text_config()
