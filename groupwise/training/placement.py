"""Chooses a run's layout on this machine: device, number format, processes, threads and slots (`choose_layout`).

The config's settings are kept; everything else is chosen to suit the machine. The layout is decided once, at the start of a run, and
recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from groupwise.core.errors import ConfigError, UsageError
from groupwise.engine.backends.unsloth import library
from groupwise.engine.distributed import prefork
from groupwise.engine.distributed.torchrun import check_world_size, read_torchrun_rank
from groupwise.engine.models.config import Dtype
from groupwise.engine.models.footprint import FLOAT, bytes_of
from groupwise.engine.models.machine import available_cores, prepare_process, set_tf32, set_threads
from groupwise.engine.models.plan import MICROBATCHES, LearningProcess
from groupwise.training.config import RunConfig
from groupwise.training.rollout_builder import longest_completion

if TYPE_CHECKING:
    from groupwise.training.sft_config import SftConfig

    AnyConfig = RunConfig | SftConfig

KEY_BLOCK = 64
"""Key lengths are rounded up to a multiple of this many tokens, so that similar configs decode with the same shapes."""
MAX_SLOTS = 64
MIN_SLOTS = 8
SLOT_BLOCK = 8
"""The number of slots of a GPU is a multiple of this; a GPU computes all slots at once."""
MAX_GPU_SLOTS = 256
USABLE = 0.9
"""Largest fraction of a GPU's free memory that a run plans to take."""
EXACT_FIELDS = frozenset({"frees_cache", "shares_gpus"})
"""Fields of a layout that change no number of a run."""
SHARE_OF_CACHE = 0.3
"""Largest fraction of a GPU's memory for the keys and values of all slots; the rest is for weights and learning."""
MICROBATCH = MICROBATCHES[-1]
"""Tokens of a micro-batch, if the config does not say, where its size is not chosen by free memory."""
MIN_EXAMPLES = 2
"""Smallest number of examples of a supervised step per process, if the number of processes is chosen automatically."""
SMALL_MODEL = 20_000_000
"""Models with fewer parameters get one process: a step takes a fraction of a second, but starting ranks takes several."""
MAX_PROCESSES = 16
"""Largest automatically chosen number, because each process has its own activations, gradients and moments. A config may set more."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a run's work on this machine, decided once at its start and recorded."""

    device: str
    dtype: Dtype
    threads: int
    """Total number of computing threads in all processes."""
    slots: int
    """Number of concurrent completions per sampling process."""
    key_length: int
    max_tokens_per_microbatch: int
    """Limit per learning process."""
    processor: str = ""
    """Name of the processor and of the instruction set that torch uses on it; others round differently."""
    torch: str = ""
    """Version of torch, with that of Unsloth if it computes; for the backend tunix, the versions of JAX and Tunix."""
    processes: int = 1
    """Number of ranks that sample, learn, or do both. With 1, there are no ranks, and this process does the work."""
    learners: int = 1
    """Number of processes that learn. If more than 1, each process has its own model instead of sharing one."""
    samplers: int = 0
    """Number of processes that only sample, while the learners only learn; 0: all do both."""
    strategy: str = "ddp"
    """Each learner has all weights (`ddp`) or a part (`fsdp2`)."""
    seeded: bool = True
    """True if each completion is drawn with its own seed; false if servers draw with random numbers of their own."""
    frees_cache: bool = False
    """True if the sampler frees its keys and values while the run learns, because the GPU's memory would be short."""
    shares_gpus: bool = False
    """True if the samplers compute on the learners' GPUs, because there are no others."""
    tf32: bool = False
    """True if the GPU computes float32 matrix products in TF32."""

    @property
    def products_dtype(self) -> str:
        """Number format of the factors of matrix products: `tf32`, or that of the weights."""
        return "tf32" if self.tf32 else self.dtype

    @property
    def separate_models(self) -> bool:
        """True if each process has its own model."""
        return self.learners > 1 or self.samplers > 0

    @property
    def processes_per_model(self) -> int:
        """Number of processes that share one model."""
        return 1 if self.separate_models else self.processes

    @property
    def learning_processes(self) -> int:
        """Number of processes that learn."""
        return self.learners if self.separate_models else self.processes

    @property
    def weight_shards(self) -> int:
        """Number of shards into which the learners' weights are divided."""
        return self.learners if self.strategy == "fsdp2" else 1

    @property
    def sampling_processes(self) -> int:
        """Number of processes that sample."""
        return self.samplers or self.processes

    @property
    def threads_each(self) -> int:
        """Threads per process, at least 1."""
        return max(1, self.threads // self.processes)

    @property
    def all_threads(self) -> int:
        """Total number of computing threads: `threads`, rounded down to a multiple of the processes."""
        return self.threads_each * self.processes

    @property
    def all_slots(self) -> int:
        """Total number of slots in all sampling processes."""
        return self.slots * self.sampling_processes


def apply_layout(layout: Layout) -> None:
    """Set this process's number of threads, and the precision of the run's products.

    With several processes, this one is the zygote, which keeps one thread: forks lose all others.
    """
    set_tf32(layout.tf32)
    if layout.processes_per_model == 1:
        prepare_process(layout.threads_each)
    else:
        set_threads(1)


def first_gpu(layout: Layout) -> int:
    """Index of the first sampler's GPU. The GPUs before it belong to this machine's learners, unless they share them."""
    if layout.shares_gpus:
        return 0
    launch = read_torchrun_rank()
    return layout.learners if launch is None else launch.local_count


def with_layout_defaults(layout: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded layout, with defaults for the fields that earlier versions did not record."""
    defaults = {"processes": 1, "learners": 1, "samplers": 0, "strategy": "ddp"}
    return {**defaults, "tf32": False, "frees_cache": False, "shares_gpus": False, **layout}


def choose_layout(config: RunConfig, longest_prompt: int) -> Layout:
    """Choose the layout for this machine, or for that of `run.server`, keeping everything that the config sets.

    Raises ConfigError if the machine cannot have the configured processes, UsageError if the server does not respond or refuses.
    """
    if config.run.server is not None:
        return _server_layout(config.run.server, "training", config, longest_prompt)
    if config.model.backend == "tinker":
        return _tinker_layout(config, key_length(config, longest_prompt))
    layout = _tunix_layout(config) if config.model.backend == "tunix" else _local_layout(config)
    layout = replace(layout, key_length=key_length(config, longest_prompt))
    sampler, seeded = config.sampler, config.sampler.seeded
    if seeded is None:  # on a GPU vLLM draws seeded tokens one completion after the other
        seeded = sampler.engine != "sglang" and (
            sampler.vllm_python is None or layout.device == "cpu"
        )
    _refuse_float32_adapters(config, layout)
    _refuse_transfer_without_gpu(config, layout)
    slots = sampler.max_num_seqs or _slot_count(config, layout)
    return replace(layout, slots=slots, seeded=seeded)


def _refuse_float32_adapters(config: RunConfig, layout: Layout) -> None:
    """Raise ConfigError if a vLLM of the run's own would compute adapters in float32 on a GPU: it would end a minute after its start."""
    serves_adapters = config.sampler.vllm_python is not None and config.lora is not None
    if serves_adapters and layout.device != "cpu" and layout.dtype == "float32":
        chosen = ", which is float32 on this GPU" if config.model.dtype == "auto" else ""
        raise ConfigError(
            f"model.dtype is {config.model.dtype}{chosen}, but on a GPU the vLLM of sampler.vllm_python computes adapters in bfloat16 "
            "or float16 alone. Set model.dtype: bfloat16, train all weights (lora: null), or leave sampler.engine out."
        )


def _refuse_transfer_without_gpu(config: RunConfig, layout: Layout) -> None:
    """Raise ConfigError if servers were to receive weights from a GPU that the learner does not have."""
    transfer = config.sampler.weight_transfer
    if transfer in ("ipc", "nccl") and layout.device == "cpu":
        raise ConfigError(
            f"sampler.weight_transfer is {transfer}, which sends weights from the learner's GPU, but the run learns on the CPU. Set it to "
            "files, or leave it out."
        )


def _slot_count(config: RunConfig, layout: Layout) -> int:
    """Enough slots for the rollouts of a step, limited by memory and by the number beyond which more slots do not pay."""
    rollouts = config.training.prompts_per_step * config.training.num_generations
    rows = -(-rollouts // layout.sampling_processes)
    if layout.device == "cpu" or config.model.backend == "tunix":
        return max(MIN_SLOTS, min(MAX_SLOTS, rows))
    slot_bytes = prefork.cache_bytes(config.model, layout.dtype, layout.key_length)
    # Memory that other programs hold on the GPU is not available, so it is not part of the total.
    fitting = int(SHARE_OF_CACHE * (prefork.free_memory(layout.device) or 0)) // slot_bytes
    max_slots = max(MIN_SLOTS, min(MAX_GPU_SLOTS, fitting) // SLOT_BLOCK * SLOT_BLOCK)
    return min(max_slots, -(-rows // SLOT_BLOCK) * SLOT_BLOCK)


def supervised_layout(config: SftConfig) -> Layout:
    """Like `choose_layout`, for runs that sample nothing."""
    if config.run.server is not None:
        return _server_layout(config.run.server, "supervised", config, None)
    if config.model.backend == "tinker":
        return _tinker_layout(config, 0)
    return _local_layout(config)


def _server_layout(
    url: str, kind: Literal["training", "supervised"], config: AnyConfig, longest_prompt: int | None
) -> Layout:
    from groupwise.engine.backends.remote.parts import planned_layout

    return layout_from_response(
        planned_layout(url, kind, config.model_dump(mode="json"), longest_prompt)
    )


def layout_from_response(facts: Mapping[str, Any]) -> Layout:
    """The layout in a server's response. Raises UsageError if the server's version has other fields."""
    try:
        return Layout(**facts)
    except TypeError:
        raise UsageError(
            "run.server: the layout that the server sent has other fields than this version knows. Install the same version of groupwise "
            "in both places."
        ) from None


def oversubscription_warning(layout: Layout, *, elsewhere: bool = False) -> str | None:
    """A warning if more threads compute on this machine than it has cores; None otherwise."""
    cores = _total_cores()
    if elsewhere or layout.all_threads <= cores:
        return None
    return (
        f"{layout.all_threads} threads of {layout.processes} process{'es' * (layout.processes > 1)} compute on {cores} "
        f"core{'s' * (cores > 1)}: those that share a core wait for each other, which is slower than fewer. Lower run.threads and "
        "run.processes, distributed.learners or distributed.samplers, or leave them out"
    )


def _total_cores() -> int:
    """Number of cores of all machines, which are assumed to be alike."""
    launch = read_torchrun_rank()
    return available_cores() * (launch.machines if launch is not None else 1)


def _tunix_layout(config: RunConfig) -> Layout:
    """The layout of a worker in Tunix's environment, on all devices that JAX sees or as many as the mesh has."""
    from groupwise.engine.backends.tunix.environment import (
        query_worker,  # with the messages of its worker
    )

    devices = query_worker()
    platform = "cuda" if devices.platform == "gpu" else devices.platform
    bfloat16 = config.model.dtype == "bfloat16" or (
        config.model.dtype == "auto" and platform != "cpu"
    )
    return Layout(
        device=platform,
        dtype="bfloat16" if bfloat16 else "float32",
        threads=config.run.threads or available_cores(),
        slots=0,
        key_length=0,
        max_tokens_per_microbatch=config.training.max_tokens_per_microbatch or MICROBATCH,
        processor=devices.device,
        torch=f"jax {devices.jax}, tunix {devices.tunix}",
    )


def _tinker_layout(config: AnyConfig, key_length: int) -> Layout:
    """The layout of a run whose work a Tinker service does: this machine only sums up numbers per token, on the CPU."""
    from groupwise.engine.backends.tinker.service import describe

    return Layout(
        device="cpu",
        dtype="float32",
        threads=config.run.threads or 1,
        slots=0,
        key_length=key_length,
        max_tokens_per_microbatch=config.training.max_tokens_per_microbatch or MICROBATCH,
        processor=describe(config.model),
        torch=prefork.torch_version(),
    )


def _local_layout(config: AnyConfig) -> Layout:
    device = prefork.choose_device()
    learners, samplers, launch = (
        config.distributed.learners,
        samplers_of(config),
        read_torchrun_rank(),
    )
    check_world_size(launch, learners)
    learners_here = launch.local_count if launch is not None else learners
    shares_gpus = device != "cpu" and _share_gpus(config, learners_here)
    separate = learners > 1 or samplers > 0
    processes = learners + samplers if separate else _process_count(config, device)
    if config.model.backend == "unsloth":
        version = f"{prefork.torch_version()}, unsloth {library.installed_version()}"
    else:
        version = prefork.torch_version()
    dtype = prefork.choose_dtype(config.model, config.lora is None, device)
    return Layout(
        device=device,
        dtype=dtype,
        tf32=prefork.choose_tf32(config.model, device),
        threads=config.run.threads or max(_total_cores(), processes),
        slots=0,
        key_length=0,
        max_tokens_per_microbatch=config.training.max_tokens_per_microbatch
        or _microbatch_tokens(config, device, dtype, learners_here, shares_gpus=shares_gpus),
        processor=prefork.describe_processor(device),
        torch=version,
        processes=processes,
        learners=learners,
        samplers=samplers,
        shares_gpus=shares_gpus,
        strategy=config.distributed.strategy,
    )


def _share_gpus(config: AnyConfig, learners: int) -> bool:
    """True if the samplers of a run with so many learners on this machine compute on their GPUs.

    Raises ConfigError if there are too few GPUs for that too, or if samplers and learners would take turns on them.
    """
    samplers = samplers_of(config)
    needed = learners + samplers
    if needed == 1 or needed <= (available := prefork.gpu_count()):
        return False
    lag = config.training.max_off_policy_steps if isinstance(config, RunConfig) else 0
    suits = available == learners and samplers <= learners
    if suits and lag > 0:
        return True
    samplers_note = f" and distributed.samplers is {samplers}" if samplers else ""
    hint = "Ask for fewer"
    if suits:
        hint = (
            "With training.max_off_policy_steps: 1 samplers share the learners' GPUs, and the next step is sampled while this one is "
            "learnt from; without it they would take turns, and need the weights twice. Set it, ask for fewer"
        )
    raise ConfigError(
        f"distributed.learners is {config.distributed.learners}{samplers_note}, which needs {needed} GPUs on this machine, one for each; "
        f"there {'are' if available != 1 else 'is'} {available}. {hint}, start the run by torchrun on several "
        "machines, or set CUDA_VISIBLE_DEVICES= to compute on the CPU."
    )


def _microbatch_tokens(
    config: AnyConfig, device: str, dtype: Dtype, learners: int, *, shares_gpus: bool
) -> int:
    """Tokens that each of this machine's `learners` computes at once, if the config does not say: on a GPU by its free memory."""
    if device == "cpu" or config.model.backend != "transformers":
        return MICROBATCH
    full, held_by_teacher, copies = config.lora is None, 0.0, False
    if isinstance(config, RunConfig):
        starts_teacher = config.teacher is not None and config.teacher.weights == "start"
        copies = full and (config.algorithm.knobs["beta"] > 0 or starts_teacher)
        held_by_teacher = teacher_bytes(config, device, 1)
    process = LearningProcess(
        dtype=dtype,
        device=device,
        needs_reference=copies,
        gradient_checkpointing=config.training.gradient_checkpointing,
        parts=config.distributed.learners if config.distributed.strategy == "fsdp2" else 1,
        samples=isinstance(config, RunConfig) and not samplers_of(config),
    )
    free = prefork.free_memory(device) or 0
    memory = _learners_share(config, learners, shares_gpus=shares_gpus) * free - held_by_teacher
    if shares_gpus:
        memory -= prefork.sampler_weights_bytes(config.model, config.lora, dtype, device)
    return prefork.fitting_microbatch(config.model, config.lora, process, int(memory))


def teacher_bytes(config: RunConfig, device: str, sharing: int) -> float:
    """Bytes of a teacher's weights in memory; `sharing`: the processes that share a model, each with its own moving average."""
    teacher = config.teacher
    if teacher is None or teacher.type == "endpoint":
        return 0.0
    if teacher.type == "self":
        trained = prefork.trained_parameters(config.model, config.lora)
        return float(FLOAT * trained * sharing) if teacher.weights == "ema" else 0.0
    model = teacher.model_config_of(config.model)
    dtype = prefork.choose_dtype(model, False, device)
    return float(bytes_of(dtype) * prefork.all_parameters(model))


def _learners_share(config: AnyConfig, learners: int, *, shares_gpus: bool) -> float:
    """The fraction of a GPU's free memory that its learner may take: `USABLE`, less what the sampler takes on that GPU."""
    if shares_gpus:
        return USABLE - SHARE_OF_CACHE
    if not isinstance(config, RunConfig) or samplers_of(config) or config.sampler.url:
        return USABLE
    if config.sampler.vllm_python is None:
        return USABLE - SHARE_OF_CACHE
    shared = prefork.gpu_count() < learners + config.sampler.tensor_parallel_size
    return 0.4 if shared else USABLE


def refuse_on_server(config: AnyConfig) -> None:
    """Raise UsageError for several learners, samplers or another backend, which a shared training server does not offer.

    With the backend tinker a client would have the server send one of its environment variables to any address.
    """
    if config.model.backend != "transformers":
        raise UsageError(
            f"model.backend is {config.model.backend}, but a training server computes with transformers and torch. Leave it out, or run "
            "groupwise rl itself."
        )
    for key, value, default in (
        ("distributed.learners", config.distributed.learners, 1),
        ("distributed.samplers", samplers_of(config), 0),
    ):
        if value > default:
            raise UsageError(
                f"{key} is {value}, but a training server has one process learn and sample, or run.processes that share a model. "
                f"Leave {key} out, or run groupwise rl itself."
            )


def samplers_of(config: AnyConfig) -> int:
    """Number of processes that only sample; 0 for a supervised run."""
    return config.distributed.samplers if isinstance(config, RunConfig) else 0


def _process_count(config: AnyConfig, device: str) -> int:
    """The configured number of processes, or `most_processes`; 1 for a small model, and if processes cannot share a model here."""
    configured = config.run.processes
    can_share = device == "cpu" and sys.platform.startswith("linux")
    if configured is not None and configured > 1 and not can_share:
        raise ConfigError(
            f"run.processes is {configured}, but several processes can share a model only on the CPUs of a Linux machine; this run "
            f"computes on {device} ({sys.platform}). Leave the key out."
        )
    max_processes = most_processes(config)
    if configured is None and (not can_share or max_processes == 1):
        return 1
    if configured is None and prefork.all_parameters(config.model) < SMALL_MODEL:
        return 1
    return max_processes


def most_processes(config: AnyConfig) -> int:
    """The configured number of processes, or the largest useful one that the config shows: one per thread, each with enough work.

    Unsloth has one process. Full fine-tuning has one, because each process would need a copy of all weights.
    """
    if config.run.processes is not None:
        return config.run.processes
    if config.model.backend == "unsloth":
        return 1
    if isinstance(config, RunConfig) and config.sampler.engine != "torch":
        return 1
    if config.lora is None or not sys.platform.startswith("linux"):
        return 1
    if not isinstance(config, RunConfig):
        useful_processes = config.training.examples_per_step // MIN_EXAMPLES
    else:
        useful_processes = (
            config.training.prompts_per_step * config.training.num_generations // MIN_SLOTS
        )
    return max(1, min(config.run.threads or available_cores(), useful_processes, MAX_PROCESSES))


def key_length(config: RunConfig, longest_prompt: int) -> int:
    """Largest number of tokens that the sampler can see, including the prompt, rounded up to `KEY_BLOCK`."""
    tokens = longest_prompt + longest_completion(config)
    return -(-tokens // KEY_BLOCK) * KEY_BLOCK
