"""From a config to working parts: the only place that picks implementations.

`training_parts` builds what the loop drives (sampler, learner, scorer), `serving_parts` what an evaluation asks. Sampler
and learner share one base model in memory when an adapter is trained; each has its own copy of the adapter, and the sampler's
changes only through published files. All of them are in this process, or in ranks (`groupwise.ranks`), as the layout says: then
what is built here for one process is built once in the zygote, by the function whose name it is given.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.algorithms.registry import make
from groupwise.config import RunConfig, load_config, view
from groupwise.errors import ConfigError, TaskError
from groupwise.models.config import Dtype, ModelConfig
from groupwise.models.tokens import completion_text
from groupwise.ranks.learner import RankLearner
from groupwise.ranks.sampler import RankSampler
from groupwise.ranks.tree import Ranks
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
from groupwise.sft_config import SftConfig, load_sft_config
from groupwise.tasks.contract import Task, load_task
from groupwise.tasks.tools import Schema
from groupwise.types import Example, Learner, Sampler, SamplingParams

if TYPE_CHECKING:
    from groupwise.learner.slopes import Slope
    from groupwise.ranks.hosted import Hosted

KEY_BLOCK = 64
"""Key lengths are rounded up to this many tokens, so that near configs decode in the same shape."""
MAX_SLOTS = 64
MIN_SLOTS = 8
MIN_EXAMPLES = 2
"""Of a supervised step in each process, where the machine chooses how many there are."""
SMALL_MODEL = 20_000_000
"""Parameters below which one process is chosen: a step takes a fraction of a second, and starting ranks takes several."""
MAX_PROCESSES = 16
"""Chosen at most, because each has activations, gradients and moments of its own. A config may say more."""
RANK_MODULES = (
    "groupwise.learner.torch_learner",
    "groupwise.models.adapters",
    "groupwise.ranks.hosted",
    "groupwise.sampler.torch_sampler",
)
"""What a zygote imports first; they bring torch and transformers."""
LARGE_ADAPTER = 512 << 20
"""Bytes of one publication where nobody says: rank 64 on a model of 7 billion parameters."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the work is laid out on this machine: decided once at the start of a run and recorded."""

    device: str
    dtype: Dtype
    threads: int
    """Of all processes that compute, together."""
    slots: int
    """Of each process."""
    key_length: int
    max_tokens_per_microbatch: int
    """Likewise."""
    processor: str = ""
    """What computes, as people call it, with the instruction set that torch uses there: others round otherwise."""
    torch: str = ""
    """Its version."""
    processes: int = 1
    """Ranks that sample and learn; with 1 there are none, and this process does."""

    @property
    def threads_each(self) -> int:
        """Of each process."""
        return max(1, self.threads // self.processes)

    @property
    def all_slots(self) -> int:
        """Of all processes together."""
        return self.slots * self.processes


def with_processes(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A layout as it was recorded, also before there could be several processes."""
    return {"processes": 1, **recorded}


@dataclass(frozen=True, slots=True, kw_only=True)
class Closable:
    """What may have processes of its own."""

    ranks: Ranks | None = None

    def close(self) -> None:
        """End them, if there are any."""
        if self.ranks is not None:
            self.ranks.close()

    def peak_memory(self, device: str) -> int:
        """Most bytes that were held so far, as `groupwise.models.probes.peak_memory`; with ranks an estimate of all processes."""
        from groupwise.models.probes import peak_memory

        own = peak_memory(device)
        if self.ranks is None:
            return own
        held: list[tuple[int, int]] = self.ranks.call_all_now("held_memory")
        return own + sum(peak - shared for peak, shared in held) + max(s for _, s in held)


@dataclass(frozen=True, slots=True)
class Parts(Closable):
    """What the loop drives."""

    sampler: Sampler
    learner: Learner
    stop_token_ids: tuple[int, ...]
    trained: Any = None
    """The learner's `groupwise.learner.weights.TrainedWeights`; None where ranks have them."""

    async def slopes(self, learning_rate: float) -> list[Slope]:
        """How much of a step reaches the outputs of the adapter's layers; none where all weights are trained."""
        from groupwise.learner.slopes import trained_slopes

        if self.ranks is not None:
            return await self.ranks.call(0, "slopes", learning_rate)
        return trained_slopes(self.trained, learning_rate)


@dataclass(frozen=True, slots=True)
class ServingParts(Closable):
    """What an evaluation asks."""

    sampler: Sampler
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LearningParts(Closable):
    """What a supervised run drives."""

    learner: Learner


def choose_layout(config: RunConfig, longest_prompt: int) -> Layout:
    """What suits this machine, where the config does not say. Raises ConfigError for processes that it cannot have."""
    from groupwise.models.load import choose_dtype
    from groupwise.models.machine import choose_device, describe_processor, torch_version

    device = choose_device()
    rows = config.training.prompts_per_step * config.training.num_generations
    processes = _processes(config, device)
    return Layout(
        device=device,
        dtype=choose_dtype(config.model, full=config.lora is None, device=device),
        threads=config.run.threads or _cores(),
        slots=config.sampler.slots or max(MIN_SLOTS, min(MAX_SLOTS, -(-rows // processes))),
        key_length=key_length(config, longest_prompt),
        max_tokens_per_microbatch=config.training.max_tokens_per_microbatch,
        processor=describe_processor(device),
        torch=torch_version(),
        processes=processes,
    )


def _processes(config: RunConfig | SftConfig, device: str) -> int:
    """How many processes are asked for, or suit."""
    asked = config.run.processes
    possible = device == "cpu" and sys.platform.startswith("linux")
    if asked is not None and asked > 1 and not possible:
        raise ConfigError(
            f"run.processes is {asked}, but several processes can share a model only on the CPUs of a Linux machine; this run "
            f"computes on {device} ({sys.platform}). Leave the key out."
        )
    most = _most_processes(config)
    if asked is None and (not possible or most == 1 or _is_small(config.model)):
        return 1
    return most


def _most_processes(config: RunConfig | SftConfig) -> int:
    """As many as are asked for, or suit as far as the config alone can tell: one for each thread, with enough to do.

    Full fine-tuning has one, because each would have a copy of all weights.
    """
    if config.run.processes is not None:
        return config.run.processes
    if config.lora is None or not sys.platform.startswith("linux"):
        return 1
    if isinstance(config, SftConfig):
        useful = config.training.examples_per_step // MIN_EXAMPLES
    else:
        useful = config.training.prompts_per_step * config.training.num_generations // MIN_SLOTS
    return max(1, min(config.run.threads or _cores(), useful, MAX_PROCESSES))


def _is_small(model: ModelConfig) -> bool:
    from groupwise.models.load import hollow_model
    from groupwise.models.plan import count_parameters

    return count_parameters(hollow_model(model).parameters()) < SMALL_MODEL


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


_begun: list[Ranks] = []
"""Whose zygote imports already what it will need; at most one."""


def expect_ranks(config: RunConfig | SftConfig) -> None:
    """Begin the zygote where the config will probably have ranks, before this process imports the same modules for itself."""
    if _begun or config.model.name == "tiny" or Path("/dev/nvidiactl").exists():
        return
    if _most_processes(config) > 1:
        _begun.append(_begin_ranks())


def _begin_ranks() -> Ranks:
    ranks = Ranks(*RANK_MODULES)
    ranks.begin()
    return ranks


def _without_ranks() -> None:
    """End a zygote that was begun for nothing."""
    while _begun:
        _begun.pop().close()


def training_parts(config: RunConfig, layout: Layout, run: str, publish_folder: Path) -> Parts:
    """Load the model once and build sampler and learner over it."""
    if layout.processes > 1:
        ranks = _started(
            "training_parts_for_ranks", config, layout, run=run, publish_folder=str(publish_folder)
        )
        stops = ranks.call_all_now("stop_token_ids")[0]
        return Parts(RankSampler(ranks), RankLearner(ranks), stops, ranks=ranks)
    _without_ranks()
    made = _training_parts(config, layout, run, publish_folder)
    assert made.sampler is not None
    assert made.learner is not None
    return Parts(made.sampler, made.learner, made.stop_token_ids, made.trained)


def training_parts_for_ranks(
    config: Mapping[str, Any], layout: Mapping[str, Any], run: str, publish_folder: str
) -> Hosted:
    """The factory that the zygote of a training calls."""
    loaded = load_config(config).config
    return _training_parts(loaded, Layout(**layout), run, Path(publish_folder))


def _started(factory: str, config: RunConfig | SftConfig, layout: Layout, **more: Any) -> Ranks:
    """Ranks that host what a function of this module makes, ready."""
    described = {"config": config.model_dump(mode="json"), "layout": asdict(layout), **more}
    ranks = _begun.pop() if _begun else _begin_ranks()
    ranks.make(f"{__name__}:{factory}", described, layout.processes)
    return ranks


def _training_parts(config: RunConfig, layout: Layout, run: str, publish_folder: Path) -> Hosted:
    """Sampler and learner in this process, which may be a zygote: it has one thread as long as there are ranks to come."""
    from groupwise.learner.torch_learner import TorchLearner
    from groupwise.models.adapters import check_adapter
    from groupwise.models.load import load_model, stop_token_ids
    from groupwise.models.tokenizer import load_tokenizer
    from groupwise.ranks.hosted import Hosted
    from groupwise.sampler.torch_sampler import DecodeLayout, TorchSampler

    check_adapter(config.model, config.lora)
    _prepare_process(layout)
    tokenizer = load_tokenizer(config.model)
    model = load_model(config.model, layout.dtype, layout.device)
    stops = stop_token_ids(model, tokenizer)
    trained, served = (
        _adapter_weights(config, model) if config.lora else _full_weights(config, layout, model)
    )
    replicas = _replicas(layout, trained)
    learner = TorchLearner(
        trained,
        run=run,
        publish_folder=publish_folder,
        max_tokens_per_microbatch=layout.max_tokens_per_microbatch,
        seed=config.training.seed,
        gradient_checkpointing=config.training.gradient_checkpointing,
        packing=config.training.packing,
        keep_publications=config.training.lag + 2,
        replicas=replicas,
    )
    sampler = TorchSampler(served, tokenizer, DecodeLayout(layout.slots, layout.key_length))
    return Hosted(
        layout.threads_each,
        sampler,
        learner,
        _with_configured(stops, config),
        trained,
        replicas,
    )


def _prepare_process(layout: Layout) -> None:
    """With several processes this one is to be forked, and has no threads that would be lost."""
    from groupwise.models.machine import prepare_process

    prepare_process(layout.threads if layout.processes == 1 else 1)


def _replicas(layout: Layout, trained: Any) -> Any:
    """What the learners of all processes have in common; None where there is one process."""
    from groupwise.learner.replicas import Replicas

    if layout.processes == 1:
        return None
    return Replicas(layout.processes, [*trained.parameters().values()])


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
        processes=_processes(config, device),
    )


def supervised_parts(config: SftConfig, layout: Layout, run: str, folder: Path) -> LearningParts:
    """Load the model and build the learner of a run that samples nothing; it would publish into `folder`."""
    if layout.processes > 1:
        ranks = _started("supervised_parts_for_ranks", config, layout, run=run, folder=str(folder))
        return LearningParts(RankLearner(ranks), ranks=ranks)
    _without_ranks()
    made = _supervised_parts(config, layout, run, folder)
    assert made.learner is not None
    return LearningParts(made.learner)


def supervised_parts_for_ranks(
    config: Mapping[str, Any], layout: Mapping[str, Any], run: str, folder: str
) -> Hosted:
    """The factory that the zygote of a supervised run calls."""
    return _supervised_parts(load_sft_config(config).config, Layout(**layout), run, Path(folder))


def _supervised_parts(config: SftConfig, layout: Layout, run: str, folder: Path) -> Hosted:
    from groupwise.learner.torch_learner import TorchLearner
    from groupwise.learner.weights import TrainedModel
    from groupwise.models.adapters import check_adapter
    from groupwise.models.load import load_model
    from groupwise.ranks.hosted import Hosted

    check_adapter(config.model, config.lora)
    _prepare_process(layout)
    model = load_model(config.model, layout.dtype, layout.device)
    trained = _trained_adapter(config, model) if config.lora else TrainedModel(model)
    replicas = _replicas(layout, trained)
    learner = TorchLearner(
        trained,
        run=run,
        publish_folder=folder,
        max_tokens_per_microbatch=layout.max_tokens_per_microbatch,
        seed=config.training.seed,
        gradient_checkpointing=config.training.gradient_checkpointing,
        packing=config.training.packing,
        replicas=replicas,
    )
    return Hosted(layout.threads_each, learner=learner, replicas=replicas)


def serving_parts(config: RunConfig, layout: Layout, weights: Path | None) -> ServingParts:
    """A sampler of the adapter or full weights in `weights`; without, `serving_label` says what it serves."""
    if layout.processes > 1:
        given = None if weights is None else str(weights)
        ranks = _started("serving_parts_for_ranks", config, layout, weights=given)
        stops = ranks.call_all_now("stop_token_ids")[0]
        return ServingParts(RankSampler(ranks), stops, ranks=ranks)
    _without_ranks()
    made = _serving_parts(config, layout, weights)
    assert made.sampler is not None
    return ServingParts(made.sampler, made.stop_token_ids)


def serving_parts_for_ranks(
    config: Mapping[str, Any], layout: Mapping[str, Any], weights: str | None
) -> Hosted:
    """The factory that the zygote of an evaluation calls."""
    folder = None if weights is None else Path(weights)
    return _serving_parts(load_config(config).config, Layout(**layout), folder)


def _serving_parts(config: RunConfig, layout: Layout, weights: Path | None) -> Hosted:
    from groupwise.models.adapters import adapter_folder
    from groupwise.models.load import load_model, stop_token_ids
    from groupwise.models.tokenizer import load_tokenizer
    from groupwise.ranks.hosted import Hosted
    from groupwise.sampler.torch_sampler import DecodeLayout, TorchSampler

    weights = weights or adapter_folder(config.model)
    _prepare_process(layout)
    tokenizer = load_tokenizer(config.model)
    model = load_model(config.model, layout.dtype, layout.device)
    served = _served_weights(config, model, weights)
    sampler = TorchSampler(served, tokenizer, DecodeLayout(layout.slots, layout.key_length))
    stops = _with_configured(stop_token_ids(model, tokenizer), config)
    return Hosted(layout.threads_each, sampler, stop_token_ids=stops)


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
