"""The config of a run: the sections of all rooms in one model, and how one is loaded.

`load_config` reads a YAML file (or a mapping, or a `RunConfig`), lays overrides over it and validates the whole. The same
file serves training and evaluation. The knobs of the algorithms are not repeated here: their sections are made from the
registered dataclasses, so that a new algorithm needs no new config. The `task` section belongs to the task;
`with_task_schema` validates it where the task has a schema of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from dataclasses import Field as Knob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, cast, get_type_hints

from pydantic import BaseModel, Discriminator, Tag, create_model, model_validator

from groupwise.algorithms.registry import ALGORITHMS
from groupwise.data.config import DataConfig
from groupwise.learner.config import TrainingConfig
from groupwise.models.config import LoraConfig, ModelConfig
from groupwise.rewards.config import RewardsConfig
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


class AlgorithmConfig(Strict):
    """The algorithm and its knobs; each registered algorithm has a subclass with the knobs as keys."""

    not_yet: ClassVar[frozenset[str]] = frozenset(
        {
            "type=dapo",
            "type=gspo",
            "type=cispo",
            "type=rloo",
            "type=reinforce_pp",
            "num_iterations",
            "entropy_coef",
            "entropy_bonus",
            "kl_estimator",
            "adaptive_kl",
            "dynamic_sampling",
            "importance_sampling_level",
            "importance_sampling_correction",
            "delta",
        }
    )

    type: str = setting(DEFAULT_ALGORITHM, "The algorithm.")

    @property
    def knobs(self) -> dict[str, Any]:
        """All knobs by name, as `groupwise.algorithms.registry.make` takes them."""
        return self.model_dump(exclude={"type"})

    @model_validator(mode="after")
    def _suits_the_algorithm(self) -> AlgorithmConfig:
        ALGORITHMS[self.type](**self.knobs)
        return self


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
    constraints = dict(knob.metadata)
    return setting(knob.default, constraints.pop("description"), **constraints)


def _algorithm_type(given: Any) -> str | None:
    """Which algorithm a section is for; the default where it does not say."""
    if isinstance(given, Mapping):
        return str(cast("Mapping[str, Any]", given).get("type", DEFAULT_ALGORITHM))
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
                "completion each time; set a temperature above 0."
            )
        return self


_BATCH = (
    "a step is training.prompts_per_step groups of training.num_generations completions, "
    "and training.max_tokens_per_microbatch is what is computed at once"
)
_ENGINE = "sampler.engine names the engine, and only torch is in this version"
_TASK_DATA = "the data comes from the task's get_rl_dataset"
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
    "clip_ratio_high": _named("algorithm.epsilon_high"),
    "loss_type": _named("algorithm.type"),
    **dict.fromkeys(("dataset", "train_dataset", "eval_dataset"), _TASK_DATA),
    **dict.fromkeys(("output_dir", "logging_dir"), "here it is run.dir with run.name"),
    **dict.fromkeys(("run_name", "experiment_name"), _named("run.name")),
    **dict.fromkeys(
        ("eval_strategy", "evaluation_strategy", "do_eval"),
        "here it is eval.eval_steps, and eval.before_and_after",
    ),
    "save_strategy": _named("run.save_steps"),
    **dict.fromkeys(("resume", "resume_from_checkpoint"), _RESUME),
}
"""What people write who come from TRL, verl, OpenRLHF or vLLM, and what it is here."""


class RunConfig(Strict):
    """One run, of training or evaluation."""

    not_yet: ClassVar[frozenset[str]] = frozenset({"rollout", "callbacks", "replay", "curriculum"})
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
    eval: EvalConfig = EvalConfig()
    run: RunSection = RunSection()
    task: dict[str, Any] = setting(
        {}, "What the task itself reads; free, unless the task brings a schema for it."
    )


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
    tree = override(_tree(source), overrides)
    config = validate(RunConfig, tree, check=lambda given: secrets_in(given, ("task",)))
    return LoadedConfig(config, _stem(path), path, tree)


def _tree(source: Path | str | Mapping[str, Any] | RunConfig) -> Tree:
    if isinstance(source, RunConfig):
        return tree_of(source.model_dump(mode="json", exclude_unset=True))
    if isinstance(source, Mapping):
        return tree_of(source)
    return read_yaml(Path(source))


def _stem(path: Path | None) -> str:
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem if path else "run").lstrip("._-")
    return stem or "run"


def with_task_schema(loaded: LoadedConfig, schema: type[BaseModel]) -> LoadedConfig:
    """The config with its `task` section validated by `schema` and filled with the schema's defaults.

    Raises ConfigError like `load_config`, each problem under `task.`.
    """
    task = validate(schema, loaded.tree, at=("task",))
    values = task.model_dump(mode="json", by_alias=True)
    return replace(loaded, config=loaded.config.model_copy(update={"task": values}))


def resolved(config: RunConfig) -> dict[str, Any]:
    """Every key with its value, as JSON knows it; `load_config` of it gives an equal config."""
    return config.model_dump(mode="json")


def view(config: RunConfig) -> View:
    """The read-only form that the hooks of a task receive."""
    return View(resolved(config))


def compare_for_resume(old: Mapping[str, Any], new: RunConfig) -> Differences:
    """What changed since a run was started with the resolved config `old`."""
    return compare(old, resolved(new), RunConfig)


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
This page is made from the code:
`python -c "from groupwise.config import documentation as d; print(d(), end='')" > docs/configuration.md`
"""
