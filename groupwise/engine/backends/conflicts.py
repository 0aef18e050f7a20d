"""Finds settings in a run's config that are incompatible with `model.backend: tunix`, `unsloth` or `tinker`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from groupwise.core.settings.schema import Conflict

BACKEND = "model.backend"
TRANSFORMERS = "Leave model.backend out to train with torch"


def _tf32_conflicts(config: Any) -> Iterator[Conflict]:
    """`model.dtype: tf32` sets torch's switch for our own engine."""
    if config.model.dtype == "tf32":
        yield Conflict(
            f"model.dtype is tf32, which the backend {config.model.backend} does not take: it decides itself how products of float32 are "
            f"computed. Set model.dtype=float32. {TRANSFORMERS}.",
            ("model.dtype", BACKEND),
        )


def tunix_rl_conflicts(config: Any) -> Iterator[Conflict]:
    """Conflicts of a `groupwise.training.config.RunConfig` with Tunix."""
    yield from _expert_conflicts(config)
    yield from _tf32_conflicts(config)
    if config.lora is None:
        yield Conflict(
            f"lora is null, but the backend tunix trains adapters. Leave lora out. {TRANSFORMERS}.",
            ("lora", BACKEND),
        )
    elif config.lora.dropout:
        yield Conflict(
            f"lora.dropout is {config.lora.dropout}, but the backend tunix has none. Leave it out.",
            ("lora.dropout", BACKEND),
        )
    if config.model.trust_remote_code:
        yield Conflict(
            "model.trust_remote_code has no effect with the backend tunix, which has models of its own. Leave it out.",
            ("model.trust_remote_code", BACKEND),
        )
    for key in ("server", "profile"):
        if (value := getattr(config.run, key)) is not None:
            yield Conflict(
                f"run.{key} is {value}, which has no effect with the backend tunix: a worker in an environment of its own computes. "
                "Leave one of the two out.",
                (f"run.{key}", BACKEND),
            )
    if (config.run.processes or 1) > 1:
        yield Conflict(
            f"run.processes is {config.run.processes}, but the backend tunix divides its work over devices: model.mesh. Leave it out.",
            ("run.processes", BACKEND),
        )
    if getattr(config.algorithm, "kl_target", None) is not None:
        yield Conflict(
            "algorithm.kl_target changes beta at each step, for which the backend tunix would compile the loss again. Set a fixed "
            "algorithm.beta.",
            ("algorithm.kl_target", BACKEND),
        )


def tunix_sft_conflicts(config: Any) -> Iterator[Conflict]:
    """Conflicts of a `groupwise.training.sft_config.SftConfig` with Tunix."""
    yield Conflict(
        f"The backend tunix trains in groupwise rl and in notebooks, not supervised. {TRANSFORMERS}, and start from its adapter "
        "with model.adapter.",
        (BACKEND,),
    )


def unsloth_conflicts(config: Any) -> Iterator[Conflict]:
    """Conflicts of a `groupwise.training.config.RunConfig`, or a `groupwise.training.sft_config.SftConfig`, with Unsloth."""
    yield from _expert_conflicts(config)
    yield from _tf32_conflicts(config)
    if config.lora is None:
        yield Conflict(
            "lora is null, but the backend unsloth trains adapters. Leave lora out, or leave model.backend out to train all weights.",
            ("lora", BACKEND),
        )
    elif config.lora.dropout:
        yield Conflict(
            f"lora.dropout is {config.lora.dropout}, which Unsloth computes without its own kernels, and sampler and learner would see "
            "other policies. Leave it out.",
            ("lora.dropout", BACKEND),
        )
    keys = (  # keys that make other processes compute, with their usual value
        ("run.server", config.run.server, None),
        ("run.processes", config.run.processes, 1),
        ("distributed.learners", config.distributed.learners, 1),
        ("distributed.samplers", getattr(config.distributed, "samplers", 0), 0),
    )
    for key, value, default in keys:
        if (value or default) != default:
            yield Conflict(
                f"{key} is {value}, but with the backend unsloth one process samples and learns. Leave one of the two out.",
                (key, BACKEND),
            )
    sampler = getattr(config, "sampler", None)
    for key in ("enforce_eager", "quantization") if sampler is not None else ():
        if getattr(sampler, key):
            yield Conflict(
                f"sampler.{key} has no effect with the backend unsloth, which samples in its own way. Leave it out.",
                (f"sampler.{key}", BACKEND),
            )
    if sampler is not None and sampler.vllm_python is not None and config.model.load_in_8bit:
        yield Conflict(
            "model.load_in_8bit is true, and the vLLM of sampler.vllm_python holds weights in 16 or in 4 bits, so that it would sample "
            "from another policy. Set load_in_4bit instead, or leave one of the two out.",
            ("model.load_in_8bit", "sampler.vllm_python"),
        )


TINKER_ALPHA = 32
"""lora_alpha of every adapter that a Tinker service makes."""


def tinker_conflicts(config: Any) -> Iterator[Conflict]:
    """Conflicts of a `groupwise.training.config.RunConfig`, or a `groupwise.training.sft_config.SftConfig`, with a Tinker service."""
    yield from _tinker_lora_conflicts(config)
    model, run, training = config.model, config.run, config.training
    keys = (  # keys about computing, which the service does in its own way, with their usual value
        ("model.dtype", model.dtype, "auto"),
        ("model.revision", model.revision, None),
        ("model.adapter_revision", model.adapter_revision, None),
        ("training.max_tokens_per_microbatch", training.max_tokens_per_microbatch, None),
        ("training.gradient_checkpointing", training.gradient_checkpointing, False),
        ("training.packing", training.packing, True),
        ("run.server", run.server, None),
        ("run.profile", run.profile, None),
        ("run.processes", run.processes, None),
        ("distributed.strategy", config.distributed.strategy, "ddp"),
    )
    for key, value, default in keys:
        if value != default:
            yield Conflict(
                f"{key} is {value}, which has no effect with the backend tinker: its service decides how it computes. Leave it out.",
                (key, BACKEND),
            )


def tinker_rl_conflicts(config: Any) -> Iterator[Conflict]:
    """Further conflicts of a `groupwise.training.config.RunConfig` with a Tinker service."""
    yield from tinker_conflicts(config)
    sampler, algorithm = config.sampler, config.algorithm
    keys = (
        ("sampler.engine", sampler.engine, "torch", "its service samples itself"),
        ("sampler.enforce_eager", sampler.enforce_eager, False, "its service decides how it computes"),
        ("sampler.quantization", sampler.quantization, None, "its service decides how it computes"),
        ("sampler.max_num_seqs", sampler.max_num_seqs, None, "its service decides how many it draws together"),
        ("sampler.min_completion_length", sampler.min_completion_length, 0, "Tinker's calls have no least length"),
        ("sampler.temperature", sampler.temperature, 1.0, "it learns with log-probabilities at temperature 1"),
        ("sampler.temperature_schedule", sampler.temperature_schedule, None, "it learns with log-probabilities at temperature 1"),
        ("eval.min_p", config.eval.min_p, None, "Tinker's calls have top_k and top_p alone"),
        ("algorithm.entropy_coef", getattr(algorithm, "entropy_coef", 0.0), 0.0, "its service gives no entropies"),
        ("algorithm.entropy_advantage", getattr(algorithm, "entropy_advantage", 0.0), 0.0, "its service gives no entropies"),
        ("algorithm.top_entropy_quantile", getattr(algorithm, "top_entropy_quantile", 1.0), 1.0, "its service gives no entropies"),
    )  # fmt: skip
    for key, value, default, why in keys:
        if value != default:
            yield Conflict(
                f"{key} is {value}, but with the backend tinker {why}. Leave {key} out.",
                (key, BACKEND),
            )
    if getattr(algorithm, "beta", 0.0) > 0 and config.model.adapter is not None:
        yield Conflict(
            f"algorithm.beta is {algorithm.beta}, a KL penalty to the policy that the run starts from, which is model.adapter; a Tinker "
            "service computes log-probabilities of the base alone beside the trained model. Set beta to 0, or start from the base.",
            ("algorithm.beta", "model.adapter"),
        )


def _expert_conflicts(config: Any) -> Iterator[Conflict]:
    if config.lora is not None and config.lora.target_parameters:
        yield Conflict(
            f"lora.target_parameters is {[*config.lora.target_parameters]}, but the backend {config.model.backend} does not adapt experts. "
            f"Leave it out. {TRANSFORMERS}.",
            ("lora.target_parameters", BACKEND),
        )


def _tinker_lora_conflicts(config: Any) -> Iterator[Conflict]:
    yield from _expert_conflicts(config)
    lora = config.lora
    if lora is None:
        yield Conflict(
            f"lora is null, but a Tinker service trains adapters. Leave lora out. {TRANSFORMERS}.",
            ("lora", BACKEND),
        )
        return
    for key, value, only in (
        ("lora.alpha", lora.alpha, TINKER_ALPHA),
        ("lora.rslora", lora.rslora, False),
        ("lora.dropout", lora.dropout, 0.0),
    ):
        if value != only:
            yield Conflict(
                f"{key} is {value}, but Tinker's calls name rank, seed and layers alone: it is {only} there. Leave it out.",
                (key, BACKEND),
            )
    try:
        trained_layers(lora.target_modules)
    except ValueError as error:
        yield Conflict(str(error), ("lora.target_modules", BACKEND))


_TINKER_LAYERS = {
    "train_attn": frozenset({"q_proj", "k_proj", "v_proj", "o_proj"}),
    "train_mlp": frozenset({"gate_proj", "up_proj", "down_proj"}),
    "train_unembed": frozenset({"lm_head"}),
}
"""Arguments of `create_lora_training_client` that choose layers, with the names of these layers."""


def trained_layers(target_modules: str | tuple[str, ...]) -> dict[str, bool]:
    """The arguments of `create_lora_training_client` that choose these layers. ValueError if it cannot name them."""
    if target_modules == "all-linear":
        return {"train_attn": True, "train_mlp": True, "train_unembed": False}
    names = set(target_modules)
    chosen = {key: layers <= names for key, layers in _TINKER_LAYERS.items()}
    if names != {name for key, layers in _TINKER_LAYERS.items() if chosen[key] for name in layers}:
        kinds = "; ".join(", ".join(sorted(layers)) for layers in _TINKER_LAYERS.values())
        raise ValueError(
            f"lora.target_modules is {', '.join(target_modules)}, but a Tinker service adapts layers by kind, each whole or not at all: "
            f"{kinds}. Name whole kinds, or leave it out for all linear layers but the output head."
        )
    return chosen
