"""Starts the zygote ahead of a run, before the object to make is known, and asks it questions meanwhile.

A command starts it before it imports what reads its config (`early_zygote`), and ends it again if the config needs none
(`groupwise.training.assembly.prepare.expect_ranks`). The zygote then imports torch, which takes a second or more. Before
the command can send the setup, it needs some facts about the model and the machine. It asks the zygote for them, so it need not import
torch itself. If no zygote has been started, the same questions are answered in this process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from groupwise.core.accelerators import NVIDIA
from groupwise.core.plugins import load
from groupwise.engine.models.machine import available_cores

if TYPE_CHECKING:
    from groupwise.engine.distributed.forked_workers import ForkedWorkers
    from groupwise.engine.models.config import Dtype, LoraConfig, ModelConfig
    from groupwise.engine.models.plan import LearningProcess

MODULES = (
    "groupwise.engine.learner.torch_learner",
    "groupwise.engine.models.adapters",
    "groupwise.engine.distributed.worker_state",
    "groupwise.engine.sampler.torch_sampler",
)
"""Modules that a zygote imports first; they import torch. Transformers is imported only for a model that needs it."""

_begun: list[ForkedWorkers] = []
"""The started zygote, if any; at most one."""


@contextmanager
def early_zygote(overrides: Sequence[str]) -> Generator[None]:
    """Start a zygote before the config is read, unless this machine or the overrides of the config show that none will be needed.

    It computes on the CPU, in several processes; torchrun and GPUs have processes of their own. `tiny` is computed in one process. A zygote
    that nobody has taken is ended at the end.
    """
    several = sys.platform == "linux" and not NVIDIA.exists() and "RANK" not in os.environ
    if several and "model.name=tiny" not in overrides and available_cores() > 1:
        start_zygote()
    try:
        yield
    finally:
        end_zygote()


def start_zygote() -> None:
    """Start a zygote that answers questions, also about GPUs, unless one has been started."""
    if not _begun:
        _begun.append(_start_ranks(sees_gpus=True))


def take_zygote() -> ForkedWorkers:
    """Hand the started zygote, or a new one, over to the caller, which sends it the setup."""
    return _begun.pop() if _begun else _start_ranks(sees_gpus=False)


def _start_ranks(*, sees_gpus: bool) -> ForkedWorkers:
    from groupwise.engine.distributed.forked_workers import ForkedWorkers

    ranks = ForkedWorkers(*MODULES, sees_gpus=sees_gpus)
    ranks.start()
    return ranks


def end_zygote() -> None:
    """End a zygote that was started but is not needed."""
    while _begun:
        _begun.pop().close()


def load_tokenizer(config: ModelConfig) -> Any:
    """See `groupwise.engine.models.tokenizer.load_tokenizer`."""
    from groupwise.engine.models import tokenizer

    fast = tokenizer.load_fast_tokenizer(config)
    if fast is not None:  # prompts are tokenised while the zygote imports
        return fast
    if config.trust_remote_code:  # its class cannot be unpickled before its code is loaded
        return tokenizer.load_tokenizer(config)
    if _begun:
        tokenizer.import_class()
    return _ask_zygote("groupwise.engine.models.tokenizer:load_tokenizer", config)


def prompt_room(config: ModelConfig, completion: int) -> int:
    """See `groupwise.engine.models.prepare.prompt_room`."""
    return _ask_zygote("groupwise.engine.models.plan:prompt_room", config, completion)


def vocabulary(config: ModelConfig) -> int:
    """See `groupwise.engine.models.plan.vocabulary`."""
    return _ask_zygote("groupwise.engine.models.plan:vocabulary", config)


def all_parameters(config: ModelConfig) -> int:
    """See `groupwise.engine.models.plan.all_parameters`."""
    return _ask_zygote("groupwise.engine.models.plan:all_parameters", config)


def trained_parameters(config: ModelConfig, lora: LoraConfig | None) -> int:
    """See `groupwise.engine.models.plan.trained_parameters`."""
    return _ask_zygote("groupwise.engine.models.plan:trained_parameters", config, lora)


def cache_bytes(config: ModelConfig, dtype: Dtype, tokens: int) -> int:
    """See `groupwise.engine.models.plan.cache_bytes`."""
    return _ask_zygote("groupwise.engine.models.plan:cache_bytes", config, dtype, tokens)


def fitting_microbatch(
    config: ModelConfig, lora: LoraConfig | None, process: LearningProcess, memory: int
) -> int:
    """See `groupwise.engine.models.plan.fitting_microbatch`."""
    return _ask_zygote(
        "groupwise.engine.models.plan:fitting_microbatch", config, lora, process, memory
    )


def sampler_weights_bytes(
    config: ModelConfig, lora: LoraConfig | None, dtype: Dtype, device: str
) -> float:
    """See `groupwise.engine.models.plan.sampler_bytes`; without keys and values."""
    return _ask_zygote(
        "groupwise.engine.models.plan:sampler_bytes", config, lora, dtype, device, None
    )


def free_memory(device: str) -> int | None:
    """See `groupwise.engine.models.probes.free_memory`."""
    return _ask_zygote("groupwise.engine.models.probes:free_memory", device)


def gpu_memory(device: str) -> int:
    """See `groupwise.engine.models.probes.gpu_memory`."""
    return _ask_zygote("groupwise.engine.models.probes:gpu_memory", device)


def gpu_count() -> int:
    """See `groupwise.engine.models.machine.gpu_count`."""
    return _ask_zygote("groupwise.engine.models.machine:gpu_count")


def choose_dtype(config: ModelConfig, full: bool, device: str) -> Dtype:
    """See `groupwise.engine.models.machine.choose_dtype`."""
    return _ask_zygote("groupwise.engine.models.machine:choose_dtype", config, full, device)


def choose_tf32(config: ModelConfig, device: str) -> bool:
    """See `groupwise.engine.models.machine.choose_tf32`."""
    return _ask_zygote("groupwise.engine.models.machine:choose_tf32", config, device)


def choose_device() -> str:
    """See `groupwise.engine.models.machine.choose_device`."""
    return _ask_zygote("groupwise.engine.models.machine:choose_device")


def describe_processor(device: str) -> str:
    """See `groupwise.engine.models.machine.describe_processor`."""
    return _ask_zygote("groupwise.engine.models.machine:describe_processor", device)


def torch_version() -> str:
    """See `groupwise.engine.models.machine.torch_version`."""
    return _ask_zygote("groupwise.engine.models.machine:torch_version")


def _ask_zygote(function: str, *arguments: Any) -> Any:
    if _begun:
        return _begun[0].ask(function, *arguments)
    return load(function, kind="function").object(*arguments)
