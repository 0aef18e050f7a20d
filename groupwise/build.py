"""From a config to working parts: the only place that picks implementations.

`training_parts` builds what the loop drives (sampler, learner, scorer), `serving_sampler` what an evaluation asks. Sampler
and learner share one base model in memory when an adapter is trained; each has its own copy of the adapter, and the sampler's
changes only through published files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from groupwise.algorithms.registry import make
from groupwise.config import RunConfig, load_config, view
from groupwise.errors import ConfigError, TaskError
from groupwise.models.config import Dtype
from groupwise.models.tokens import completion_text
from groupwise.rewards.inprocess import InProcessScorer, RubricScorer
from groupwise.rewards.rubric import Rubric
from groupwise.rewards.scoring import Scorer, unpicklable
from groupwise.rewards.workers import RewardWorkers
from groupwise.rollouts.asking import Ask, RolloutKind
from groupwise.rollouts.dialogue import first_ids
from groupwise.rollouts.environment import EnvironmentRollouts, Limits
from groupwise.rollouts.hosts import EnvironmentHost, LocalHost, WorkerHost
from groupwise.rollouts.seeds import member_seed
from groupwise.rollouts.sessions import Sessions
from groupwise.rollouts.single import Single
from groupwise.rollouts.two_stage import TwoStage
from groupwise.runs import publications
from groupwise.sft_config import SftConfig
from groupwise.tasks.contract import Task, load_task
from groupwise.tasks.tools import Schema
from groupwise.types import Example, Learner, Sampler, SamplingParams

KEY_BLOCK = 64
"""Key lengths are rounded up to this many tokens, so that near configs decode in the same shape."""
MAX_SLOTS = 64
MIN_SLOTS = 8
LARGE_ADAPTER = 512 << 20
"""Bytes of one publication where nobody says: rank 64 on a model of 7 billion parameters."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the work is laid out on this machine: decided once at the start of a run and recorded."""

    device: str
    dtype: Dtype
    threads: int
    slots: int
    key_length: int
    max_tokens_per_microbatch: int
    processor: str = ""
    """What computes, as people call it, with the instruction set that torch uses there: others round otherwise."""
    torch: str = ""
    """Its version."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop drives."""

    sampler: Sampler
    learner: Learner
    stop_token_ids: tuple[int, ...]
    trained: Any = None
    """The learner's `groupwise.learner.weights.TrainedWeights`, for whoever examines them."""


def choose_layout(config: RunConfig, longest_prompt: int) -> Layout:
    """What suits this machine, where the config does not say."""
    from groupwise.models.load import choose_dtype
    from groupwise.models.machine import choose_device, describe_processor, torch_version

    device = choose_device()
    rows = config.training.prompts_per_step * config.training.num_generations
    return Layout(
        device=device,
        dtype=choose_dtype(config.model, full=config.lora is None, device=device),
        threads=config.run.threads or _cores(),
        slots=config.sampler.slots or max(MIN_SLOTS, min(MAX_SLOTS, rows)),
        key_length=key_length(config, longest_prompt),
        max_tokens_per_microbatch=config.training.max_tokens_per_microbatch,
        processor=describe_processor(device),
        torch=torch_version(),
    )


def key_length(config: RunConfig, longest_prompt: int) -> int:
    """Most tokens that the sampler can see, prompt included, where prompts have at most so many."""
    needed = longest_prompt + longest_completion(config)
    return -(-needed // KEY_BLOCK) * KEY_BLOCK


def _cores() -> int:
    """Those that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def longest_completion(config: RunConfig) -> int:
    """Most tokens that may follow a prompt in training or evaluation: of a rollout, whatever it consists of."""
    one = max(config.sampler.max_completion_length, config.eval.max_completion_length or 0)
    return config.rollout.longest(one)


def longest_written(config: RunConfig) -> int:
    """Most tokens that the policy may write in one rollout of training: what algorithms take as the longest completion."""
    return config.rollout.longest_written(config.sampler.max_completion_length)


def training_parts(config: RunConfig, layout: Layout, run: str, publish_folder: Path) -> Parts:
    """Load the model once and build sampler and learner over it."""
    from groupwise.learner.torch_learner import TorchLearner
    from groupwise.models.adapters import check_adapter
    from groupwise.models.load import load_model, stop_token_ids
    from groupwise.models.machine import prepare_process
    from groupwise.models.tokenizer import load_tokenizer
    from groupwise.sampler.torch_sampler import DecodeLayout, TorchSampler

    check_adapter(config.model, config.lora)
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
        gradient_checkpointing=config.training.gradient_checkpointing,
        packing=config.training.packing,
        keep_publications=config.training.lag + 2,
    )
    sampler = TorchSampler(served, tokenizer, DecodeLayout(layout.slots, layout.key_length))
    return Parts(sampler, learner, _with_configured(stops, config), trained)


def supervised_layout(config: SftConfig) -> Layout:
    """What suits this machine; nothing is sampled."""
    from groupwise.models.load import choose_dtype
    from groupwise.models.machine import choose_device, describe_processor, torch_version

    device = choose_device()
    return Layout(
        device=device,
        dtype=choose_dtype(config.model, full=config.lora is None, device=device),
        threads=config.run.threads or _cores(),
        slots=0,
        key_length=0,
        max_tokens_per_microbatch=config.training.max_tokens_per_microbatch,
        processor=describe_processor(device),
        torch=torch_version(),
    )


def supervised_learner(config: SftConfig, layout: Layout, run: str, folder: Path) -> Learner:
    """Load the model and build the learner of a run that samples nothing; it would publish into `folder`."""
    from groupwise.learner.torch_learner import TorchLearner
    from groupwise.learner.weights import TrainedModel
    from groupwise.models.adapters import check_adapter
    from groupwise.models.load import load_model
    from groupwise.models.machine import prepare_process

    check_adapter(config.model, config.lora)
    prepare_process(layout.threads)
    model = load_model(config.model, layout.dtype, layout.device)
    return TorchLearner(
        _trained_adapter(config, model) if config.lora else TrainedModel(model),
        run=run,
        publish_folder=folder,
        max_tokens_per_microbatch=layout.max_tokens_per_microbatch,
        seed=config.training.seed,
        gradient_checkpointing=config.training.gradient_checkpointing,
        packing=config.training.packing,
    )


def serving_sampler(
    config: RunConfig, layout: Layout, weights: Path | None
) -> tuple[Sampler, tuple[int, ...]]:
    """A sampler and its stop tokens. It serves the adapter or full weights in `weights`; without, `serving_label` says what."""
    from groupwise.models.adapters import adapter_folder
    from groupwise.models.load import load_model, stop_token_ids
    from groupwise.models.machine import prepare_process
    from groupwise.models.tokenizer import load_tokenizer
    from groupwise.sampler.torch_sampler import DecodeLayout, TorchSampler

    weights = weights or adapter_folder(config.model)
    prepare_process(layout.threads)
    tokenizer = load_tokenizer(config.model)
    model = load_model(config.model, layout.dtype, layout.device)
    served = _served_weights(config, model, weights)
    sampler = TorchSampler(served, tokenizer, DecodeLayout(layout.slots, layout.key_length))
    return sampler, _with_configured(stop_token_ids(model, tokenizer), config)


def serving_label(config: RunConfig) -> str:
    """How results call the policy that a run would start from."""
    return "base" if config.model.adapter is None else "base+adapter"


def task_rubric(config: RunConfig, task: Task, tokenizer: Any) -> Rubric | None:
    """The task's rewards, or None where it has none; made once in a process, because it may load a reward model."""
    if not task.has("get_reward_funcs"):
        return None
    return task.rubric(view(config), tokenizer, config.rewards.reward_weights)


def scores_in_workers(config: RunConfig, task: Task, rubric: Rubric | None) -> bool:
    """Whether rewards run in processes of their own: not where they cannot be imported elsewhere or keep state."""
    stateful = rubric is not None and rubric.stateful
    return task.spec is not None and not config.rewards.in_process and not stateful


def build_scorer(
    config: RunConfig, task: Task, tokenizer: Any, rubric: Rubric | None = None
) -> Scorer:
    """Reward workers, or one thread here that calls `rubric`; see `scores_in_workers`.

    `rubric` is the task's, where the caller has made it already. A task without rewards can be asked for its metrics only.
    """
    rubric = rubric or task_rubric(config, task, tokenizer)
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


def check_rollouts(
    config: RunConfig, task: Task, examples: Sequence[Example]
) -> tuple[Schema, ...]:
    """Raise TaskError where task and `rollout.type` do not go together, or an example lacks what its environment asks for.

    Returns the tools that the prompts of chats describe.
    """
    if config.rollout.type != "environment":
        if task.has("get_environment"):
            raise TaskError(
                f"{task.described} has get_environment, but rollout.type is {config.rollout.type}, so that it would never "
                "be asked. Set rollout.type to environment, or remove the hook."
            )
        return ()
    if not task.has("get_environment"):
        raise TaskError(
            f"{task.described} has no get_environment, but rollout.type is environment.\n"
            "  expected: def get_environment(config)\n"
            "Add the hook, or leave rollout.type out."
        )
    factory = task.check_environment(view(config), examples)
    stuck = unpicklable(examples[0].columns) if examples and _hosts_in_workers(config, task) else []
    if stuck:
        raise TaskError(
            f"{task.described}: the dataset's column {' and '.join(f'`{name}`' for name in stuck)} holds values that "
            "cannot be sent to the environment workers (pickle refuses them). Keep plain values in the dataset and make "
            "the objects in the environment, or set rollout.in_process."
        )
    return tuple(getattr(factory, "schemas", ()))


def build_rollouts(
    config: RunConfig, task: Task, tokenizer: Any, room: int | None = None
) -> RolloutKind:
    """What makes the rollouts. `room` is the sampler's key length, which an environment's own prompts must not exceed."""
    if config.rollout.type == "single":
        return Single(lambda ids: completion_text(tokenizer, ids))
    if config.rollout.type == "two_stage":
        return TwoStage(config.rollout, tokenizer)
    limits = Limits(
        max_turns=config.rollout.max_turns,
        max_tokens=longest_completion(config),
        time_limit=config.rollout.time_limit,
        max_seconds=config.rollout.max_seconds,
        room=room,
    )
    tools = check_rollouts(config, task, ())
    return EnvironmentRollouts(_environment_host(config, task), tokenizer, limits, tools)


async def first_prompts(
    config: RunConfig,
    task: Task,
    tokenizer: Any,
    examples: Sequence[Example],
    room: int | None = None,
) -> list[tuple[int, ...]]:
    """What the policy is asked first for these examples, as tokens: with tools, and as their environments begin.

    `room` is as in `build_rollouts`. Raises TaskError where an environment gives no first prompt.
    """
    tools = check_rollouts(config, task, ())
    asked = [first_ids(tokenizer, example.prompt, tools) for example in examples]
    if config.rollout.type != "environment":
        return asked
    rollouts = build_rollouts(config, task, tokenizer, room)
    assert isinstance(rollouts, EnvironmentRollouts)
    params = SamplingParams(max_tokens=1)
    asks = [
        Ask(draw, example, ids, 1, partial(member_seed, config.training.seed, draw), params)
        for draw, (example, ids) in enumerate(zip(examples, asked, strict=True))
    ]
    try:
        await rollouts.start()
        return [await rollouts.opening(ask) for ask in asks]
    finally:
        await rollouts.close()


def environments_for_worker(config: Mapping[str, Any], task: str) -> Sessions:
    """The factory that environment workers call: the task's environments, made afresh in the worker."""
    return Sessions(load_task(task).environment(view(load_config(config).config)))


def _environment_host(config: RunConfig, task: Task) -> EnvironmentHost:
    if not _hosts_in_workers(config, task):
        return LocalHost(Sessions(task.environment(view(config))))
    return WorkerHost(
        "groupwise.build:environments_for_worker",
        {"config": config.model_dump(mode="json"), "task": task.spec},
        workers=config.rollout.workers,
        start_limit=config.rollout.start_limit,
    )


def _hosts_in_workers(config: RunConfig, task: Task) -> bool:
    return task.spec is not None and not config.rollout.in_process


class LazyTokenizer:
    """The model's tokenizer, loaded when a task first uses it: most rewards never ask.

    Until then a worker has neither transformers nor torch. The first use imports both (seconds, some 250 MB), because
    transformers decides once for a process whether there is torch: hidden from it to save that, torch would be
    missing for a reward that loads a model later.
    """

    def __init__(self, config: RunConfig) -> None:
        vars(self).update(_config=config, _tokenizer=None)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The tokenizer's own, for `isinstance`."""
        return self._loaded().__class__

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


def publication_folder(run_folder: Path, size: int = LARGE_ADAPTER) -> Path:
    """Claim the folder where a run publishes its weights, empty; `size` is that of one publication in bytes."""
    return publications.claim(run_folder, size)


def publication_bytes(config: RunConfig) -> int:
    """Size of a publication: what is trained, in float32; and of the earlier ones that a lag keeps."""
    from groupwise.models.plan import trained_parameters

    return 4 * trained_parameters(config.model, config.lora) * (1 + config.training.lag)


def remove_publications(folder: Path) -> None:
    """Delete what a run published, and give the folder up."""
    publications.release(folder)


def build_algorithm(config: RunConfig) -> Any:
    """The configured algorithm."""
    return make(config.algorithm.type, config.algorithm.knobs)


def _metrics_of(config: RunConfig, task: Task, tokenizer: Any) -> Any:
    def compute(prompts: Any, completions: Any, rows: Any) -> dict[str, Any]:
        return task.compute_metrics(prompts, completions, rows, view(config), tokenizer)

    return compute


def _served_weights(config: RunConfig, model: Any, weights: Path | None) -> Any:
    from groupwise.models.adapters import warn_of_other_base
    from groupwise.models.lora import CONFIG, AdaptedModel, read_lora_config
    from groupwise.sampler.weights import ServedAdapter, ServedModel

    if weights is None:
        return ServedModel(model)
    if (weights / CONFIG).is_file():
        stored = read_lora_config(weights)
        warn_of_other_base(stored, config.model, weights)
        served: Any = ServedAdapter(AdaptedModel(model, stored))
    else:
        served = ServedModel(model)
    served.read(weights)
    return served


def _adapter_weights(config: RunConfig, model: Any) -> tuple[Any, Any]:
    from groupwise.sampler.weights import ServedAdapter

    trained = _trained_adapter(config, model)
    return trained, ServedAdapter(trained.adapted)


def _trained_adapter(config: RunConfig | SftConfig, model: Any) -> Any:
    """A new adapter, or the one that the config starts from."""
    from groupwise.learner.weights import TrainedAdapter
    from groupwise.models.adapters import adapter_folder, starting_config, warn_of_other_base
    from groupwise.models.lora import AdaptedModel, read_adapter, read_lora_config

    assert config.lora is not None
    folder = adapter_folder(config.model)
    adapted = AdaptedModel(model, starting_config(config.model, config.lora))
    if folder is None:
        return TrainedAdapter(adapted, config.training.seed)
    warn_of_other_base(read_lora_config(folder), config.model, folder)
    return TrainedAdapter(adapted, config.training.seed, read_adapter(folder))


def _full_weights(config: RunConfig, layout: Layout, model: Any) -> tuple[Any, Any]:
    from groupwise.learner.weights import TrainedModel
    from groupwise.models.load import load_model
    from groupwise.sampler.weights import ServedModel

    beta = getattr(config.algorithm, "beta", 0.0)
    reference = load_model(config.model, layout.dtype, layout.device) if beta > 0 else None
    sampled = load_model(config.model, layout.dtype, layout.device)
    return TrainedModel(model, reference), ServedModel(sampled)


def check_stop_tokens(config: RunConfig, tokenizer: Any) -> None:
    """Raise ConfigError for `sampler.stop_token_ids` that the tokenizer does not have."""
    unknown = [token for token in config.sampler.stop_token_ids if token >= len(tokenizer)]
    if unknown:
        raise ConfigError(
            f"sampler.stop_token_ids has {', '.join(map(str, unknown))}, but the tokens of {config.model.name} end at "
            f"{len(tokenizer) - 1}."
        )


def _with_configured(stops: tuple[int, ...], config: RunConfig) -> tuple[int, ...]:
    return tuple(sorted({*stops, *config.sampler.stop_token_ids}))
