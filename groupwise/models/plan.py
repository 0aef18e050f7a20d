"""What a model will need, told from its config alone: room for prompts, parameters, memory. No weights are loaded.

Importing this costs nothing: torch, transformers and peft are imported by what needs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from groupwise.models.config import LoraConfig, ModelConfig

if TYPE_CHECKING:
    from torch.nn import Parameter
    from transformers import PreTrainedConfig

MIB = 2**20
PROCESS_MIB = 600.0
"""What a process holds once torch and transformers are imported and have computed something."""
RANK_MIB = 150.0
"""What a rank holds of that for itself."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a run will hold on its device, in MiB; an estimate."""

    process: float
    """The interpreter and its libraries, where the device is the processor."""
    weights: float
    trained: float
    """Trained weights, their gradient, both moments of AdamW, and the sampler's copy."""
    reference: float
    """The frozen copy that full fine-tuning with beta > 0 needs."""
    keys_and_values: float
    activations: float
    """Of one micro-batch, kept for its backward pass; the largest part for long texts. With gradient checkpointing the inputs of
    all layers, and what one of them computes again."""

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Sizes of a model and what of it is trained."""

    parameters: int
    trained_parameters: int
    memory: MemoryPlan


def prompt_room(config: ModelConfig, completion: int) -> int:
    """Most tokens that a prompt may have beside a completion of so many."""
    from groupwise.models.load import read_model_config

    described = read_model_config(config).get_text_config()
    limits = [getattr(described, "max_position_embeddings", None), config.max_seq_length]
    return min((limit for limit in limits if limit), default=1 << 30) - completion


def vocabulary(config: ModelConfig) -> int:
    """How many token ids the model has an embedding for: 0 up to one less."""
    from groupwise.models.load import read_model_config

    return read_model_config(config).get_text_config().vocab_size


def plan_model(
    config: ModelConfig,
    lora: LoraConfig | None,
    *,
    dtype: str,
    slots: int,
    key_length: int,
    microbatch: int,
    needs_reference: bool,
    device: str,
    gradient_checkpointing: bool = False,
    processes: int = 1,
) -> ModelPlan:
    """Count parameters on a model without storage, and estimate the memory of a run.

    With several `processes` the rest of what they hold is of each of them, but for frozen weights, which they share; so are all
    weights as long as they are not trained.
    """
    from groupwise.models.load import read_model_config

    described = read_model_config(config).get_text_config()
    total = all_parameters(config)
    trained = trained_parameters(config, lora)
    size = _size(dtype)
    memory = MemoryPlan(
        process=_processes_mib(processes) if device == "cpu" else 0.0,
        weights=total * size / MIB * (1 if lora else processes),
        trained=((5 if lora else 4) + (processes > 1)) * processes * trained * 4 / MIB,
        reference=total * size / MIB if needs_reference and lora is None else 0.0,
        keys_and_values=processes * slots * key_length * _cache_per_token(described) * size / MIB,
        activations=processes
        * microbatch
        * _activations_per_token(described, gradient_checkpointing)
        * size
        / MIB,
    )
    return ModelPlan(total, trained, memory)


def cache_bytes(config: ModelConfig, dtype: str, tokens: int) -> int:
    """What the sampler holds of so many tokens: their keys and values in all layers."""
    from groupwise.models.load import read_model_config

    per_token = _cache_per_token(read_model_config(config).get_text_config())
    return tokens * per_token * _size(dtype)


def _processes_mib(processes: int) -> float:
    """Of one process that does it all; or of the loop's, the zygote's, and what each rank does not share with it."""
    return PROCESS_MIB if processes == 1 else 2 * PROCESS_MIB + processes * RANK_MIB


def all_parameters(config: ModelConfig) -> int:
    """How many numbers the model has."""
    from groupwise.models.load import hollow_model

    return count_parameters(hollow_model(config).parameters())


def trained_parameters(config: ModelConfig, lora: LoraConfig | None) -> int:
    """How many numbers are trained: those of the adapter (the given one or a new one), or all."""
    from groupwise.models.adapters import hollow_adapter, starting_config

    if lora is None:
        return all_parameters(config)
    adapted = hollow_adapter(config, starting_config(config, lora))
    return count_parameters(adapted.parameters("hollow").values())


def count_parameters(parameters: Iterable[Parameter]) -> int:
    """Numbers in all of them together."""
    return sum(parameter.numel() for parameter in parameters)


def _size(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def _cache_per_token(config: PreTrainedConfig) -> int:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return 2 * config.num_hidden_layers * heads * head_size


def _activations_per_token(config: PreTrainedConfig, gradient_checkpointing: bool) -> int:
    """Numbers kept for each token: about twelve hidden states and four feed-forward states in each layer, or in one at a time."""
    of_a_layer = 12 * config.hidden_size + 4 * config.intermediate_size
    if gradient_checkpointing:
        return config.num_hidden_layers * config.hidden_size + of_a_layer
    return config.num_hidden_layers * of_a_layer
