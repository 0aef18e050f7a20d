"""The config of a run: one model of all sections, and how it is loaded.

`load_config` reads a YAML file (or a mapping, or a `RunConfig`), applies overrides and validates the whole. The same file serves
training and evaluation. The knobs of the algorithms are not repeated here: their sections are made from the registered dataclasses, so
a new algorithm needs no new config. The `task` section belongs to the task; `with_task_schema` validates it if the task has a schema.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Protocol,
    TypeVar,
    cast,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    create_model,
    field_validator,
    model_validator,
)

from groupwise.algorithms.custom import is_custom, load_custom
from groupwise.algorithms.distillation import Distillation
from groupwise.algorithms.kl import FIRST_BETA, TARGET
from groupwise.algorithms.knobs import ConflictingKnobs, KnobConflict, disabled_by
from groupwise.algorithms.pass_at_k import PassAtK
from groupwise.algorithms.presets import PRESETS, Preset
from groupwise.algorithms.registry import ALGORITHMS, kind_of
from groupwise.algorithms.sft import Sft
from groupwise.core.settings.comparison import Differences, compare
from groupwise.core.settings.credentials import secrets_in
from groupwise.core.settings.overrides import override
from groupwise.core.settings.schema import (
    Conflict,
    ForeignKey,
    SectionByType,
    Strict,
    refuse,
    setting,
)
from groupwise.core.settings.tree import Tree, read_yaml, tree_of
from groupwise.core.settings.validation import validate
from groupwise.core.settings.view import View
from groupwise.core.settings.wording import key_rows, section_tables
from groupwise.engine.backends.conflicts import (
    tinker_rl_conflicts,
    tunix_rl_conflicts,
    unsloth_conflicts,
)
from groupwise.engine.distributed.config import SampledDistributedConfig, distributed_conflicts
from groupwise.engine.learner.config import LENGTHS, TrainingConfig
from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.teacher_config import TeacherConfig
from groupwise.engine.sampler.config import SamplerConfig
from groupwise.runs.config import RunSection
from groupwise.tasks.data.config import DataConfig
from groupwise.tasks.data.reward_hacking_detectors import SignalsConfig
from groupwise.tasks.rewards.config import DEFAULT_TASK_VARIABLE, RewardsConfig
from groupwise.tasks.rollouts.config import TURNS, RolloutConfig
from groupwise.training.foreign_keys import FOREIGN_VALUES, foreign_to_rl

DEFAULT_ALGORITHM = "dr_grpo"
"""Its centred advantages have no difficulty bias and stay bounded if a group's rewards hardly differ."""


if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(PRESETS)]


_TYPE = "The algorithm; one of your own by its file and class, `my_file.py:Mine`."
_DEFAULTS_FROM = ("type", "preset", "adaptive_kl")
"""Keys of `algorithm` that decide the defaults of its knobs."""


class AlgorithmConfig(Strict):
    """The algorithm and its knobs; each registered algorithm has a subclass with the knobs as keys."""

    type_from: ClassVar[tuple[str, ...]] = ("type", "preset")

    type: str = setting(DEFAULT_ALGORITHM, _TYPE)
    preset: PresetName | None = setting(
        None,
        "Published settings by name: a type and values for its keys. Other keys of this section override them.",
        on_resume="free",
    )

    adaptive_kl: bool = setting(
        False,
        f"true: an adaptive KL penalty, with kl_target {TARGET:g} and a beta that starts at {FIRST_BETA:g}; "
        "values that you set for these keys win.",
        on_resume="free",
    )

    @property
    def knobs(self) -> dict[str, Any]:
        """All knobs by name, in the form that `groupwise.algorithms.registry.make` accepts."""
        return self.model_dump(exclude={"type", "preset", "adaptive_kl"})

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        values, preset = dict(cast("Mapping[str, Any]", data)), _preset_of(data)
        applies = preset and values.get("type", preset.algorithm) == preset.algorithm
        defaults = dict(preset.knobs) if preset and applies else {}
        if values.get("adaptive_kl") is True:
            defaults |= {"kl_target": TARGET, "beta": defaults.get("beta") or FIRST_BETA}
        return defaults | values

    def conflicts(self) -> Iterator[Conflict]:
        """Report a preset of another algorithm, knobs that conflict, and knobs without effect."""
        preset = PRESETS[self.preset] if self.preset else None
        if preset and preset.algorithm != self.type:
            defaults = {knob.name: knob.default for knob in fields(kind_of(self.type))}
            others = [
                f"{knob}: {json.dumps(value)}"
                for knob, value in preset.knobs.items()
                if value != defaults.get(knob, value)
            ]
            yield Conflict(
                f"preset {self.preset} is {preset.algorithm}, but type is {self.type}. Leave type out, or set algorithm.preset=null"
                + (
                    f"; {self.type} has other defaults than {', '.join(others)}." if others else "."
                ),
                ("preset", "type"),
            )
            return
        conflicts: tuple[KnobConflict, ...] = ()
        try:
            kind_of(self.type)(**self.knobs)
        except ConflictingKnobs as error:
            conflicts = error.conflicts
        for conflict in conflicts:
            yield Conflict(conflict.message, (*conflict.knobs, *_DEFAULTS_FROM))
        conflicting = {knob for conflict in conflicts for knob in conflict.knobs}
        preset_knobs: Mapping[str, Any] = preset.knobs if preset else {}
        values = self.knobs
        for knob in fields(kind_of(self.type)):
            needed_knob, value = disabled_by(knob, values), values[knob.name]
            is_default = value in (knob.default, preset_knobs.get(knob.name, knob.default))
            if needed_knob and not is_default and knob.name not in conflicting:
                yield Conflict(
                    f"{knob.name} is {value}, which has no effect while {needed_knob} is "
                    f"{json.dumps(values[needed_knob])}. Set {needed_knob}, or leave {knob.name} out.",
                    (knob.name, needed_knob, *_DEFAULTS_FROM),
                )


class OwnAlgorithmConfig(AlgorithmConfig):
    """An algorithm in a file of one's own; its keys are the fields of that class, and are checked by it."""

    model_config = ConfigDict(extra="allow")

    type: str = setting(
        ...,
        "The algorithm: a file and the class in it, `my_file.py:Mine`.",
        pattern=r"^.+\.py:[A-Za-z_]\w*$",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        values = cast("Mapping[str, Any]", data)
        kind = load_custom(str(values.get("type")), again=True)
        return {knob.name: knob.default for knob in fields(kind)} | dict(values)

    def conflicts(self) -> Iterator[Conflict]:
        """Also report keys that the class does not have, and values that it refuses."""
        known = [knob.name for knob in fields(kind_of(self.type))]
        if unknown := [name for name in self.knobs if name not in known]:
            yield Conflict(
                f"{', '.join(unknown)}: not a knob of {self.type}; there are {', '.join(known)}.",
                (*unknown, *_DEFAULTS_FROM),
            )
            return
        try:
            kind_of(self.type)(**self.knobs)
        except ConflictingKnobs:
            pass
        except (TypeError, ValueError) as error:
            yield Conflict(str(error), (*known, *_DEFAULTS_FROM))
            return
        yield from super().conflicts()


def _preset_of(section: Any) -> Preset | None:
    """The preset that a section names; None if it names none, or an unknown one."""
    if not isinstance(section, Mapping):
        return None
    name = cast("Mapping[str, Any]", section).get("preset")
    return PRESETS.get(name) if isinstance(name, str) else None


@cache
def algorithm_section(name: str) -> type[AlgorithmConfig]:
    """The config section of an algorithm, made from the fields of its dataclass and their metadata."""
    kind, keys = ALGORITHMS[name], dict[str, Any]()
    hints = get_type_hints(kind)
    for knob in fields(kind):
        assert knob.default is not MISSING, f"knob {knob.name} needs a default"
        constraints = {name: limit for name, limit in knob.metadata.items() if name != "needs"}
        key = setting(knob.default, constraints.pop("description"), **constraints)
        keys[knob.name] = (hints[knob.name], key)
    keys["type"] = (Literal[name], setting(name, _TYPE))
    return create_model(f"{kind.__name__}Config", __base__=AlgorithmConfig, **keys)


def _algorithm_type(section: Any) -> str | None:
    """The algorithm of a section; if it names none, that of its preset, or the default."""
    if isinstance(section, Mapping):
        preset = _preset_of(cast("Any", section))
        default = preset.algorithm if preset else DEFAULT_ALGORITHM
        return _tag_of_type(str(cast("Mapping[str, Any]", section).get("type", default)))
    return _tag_of_type(section.type) if isinstance(section, AlgorithmConfig) else None


def _tag_of_type(name: str) -> str:
    return OwnAlgorithmConfig.__name__ if is_custom(name) else name


class AlgorithmSections(SectionByType):
    """The key `algorithm`."""

    tag_of = staticmethod(_algorithm_type)

    @staticmethod
    def tags() -> tuple[str, ...]:
        return (*ALGORITHMS, OwnAlgorithmConfig.__name__)

    @staticmethod
    def section(tag: str) -> type[AlgorithmConfig]:
        return OwnAlgorithmConfig if tag == OwnAlgorithmConfig.__name__ else algorithm_section(tag)


if TYPE_CHECKING:
    AnyAlgorithm = AlgorithmConfig
else:
    AnyAlgorithm = AlgorithmSections


class EvalConfig(Strict):
    """Answering held-out prompts, beside a training and in `groupwise eval`."""

    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("suites", "benchmarks"),
        "suites by name belong to the callback benchmark_on_checkpoint, or to groupwise eval --suite",
    )

    before_and_after: bool = setting(
        True,
        "Answer the same held-out prompts before and after training, if the task has get_eval_dataset.",
        on_resume="free",
    )
    eval_steps: int | None = setting(
        None, "Steps between evaluations during training; null: none.", on_resume="free", ge=1
    )
    max_prompts: int | None = setting(
        128,
        "Number of held-out prompts, taken from the first on; null: all. 128 show a difference of about 0.1.",
        on_resume="free",
        ge=1,
    )
    samples_per_prompt: int = setting(1, "Completions of each prompt.", on_resume="free", ge=1)
    pass_at_k: tuple[int, ...] | None = setting(
        None,
        "The k for which pass@k is estimated; null: 1, 2, 4 and so on up to samples_per_prompt.",
        on_resume="free",
    )
    success_threshold: float = setting(
        0.999,
        "A completion succeeds if its reward is at least this; the default is a full reward of 1.",
        on_resume="free",
    )
    success_part: str | None = setting(
        None,
        "Name of the reward part that success_threshold is about; null: the total.",
        on_resume="free",
    )
    temperature: float = setting(
        0.0, "0 answers greedily, which repeats exactly.", on_resume="free", ge=0
    )
    top_k: int | None = setting(
        None,
        "Draw only from this many of the most probable tokens; null: all. top_k, top_p and min_p are applied in this order.",
        on_resume="free",
        ge=1,
    )
    top_p: float | None = setting(
        None,
        "Draw from the most probable tokens that together reach this probability, at the temperature; null: all.",
        on_resume="free",
        gt=0,
        lt=1,
    )
    min_p: float | None = setting(
        None,
        "Draw from the tokens that have at least this share of the highest probability; null: all.",
        on_resume="free",
        gt=0,
        le=1,
    )
    max_completion_length: int | None = setting(
        None,
        "Longest completion in tokens; null is sampler.max_completion_length.",
        on_resume="free",
        ge=1,
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Report keys without effect on greedy answers, and a k of pass@k above the number of samples."""
        if self.temperature == 0:
            yield from self._conflicts_with_greedy_answers()
        max_k = max(self.pass_at_k or (1,))
        if max_k > self.samples_per_prompt:
            yield Conflict(
                f"pass_at_k has {max_k}, but samples_per_prompt is {self.samples_per_prompt}: pass@k is estimated "
                f"from at least k samples of each prompt. Set samples_per_prompt to {max_k} or more.",
                ("pass_at_k", "samples_per_prompt"),
            )

    def _conflicts_with_greedy_answers(self) -> Iterator[Conflict]:
        if self.samples_per_prompt > 1:
            yield Conflict(
                f"samples_per_prompt is {self.samples_per_prompt}, but temperature 0 gives the same "
                "completion each time; set a temperature above 0, as in eval.temperature=1.0.",
                ("samples_per_prompt", "temperature"),
            )
        for key in ("top_k", "top_p", "min_p"):
            if (value := getattr(self, key)) is not None:
                yield Conflict(
                    f"{key} is {value}, which has no effect while temperature is 0, where always the most "
                    f"probable token is taken; set a temperature above 0, as in eval.temperature=1.0, or leave {key} out.",
                    (key, "temperature"),
                )

    @field_validator("pass_at_k")
    @classmethod
    def _counts_samples(cls, ks: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if min(ks or (1,)) < 1:
            raise ValueError(f"pass_at_k has {min(ks or ())}; k is a number of samples, 1 or more.")
        return ks

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k in ascending order; by default, the powers of 2 up to the number of samples."""
        if self.pass_at_k is not None:
            return tuple(sorted(set(self.pass_at_k)))
        return tuple(2**power for power in range(self.samples_per_prompt.bit_length()))


def _each_named(entries: tuple[str | dict[str, Any], ...]) -> tuple[str | dict[str, Any], ...]:
    """Refuse entries that name no callback. The callbacks' code is loaded later, when a run is prepared."""
    refuse(
        f"the entry {json.dumps(entry)} does not say which callback it is; write a name, or a section with `name:` "
        "and parameters."
        for entry in entries
        if _name_of(entry) is None
    )
    return entries


def _name_of(entry: object) -> str | None:
    """The name in an entry of `callbacks`; None if it is not text."""
    if isinstance(entry, Mapping):
        entry = cast("Mapping[str, Any]", entry).get("name")
    return entry if isinstance(entry, str) and entry else None


CallbackEntries = Annotated[tuple[str | dict[str, Any], ...], AfterValidator(_each_named)]
CALLBACKS: Any = setting(
    (),
    "Callbacks, which observe the run's events and may stop it: names, `module:Class`, `file.py:Class`, or sections with `name` and "
    "parameters.",
    on_resume="free",
)
"""The key `callbacks` of every command that trains."""


_COMPARING = ("group_baseline", "dynamic_sampling", "reward_weight")
"""Knobs that decide whether an algorithm compares the completions of a prompt."""


class RunConfig(Strict):
    """One run, of training or evaluation."""

    foreign_values: ClassVar[Mapping[tuple[str, str], str]] = FOREIGN_VALUES

    model: ModelConfig
    lora: LoraConfig | None = setting(
        LoraConfig(), "The adapter that is trained; null trains all weights of the model."
    )
    warm_up: str | dict[str, Any] | None = setting(
        None,
        "A supervised run before this one, which then begins with its weights: a config file of groupwise sft (a path relative to "
        "this file's folder), or its sections. It takes model, lora and run.dir from this config, and task and distributed unless it "
        "has its own. A finished run of the same config, task and data is used again, and an interrupted one continues.",
        on_resume="free",
    )
    sampler: SamplerConfig = SamplerConfig()
    algorithm: AnyAlgorithm = algorithm_section(DEFAULT_ALGORITHM)()
    teacher: TeacherConfig | None = setting(
        None, "The teacher of the algorithm distillation; null with every other algorithm."
    )
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    rewards: RewardsConfig = RewardsConfig()
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()
    signals: SignalsConfig | None = setting(
        SignalsConfig(),
        "Limits beyond which the run warns of reward hacking; it goes on. null: no warnings.",
        on_resume="free",
    )
    callbacks: CallbackEntries = CALLBACKS
    run: RunSection = RunSection()
    distributed: SampledDistributedConfig = SampledDistributedConfig()
    task: dict[str, Any] = setting(
        {}, "Settings of the task. Any keys are allowed, unless the task brings a schema for them."
    )

    @classmethod
    def foreign_keys(cls) -> Mapping[str, ForeignKey]:
        return foreign_to_rl()

    def conflicts(self) -> Iterator[Conflict]:
        """Report settings of one section that conflict with another section."""
        yield from self._comparison_conflicts()
        yield from self._teacher_conflicts()
        if self.rollout.type == "two_stage":
            yield from self._two_stage_conflicts()
        yield from self._length_conflicts()
        yield from self._replay_conflicts()
        if self.signals is not None and self.signals.held_out_metric is not None:
            yield from self._signal_conflicts()
        if self.model.backend == "tunix":
            yield from tunix_rl_conflicts(self)
        if self.model.backend == "unsloth":
            yield from unsloth_conflicts(self)
        if self.model.backend == "tinker":
            yield from tinker_rl_conflicts(self)
        step = self.training.prompts_per_step * self.training.num_generations
        yield from distributed_conflicts(
            self, step, ("training.prompts_per_step", "training.num_generations")
        )
        if self.sampler.engine != "torch":
            yield from self._sampling_server_conflicts()
        if self.sampler.quantization is not None:
            yield from self._quantization_conflicts()

    def _quantization_conflicts(self) -> Iterator[Conflict]:
        quantization = self.sampler.quantization
        if self.algorithm.knobs.get("importance_sampling_correction") == "none":
            yield Conflict(
                f"sampler.quantization is {quantization}, whose log-probabilities differ from the learner's, but "
                "algorithm.importance_sampling_correction is none, so that completions would be trained as if the learner's policy had "
                "sampled them. Leave the key out (token_truncate), or leave sampler.quantization out.",
                ("sampler.quantization", "algorithm.importance_sampling_correction"),
            )
        if self.run.server is not None or self.model.backend == "tunix":
            key = "model.backend" if self.run.server is None else "run.server"
            yield Conflict(
                f"sampler.quantization is {quantization}, which has no effect with {key}: this process does not sample. Leave it out.",
                ("sampler.quantization", key),
            )

    def _sampling_server_conflicts(self) -> Iterator[Conflict]:
        settings: dict[str, tuple[bool, str, str]] = {
            "lora": (
                self.lora is not None and self.sampler.weight_transfer is not None,
                "set",
                f"sampler.weight_transfer is {self.sampler.weight_transfer}, which has no effect on adapters",
            ),
            "lora.target_parameters": (
                self.sampler.engine == "sglang" and self.lora is not None and bool(self.lora.target_parameters),
                str([*self.lora.target_parameters] if self.lora else []),
                "only vLLM is given adapters of experts",
            ),
            "model.backend": (self.model.backend == "tunix", "tunix", "it samples itself"),
            "run.server": (self.run.server is not None, str(self.run.server), "that server samples itself"),
            "run.processes": ((self.run.processes or 1) > 1, str(self.run.processes), "one process learns, and the servers sample"),
            "distributed.samplers": (self.distributed.samplers > 0, str(self.distributed.samplers), "the servers sample"),
        }  # fmt: skip
        for key, (conflicts, value, why) in settings.items():
            if conflicts:
                yield Conflict(
                    f"sampler.engine is {self.sampler.engine}, but {key} is {value}: {why}. Leave one of the two out.",
                    ("sampler.engine", key),
                )
        if self.sampler.routing_replay and self.distributed.strategy == "fsdp2":
            yield Conflict(
                "sampler.routing_replay is true, but distributed.strategy is fsdp2, whose learners choose experts themselves. Leave one of "
                "the two out.",
                ("sampler.routing_replay", "distributed.strategy"),
            )
        if self.sampler.routing_replay and self.model.backend not in ("transformers", "tunix"):
            yield Conflict(
                f"sampler.routing_replay is true, but model.backend is {self.model.backend}, which computes experts in its own way. Leave "
                "one of the two out.",
                ("sampler.routing_replay", "model.backend"),
            )

    def _signal_conflicts(self) -> Iterator[Conflict]:
        if self.eval.eval_steps is None and not self.eval.before_and_after:
            yield Conflict(
                "signals.held_out_metric has no effect without an evaluation of held-out prompts. Set eval.eval_steps or "
                "eval.before_and_after, or leave the key out.",
                ("signals.held_out_metric", "eval.eval_steps", "eval.before_and_after"),
            )

    def _replay_conflicts(self) -> Iterator[Conflict]:
        replay = self.data.replay
        if replay is None:
            return
        if replay.at_temperature_floor and self.sampler.temperature_schedule is None:
            yield Conflict(
                "data.replay.at_temperature_floor has no effect without sampler.temperature_schedule, which has the floor. Give a "
                "schedule, or leave the key out.",
                ("data.replay.at_temperature_floor", "sampler.temperature_schedule"),
            )
        if int(replay.max_share * self.training.prompts_per_step) == 0:
            yield Conflict(
                f"data.replay.max_share is {replay.max_share:g}, which is less than one of the {self.training.prompts_per_step} prompts "
                "of a step, so that nothing would ever be drawn again. Raise it, or training.prompts_per_step.",
                ("data.replay.max_share", "training.prompts_per_step"),
            )
        if replay.mode == "completions":
            if not self.run.keep_tokens:
                yield Conflict(
                    "data.replay.mode is completions, which are taken from the run's record, but run.keep_tokens is false. Keep the "
                    "tokens, or use data.replay.mode=prompts.",
                    ("data.replay.mode", "run.keep_tokens"),
                )
            if self.algorithm.knobs.get("importance_sampling_correction") == "none":
                yield Conflict(
                    "data.replay.mode is completions, which an earlier policy sampled, but algorithm.importance_sampling_correction is "
                    "none, so that they would be trained as if this one had. Leave the key out (token_truncate), or use "
                    "data.replay.mode=prompts.",
                    ("data.replay.mode", "algorithm.importance_sampling_correction"),
                )

    def _teacher_conflicts(self) -> Iterator[Conflict]:
        teacher, algorithm = self.teacher, self.algorithm.type
        if (algorithm == Distillation.name) != (teacher is not None):
            yield Conflict(
                f"algorithm.type is {algorithm}, but teacher is {'null' if teacher is None else 'given'}: distillation learns from a "
                "teacher, other algorithms from rewards alone. Give both, as in algorithm.type=distillation teacher.name=MODEL, or none.",
                ("algorithm.type", "algorithm.preset", "teacher"),
            )
        if teacher is None or algorithm != Distillation.name:
            return
        form = self.algorithm.knobs["form"]
        elsewhere = {
            "model.backend": (self.model.backend != "transformers", self.model.backend),
            "run.server": (self.run.server is not None, self.run.server),
            "distributed.strategy": (self.distributed.strategy == "fsdp2", "fsdp2"),
        }
        for key, (conflicts, value) in elsewhere.items():
            if conflicts and (teacher.type != "endpoint" or key != "distributed.strategy"):
                yield Conflict(
                    f"teacher.type is {teacher.type}, but {key} is {value}, where no teacher is computed. Leave {key} out.",
                    ("teacher.type", key),
                )
        if teacher.type == "endpoint" and form == "full_vocabulary":
            yield Conflict(
                "algorithm.form is full_vocabulary, but teacher.type is endpoint, and no endpoint gives the log-probabilities of all "
                "tokens. Set algorithm.form=top_k algorithm.top_k=16, or algorithm.form=sampled.",
                ("algorithm.form", "teacher.type"),
            )
        if form == "top_k" and (teacher.type != "endpoint" or teacher.engine == "openai"):
            yield Conflict(
                f"algorithm.form is top_k, which needs an endpoint of vLLM or SGLang; teacher.type is {teacher.type}"
                f"{f' and teacher.engine {teacher.engine}' if teacher.type == 'endpoint' else ''}. Set algorithm.form=sampled, or "
                "full_vocabulary for a teacher in this process.",
                ("algorithm.form", "teacher.type", "teacher.engine"),
            )
        sampler = self.sampler
        if teacher.type == "endpoint" and (
            sampler.temperature != 1 or sampler.temperature_schedule is not None
        ):
            yield Conflict(
                "teacher.type is endpoint, whose log-probabilities are at temperature 1, but the policy is sampled at another one. Leave "
                "sampler.temperature and sampler.temperature_schedule out.",
                ("teacher.type", "sampler.temperature", "sampler.temperature_schedule"),
            )
        if teacher.type == "endpoint" and sampler.min_completion_length > 0:
            yield Conflict(
                f"teacher.type is endpoint, but sampler.min_completion_length is {sampler.min_completion_length}, for which the policy "
                "cannot draw a token that the endpoint counts in. Leave it out.",
                ("teacher.type", "sampler.min_completion_length"),
            )

    def _comparison_conflicts(self) -> Iterator[Conflict]:
        knobs = self.algorithm.knobs
        # Use only the keys that decide this; conflicts of other keys are reported separately.
        relevant_knobs = {knob: knobs[knob] for knob in _COMPARING if knob in knobs}
        algorithm = kind_of(self.algorithm.type)(**relevant_knobs)
        if self.training.num_generations == 1 and algorithm.compares_members:
            yield Conflict(
                f"training.num_generations is 1, but {self.algorithm.type} as it is set compares the completions of a prompt "
                "with each other; give at least 2. Only reinforce_pp without group_baseline and dynamic_sampling, and distillation "
                "without reward_weight, take 1.",
                (
                    "training.num_generations",
                    *(f"algorithm.{key}" for key in ("type", "preset", *_COMPARING)),
                ),
            )
        most = self.training.num_generations - (knobs.get("baseline") == "mean")
        if self.algorithm.type == PassAtK.name and knobs["k"] > most:
            yield Conflict(
                f"algorithm.k is {knobs['k']}, but training.num_generations is {self.training.num_generations}: pass_at_k with the "
                f"baseline {knobs['baseline']} compares sets of k completions of a prompt, so k must be at most {most}.",
                ("training.num_generations", "algorithm.k", "algorithm.type", "algorithm.preset"),
            )

    def _two_stage_conflicts(self) -> Iterator[Conflict]:
        sections = {
            "sampler": self.sampler.max_completion_length != SamplerConfig().max_completion_length,
            "eval": self.eval.max_completion_length is not None,
        }
        for section, is_set in sections.items():
            if is_set:
                yield Conflict(
                    f"{section}.max_completion_length has no effect where rollout.type is two_stage; set "
                    "rollout.max_reasoning_length and rollout.max_answer_length instead.",
                    (f"{section}.max_completion_length", "rollout.type"),
                )

    def _length_conflicts(self) -> Iterator[Conflict]:
        min_length = self.sampler.min_completion_length
        if self.rollout.type == "two_stage":
            limits = {
                "rollout.max_reasoning_length": self.rollout.max_reasoning_length,
                "rollout.max_answer_length": self.rollout.max_answer_length,
            }
        else:
            lengths = {
                "sampler.max_completion_length": self.sampler.max_completion_length,
                "eval.max_completion_length": self.eval.max_completion_length,
            }
            if self.rollout.type in TURNS:
                lengths["rollout.max_rollout_length"] = self.rollout.max_rollout_length
            limits = lengths
        for key, limit in limits.items():
            if limit is not None and limit < min_length:
                yield Conflict(
                    f"sampler.min_completion_length is {min_length}, but {key} is {limit}, and no completion can be longer. Lower "
                    "the one or raise the other.",
                    ("sampler.min_completion_length", key, "rollout.type"),
                )


class Dumped(Protocol):
    """A config of any command."""

    def model_dump(self, *, mode: str) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A validated config and its origin."""

    config: RunConfig
    name_stem: str
    """Name of the config file without its suffix, usable as a run's name; `run` if there was no file."""
    path: Path | None
    tree: Tree
    """The config as written, with line numbers for messages about the `task` section."""

    @property
    def run_name(self) -> str:
        """`run.name`, or the name of the config file if that is not set."""
        return self.config.run.name or self.name_stem


Loaded = TypeVar("Loaded", bound=LoadedConfig)


def load_config(
    source: Path | str | Mapping[str, Any] | RunConfig,
    overrides: Sequence[str] = (),
    *,
    to_train: bool = False,
) -> LoadedConfig:
    """Read the config, apply the overrides, and validate. Raises ConfigError with every problem, one per line.

    `to_train`: also check the names of `callbacks`, which only training loads.
    """
    path = Path(source) if isinstance(source, str | Path) else None
    tree = override(read_source_tree(source), overrides, LENGTHS)
    # By default, correct by importance sampling if completions come from earlier policies, from
    # engines that round differently from the learner, or from quantised weights.
    training = tree.value(("training",))
    off_policy = (
        isinstance(training, dict)
        and cast("dict[str, Any]", training).get("max_off_policy_steps", 0) != 0
    )
    uses_servers = tree.value(("sampler", "engine")) in ("vllm", "sglang")
    replays_completions = tree.value(("data", "replay", "mode")) == "completions"
    algorithm = tree.values.get("algorithm", {})
    quantized = tree.value(("sampler", "quantization")) is not None
    corrected = off_policy or replays_completions or uses_servers or quantized
    if corrected and isinstance(algorithm, dict):
        knobs = cast("dict[str, Any]", algorithm)
        tree.values["algorithm"] = {"importance_sampling_correction": "token_truncate"} | knobs
    # The default label goes from the environment into the config, so that a resume has the same one.
    rewards = tree.values.get("rewards")
    label = os.environ.get(DEFAULT_TASK_VARIABLE)
    if label and isinstance(rewards, dict):
        section = cast("dict[str, Any]", rewards)
        if section.get("router") is not None and section.get("default_task") is None:
            tree.values["rewards"] = {**section, "default_task": label}

    def check(tree: Tree) -> list[str]:
        problems = secrets_in(tree, "task", "callbacks", "rewards")
        if tree.value(("algorithm", "type")) == Sft.name:
            origin = tree.origin(("algorithm", "type"))
            problems.append(
                f"{origin}: sft learns from given answers; it has its own command, groupwise sft."
            )
        return [
            *problems,
            *(unknown_callbacks(tree) if to_train else ()),
        ]

    config = validate(RunConfig, tree, check=check)
    return LoadedConfig(config, stem_of(path), path, tree)


def unknown_callbacks(tree: Tree) -> list[str]:
    """A problem for each entry of `callbacks` with an unknown name. Runs no code, so it may miss some."""
    entries: Any = tree.value(("callbacks",))
    entry_list = cast("list[object]", entries) if isinstance(entries, list) else []
    if not entry_list:
        return []
    from groupwise.training.callbacks.registry import (
        unknown_callback,  # which most configs do without
    )

    names = [_name_of(entry) for entry in entry_list]
    origin = tree.origin(("callbacks",))
    return [
        f"{origin}: callbacks: {problem}"
        for name in names
        if name and (problem := unknown_callback(name))
    ]


def read_source_tree(source: Path | str | Mapping[str, Any] | BaseModel | Tree) -> Tree:
    """The given config of any command as a tree, not yet validated."""
    if isinstance(source, Tree):
        return source
    if isinstance(source, BaseModel):
        return tree_of(source.model_dump(mode="json", exclude_unset=True))
    if isinstance(source, Mapping):
        return tree_of(source)
    return read_yaml(Path(source))


def stem_of(path: Path | None) -> str:
    """The name of a config file without its suffix, usable as a run's name."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem if path else "run").lstrip("._-")
    return stem or "run"


def with_task_schema(loaded: Loaded, schema: type[BaseModel] | None) -> Loaded:
    """The config with its `task` section validated by `schema` and filled with its defaults; unchanged without a schema.

    Raises ConfigError like `load_config`, each problem under `task.`.
    """
    if schema is None:
        return loaded
    task = validate(schema, loaded.tree, at=("task",))
    values = task.model_dump(mode="json", by_alias=True)
    return replace(loaded, config=loaded.config.model_copy(update={"task": values}))


def resolved_values(config: Dumped) -> dict[str, Any]:
    """Every key with its value as JSON types; `load_config` of the result gives an equal config."""
    return config.model_dump(mode="json")


def view(config: RunConfig) -> View:
    """The config in the read-only form that a task's hooks receive."""
    return View(resolved_values(config))


def compare_for_resume(old: Mapping[str, Any], new: Dumped) -> Differences:
    """The changes since a run was started with the resolved config `old`."""
    return compare(old, resolved_values(new), cast("type[BaseModel]", type(new)))


def json_schema(model: type[BaseModel] = RunConfig) -> str:
    """The content of `docs/schemas/rl.json`, by which editors check and complete YAML."""
    return json.dumps(model.model_json_schema(), indent=1, ensure_ascii=False) + "\n"


_OF_DATA = ("data", "rewards", "rollout", "eval", "signals", "callbacks")
"""The sections that have a page of their own, which keeps both pages short enough to read."""


def documentation() -> dict[str, str]:
    """The pages of the documentation about a config, by their names."""
    rows = key_rows(RunConfig)
    of_data = {path: row for path, row in rows.items() if path[0] in _OF_DATA}
    others = {path: row for path, row in rows.items() if path not in of_data}
    return {
        "configuration.md": _PAGE.format(tables=section_tables(others)),
        "configuration-data.md": _DATA_PAGE.format(tables=section_tables(of_data)),
    }


_PAGE = """\
# Configuration

A config is a YAML 1.2 file with the sections below and those [of data and rewards](configuration-data.md). Only `model.name` is required:

```yaml
model:
  name: smollm2-135m-instruct
training:
  learning_rate: 1e-5
  max_steps: 50
```

- Change single keys on the command line by `key=value`, written as in the file: `training.learning_rate=1e-5`, `sampler.stop='["\\n"]'`,
  `lora=null`. If a key comes twice, the last value counts.
- Unknown keys, wrong types and values out of range are reported all at once, with file and line.
- A config must hold no secrets, because it is stored with the run. Put them into environment variables.
- The column **on resume** says what `--resume` does with a changed value. *free*: it takes the new one. *warn*: it takes it with a warning,
  because the result then stays equal only up to rounding. *fixed*: it refuses it.
- An editor can check and complete a config by its JSON schema, [for rl and eval](schemas/rl.json) or [for sft](schemas/sft.json). Name the
  schema in the first line: `# yaml-language-server: $schema=<path of the file>`.

{tables}
`make fix` makes this page from the code, as well as the schemas.
"""

_DATA_PAGE = """\
# Configuration of data and rewards

The sections of a config about data, rewards, rollouts and evaluations. [Configuration](configuration.md) has the others, and says how a
config is written and what **on resume** means.

```yaml
data:
  dataset_name: sums.jsonl
  answer_column: solution
rewards:
  reward_funcs: [math_answer]
eval:
  eval_steps: 20
```

{tables}
`make fix` makes this page from the code.
"""
