"""The config of a run: the sections of all rooms in one model, and how one is loaded.

`load_config` reads a YAML file (or a mapping, or a `RunConfig`), lays overrides over it and validates the whole. The same
file serves training and evaluation. The knobs of the algorithms are not repeated here: their sections are made from the
registered dataclasses, so that a new algorithm needs no new config. The `task` section belongs to the task;
`with_task_schema` validates it where the task has a schema of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from dataclasses import Field as Knob
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Protocol,
    Union,
    cast,
    get_type_hints,
)

from pydantic import AfterValidator, BaseModel, Discriminator, Tag, create_model, model_validator

from groupwise.algorithms.knobs import idle
from groupwise.algorithms.presets import PRESETS, Preset
from groupwise.algorithms.registry import ALGORITHMS
from groupwise.algorithms.sft import Sft
from groupwise.data.config import DataConfig
from groupwise.learner.config import TrainingConfig
from groupwise.models.config import LoraConfig, ModelConfig
from groupwise.rewards.config import RewardsConfig
from groupwise.rollouts.config import RolloutConfig
from groupwise.runs.config import RunSection
from groupwise.sampler.config import SamplerConfig
from groupwise.settings import (
    Differences,
    Strict,
    Tree,
    View,
    compare,
    document,
    override,
    read_yaml,
    secrets_in,
    setting,
    tree_of,
    validate,
)

DEFAULT_ALGORITHM = "dr_grpo"
"""Its centred advantages have no difficulty bias and do not explode on tiny spreads."""


if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(PRESETS)]


class AlgorithmConfig(Strict):
    """The algorithm and its knobs; each registered algorithm has a subclass with the knobs as keys."""

    type: str = setting(DEFAULT_ALGORITHM, "The algorithm.")
    preset: PresetName | None = setting(
        None,
        "Published settings by name: a type and values for its keys, which keys beside it change.",
        on_resume="free",
    )

    @property
    def knobs(self) -> dict[str, Any]:
        """All knobs by name, as `groupwise.algorithms.registry.make` takes them."""
        return self.model_dump(exclude={"type", "preset"})

    @model_validator(mode="before")
    @classmethod
    def _filled_from_preset(cls, given: Any) -> Any:
        preset = _preset_of(given)
        if preset is None:
            return given
        if given.get("type", preset.algorithm) != preset.algorithm:
            raise ValueError(
                f"preset {given['preset']} is {preset.algorithm}, but type is {given['type']}. Leave "
                "type out, or leave preset out and give its values one by one."
            )
        return {**preset.knobs, **given}

    @model_validator(mode="after")
    def _suits_the_algorithm(self) -> AlgorithmConfig:
        kind, values = ALGORITHMS[self.type], self.knobs
        kind(**values)
        of_preset: Mapping[str, Any] = PRESETS[self.preset].knobs if self.preset else {}
        for knob in fields(kind):
            needed, value = idle(knob, values), values[knob.name]
            if needed and value not in (knob.default, of_preset.get(knob.name, knob.default)):
                raise ValueError(
                    f"{knob.name} is {value}, which has no effect while {needed} is "
                    f"{json.dumps(values[needed])}. Set {needed}, or leave {knob.name} out."
                )
        return self


def _preset_of(given: Any) -> Preset | None:
    """The preset that a section asks for; None where it asks for none, or for one that does not exist."""
    if not isinstance(given, Mapping):
        return None
    name = cast("Mapping[str, Any]", given).get("preset")
    return PRESETS.get(name) if isinstance(name, str) else None


def algorithm_sections(
    algorithms: Mapping[str, type[Any]] = ALGORITHMS,
) -> dict[str, type[AlgorithmConfig]]:
    """A config section for each algorithm, made from the fields of its dataclass and their metadata."""
    return {name: _algorithm_section(name, kind) for name, kind in algorithms.items()}


def _algorithm_section(name: str, kind: type[Any]) -> type[AlgorithmConfig]:
    hints = get_type_hints(kind)
    keys: dict[str, Any] = {knob.name: (hints[knob.name], _knob_key(knob)) for knob in fields(kind)}
    keys["type"] = (Literal[name], setting(name, "The algorithm."))
    return create_model(f"{kind.__name__}Config", __base__=AlgorithmConfig, **keys)


def _knob_key(knob: Knob[Any]) -> Any:
    assert knob.default is not MISSING, f"knob {knob.name} needs a default"
    constraints = {name: limit for name, limit in knob.metadata.items() if name != "needs"}
    return setting(knob.default, constraints.pop("description"), **constraints)


def _algorithm_type(given: Any) -> str | None:
    """Which algorithm a section is for; that of its preset or the default where it does not say."""
    if isinstance(given, Mapping):
        preset = _preset_of(cast("Any", given))
        default = preset.algorithm if preset else DEFAULT_ALGORITHM
        return str(cast("Mapping[str, Any]", given).get("type", default))
    return getattr(given, "type", None)


_SECTIONS = algorithm_sections()

if TYPE_CHECKING:
    AnyAlgorithm = AlgorithmConfig
else:
    AnyAlgorithm = Annotated[
        Union[tuple(Annotated[section, Tag(name)] for name, section in _SECTIONS.items())],  # noqa: UP007
        Discriminator(_algorithm_type),
    ]


class EvalConfig(Strict):
    """Answering held-out prompts, beside a training and in `groupwise eval`."""

    not_yet: ClassVar[frozenset[str]] = frozenset({"suites", "benchmarks", "top_p", "top_k"})

    before_and_after: bool = setting(
        True,
        "Answer the same held-out prompts before and after training, where the task has "
        "get_eval_dataset.",
        on_resume="free",
    )
    eval_steps: int | None = setting(
        None, "Steps between evaluations during training; null: none.", on_resume="free", ge=1
    )
    max_prompts: int | None = setting(
        128,
        "Held-out prompts used, the first ones; null uses all. 128 show a difference of about 0.1.",
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
    max_completion_length: int | None = setting(
        None,
        "Longest completion in tokens; null is sampler.max_completion_length.",
        on_resume="free",
        ge=1,
    )

    @model_validator(mode="after")
    def _greedy_repeats_itself(self) -> EvalConfig:
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError(
                f"samples_per_prompt is {self.samples_per_prompt}, but temperature 0 gives the same "
                "completion each time; set a temperature above 0, as in eval.temperature=1.0."
            )
        return self

    @model_validator(mode="after")
    def _has_samples_for_each_k(self) -> EvalConfig:
        given = self.pass_at_k or (1,)
        if min(given) < 1:
            raise ValueError(f"pass_at_k has {min(given)}; k is a number of samples, 1 or more.")
        if max(given) > self.samples_per_prompt:
            raise ValueError(
                f"pass_at_k has {max(given)}, but samples_per_prompt is {self.samples_per_prompt}: pass@k is estimated "
                f"from at least k samples of each prompt. Set samples_per_prompt to {max(given)} or more."
            )
        return self

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k, in order."""
        if self.pass_at_k is not None:
            return tuple(sorted(set(self.pass_at_k)))
        return tuple(2**power for power in range(self.samples_per_prompt.bit_length()))


_BATCH = (
    "a step is training.prompts_per_step groups of training.num_generations completions, "
    "and training.max_tokens_per_microbatch is what is computed at once"
)
_ENGINE = "sampler.engine names the engine, and only torch is in this version"
_TASK_DATA = "the data comes from the task's get_rl_dataset"
_OVERLONG = (
    "algorithm.type dapo has algorithm.soft_punish_cache and algorithm.soft_punish_factor, and "
    "algorithm.mask_truncated_completions leaves rollouts that were cut off out of the loss"
)
_RESUME = "give --resume or --resume-from RUN@STEP on the command line"


def _named(key: str) -> str:
    return f"here it is {key}"


FOREIGN: dict[str, str] = {
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "generation_batch_size",
            "steps_per_generation",
            "train_batch_size",
            "rollout_batch_size",
            "mini_batch_size",
            "micro_batch_size",
            "batch_size",
        ),
        _BATCH,
    ),
    **dict.fromkeys(("vllm", "vllm_*", "use_vllm", "sglang"), _ENGINE),
    **dict.fromkeys(
        ("max_tokens", "max_new_tokens", "max_response_length", "response_length"),
        _named("sampler.max_completion_length"),
    ),
    **dict.fromkeys(
        ("hf_repo_id", "hub_model_id", "push_to_hub", "repo_id"),
        "the hub is not in this version; the final adapter stands in the run's folder",
    ),
    **dict.fromkeys(
        ("model_name_or_path", "model_name", "model_id", "base_model", "pretrained_model"),
        _named("model.name"),
    ),
    "model_revision": _named("model.revision"),
    **dict.fromkeys(("adapter_path", "adapter_name_or_path"), _named("model.adapter")),
    **dict.fromkeys(("torch_dtype", "bf16", "fp16", "precision"), _named("model.dtype")),
    **dict.fromkeys(("max_seq_len", "max_length"), _named("model.max_seq_length")),
    **dict.fromkeys(("lora_r", "lora_rank", "rank"), _named("lora.r")),
    "lora_alpha": _named("lora.alpha"),
    "lora_dropout": _named("lora.dropout"),
    "lora_target_modules": _named("lora.target_modules"),
    "use_peft": "here it is lora, where null trains all weights",
    **dict.fromkeys(("lr", "actor_lr"), _named("training.learning_rate")),
    **dict.fromkeys(("epochs", "num_epochs", "total_epochs"), _named("training.num_train_epochs")),
    **dict.fromkeys(
        ("total_steps", "num_steps", "total_training_steps"), _named("training.max_steps")
    ),
    **dict.fromkeys(
        ("group_size", "num_return_sequences", "rollouts_per_example"),
        _named("training.num_generations"),
    ),
    **dict.fromkeys(("lr_scheduler", "scheduler"), _named("training.lr_scheduler_type")),
    "warmup": "here it is training.warmup_steps or training.warmup_ratio",
    "optimizer": _named("training.optim"),
    **dict.fromkeys(
        ("gradient_clipping", "grad_clip", "clip_grad_norm"), _named("training.max_grad_norm")
    ),
    **dict.fromkeys(("kl_coef", "kl_loss_coef", "init_kl_coef"), _named("algorithm.beta")),
    **dict.fromkeys(("clip_range", "cliprange", "clip_ratio"), _named("algorithm.epsilon")),
    **dict.fromkeys(("clip_ratio_high", "cliprange_high"), _named("algorithm.epsilon_high")),
    "clip_ratio_low": _named("algorithm.epsilon"),
    "clip_ratio_c": _named("algorithm.delta"),
    **dict.fromkeys(
        ("loss_type", "adv_estimator", "advantage_estimator"), _named("algorithm.type")
    ),
    "importance_sampling_level": "here algorithm.type gspo has one ratio for a sequence",
    **dict.fromkeys(
        ("kl_loss_type", "kl_penalty", "kl_type"),
        _named("algorithm.kl_estimator"),
    ),
    "use_bias_correction_kl": "here it is algorithm.kl_gradient with the value exact, its default",
    **dict.fromkeys(("adaptive_kl", "use_adaptive_kl", "target_kl"), _named("algorithm.kl_target")),
    **dict.fromkeys(
        ("entropy_bonus", "entropy_coeff", "entropy_loss_coef"), _named("algorithm.entropy_coef")
    ),
    **dict.fromkeys(
        ("filter_groups", "dynamic_sample", "dynamic_filtering"),
        _named("algorithm.dynamic_sampling"),
    ),
    **dict.fromkeys(
        ("max_resample_times", "max_num_gen_batches"), _named("algorithm.max_resample_rounds")
    ),
    **dict.fromkeys(("overlong_buffer", "overlong_filter"), _OVERLONG),
    **dict.fromkeys(
        ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "rollout_is"),
        _named("algorithm.importance_sampling_correction"),
    ),
    **dict.fromkeys(
        (
            "vllm_importance_sampling_cap",
            "vllm_importance_sampling_clip_max",
            "tis_imp_ratio_cap",
        ),
        _named("algorithm.importance_sampling_cap"),
    ),
    "normalize_advantages": "here algorithm.type reinforce_pp normalises advantages over the step",
    **dict.fromkeys(("dataset", "train_dataset", "eval_dataset"), _TASK_DATA),
    **dict.fromkeys(("output_dir", "logging_dir"), "here it is run.dir with run.name"),
    **dict.fromkeys(("run_name", "experiment_name"), _named("run.name")),
    **dict.fromkeys(
        ("eval_strategy", "evaluation_strategy", "do_eval"),
        "here it is eval.eval_steps, and eval.before_and_after",
    ),
    "save_strategy": _named("run.save_steps"),
    **dict.fromkeys(
        (
            "examples_per_step",
            "completion_only_loss",
            "assistant_only_loss",
            "assistant_turns",
            "dataset_text_field",
            "truncation_mode",
            "load_best_model_at_end",
            "eval_on_start",
        ),
        "it belongs to `groupwise sft`, which has a config of its own",
    ),
    **dict.fromkeys(("resume", "resume_from_checkpoint"), _RESUME),
}
"""What people write who come from TRL, verl, OpenRLHF or vLLM, and what it is here."""


LATER_CALLBACKS = frozenset({"push_to_hub_revision", "success_cache", "benchmark_on_checkpoint"})
"""Names of callbacks that are not in this version."""


def _each_named(entries: tuple[str | dict[str, Any], ...]) -> tuple[str | dict[str, Any], ...]:
    """Each entry says which callback it is. What the names mean is found out where a run is prepared."""
    for entry in entries:
        name = entry if isinstance(entry, str) else entry.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"the entry {json.dumps(entry)} does not say which callback it is; write a name, or a section with `name:` "
                "and parameters."
            )
        if name in LATER_CALLBACKS:
            raise ValueError(f"{name} is not in this version.")
    return entries


CallbackEntries = Annotated[tuple[str | dict[str, Any], ...], AfterValidator(_each_named)]
CALLBACKS: Any = setting(
    (),
    "What is told of the run's events and may stop it: names, `module:Class`, `file.py:Class`, or sections with `name` and "
    "parameters.",
    on_resume="free",
)
"""The key `callbacks` of every command that trains."""


class RunConfig(Strict):
    """One run, of training or evaluation."""

    not_yet: ClassVar[frozenset[str]] = frozenset({"replay", "curriculum"})
    foreign: ClassVar[Mapping[str, str]] = FOREIGN

    model: ModelConfig
    lora: LoraConfig | None = setting(
        LoraConfig(), "The adapter that is trained; null trains all weights of the model."
    )
    sampler: SamplerConfig = SamplerConfig()
    algorithm: AnyAlgorithm = _SECTIONS[DEFAULT_ALGORITHM]()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    rewards: RewardsConfig = RewardsConfig()
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()
    callbacks: CallbackEntries = CALLBACKS
    run: RunSection = RunSection()
    task: dict[str, Any] = setting(
        {}, "What the task itself reads; free, unless the task brings a schema for it."
    )

    @model_validator(mode="after")
    def _groups_have_members_to_compare(self) -> RunConfig:
        kind = ALGORITHMS[self.algorithm.type]
        if self.training.num_generations == 1 and kind(**self.algorithm.knobs).compares_members:
            raise ValueError(
                f"training.num_generations is 1, but {self.algorithm.type} as it is set compares the completions of a prompt "
                "with each other; give at least 2. Only reinforce_pp without group_baseline and dynamic_sampling takes 1."
            )
        return self

    @model_validator(mode="after")
    def _two_stages_have_lengths_of_their_own(self) -> RunConfig:
        default = SamplerConfig().max_completion_length
        given = {
            "sampler": self.sampler.max_completion_length != default,
            "eval": self.eval.max_completion_length is not None,
        }
        idle = [section for section, is_set in given.items() if is_set]
        if self.rollout.type == "two_stage" and idle:
            raise ValueError(
                f"{idle[0]}.max_completion_length has no effect where rollout.type is two_stage; set "
                "rollout.max_reasoning_length and rollout.max_answer_length instead."
            )
        return self


class Dumped(Protocol):
    """A config, of whatever command."""

    def model_dump(self, *, mode: str) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A validated config and where it came from."""

    config: RunConfig
    name_stem: str
    """Name of the config file without its ending, fit to name a run; `run` where there was no file."""
    path: Path | None
    tree: Tree
    """What was written, with lines: for messages about the `task` section."""

    @property
    def run_name(self) -> str:
        """`run.name`, or the stem."""
        return self.config.run.name or self.name_stem


def load_config(
    source: Path | str | Mapping[str, Any] | RunConfig, overrides: Sequence[str] = ()
) -> LoadedConfig:
    """Read, override and validate. Raises ConfigError with every problem, one in each line."""
    path = Path(source) if isinstance(source, str | Path) else None
    tree = override(given_tree(source), overrides)
    _correct_for_lag(tree)
    config = validate(RunConfig, tree, check=_problems_beside_the_schema)
    return LoadedConfig(config, stem_of(path), path, tree)


def _correct_for_lag(tree: Tree) -> None:
    """Completions of earlier policies are weighed by what the learner makes of them, unless the config says otherwise."""
    sections = tree.values
    training, algorithm = sections.get("training"), sections.get("algorithm", {})
    if isinstance(training, dict) and isinstance(algorithm, dict):
        given = cast("dict[str, Any]", algorithm)
        if cast("dict[str, Any]", training).get("lag"):
            sections["algorithm"] = {"importance_sampling_correction": "token_truncate"} | given


def given_tree(source: Path | str | Mapping[str, Any] | BaseModel) -> Tree:
    """What was given as a config, of whatever command, not yet validated."""
    if isinstance(source, BaseModel):
        return tree_of(source.model_dump(mode="json", exclude_unset=True))
    if isinstance(source, Mapping):
        return tree_of(source)
    return read_yaml(Path(source))


def _problems_beside_the_schema(tree: Tree) -> list[str]:
    problems = [*secrets_in(tree, ("task",)), *secrets_in(tree, ("callbacks",))]
    if tree.value(("algorithm", "type")) == Sft.name:
        where = tree.origin(("algorithm", "type"))
        problems.append(
            f"{where}: sft learns from given answers; it has its own command, groupwise sft."
        )
    return problems


def stem_of(path: Path | None) -> str:
    """The name of a config file without its ending, fit to name a run."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem if path else "run").lstrip("._-")
    return stem or "run"


def with_task_schema(loaded: LoadedConfig, schema: type[BaseModel]) -> LoadedConfig:
    """The config with its `task` section validated by `schema` and filled with the schema's defaults.

    Raises ConfigError like `load_config`, each problem under `task.`.
    """
    task = validate(schema, loaded.tree, at=("task",))
    values = task.model_dump(mode="json", by_alias=True)
    return replace(loaded, config=loaded.config.model_copy(update={"task": values}))


def resolved(config: Dumped) -> dict[str, Any]:
    """Every key with its value, as JSON knows it; `load_config` of it gives an equal config."""
    return config.model_dump(mode="json")


def view(config: RunConfig) -> View:
    """The read-only form that the hooks of a task receive."""
    return View(resolved(config))


def compare_for_resume(old: Mapping[str, Any], new: Dumped) -> Differences:
    """What changed since a run was started with the resolved config `old`."""
    return compare(old, resolved(new), cast("type[BaseModel]", type(new)))


def json_schema(model: type[BaseModel] = RunConfig) -> str:
    """`docs/schemas/rl.json`, for editors that check and complete YAML."""
    return json.dumps(model.model_json_schema(), indent=1, ensure_ascii=False) + "\n"


def documentation() -> str:
    """`docs/configuration.md`."""
    return _PAGE.format(table=document(RunConfig))


_PAGE = """\
# Configuration

A config is a YAML 1.2 file with the sections below. Only `model.name` is required:

```yaml
model:
  name: smollm2-135m-instruct
training:
  learning_rate: 1e-5
  max_steps: 50
```

- `key=value` words on the command line change single keys and are typed as in the file:
  `training.learning_rate=1e-5`, `sampler.stop='["\\n"]'`, `lora=null`. The last one wins.
- Unknown keys, wrong types and values out of range are refused, all of them at once, with file and line.
- Secrets never stand in a config, which is stored with the run: they come from the environment.
- **on resume** says what happens when a run goes on with another value: *free* takes it, *warn* takes it and says so
  (the result stays equal up to rounding), *fixed* refuses it.

{table}
Editors check and complete a config by its JSON schema, [for rl and eval](schemas/rl.json) or [for sft](schemas/sft.json): a first line
`# yaml-language-server: $schema=<path of the file>` names it.

This page is made from the code, as are the schemas:
`python -c "from groupwise.config import documentation as d; print(d(), end='')" > docs/configuration.md`
`python -c "from groupwise.config import json_schema as s; print(s(), end='')" > docs/schemas/rl.json`
`python -c "from groupwise.sft_config import sft_schema as s; print(s(), end='')" > docs/schemas/sft.json`
"""
