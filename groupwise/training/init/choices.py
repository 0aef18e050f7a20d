"""The choices of `groupwise init`: each is a config key, a value and a reason, derived from measured facts.

A `Draft` collects them. Keys that the user gave on the command line always have priority: no choice is made for such a key or for a key
that it excludes (`EXCLUDED_BY`). If a given key requires another one, that is chosen first (`choose_required_keys`). Nothing here
measures, or loads anything but configs; facts are passed in as plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from pydantic import BaseModel

from groupwise.core.errors import UsageError
from groupwise.core.settings.overrides import parse_override
from groupwise.core.settings.schema import keys_of
from groupwise.core.settings.tree import KeyPath
from groupwise.engine.learner.config import TrainingConfig
from groupwise.engine.models.config import Dtype
from groupwise.engine.sampler.config import SamplerConfig
from groupwise.tasks.rollouts.config import OWN_KEYS, TURNS
from groupwise.training import rollout_builder
from groupwise.training.checks.doctor_machine import NEARLY_FULL
from groupwise.training.config import DEFAULT_ALGORITHM, LoadedConfig, RunConfig, load_config
from groupwise.training.config import with_task_schema as validated_task
from groupwise.training.sft_config import LoadedSftConfig, SftConfig, load_sft_config

Kind = Literal["rl", "sft"]

TOY = 1_000_000
"""Models with fewer parameters are trained fully: an adapter would save nothing."""
SMALL = 1_000_000_000
"""Up to this number of parameters, an adapter gets the larger learning rate."""
UNKNOWN_COMPLETION, UNKNOWN_TURN = 256, 128
"""Tokens of a completion and of one of several turns, if the task does not show how long they are."""
MIN_COMPLETION = 16
ROUNDING = 16
"""Lengths in tokens are rounded up to a multiple of this."""
BUDGETS: dict[str, tuple[int, ...]] = {
    "cpu": (4096, 2048, 1024, 512),
    "cuda": (32768, 16384, 8192, 4096, 2048, 1024, 512),
}
"""Numbers of tokens per micro-batch to try, largest first. On a CPU, more than 4096 gain no speed."""
SLOTS = (None, 32, 16, 8)
"""Numbers of concurrently decoded completions to try; None: as many as suit the machine. Fewer slots cost more time than recomputing
activations.
"""
MAX_STEP_SECONDS = 120.0
"""Seconds of a step above which it gets fewer completions: users should see within minutes whether training works."""
TOO_SLOW = "more would take minutes on this machine"
PROMPTS_ON_CPU, PROMPTS_ON_GPU, GENERATIONS = 8, 16, 8
"""Prompts of a step, and completions of each prompt, before the time of a step is measured."""
MIN_PROMPTS, MIN_GENERATIONS = 2, 4
"""The numbers below which `fit_time` does not go."""
FEW_ROWS = 1000
"""Number of supervised rows below which they are trained on several times."""
CACHES_PER_COMPLETION = 5
"""Completion limit divided by the length of the penalised stretch before it (`algorithm.soft_punish_cache`)."""
LENGTHS = (
    "model.max_seq_length",
    "sampler.max_completion_length",
    "sampler.min_completion_length",
    "eval.max_completion_length",
    "algorithm.soft_punish_cache",
    *(f"rollout.{key}" for key in ("max_rollout_length", "max_turns")),
    *(f"rollout.{key}" for key in ("max_reasoning_length", "max_answer_length", "type")),
)
"""The keys that decide how much room a prompt has, for the message that there is none."""
EXCLUDED_BY: dict[KeyPath, KeyPath] = {
    ("algorithm", "type"): ("algorithm", "preset"),
    ("training", "max_steps"): ("training", "num_train_epochs"),
    ("training", "num_train_epochs"): ("training", "max_steps"),
}
"""Keys that are not chosen if the user gave the other key a value, because that decides the same thing in another way."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A key of the config with its value and the reason for it."""

    path: KeyPath
    value: Any
    reason: str

    @property
    def key(self) -> str:
        """The dotted name, such as `training.seed`."""
        return ".".join(self.path)


@dataclass(slots=True)
class Draft:
    """A config that is being built."""

    kind: Kind
    model: str
    overrides: tuple[str, ...] = ()
    schema: type[BaseModel] | None = None
    """Schema of the task's own section."""
    chosen: dict[KeyPath, Choice] = field(default_factory=dict[KeyPath, Choice])
    _given: dict[KeyPath, Any] = field(init=False, default_factory=dict[KeyPath, Any])

    def __post_init__(self) -> None:
        for path, value in map(parse_override, self.overrides):
            # Merge as overrides are merged: a section replaces its keys, and a key is set within the
            # section that was given.
            for given_path in [
                given_path for given_path in self._given if given_path[: len(path)] == path
            ]:
                del self._given[given_path]
            section = next(
                (given_path for given_path in self._given if path[: len(given_path)] == given_path),
                path,
            )
            self._given[section] = _with_value(
                self._given.get(section), path[len(section) :], value
            )

    def is_given(self, path: KeyPath) -> bool:
        """True if the user gave this key, a part of it, or a section that contains it."""
        return any(
            path[: len(given_path)] == given_path or given_path[: len(path)] == path
            for given_path in self._given
        )

    def given_value(self, path: KeyPath) -> Any:
        """The value that the user gave for this key, directly or within a section; None if there is none or it is null."""
        result: Any = None
        for given_path, value in self._given.items():
            if path[: len(given_path)] == given_path:
                result = value
                for key in path[len(given_path) :]:
                    result = (
                        cast("dict[str, Any]", result).get(key)
                        if isinstance(result, dict)
                        else None
                    )
        return result

    def is_open(self, path: KeyPath) -> bool:
        """True if this key may still be chosen."""
        excluding_path = EXCLUDED_BY.get(path)
        return not self.is_given(path) and (
            excluding_path is None or self.given_value(excluding_path) is None
        )

    def choose(self, path: KeyPath, value: Any, reason: str) -> None:
        """Choose a value; replaces an earlier choice for the same key."""
        if self.is_open(path):
            self.chosen[path] = Choice(path, value, reason)

    def drop(self, path: KeyPath) -> None:
        """Leave a key at its default."""
        self.chosen.pop(path, None)

    def load(self) -> LoadedConfig:
        """The config so far. Raises ConfigError for mistakes in the user's values and for missing keys of the task."""
        values: dict[str, Any] = {"model": {"name": self.model}}
        for choice in self.chosen.values():
            *sections, leaf = choice.path
            inner = values
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[leaf] = choice.value
        load: Any = load_config if self.kind == "rl" else load_sft_config
        loaded = cast("LoadedConfig", load(values, self.overrides, to_train=True))
        return loaded if self.schema is None else validated_task(loaded, self.schema)

    @property
    def config(self) -> RunConfig:
        """The config so far, as one of `groupwise rl`."""
        return self.load().config

    @property
    def sft_config(self) -> SftConfig:
        """The config so far, as one of `groupwise sft`."""
        return cast("LoadedSftConfig", self.load()).config

    def choices(self) -> Iterator[Choice]:
        """All entries of the file, with sections in the order of the schema: given, chosen, and the task's own."""
        given_choices = {
            path: Choice(path, value, "given on the command line")
            for path, value in self._given.items()
            if path[0] != "task"
        }
        name = Choice(("model", "name"), self.model, "")
        choices_by_path = {name.path: name, **self.chosen, **given_choices}
        schema = RunConfig if self.kind == "rl" else SftConfig
        order = list(schema.model_fields)
        yield from sorted(choices_by_path.values(), key=lambda choice: order.index(choice.path[0]))
        # Then every key of the task's section, with the task's own description as the reason.
        schema_keys = keys_of(self.schema) if self.schema else {}
        values: Mapping[str, Any] = self.load().config.task
        for key, value in values.items():
            description = schema_keys[key].description if key in schema_keys else None
            origin = "given on the command line" if self.is_given(("task", key)) else ""
            yield Choice(("task", key), value, description or origin)


def _with_value(section: Any, keys: KeyPath, value: Any) -> Any:
    """A section in which one value is replaced; without keys, the value itself."""
    if not keys:
        return value
    inner = cast("dict[str, Any]", section) if isinstance(section, dict) else {}
    return {**inner, keys[0]: _with_value(inner.get(keys[0]), keys[1:], value)}


def rounded_up(tokens: float, multiple: int = ROUNDING) -> int:
    """The next multiple of `multiple`."""
    return -(-int(-(-tokens // 1)) // multiple) * multiple


# --- keys required by given ones -----------------------------------------------------------------


def choose_required_keys(draft: Draft) -> None:
    """Choose the keys that given ones require, so that the config is valid before anything is measured. Later choices may replace them."""
    if draft.kind == "sft":
        if draft.is_given(("training", "num_train_epochs")):
            draft.choose(("training", "max_steps"), 100, "a first look")
        return
    if draft.is_given(("training", "max_steps")):
        draft.choose(("training", "num_train_epochs"), 1.0, "one pass, as max_steps is null")
    given = (key for key in OWN_KEYS if draft.given_value(("rollout", key)) is not None)
    if (key := next(given, None)) is not None:
        draft.choose(("rollout", "type"), OWN_KEYS[key][0], f"rollout.{key} belongs to it")
    # The completion must be long enough for the given keys.
    min_length, reason = _min_completion(draft)
    chosen_type = draft.chosen.get(("rollout", "type"))
    two_stage = "two_stage" in (
        draft.given_value(("rollout", "type")),
        chosen_type and chosen_type.value,
    )
    if min_length > SamplerConfig().max_completion_length and not two_stage:
        draft.choose(("sampler", "max_completion_length"), rounded_up(min_length), reason)
    minibatches = _int_or_zero(draft.given_value(("training", "minibatches")))
    if minibatches > TrainingConfig().prompts_per_step:
        path = ("training", "prompts_per_step")
        draft.choose(path, minibatches, "prompts of a step, one for each of training.minibatches")
    if draft.given_value(("training", "schedule")) == "free":
        draft.choose(
            ("training", "max_off_policy_steps"),
            1,
            "the smallest value that the schedule free accepts",
        )
    # pass@k needs at least k samples, and a temperature at which they differ.
    ks: Any = draft.given_value(("eval", "pass_at_k"))
    max_k = max(map(_int_or_zero, cast("list[Any]", ks)), default=0) if isinstance(ks, list) else 0
    if max_k > 1:
        draft.choose(("eval", "samples_per_prompt"), max_k, f"pass@{max_k} needs this many samples")
    samples = _int_or_zero(draft.given_value(("eval", "samples_per_prompt")))
    filters = (draft.given_value(("eval", key)) for key in ("top_k", "top_p", "min_p"))
    if max(max_k, samples) > 1 or any(value is not None for value in filters):
        draft.choose(("eval", "temperature"), 1.0, "at 0, always the most probable token is taken")


def _min_completion(draft: Draft) -> tuple[int, str]:
    """Smallest number of tokens per completion that the given keys require, and which key requires it."""
    min_length = _int_or_zero(draft.given_value(("sampler", "min_completion_length")))
    cache = _int_or_zero(draft.given_value(("algorithm", "soft_punish_cache")))
    if CACHES_PER_COMPLETION * cache > min_length:
        return (
            CACHES_PER_COMPLETION * cache,
            f"{CACHES_PER_COMPLETION} times algorithm.soft_punish_cache, as is usual",
        )
    return min_length, "sampler.min_completion_length asks for it"


def _int_or_zero(value: Any) -> int:
    """The given integer; 0 for anything else, which the config's validation refuses."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


# --- the model -----------------------------------------------------------------------------------


def choose_dtype(draft: Draft, dtype: Dtype, has_bfloat16: bool) -> None:
    """Choose `auto`, which gives this format here and a suitable one on other machines."""
    if dtype == "bfloat16":
        reason = "bfloat16 on this machine, whose processor has it"
    elif has_bfloat16:
        reason = "float32, because all weights are trained; bfloat16 computes faster"
    else:
        reason = "float32 on this machine, whose processor has no bfloat16"
    draft.choose(("model", "dtype"), "auto", reason)


def choose_trainable(draft: Draft, parameters: int) -> None:
    """Choose an adapter or all weights, and the learning rate for it."""
    if parameters < TOY and draft.given_value(("model", "adapter")) is None:
        draft.choose(
            ("lora",),
            None,
            f"all {parameters:,} weights are trained; an adapter would save nothing",
        )
    elif draft.given_value(("model", "adapter")) is None:  # a given adapter has its own rank
        draft.choose(
            ("lora", "r"),
            16,
            f"an adapter on {parameters:,} frozen weights; `lora: null` trains all of them",
        )
    is_full = draft.load().config.lora is None
    if parameters < TOY:
        rate, reason = 1e-2, "a model this small needs a high learning rate"
    elif is_full:
        rate, reason = (
            (1e-6 if draft.kind == "rl" else 1e-5),
            "all weights are trained, which needs a low learning rate",
        )
    elif draft.kind == "sft":
        rate, reason = 1e-4, "usual for an adapter; the first key to vary"
    elif parameters <= SMALL:
        rate, reason = 1e-4, "usual for an adapter of a small model; the first key to vary"
    else:
        rate, reason = 1e-5, "careful, for an adapter of a large model; the first key to vary"
    draft.choose(("training", "learning_rate"), rate, reason)


# --- lengths -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answers:
    """The length of the task's right answers."""

    longest: int
    """Length of the longest answer in tokens."""
    source: str
    """The source: `column answer`, `get_sft_dataset`."""
    whole: bool
    """True for complete completions, False for bare results."""
    count: int


def choose_completion_length(answers: Answers | None, turns: bool) -> tuple[int, str]:
    """Number of tokens per completion, with the reason."""
    if answers is None and turns:
        return UNKNOWN_TURN, "tokens of one turn; the task has no example of a turn's length"
    if answers is None:
        return UNKNOWN_COMPLETION, "nothing in the task says how long answers are; look at a few"
    basis = f"the longest of {answers.count} ({answers.source}) has {answers.longest} tokens"
    if answers.whole:
        return rounded_up(
            1.5 * answers.longest
        ), f"{basis}; one and a half times that, rounded up to a multiple of {ROUNDING}"
    return (
        rounded_up(2 * answers.longest + 48),
        f"{basis}; twice that, and 48 for a sentence, rounded up to a multiple of {ROUNDING}. More if the model is to think first",
    )


def choose_lengths(
    draft: Draft,
    prompts: Sequence[int],
    prompt_description: str,
    longest_completion: tuple[int, str],
    limit: int,
) -> None:
    """Choose lengths of prompt and completion that fit the model together.

    `prompts` are the measured lengths of prompts and `limit` is the model's longest text, in tokens; `prompt_description` says what was
    measured. Raises `UsageError`, in the words of the command line, if there is no room for any prompt.
    """
    longest_prompt = max(prompts)
    completion, reason = longest_completion
    space = rounded_up(longest_prompt)
    room = limit - space
    kind, (min_length, why) = draft.config.rollout.type, _min_completion(draft)
    if completion < min_length:
        completion, reason = rounded_up(min_length), why
    if completion > room >= max(MIN_COMPLETION, min_length):
        completion, reason = room, f"what is left of the model's {limit} tokens after the prompt"
    if kind != "two_stage":
        draft.choose(("sampler", "max_completion_length"), completion, reason)
    config = draft.config
    rollout_length = rollout_builder.longest_completion(config)
    left = f"what is left of the model's {limit} tokens after the prompt"
    if kind in TURNS and rollout_length > room:
        turn = config.sampler.max_completion_length
        turns, reason = (
            (room, f"{left}, for all turns together")
            if room >= turn
            else (limit // 2, f"half of the model's {limit} tokens, for all turns together")
        )
        if turns >= turn:
            draft.choose(("rollout", "max_rollout_length"), turns, reason)
    elif kind == "two_stage" and rollout_length > room:
        reasoning = config.rollout.max_reasoning_length - (rollout_length - room)
        if reasoning >= MIN_COMPLETION:
            reason = f"{left} and the answer"
            draft.choose(("rollout", "max_reasoning_length"), reasoning, reason)
    rollout_length = rollout_builder.longest_completion(draft.config)
    # Not the longest prompt: with model.name=tiny, whose tokens are characters, none would be left.
    max_prompt = limit - rollout_length
    if max_prompt < min(prompts):
        raise UsageError(_no_room(draft, prompts, rollout_length, limit))
    if max_prompt < longest_prompt:
        reason = f"{prompt_description}, but the model's {limit} tokens leave no more; longer ones are left out and counted"
    else:
        reason = f"what is left of the model's {limit} tokens; {prompt_description}; longer ones would be left out and counted"
    draft.choose(("data", "max_prompt_length"), max_prompt, reason)


def _no_room(draft: Draft, prompts: Sequence[int], rollout_length: int, limit: int) -> str:
    """Why no prompt fits the model together with a completion, and what to change in the command."""
    given = [key for key in LENGTHS if draft.is_given(tuple(key.split(".")))]
    shortest, longest = min(prompts), max(prompts)
    range_ = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
    facts = (
        f"No prompt has room: the prompts have {range_} tokens, what follows them takes up to {rollout_length}, "
        f"and the longest text of --model {draft.model} has {limit}."
    )
    if given:
        return f"{facts} Change {' or '.join(given)}, which you gave, or give another model."
    return f"{facts} Give a model with a longer context, or a task with shorter prompts."


# --- the step ------------------------------------------------------------------------------------


def choose_step(draft: Draft, device: str, examples: int) -> None:
    """Choose the batch size and the number of steps, before anything is measured.

    A step has 8 prompts on a CPU and 16 on a GPU, or all if there are fewer, and 8 completions of each. `fit_time` halves these
    numbers later if a step would take too long.
    """
    usual = PROMPTS_ON_CPU if device == "cpu" else PROMPTS_ON_GPU
    prompts = max(min(examples, usual), draft.config.training.minibatches)
    draft.choose(
        ("algorithm", "type"),
        DEFAULT_ALGORITHM,
        "the default; the documentation lists others",
    )
    draft.choose(("training", "prompts_per_step"), prompts, "prompts of a step")
    draft.choose(
        ("training", "num_generations"),
        GENERATIONS,
        "completions of each prompt, which are compared with each other",
    )
    choose_run_length(draft, examples)


def choose_run_length(draft: Draft, examples: int) -> None:
    """Choose the number of steps; the reason says how many steps one pass over the examples takes."""
    epoch = -(-examples // draft.config.training.prompts_per_step)
    steps = f"{epoch:,} step{'s' * (epoch > 1)}"
    draft.choose(
        ("training", "max_steps"),
        100,
        f"a first look; one pass over the {examples:,} examples takes {steps}",
    )


def choose_sft_step(draft: Draft, rows: int) -> None:
    """Choose the batch size and the number of steps of a supervised run on so many rows."""
    epochs, reason = (1, "one pass") if rows >= FEW_ROWS else (3, "three passes, as they are few,")
    draft.choose(("training", "examples_per_step"), min(16, rows), "the batch size")
    reason = f"{reason} over the {rows:,} rows"
    if draft.is_given(("training", "max_steps")):
        draft.choose(("training", "num_train_epochs"), float(epochs), reason)
    else:
        steps = -(-epochs * rows // draft.sft_config.training.examples_per_step)
        draft.choose(("training", "max_steps"), steps, reason)


# --- memory and time -----------------------------------------------------------------------------


def fit_memory(
    draft: Draft,
    planned_memory: Callable[[], float],
    free_mib: float | None,
    budgets: Sequence[int],
    slots: Sequence[int | None] = (None,),
) -> None:
    """Choose the fastest settings whose plan leaves a fifth of the free memory (MiB); the most economical ones if none does.

    `planned_memory` returns the planned memory of the current draft (MiB). If `free_mib` is None (unknown), the first settings are chosen.
    """
    limit = float("inf") if free_mib is None else NEARLY_FULL * free_mib
    for count in slots:
        for checkpointing in (False, True):
            for path in (("sampler", "max_num_seqs"), ("training", "gradient_checkpointing")):
                draft.drop(path)
            if count is not None:
                reason = "completions decoded together; more do not fit into the memory"
                draft.choose(("sampler", "max_num_seqs"), count, reason)
            if checkpointing:
                reason = "slower, but without it a step does not fit into the free memory"
                draft.choose(("training", "gradient_checkpointing"), True, reason)
            _choose_budget(draft, budgets[-1])
            if planned_memory() > limit:
                continue
            for budget in budgets:
                _choose_budget(draft, budget)
                if planned_memory() <= limit:
                    return


def _choose_budget(draft: Draft, budget: int) -> None:
    reason = "tokens that the learner computes at once, chosen for the free memory; the gradient stays the same"
    draft.choose(("training", "max_tokens_per_microbatch"), budget, reason)


def mention_load(draft: Draft, load: float) -> None:
    """Add to the reasons of a smaller step that other programs, with this load, made the measured speeds low."""
    for choice in [each for each in draft.chosen.values() if each.reason.endswith(TOO_SLOW)]:
        reason = f"{choice.reason} while other programs run (load {load:.1f}); measure again when it is idle"
        draft.choose(choice.path, choice.value, reason)


def fit_time(draft: Draft, step_seconds: Callable[[], float]) -> None:
    """Halve the prompts of a step, then the completions of each, until a step takes at most `MAX_STEP_SECONDS`.

    `step_seconds` returns an upper bound for the current draft. Keys that the user gave are not changed.
    """
    min_prompts = max(MIN_PROMPTS, draft.config.training.minibatches)
    for path, minimum, label in (
        (("training", "prompts_per_step"), min_prompts, "prompts of a step"),
        (("training", "num_generations"), MIN_GENERATIONS, "completions of each prompt"),
    ):
        while step_seconds() > MAX_STEP_SECONDS and not draft.is_given(path):
            size = draft.chosen[path].value
            if size // 2 < minimum:
                break
            draft.choose(path, size // 2, f"{label}; {TOO_SLOW}")
