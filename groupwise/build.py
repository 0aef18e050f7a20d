"""From a config to working parts: the only place that picks implementations.

`training_parts` builds what the loop drives (sampler, learner, scorer), `serving_sampler` what an evaluation asks. Sampler
and learner share one base model in memory when an adapter is trained; each has its own copy of the adapter, and the sampler's
changes only through published files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.algorithms.registry import make
from groupwise.config import RunConfig, load_config, view
from groupwise.errors import ModelError
from groupwise.models.config import Dtype
from groupwise.rewards.inprocess import InProcessScorer, RubricScorer
from groupwise.rewards.rubric import Rubric
from groupwise.rewards.scoring import Scorer
from groupwise.rewards.workers import RewardWorkers
from groupwise.tasks.contract import Task, load_task
from groupwise.types import Learner, Sampler

KEY_BLOCK = 64
"""Key lengths are rounded up to this many tokens, so that near configs decode in the same shape."""
MAX_SLOTS = 64
MIN_SLOTS = 8
MEMORY_FREE = 2 << 30
"""Bytes that must be free in memory before weights are published there."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the work is laid out on this machine: decided once at the start of a run and recorded."""

    device: str
    dtype: Dtype
    threads: int
    slots: int
    key_length: int
    max_tokens_per_microbatch: int


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop drives."""

    sampler: Sampler
    learner: Learner
    stop_token_ids: tuple[int, ...]


def choose_layout(config: RunConfig, longest_prompt: int) -> Layout:
    """What suits this machine, where the config does not say."""
    from groupwise.models.load import choose_dtype
    from groupwise.models.machine import choose_device

    device = choose_device()
    needed = longest_prompt + longest_completion(config)
    rows = config.training.prompts_per_step * config.training.num_generations
    return Layout(
        device=device,
        dtype=choose_dtype(config.model, full=config.lora is None, device=device),
        threads=config.run.threads or _cores(),
        slots=config.sampler.slots or max(MIN_SLOTS, min(MAX_SLOTS, rows)),
        key_length=-(-needed // KEY_BLOCK) * KEY_BLOCK,
        max_tokens_per_microbatch=config.training.max_tokens_per_microbatch,
    )


def _cores() -> int:
    """Those that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def longest_completion(config: RunConfig) -> int:
    """The longest completion that training or evaluation may ask for, in tokens."""
    return max(config.sampler.max_completion_length, config.eval.max_completion_length or 0)


def training_parts(config: RunConfig, layout: Layout, run: str, publish_folder: Path) -> Parts:
    """Load the model once and build sampler and learner over it."""
    from groupwise.learner.torch_learner import TorchLearner
    from groupwise.models.load import load_model, stop_token_ids
    from groupwise.models.machine import prepare_process
    from groupwise.models.tokenizer import load_tokenizer
    from groupwise.sampler.torch_sampler import DecodeLayout, TorchSampler

    prepare_process(layout.threads)
    tokenizer = load_tokenizer(config.model)
    model = load_model(config.model, layout.dtype, layout.device)
    stops = stop_token_ids(model, tokenizer)
    trained, served = (
        _adapter_weights(config, model) if config.lora else _full_weights(config, layout, model)
    )
    learner = TorchLearner(
        trained,
        run=run,
        publish_folder=publish_folder,
        max_tokens_per_microbatch=layout.max_tokens_per_microbatch,
        seed=config.training.seed,
        dropout=config.lora is not None and config.lora.dropout > 0,
        gradient_checkpointing=config.training.gradient_checkpointing,
    )
    sampler = TorchSampler(served, tokenizer, DecodeLayout(layout.slots, layout.key_length))
    return Parts(sampler, learner, _with_configured(stops, config))


def serving_sampler(
    config: RunConfig, layout: Layout, weights: Path | None
) -> tuple[Sampler, tuple[int, ...]]:
    """A sampler that serves the base model, or the adapter or full weights in `weights`, and its stop tokens."""
    from groupwise.models.load import load_model, stop_token_ids
    from groupwise.models.lora import CONFIG, AdaptedModel, read_lora_config
    from groupwise.models.machine import prepare_process
    from groupwise.models.tokenizer import load_tokenizer
    from groupwise.sampler.torch_sampler import DecodeLayout, TorchSampler
    from groupwise.sampler.weights import ServedAdapter, ServedModel

    prepare_process(layout.threads)
    tokenizer = load_tokenizer(config.model)
    model = load_model(config.model, layout.dtype, layout.device)
    if weights is not None and (weights / CONFIG).is_file():
        served: Any = ServedAdapter(AdaptedModel(model, read_lora_config(weights)))
    else:
        served = ServedModel(model)
    if weights is not None:
        served.read(weights)
    sampler = TorchSampler(served, tokenizer, DecodeLayout(layout.slots, layout.key_length))
    return sampler, _with_configured(stop_token_ids(model, tokenizer), config)


def task_rubric(config: RunConfig, task: Task, tokenizer: Any) -> Rubric | None:
    """The task's rewards, or None where it has none; made once in a process, because it may load a reward model."""
    if not task.has("get_reward_funcs"):
        return None
    return task.rubric(view(config), tokenizer, config.rewards.reward_weights)


def scores_in_workers(config: RunConfig, task: Task, rubric: Rubric | None) -> bool:
    """Whether rewards run in processes of their own: not where they cannot be imported elsewhere or keep state."""
    stateful = rubric is not None and rubric.stateful
    return task.spec is not None and not config.rewards.in_process and not stateful


def build_scorer(config: RunConfig, task: Task, tokenizer: Any, rubric: Rubric | None) -> Scorer:
    """Reward workers, or one thread here that calls `rubric`; see `task_rubric` and `scores_in_workers`.

    Without a rubric only the task's metrics can be asked for.
    """
    if not scores_in_workers(config, task, rubric):
        return InProcessScorer(
            rubric, _metrics_of(config, task, tokenizer), time_limit=config.rewards.time_limit
        )
    return RewardWorkers(
        "groupwise.build:scorer_for_worker",
        {"config": config.model_dump(mode="json"), "task": task.spec},
        workers=config.rewards.workers,
        time_limit=config.rewards.time_limit,
        start_limit=config.rewards.start_limit,
    )


def scorer_for_worker(config: Mapping[str, Any], task: str) -> RubricScorer:
    """The factory that reward workers call: the task's rewards and metrics, made afresh in the worker."""
    loaded = load_config(config).config
    found = load_task(task)
    tokenizer = LazyTokenizer(loaded)
    return RubricScorer(
        task_rubric(loaded, found, tokenizer), _metrics_of(loaded, found, tokenizer)
    )


class LazyTokenizer:
    """The model's tokenizer, loaded when a task first uses it: most rewards never ask.

    Until then a worker has neither transformers nor torch. The first use imports both (seconds, some 250 MB), because
    transformers decides once for a process whether there is torch: hidden from it to save that, torch would be
    missing for a reward that loads a model later.
    """

    def __init__(self, config: RunConfig) -> None:
        vars(self).update(_config=config, _tokenizer=None)

    @property
    def __class__(self) -> Any:
        """The tokenizer's own, for `isinstance`."""
        return type(self._loaded())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loaded(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loaded(), name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._loaded()(*arguments, **keywords)

    def __len__(self) -> int:
        return len(self._loaded())

    def _loaded(self) -> Any:
        own = vars(self)
        if own["_tokenizer"] is None:
            from groupwise.models.tokenizer import load_tokenizer

            own["_tokenizer"] = load_tokenizer(own["_config"].model)
        return own["_tokenizer"]


def publication_folder(run_folder: Path) -> Path:
    """Where a run publishes its weights: in memory where the system has room there, named by the run's folder.

    Nobody else can write there: what the sampler loads must be what the learner published.
    """
    name = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:16]
    mine = _roomy_place() / f"groupwise-{os.getuid()}"
    mine.mkdir(mode=0o700, exist_ok=True)
    found = mine.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or mine.is_symlink():
        mine = Path(tempfile.mkdtemp(prefix="groupwise-"))
    return mine / name


def _roomy_place() -> Path:
    """Memory where it is free: containers often have next to none at /dev/shm."""
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free >= MEMORY_FREE:
        return memory
    return Path(tempfile.gettempdir())


def remove_publications(folder: Path) -> None:
    """Forget what a run published, its own or what a killed process of the same run left."""
    shutil.rmtree(folder, ignore_errors=True)


def build_algorithm(config: RunConfig) -> Any:
    """The configured algorithm."""
    return make(config.algorithm.type, config.algorithm.knobs)


def _metrics_of(config: RunConfig, task: Task, tokenizer: Any) -> Any:
    def compute(prompts: Any, completions: Any, rows: Any) -> dict[str, Any]:
        return task.compute_metrics(prompts, completions, rows, view(config), tokenizer)

    return compute


def _adapter_weights(config: RunConfig, model: Any) -> tuple[Any, Any]:
    from groupwise.learner.weights import TrainedAdapter
    from groupwise.models.lora import AdaptedModel, new_lora_config, read_adapter, read_lora_config
    from groupwise.sampler.weights import ServedAdapter

    assert config.lora is not None
    if config.model.adapter is None:
        adapted, start = AdaptedModel(model, new_lora_config(config.lora)), None
    else:
        folder = Path(config.model.adapter).expanduser()
        stored = read_lora_config(folder)
        _refuse_other_shape(config, stored)
        adapted, start = AdaptedModel(model, stored), read_adapter(folder)
    return TrainedAdapter(adapted, config.training.seed, start), ServedAdapter(adapted)


def _full_weights(config: RunConfig, layout: Layout, model: Any) -> tuple[Any, Any]:
    from groupwise.learner.weights import TrainedModel
    from groupwise.models.load import load_model
    from groupwise.sampler.weights import ServedModel

    if config.model.adapter is not None:
        raise ModelError(
            "model.adapter is set, but lora is null: all weights are trained, and an adapter has no part in that. "
            "Merge the adapter into the model first, or train it with lora: {}."
        )
    beta = getattr(config.algorithm, "beta", 0.0)
    reference = load_model(config.model, layout.dtype, layout.device) if beta > 0 else None
    sampled = load_model(config.model, layout.dtype, layout.device)
    return TrainedModel(model, reference), ServedModel(sampled)


def _refuse_other_shape(config: RunConfig, stored: Any) -> None:
    assert config.lora is not None
    given = config.lora.model_fields_set
    pairs = {"r": stored.r, "alpha": stored.lora_alpha}
    different = [
        f"lora.{key} is {getattr(config.lora, key)}, but the adapter's is {value}"
        for key, value in pairs.items()
        if key in given and getattr(config.lora, key) != value
    ]
    if different:
        raise ModelError(
            f"model.adapter {config.model.adapter}: {'; '.join(different)}. Leave these keys out: the adapter decides."
        )


def _with_configured(stops: tuple[int, ...], config: RunConfig) -> tuple[int, ...]:
    return tuple(sorted({*stops, *config.sampler.stop_token_ids}))
