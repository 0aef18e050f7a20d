"""The config of a supervised run (`groupwise sft`): its own sections, and those that it shares with other runs.

Each command has one strict schema: a key that would have no effect is refused, so a config of `groupwise rl` is not valid for
`groupwise sft`. The sections `model`, `lora`, `run` and `task` have the same meaning in both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import ge, gt, le, lt
from pathlib import Path
from textwrap import fill
from typing import Any, ClassVar, Literal, cast

from pydantic import ValidationError, field_validator, model_validator

from groupwise.core.settings.credentials import secrets_in
from groupwise.core.settings.overrides import override
from groupwise.core.settings.schema import Conflict, ForeignKey, Strict, setting
from groupwise.core.settings.tree import Tree
from groupwise.core.settings.validation import validate
from groupwise.core.settings.wording import key_rows, section_tables
from groupwise.engine.backends.conflicts import (
    tinker_conflicts,
    tunix_sft_conflicts,
    unsloth_conflicts,
)
from groupwise.engine.distributed.config import DistributedConfig, distributed_conflicts
from groupwise.engine.learner.config import LENGTHS, OptimisationConfig
from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.runs.config import RunSection
from groupwise.tasks.data.config import DatasetConfig
from groupwise.training.config import (
    CALLBACKS,
    CallbackEntries,
    LoadedConfig,
    RunConfig,
    json_schema,
    load_config,
    read_source_tree,
    stem_of,
    unknown_callbacks,
)
from groupwise.training.foreign_keys import FOREIGN_VALUES, foreign_to_sft

_BOUND = re.compile(r"\s*(\S+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)\s*")
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {">=": ge, "<=": le, ">": gt, "<": lt}

DRAWING_SECTIONS = ("sampler", "rollout", "rewards", "data", "task")
"""Sections of an RL config that decide how completions are drawn and scored; in `eval`, the `success…` keys do, too."""


def parse_condition(condition: str) -> list[tuple[str, str, float]]:
    """Parse a condition such as `eval_loss < 0.5 and reward >= 0.6` into (metric, comparison, value) triples.

    Raises ValueError for any other text.
    """
    matches = [_BOUND.fullmatch(part) for part in condition.split(" and ")]
    if not all(matches):
        raise ValueError(
            f"{condition!r} is not a condition. Expected a metric, one of >=, <=, > and <, and a number, as in "
            "'groups/with_signal >= 0.6'; several are joined by ' and '."
        )
    return [(match[1], match[2], float(match[3])) for match in matches if match]


def holds(condition: str, metrics: Mapping[str, float]) -> bool:
    """True if the condition holds for these metrics; False also if a metric is missing."""
    return all(
        name in metrics and _SIGNS[sign](metrics[name], value)
        for name, sign, value in parse_condition(condition)
    )


class SftTrainingConfig(OptimisationConfig):
    """The steps of a supervised run. Each makes one update with `examples_per_step` examples."""

    max_steps: int | None = setting(
        None,
        "Steps to train, instead of num_train_epochs.",
        on_resume="free",
        ge=1,
    )
    num_train_epochs: float | None = setting(
        1.0,
        "Passes over the dataset; fractions are possible. null if max_steps is set.",
        on_resume="free",
        gt=0,
    )
    examples_per_step: int = setting(
        16, "Examples of each step, the batch size; each becomes one row or more.", ge=1
    )
    learning_rate: float = setting(
        1e-4,
        "Peak step size of AdamW. The default suits a LoRA adapter; training all weights needs a tenth of it.",
        gt=0,
    )
    stop_when: list[str] = setting(
        [],
        "Conditions on the metrics of an evaluation; the run ends at the first evaluation where one of them holds: "
        "`groups/with_signal >= 0.6`, `reward >= 0.3 and groups/distinct < 0.5`. eval.completions adds metrics of what the policy writes.",
        on_resume="free",
    )

    @field_validator("stop_when")
    @classmethod
    def _are_conditions(cls, conditions: list[str]) -> list[str]:
        for condition in conditions:
            parse_condition(condition)
        return conditions

    @model_validator(mode="before")
    @classmethod
    def _steps_replace_the_default_epochs(cls, data: Any) -> Any:
        """If steps are given, imply `num_train_epochs: null`."""
        if not isinstance(data, dict):
            return data
        keys = cast("dict[str, Any]", data)
        if keys.get("max_steps") is None or "num_train_epochs" in keys:
            return keys
        return {**keys, "num_train_epochs": None}


class SftDataConfig(DatasetConfig):
    """How the rows of the task's `get_sft_dataset` are read, or those that `dataset_name` names, and what of them is trained."""

    dataset_text_field: str = setting(
        "text", "Column of rows that are one text, trained whole.", min_length=1
    )
    completion_only_loss: bool | None = setting(
        None,
        "true: only completions and the assistant's turns are trained. false: every token. null: completions if the row has them "
        "(messages, or prompt and completion), else the whole text.",
    )
    assistant_turns: Literal["all", "last"] = setting(
        "all", "Which of the assistant's turns in `messages` are trained."
    )
    max_length: int | None = setting(
        None, "Longest row in tokens; null: only the model's own limit.", ge=2
    )
    truncation_mode: Literal["keep_start", "keep_end", "drop"] = setting(
        "keep_start",
        "What happens to longer rows: they are cut at the end, cut at the beginning, or left out. A row that has no trained token "
        "left is left out as well; all of these are counted.",
    )
    shuffle: bool = setting(
        True,
        "Take the examples in random order, a new one for each epoch, which follows from the seed.",
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Report a choice of turns although every token is trained, and conflicts in the named data."""
        yield from super().conflicts()
        if self.completion_only_loss is False and self.assistant_turns == "last":
            yield Conflict(
                "assistant_turns is last, but completion_only_loss is false, which trains every token. Set one of the two.",
                ("assistant_turns", "completion_only_loss"),
            )


class CompletionsConfig(Strict):
    """Completions that the policy writes by itself at each evaluation, for the task's `get_eval_dataset`, scored by its rewards."""

    rl: str | dict[str, Any] | None = setting(
        None,
        "The config of groupwise rl that says how they are drawn and scored (sampler, rollout, rewards): its file (a path relative to "
        "this file's folder), or its sections; null: the defaults. In a warm_up it is the RL config itself.",
        on_resume="free",
    )
    max_prompts: int = setting(
        32, "Number of prompts, taken from the first on.", on_resume="free", ge=1
    )
    num_generations: int = setting(
        4,
        "Completions of each prompt; their differences are what RL learns from.",
        on_resume="free",
        ge=2,
    )


class SftEvalConfig(Strict):
    """The loss on the rows of the task's `get_sft_eval_dataset`."""

    eval_steps: int | None = setting(
        None, "Steps between evaluations; null: once an epoch.", on_resume="free", ge=1
    )
    eval_on_start: bool = setting(
        True,
        "Evaluate before the first step as well, for comparison.",
        on_resume="free",
    )
    max_examples: int | None = setting(
        None,
        "Number of examples that are evaluated, taken from the first on; null: all.",
        on_resume="free",
        ge=1,
    )
    early_stopping_patience: int | None = setting(
        None,
        "Evaluations in a row without a better loss, after which the run ends; null: never.",
        on_resume="free",
        ge=1,
    )
    early_stopping_threshold: float = setting(
        0.0,
        "A loss (nats per token) is better if it is lower by more than this than the best so far.",
        on_resume="free",
        ge=0,
    )
    load_best_model_at_end: bool = setting(
        False,
        "final/ holds the weights of the best evaluation instead of the last ones.",
        on_resume="free",
    )
    completions: CompletionsConfig | None = setting(
        None,
        "Completions that the policy draws at each evaluation, and their scores beside the loss; null: none.",
        on_resume="free",
    )


class SftConfig(Strict):
    """One supervised run."""

    foreign_values: ClassVar[Mapping[tuple[str, str], str]] = FOREIGN_VALUES

    model: ModelConfig
    lora: LoraConfig | None = setting(
        LoraConfig(), "The adapter that is trained; null trains all weights of the model."
    )
    training: SftTrainingConfig = SftTrainingConfig()
    data: SftDataConfig = SftDataConfig()
    eval: SftEvalConfig = SftEvalConfig()
    callbacks: CallbackEntries = CALLBACKS
    run: RunSection = RunSection()
    distributed: DistributedConfig = DistributedConfig()
    task: dict[str, Any] = setting(
        {}, "Settings of the task. Any keys are allowed, unless the task brings a schema for them."
    )

    @classmethod
    def foreign_keys(cls) -> Mapping[str, ForeignKey]:
        return foreign_to_sft()

    def conflicts(self) -> Iterator[Conflict]:
        """Report conflicts with the backend and the distributed settings, and keys about rollouts, because this command makes none."""
        if self.model.backend == "tunix":
            yield from tunix_sft_conflicts(self)
        if self.model.backend == "unsloth":
            yield from unsloth_conflicts(self)
        if self.model.backend == "tinker":
            yield from tinker_conflicts(self)
        step = self.training.examples_per_step
        yield from distributed_conflicts(self, step, ("training.examples_per_step",))
        for key in ("num_completions_to_print", "log_unique_prompts"):
            if (value := getattr(self.run, key)) != RunSection.model_fields[key].default:
                yield Conflict(
                    f"run.{key} is {value}, which has no effect here: nothing is sampled, so there are no rollouts to show. Leave it out.",
                    (f"run.{key}",),
                )


@dataclass(frozen=True, slots=True)
class LoadedSftConfig(LoadedConfig):
    """A validated config of a supervised run and its origin."""

    config: SftConfig  # pyright: ignore[reportIncompatibleVariableOverride]


def load_sft_config(
    source: Path | str | Mapping[str, Any] | SftConfig | Tree,
    overrides: Sequence[str] = (),
    *,
    to_train: bool = False,
) -> LoadedSftConfig:
    """Read, override and validate; see `groupwise.training.config.load_config`. In a config of `groupwise rl`, its warm-up is used."""
    path = Path(source) if isinstance(source, str | Path) else None
    tree = override(read_source_tree(source), overrides, LENGTHS)
    is_rl_config = tree.values.get("warm_up") is not None
    if is_rl_config and not isinstance(source, SftConfig | Tree):
        return config_of_warm_up(load_config(source, overrides))

    def check(tree: Tree) -> list[str]:
        return [
            *secrets_in(tree, "task", "callbacks"),
            *(unknown_callbacks(tree) if to_train else ()),
        ]

    config = validate(SftConfig, tree, check=check)
    return LoadedSftConfig(config, stem_of(path), path, tree)


def config_of_warm_up(loaded: LoadedConfig) -> LoadedSftConfig:
    """The config of `groupwise sft` for the section `warm_up`. Raises ConfigError for anything that command refuses."""
    config = loaded.config
    warm_up = config.warm_up
    assert warm_up is not None
    if isinstance(warm_up, str):
        base_folder = loaded.path.parent if loaded.path else Path()
        tree = read_source_tree(base_folder / warm_up)
    else:
        tree = read_source_tree(warm_up)
        tree = replace(tree, source=f"{loaded.tree.source}: warm_up")
        for path, origin in loaded.tree.origins.items():
            if path[0] == "warm_up" and len(path) > 1:
                tree.origins[path[1:]] = origin
    rl_values = config.model_dump(mode="json", exclude_unset=True)
    shared_sections = {
        "model": rl_values["model"],
        **({"lora": rl_values["lora"]} if "lora" in rl_values else {}),
    }
    inherited_sections = {"task": rl_values["task"]} if "task" in rl_values else {}
    if distributed := {
        k: v
        for k, v in rl_values.get("distributed", {}).items()
        if k in DistributedConfig.model_fields
    }:
        inherited_sections["distributed"] = distributed
    values = {key: value for key, value in tree.values.items() if key not in ("model", "lora")}
    run = {"name": f"{loaded.run_name}-warm-up", **_section(values, "run")}
    run |= {"dir": config.run.dir, "server": config.run.server}
    completions = _section(values, "eval").get("completions")
    if isinstance(completions, dict):
        # Take only keys that decide how completions are drawn and scored: otherwise another learning rate
        # of the RL run would require another warm-up.
        success = {k: v for k, v in rl_values.get("eval", {}).items() if k.startswith("success")}
        sampling_sections = {
            name: rl_values[name] for name in ("model", *DRAWING_SECTIONS) if name in rl_values
        }
        cast("dict[str, Any]", completions)["rl"] = {
            **sampling_sections,
            **({"eval": success} if success else {}),
        }
    tree.values.clear()
    tree.values.update({**inherited_sections, **values, **shared_sections, "run": run})
    return load_sft_config(tree)


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The content of a section; empty if it is not a mapping, which validation reports."""
    section = values.get(name)
    return dict(cast("Mapping[str, Any]", section)) if isinstance(section, Mapping) else {}


def settings_that_differ(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run of either kind that are not defaults; all of them if this release would refuse the config."""
    kind = RunConfig if "algorithm" in config else SftConfig
    try:
        validated = kind.model_validate_json(json.dumps(config))
    except ValidationError:
        return dict(config)
    differing = validated.model_dump(mode="json", exclude_defaults=True)
    if "algorithm" in config:
        chosen = {"type": config["algorithm"]["type"]}
        differing["algorithm"] = chosen | differing.get("algorithm", {})
    return differing


def sft_schema() -> str:
    """The content of `docs/schemas/sft.json`."""
    return json_schema(SftConfig)


def documentation() -> dict[str, str]:
    """The page of the documentation about a config, by its name."""
    rows, rl_rows = key_rows(SftConfig), key_rows(RunConfig)
    own = {path: row for path, row in rows.items() if row != rl_rows.get(path)}
    items = list[str]()
    for section in dict.fromkeys(path[0] for path in rows if path not in own):
        shared = [path for path in rows if path[0] == section and path not in own]
        if len(shared) > 1 and shared == [path for path in rl_rows if path[0] == section]:
            items.append(f"all of `{section}`")
        else:
            items.append(", ".join(f"`{'.'.join(path)}`" for path in shared))
    lines = (
        fill(f"- {item}", 140, subsequent_indent="  ", break_on_hyphens=False) for item in items
    )
    return {
        "configuration-sft.md": _PAGE.format(shared="\n".join(lines), tables=section_tables(own))
    }


_PAGE = """\
# Configuration of a supervised run

The keys of a config of `groupwise sft`. [Warm up with examples](how-to/sft.md) shows how they work together, and
[Configuration](configuration.md) says how a config is written and what **on resume** means.

```yaml
model:
  name: smollm2-135m-instruct
data:
  dataset_name: examples.jsonl
training:
  num_train_epochs: 2
```

{tables}
## Keys as in `groupwise rl`

These mean the same and have the same default as in a [config of groupwise rl](configuration.md) ([data](configuration-data.md)):

{shared}

`make fix` makes this page from the code.
"""
