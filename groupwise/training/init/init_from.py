"""`groupwise init --from FILE`: translates a GRPO config of TRL, open-r1 or Unsloth into one of ours.

Each value that is taken over has its origin as a comment. Keys that mean something else here, have no equivalent or cannot be read are
reported by name, and the report lists what became of every key. Settings that the file leaves to TRL's defaults (all weights are trained,
the loss is `dapo`) are written out, if they decide what is learnt and differ from ours; the seed stays ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import Any, Literal, cast

from groupwise.algorithms.registry import ALGORITHMS
from groupwise.core.errors import ConfigError, UsageError
from groupwise.core.findings import Finding, Findings, OnFinding, Report
from groupwise.core.plugins import trains_when_imported
from groupwise.core.settings.overrides import parse_override
from groupwise.core.settings.schema import foreign_key
from groupwise.core.terminal.quantities import counted
from groupwise.core.terminal.text import shorten
from groupwise.tasks.data.config import DatasetConfig
from groupwise.tasks.data.success import part_of_success
from groupwise.training.config import RunConfig, load_config, resolved_values
from groupwise.training.init.choices import EXCLUDED_BY, Choice
from groupwise.training.init.config_file import render
from groupwise.training.init.foreign_config import ForeignConfig, read_foreign
from groupwise.training.init.foreign_names import (
    DEFAULTS,
    LORA_DEFAULTS,
    LOSS_DIVISORS,
    LOSSES,
    MAY_BE_NULL,
    MAY_BE_ZERO,
    NO_EQUIVALENT,
    NUMBERS,
    REMARKS,
    SAME_MEANING,
    SCALES,
    SCHEDULES,
    TRL_BATCH,
    TRL_GENERATIONS,
    TRL_LEARNING_RATE,
    TRL_LENGTH,
    WHOLE_NUMBERS,
    WITHOUT_EFFECT,
)
from groupwise.training.init.foreign_python import ROWS, SPLIT, Unread, entry_name
from groupwise.training.init.foreign_rewards import (
    CODE_REWARDS,
    OPEN_R1_REWARDS,
    PARAMETERS,
    is_open_r1,
    reward_entry,
)

CODE = "init_failed"
PIPELINE = "preprocessing_pipeline"
OF_INIT = '"""Written by groupwise init:'
"""How the module with copied functions begins; no other file is overwritten."""

KeyStatus = Literal["taken", "default", "no effect", "no equivalent", "unread"]
"""The status of a key: `default` has the default of both sides; `no effect` is overridden, or does not influence what is learnt."""


@dataclass(slots=True)
class Translation:
    """A foreign config during its translation."""

    file: Path
    settings: dict[str, Any]
    """The file's keys under their usual names."""
    processes: int
    written: Mapping[str, str] = field(default_factory=dict[str, str])
    """Usual name → name in the file, where they differ."""
    own_module: str = "rewards.py"
    """Path of the module that holds the file's own functions, or should."""
    open_r1: bool = False
    flag_uses: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the script does with each flag of the command that is its own, such as `line 12 reads it`."""
    choices: dict[str, Choice] = field(default_factory=dict[str, Choice])
    findings: list[Finding] = field(default_factory=list[Finding])
    key_statuses: dict[str, KeyStatus] = field(default_factory=dict[str, KeyStatus])
    chat_template: str | None = None
    """The chat template, which is written to a separate file."""

    def choose(self, key: str, value: Any, reason: str) -> None:
        """Write a value under our key."""
        self.choices[key] = Choice(tuple(key.split(".")), value, reason)

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a foreign key, which then counts as taken."""
        if name in self.settings:
            self.key_statuses.setdefault(name, "taken")
        return self.settings.get(name, default)

    def origin(self, name: str) -> str:
        """The reason for a value that comes from the file."""
        return f"From {self.as_written(name)} of {self.file.name}."

    def as_written(self, name: str) -> str:
        """The name that the file has for a key."""
        return self.written.get(name, name)

    def remark(self, name: str, text: str) -> None:
        """Report that a key means something else here, or has no effect."""
        self.findings.append(Finding(self.as_written(name), "ok", text))

    def lose(self, name: str, text: str, status: KeyStatus = "no equivalent") -> None:
        """Report a setting that is not taken over, and why."""
        self.findings.append(Finding(self.as_written(name), "warning", text))
        if name in self.settings or status == "unread":
            self.key_statuses[name] = status

    @property
    def names_data(self) -> bool:
        """True if the config names the source of the rows."""
        return bool(self.choices.keys() & {"data.dataset_name", "data.dataset_mixture"})


def init_from(
    file: Path,
    *,
    processes: int | None = None,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    force: bool = False,
    on_finding: OnFinding | None = None,
) -> Report:
    """Translate a foreign config into a file of ours: the command `groupwise init --from`.

    `processes` is the number of devices of the foreign run, for each of which its batch sizes count. `overrides`, `key=value`, take
    precedence over the file. Raises `UsageError`, and `ConfigError` for overrides that cannot be.
    """
    foreign = read_foreign(file)
    target = out or file.with_name(f"{file.stem}-groupwise.yaml")
    functions = target.with_suffix(".py")
    if target.exists() and not force:
        raise UsageError(
            f"{target} exists and is kept. Give --force to overwrite it, or another name with --out."
        )
    if foreign.own_functions and functions.exists() and not _is_ours(functions):
        raise UsageError(
            f"{functions}, where the functions of {file.name} would be copied, exists and is kept. Give another name with --out."
        )
    own_module = file.with_name("rewards.py") if file.suffix != ".py" else file
    if foreign.own_functions:
        own_module = functions
        if pipeline := foreign.settings.get(PIPELINE):
            foreign.settings[PIPELINE] = f"{functions}{pipeline}"
    translation = translate(
        file, foreign, processes or _device_count(foreign.settings), str(own_module)
    )
    _apply_overrides(translation, overrides)
    beside: list[Path] = []
    if foreign.own_functions:
        beside.append(functions)
        title = f'{OF_INIT} what {target.name} needs of {file.name}."""\n\n'
        functions.write_text(title + foreign.own_functions)
    if translation.chat_template is not None:
        template = target.with_suffix(".jinja")
        template.write_text(translation.chat_template)
        beside.append(template)
        translation.choose(
            "model.chat_template", str(template), translation.origin("chat_template")
        )
    findings = Findings(on_finding)
    for choice in translation.choices.values():
        findings.add(Finding(choice.key, "ok", json.dumps(choice.value), choice.reason))
    findings.extend(translation.findings)
    sections = list(RunConfig.model_fields)
    choices = sorted(
        translation.choices.values(), key=lambda choice: sections.index(choice.path[0])
    )
    given = ""
    rows = foreign.settings.get("train_dataset")
    if not translation.names_data:
        makes_rows = f"def {ROWS}(" in (foreign.own_functions or "")
        given = f" --task-module {functions if makes_rows else 'TASK.py'}"
    elif isinstance(rows, Unread) and re.search(r"\bmap\b|\(", rows.written):
        given = f" data.{PIPELINE}=FILE.py:FUNCTION"  # without it, the rows have no prompts
    words = [
        f"groupwise check --config {target}{given}",
        f"groupwise rl --config {target}{given} --dry-run",
        f"groupwise rl --config {target}{given}",
    ]
    target.write_text(render(f"Written by groupwise init from {file.name}.", words, choices))
    config = load_config(target).config
    details = {
        "file": str(target),
        "files_beside": [str(path) for path in beside],
        "command": "rl",
        "config": resolved_values(config),
        "keys": {
            translation.as_written(name): status
            for name, status in translation.key_statuses.items()
        },
        "next": words,
    }
    return Report(f"{target} from {file}", tuple(findings.found), CODE, details)


def _apply_overrides(translation: Translation, overrides: Sequence[str]) -> None:
    """Replace what was translated by the user's own values, and drop what these exclude. Raises ConfigError."""
    excluded_by = EXCLUDED_BY | {("algorithm", "preset"): ("algorithm", "type")}
    for path, value in map(parse_override, overrides):
        chosen = [choice for choice in translation.choices.values() if choice.key != ".".join(path)]
        for choice in chosen:
            is_section = path[: len(choice.path)] == choice.path  # such as `lora: null`
            is_within = choice.path[: len(path)] == path
            is_excluded = value is not None and excluded_by.get(choice.path) == path
            if is_section or is_within or is_excluded:
                del translation.choices[choice.key]
        key = ".".join(path)
        translation.findings = [
            finding
            for finding in translation.findings
            if finding.level != "warning" or key not in (finding.name, *_our_key(finding.name))
        ]
        translation.choose(key, value, "given on the command line")
    if overrides:
        load_config(_tree(translation))


def _our_key(name: str) -> tuple[str, ...]:
    """Our key for a key of the file, if one value of ours replaces it."""
    key = "rewards.reward_funcs" if name == "reward_funcs" else SAME_MEANING.get(name)
    return () if key is None else (key,)


def _tree(translation: Translation) -> dict[str, Any]:
    """The config so far."""
    tree: dict[str, Any] = {}
    for choice in translation.choices.values():
        section = tree
        for part in choice.path[:-1]:
            section = section.setdefault(part, {})
        section[choice.path[-1]] = choice.value
    return tree


def _is_ours(module: Path) -> bool:
    """True if an earlier `init` has written this module."""
    return module.read_bytes().startswith(OF_INIT.encode())


COUNTED_IN_STEPS = (
    "training.max_steps",
    "training.warmup_steps",
    "eval.eval_steps",
    "run.save_steps",
    "run.logging_steps",
)
"""Keys whose value is a number of steps."""


# --- translating ---------------------------------------------------------------------------------


def translate(file: Path, foreign: ForeignConfig, processes: int, own_module: str) -> Translation:
    """Our choices for the foreign keys, and the status of each key."""
    translation = Translation(
        file, {}, processes, foreign.written, own_module, flag_uses=foreign.flag_uses
    )
    for name, value in foreign.settings.items():
        _read_key(translation, name, value)
    translation.open_r1 = (
        is_open_r1(foreign.settings)
        and file.suffix not in (".py", ".ipynb")
        and not foreign.own_functions
    )
    for step in (
        _translate_model,
        _translate_lora,
        _remark_on_dropout,
        _translate_batch,
        _translate_length,
        _translate_algorithm,
        _translate_schedule,
        _translate_optimiser,
        _translate_data,
        _translate_split,
        _translate_rewards,
        _translate_callbacks,
        _translate_run,
        _translate_eval_temperature,
    ):
        step(translation)
    for name, key in SAME_MEANING.items():
        if name in translation.settings and name not in translation.key_statuses:
            _take_unchanged(translation, name, key)
    for name in translation.settings:
        if name not in translation.key_statuses:
            _report_not_taken(translation, name)
    _count_in_our_steps(translation)
    _leave_out_invalid_values(translation)
    options = " ".join(
        [
            *(choice.reason for choice in translation.choices.values()),
            *(f"{finding.name} {finding.measured}" for finding in translation.findings),
        ]
    )
    for name, status in translation.key_statuses.items():
        if status == "taken" and not re.search(
            rf"\b{re.escape(translation.as_written(name))}\b", options
        ):
            translation.key_statuses[name] = "default"  # it set what is the default here
    _report_ineffective_keys(translation)
    return translation


def _report_ineffective_keys(translation: Translation) -> None:
    """Report in one line all keys without effect, and in another all keys at their defaults."""
    remarked_names = {finding.name for finding in translation.findings}
    for outcome, subject, text in (
        (
            "no effect",
            "keys without effect",
            "do not change what is learnt here",
        ),
        ("default", "keys at a default", "have their default values"),
    ):
        names = [
            name
            for name, status in translation.key_statuses.items()
            if status == outcome and name not in remarked_names
        ]
        if names:
            translation.remark(subject, f"{text}: {', '.join(names)}")


def _read_key(translation: Translation, name: str, value: Any) -> None:
    """Keep a usable value; for any other, set the status of its key."""
    parsed_value = _parse_number(name, value)
    decide = ("train_dataset", "eval_dataset", "peft_config", "args")
    has_no_effect = (name in WITHOUT_EFFECT and name not in decide) or (
        name == "model_name_or_path" and translation.file.suffix == ".py"
    )
    if name in MAY_BE_NULL and (value is None or value == 0):
        translation.choose(SAME_MEANING[name], None, translation.origin(name))
        translation.key_statuses[name] = "taken"
    elif not (objection := _rejection_reason(name, parsed_value)):
        if _is_at_default(name, parsed_value):
            translation.key_statuses[name] = "default"
        else:
            translation.settings[name] = parsed_value
    elif name in NO_EQUIVALENT:
        translation.lose(name, f"is not taken over: {NO_EQUIVALENT[name]}")
        translation.key_statuses[name] = "no equivalent"
    elif has_no_effect:
        translation.key_statuses[name] = "no effect"
    else:
        translation.lose(name, objection, "unread")


def _device_count(settings: Mapping[str, Any]) -> int:
    """The number of devices of the run, if the file shows it: a dumped config has the number of completions of all devices and of each."""
    count = settings.get("num_processes")
    names = ("generation_batch_size", "per_device_train_batch_size", "steps_per_generation")
    total, device, steps = (settings.get(name) for name in names)
    if not isinstance(count, int) and all(
        isinstance(number, int) for number in (total, device, steps)
    ):
        count = cast("int", total) // max(1, cast("int", device) * cast("int", steps))
    return max(1, count) if isinstance(count, int) else 1


def _leave_out_invalid_values(translation: Translation) -> None:
    """Leave out the values that no config of ours can have, and report why."""
    for _ in range(len(translation.choices)):
        try:
            load_config(_tree(translation))
            return
        except ConfigError as error:
            problems = re.findall(r"(?m)^config: ([\w.]+)((?: is|:) .*)", str(error))
        invalid_keys = [(key, text) for key, text in problems if key in translation.choices]
        for key, text in dict(invalid_keys).items():
            # It may have been removed with another key that needs it.
            if key in translation.choices:
                _leave_out(translation, key, f"{key}{text.rstrip('.')}")
        if not invalid_keys:
            return  # errors that remain are reported when the written file is read


def _leave_out(translation: Translation, key: str, why: str) -> None:
    source = re.match(r"From ([\w.]+)", translation.choices.pop(key).reason)
    if source is not None:
        usual = {written: name for name, written in translation.written.items()}
        name = usual.get(source[1], source[1])
        translation.lose(name, f"is not taken over: {why}", "unread")
    if key == "model.name":
        translation.choose(key, "tiny", "Put yours here.")
    if key in ("data.dataset_name", "data.dataset_mixture"):
        for other_key in [
            chosen_key for chosen_key in translation.choices if chosen_key.startswith("data.")
        ]:
            if other_key.removeprefix("data.") in DatasetConfig.model_fields:
                _leave_out(translation, other_key, "nothing says where the rows come from")


def _parse_number(name: str, value: Any) -> Any:
    """A number that is written as text, because TRL's YAML reads 1e-6 as text."""
    if name in NUMBERS and isinstance(value, str):
        try:
            return int(value) if value.isdecimal() else float(value)
        except ValueError:
            return value
    return value


def _is_at_default(name: str, value: Any) -> bool:
    """True if a key changes nothing: it is empty, or has the default of both TRL and this package."""
    if value is None or (isinstance(value, str | list | dict) and not value):
        return True
    default = DEFAULTS.get(name)
    return name in DEFAULTS and (
        value in default if isinstance(default, list) else value == default
    )


def _rejection_reason(name: str, value: Any) -> str | None:
    """Why a value cannot be taken over; None if it can."""
    if isinstance(value, Unread):
        return f"is not taken over: {value.explanation}. {value.remedy}"
    if value is None or name not in NUMBERS:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return f"is not taken over: {shorten(repr(value), 40)} is not a number. Edit the written config"
    if (
        name in WHOLE_NUMBERS
        and value != int(value)
        and not (name == "warmup_steps" and 0 < value < 1)
    ):
        return f"is not taken over: {value} is a share of the run there; here it is a whole number"
    if name in WHOLE_NUMBERS and value == 0 and name not in MAY_BE_ZERO:
        return "is not taken over: it must be at least 1"
    return None


def _take_unchanged(translation: Translation, name: str, key: str) -> None:
    """Take a value whose key has the same meaning here, if our section has that key."""
    section, _, own_key = key.partition(".")
    choice = translation.choices.get("algorithm.type")
    algorithm = choice.value if choice else "dapo"
    knobs = {knob.name for knob in fields(ALGORITHMS[algorithm])}
    if section == "data" and own_key in DatasetConfig.model_fields and not translation.names_data:
        translation.lose(
            name,
            f"is not taken over: {key} has no effect until data.dataset_name says where the rows come from",
        )
    elif section == "algorithm" and own_key not in knobs:
        translation.lose(
            name,
            f"is not taken over: {algorithm} has no {own_key}",
        )
    else:
        translation.choose(key, translation.take(name), translation.origin(name))


def _choose_or_default(translation: Translation, key: str, name: str, default: Any) -> Any:
    """Write a foreign key's value under ours, or TRL's default if the file lacks the key. Returns the value."""
    reason = translation.origin(name) if name in translation.settings else "TRL's default."
    value = translation.take(name, default)
    translation.choose(key, value, reason)
    return value


def _report_not_taken(translation: Translation, name: str) -> None:
    """Report a key that is not taken over."""
    value = translation.settings[name]
    foreign = foreign_key(RunConfig, name)
    if name in NO_EQUIVALENT:
        translation.lose(name, f"is not taken over: {NO_EQUIVALENT[name]}")
    elif name in WITHOUT_EFFECT or name.startswith("unsloth_"):
        translation.key_statuses[name] = "no effect"
        if name in REMARKS and value is not False:
            translation.remark(name, REMARKS[name])
    elif use := translation.flag_uses.get(name):
        translation.key_statuses[name] = "taken"
        translation.remark(name, f"is a flag of the script itself: {use}")
    elif foreign is not None:
        translation.lose(name, f"is not taken over: {foreign.advice}")
    else:
        translation.lose(name, "is not taken over: nothing here has that name")


def _translate_model(translation: Translation) -> None:
    if "model_name_or_path" not in translation.settings:
        translation.choose(
            "model.name", "tiny", f"{translation.file.name} names no model: put yours here."
        )
        if "model_name_or_path" not in {finding.name for finding in translation.findings}:
            translation.lose(
                "model_name_or_path",
                "is not in the file: model.name is `tiny` until you name yours",
            )
    if translation.settings.get("load_in_4bit") or translation.settings.get("load_in_8bit"):
        translation.choose(
            "model.backend", "unsloth", "Weights in 4 or 8 bits are held by this backend."
        )
    if (checkpointing := translation.take("gradient_checkpointing")) is not None:
        translation.choose(
            "training.gradient_checkpointing",
            bool(checkpointing),
            translation.origin("gradient_checkpointing"),
        )
    template = translation.take("chat_template")
    if isinstance(template, str):
        if "{" in template:
            translation.chat_template = template
        else:
            translation.choose("model.chat_template", template, translation.origin("chat_template"))


def _translate_lora(translation: Translation) -> None:
    call = translation.settings.pop("lora_call", "")
    translation.key_statuses.pop("lora_call", None)
    keys = ("lora_r", "lora_alpha", "lora_target_modules", "use_peft")
    source_key = "full_finetuning" if translation.take("full_finetuning") else "use_peft"
    is_full = (
        source_key == "full_finetuning" or translation.key_statuses.get("use_peft") == "default"
    )
    if is_full or not (call or any(key in translation.settings for key in keys)):
        translation.choose(
            "lora",
            None,
            translation.origin(source_key)
            if source_key in translation.settings
            else "TRL trains all weights unless use_peft or a LoraConfig says otherwise.",
        )
        for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora"):
            if name in translation.settings:
                translation.key_statuses[name] = "no effect"
        return
    if translation.take("use_peft"):
        translation.remark("use_peft", "trains an adapter, as the section lora does here")
    elif call == "":
        translation.remark(
            "use_peft",
            "is not in the file, where TRL trains all weights: lora is taken for what is meant",
        )
    for key, default in zip(("r", "alpha", "dropout"), LORA_DEFAULTS[call], strict=True):
        origin = f"The default of {call or 'TRL'}."
        name = f"lora_{key}"
        value = translation.take(name, default)
        if name in translation.settings or key != "dropout" or default:
            translation.choose(
                f"lora.{key}",
                value,
                translation.origin(name) if name in translation.settings else origin,
            )
    modules = translation.take("lora_target_modules")
    if modules:
        all_linear = modules in ("all-linear", ["all-linear"])
        module_names = cast("list[Any]", modules) if isinstance(modules, list) else [modules]
        translation.choose(
            "lora.target_modules",
            "all-linear" if all_linear else module_names,
            translation.origin("lora_target_modules"),
        )
    elif call != "get_peft_model":
        translation.remark(
            "lora_target_modules",
            "is not in the file, where peft then takes few layers, mostly q_proj and v_proj; lora.target_modules takes every linear layer",
        )


def _remark_on_dropout(translation: Translation) -> None:
    choice = translation.choices.get("lora.dropout")
    if choice is not None and choice.value:
        translation.remark(
            "lora_dropout",
            f"{choice.value} is taken over. With dropout, transformers' modules train the model, which on a CPU takes several times as "
            "long as the native code that trains it with lora.dropout=0, the default here",
        )


def _translate_batch(translation: Translation) -> None:
    """Translate the batch size: a step of TRL has per_device_train_batch_size × gradient_accumulation_steps × processes completions."""
    generations = _choose_or_default(
        translation, "training.num_generations", "num_generations", TRL_GENERATIONS
    )
    device, accumulation = (
        translation.take("per_device_train_batch_size", TRL_BATCH),
        translation.take("gradient_accumulation_steps", 1),
    )
    completions = device * accumulation * translation.processes
    prompts = Fraction(completions, generations)
    prompt_count = max(1, round(prompts))
    translation.choose(
        "training.prompts_per_step",
        prompt_count,
        f"per_device_train_batch_size {device} × gradient_accumulation_steps {accumulation} × "
        f"{translation.processes} {'process' if translation.processes == 1 else 'processes'} ÷ num_generations {generations}.",
    )
    if prompts != prompt_count:
        translation.remark(
            "per_device_train_batch_size",
            f"{completions} completions do not divide into groups of {generations}: a step has {counted(prompt_count, 'group')}",
        )
    generation_batch = translation.take("generation_batch_size")
    steps = translation.take("steps_per_generation")
    if generation_batch is not None and steps is not None:
        # A dumped config has both; steps_per_generation suffices.
        translation.key_statuses["generation_batch_size"] = "no effect"
    elif generation_batch is not None:
        steps = Fraction(generation_batch, device * translation.processes)
    reuse = Fraction(accumulation if steps is None else steps, accumulation)
    name = (
        "steps_per_generation"
        if "steps_per_generation" in translation.settings
        else "generation_batch_size"
    )
    if reuse > 1 and reuse.denominator == 1:
        translation.choose(
            "training.minibatches",
            int(reuse),
            f"{name} over gradient_accumulation_steps: updates for each generation.",
        )
        translation.choose(
            "training.prompts_per_step",
            max(int(reuse), round(prompts * reuse)),
            f"{translation.choices['training.prompts_per_step'].reason} Times {int(reuse)}: all groups sampled before these updates.",
        )
    elif reuse < 1:
        translation.remark(
            name,
            f"{translation.settings[name]} has a step's completions drawn in several goes, by the same weights; here it is one",
        )
    elif reuse > 1:
        translation.lose(
            name,
            f"{translation.settings[name]} is not taken over: that makes {reuse} updates of what is sampled at once, and here it is a "
            "whole number",
        )


def _translate_length(translation: Translation) -> None:
    key, whole = "sampler.max_completion_length", translation.settings.get("max_seq_length")
    _choose_or_default(translation, key, "max_completion_length", TRL_LENGTH)
    if "max_completion_length" not in translation.settings and isinstance(whole, int):
        half = min(TRL_LENGTH, max(1, whole // 2))
        translation.choose(
            key, half, f"Half of max_seq_length, at most {TRL_LENGTH}: the file says no number."
        )
    steps = translation.take("max_steps", -1)
    if steps > 0:
        translation.choose("training.max_steps", int(steps), translation.origin("max_steps"))
        if "num_train_epochs" in translation.settings:
            translation.key_statuses["num_train_epochs"] = "no effect"
    else:
        translation.choose("training.max_steps", None, "The number of epochs decides the length.")
        _choose_or_default(translation, "training.num_train_epochs", "num_train_epochs", 3)
    if stop := translation.take("stop"):
        texts = cast("list[Any]", stop) if isinstance(stop, list) else [stop]
        translation.choose("sampler.stop", texts, translation.origin("stop"))


def _count_in_our_steps(translation: Translation) -> None:
    """Divide numbers of steps: TRL counts each update, and we count once for all updates from the same completions."""
    updates = 1
    for key in ("training.minibatches", "training.num_iterations"):
        if key in translation.choices:
            updates *= max(1, int(translation.choices[key].value))
    for key in COUNTED_IN_STEPS:
        choice = translation.choices.get(key)
        if choice is None or choice.value is None:
            continue
        steps, remainder = divmod(int(choice.value), updates)
        if (steps := steps + bool(remainder)) != choice.value:
            quotient = f"{choice.value} ÷ {updates}{', rounded up' if remainder else ''}"
            reason = f"TRL counts updates, and a step here makes {updates}: {quotient}."
            translation.choose(key, steps, f"{choice.reason} {reason}")


def _translate_algorithm(translation: Translation) -> None:
    loss = str(translation.take("loss_type", "dapo"))
    level = translation.take("importance_sampling_level", "token")
    of_rollout = level == "sequence" and loss not in ("luspo", "vespo")
    kind = "gspo" if of_rollout else LOSSES.get(loss)
    origin = "importance_sampling_level sequence" if kind == "gspo" else f"loss_type {loss}"
    if level not in ("token", "sequence"):
        translation.lose(
            "importance_sampling_level",
            f"{level} is not taken over: there are token, and sequence as gspo",
        )
    if kind is None:
        translation.lose(
            "loss_type",
            f"{loss} is not an algorithm here: there are {', '.join(LOSSES)}, and `dapo` replaces it",
        )
        kind = "dapo"
    if kind == "dapo":
        is_given = "loss_type" in translation.settings
        reason = f"From {origin}." if is_given else f"{origin}: the loss that TRL has by default."
        translation.choose("algorithm.preset", "trl_default", reason)
        if loss == "bnpo":
            translation.remark(
                "loss_type",
                "bnpo divides by the tokens of each device's batch; here it is all tokens of the step",
            )
    else:
        translation.choose("algorithm.type", kind, f"From {origin}.")
    _remark_on_level(translation, kind, loss, level)
    scale = translation.take("scale_rewards")
    if kind == "dr_grpo":
        if scale in (False, "none"):
            translation.remark("scale_rewards", "none, as for every dr_grpo here")
        else:
            translation.remark(
                "scale_rewards",
                f"{'group, as TRL has it without that key' if scale is None else scale}, divides by the spread of rewards there; dr_grpo "
                "here never does. `algorithm.type: grpo` does, and divides by each rollout's length",
            )
    elif scale is not None:
        translation.choose(
            "algorithm.scale_rewards",
            SCALES.get(str(scale), "group"),
            translation.origin("scale_rewards"),
        )
        if str(scale) not in SCALES:
            translation.lose(
                "scale_rewards",
                f"{shorten(repr(scale), 40)} is not taken over: there are group, batch, none",
            )
    _translate_clip(translation, kind)
    _translate_correction(translation)


def _remark_on_level(translation: Translation, kind: str, loss: str, level: Any) -> None:
    """Say where a loss with one ratio for a rollout differs from TRL's with these keys."""
    if kind == "gspo" and loss != "grpo":
        translation.remark(
            "loss_type",
            f"{loss}{'' if 'loss_type' in translation.settings else ', as TRL has it without that key,'} "
            f"{LOSS_DIVISORS.get(loss, 'is another loss')} there; gspo here takes the mean of each rollout's tokens, and of the rollouts",
        )
    if kind == "luspo" and level == "token":
        translation.remark(
            "loss_type",
            "each token has its own ratio there without importance_sampling_level: sequence; luspo here has one for each rollout",
        )


def _translate_clip(translation: Translation, kind: str) -> None:
    """Translate the clip range for algorithms with another default or notation."""
    if kind in ("gspo", "luspo"):
        _choose_or_default(translation, "algorithm.epsilon", "epsilon", 0.2)
        high = "epsilon_high" if "epsilon_high" in translation.settings else "epsilon"
        _choose_or_default(translation, "algorithm.epsilon_high", high, 0.2)
    elif kind == "cispo":
        if isinstance(cap := translation.take("epsilon_high"), int | float) and cap > 1:
            translation.choose(
                "algorithm.epsilon_high",
                cap - 1,
                f"{translation.origin('epsilon_high')} There it is the largest weight, here what it may have above 1.",
            )
        else:
            translation.lose(
                "epsilon_high",
                f"{'TRL without it' if cap is None else cap} caps each weight below 1; here the cap is 5, algorithm.epsilon_high 4",
            )


def _translate_correction(translation: Translation) -> None:
    """Translate TRL's correction for differences between vLLM's and the learner's log-probabilities."""
    names = [
        f"vllm_importance_sampling_{suffix}" for suffix in ("correction", "mode", "cap", "clip_min")
    ]
    correction, mode, cap, floor = map(translation.take, names)
    if not translation.settings.get("use_vllm") or not correction:
        for name in names:
            if name in translation.settings:
                translation.key_statuses[name] = "no effect"
        return
    translation.choose(
        "algorithm.importance_sampling_correction",
        mode or "sequence_mask",
        translation.origin(names[1] if mode else names[0])
        + " TRL corrects for differences between vLLM and the learner.",
    )
    if cap is not None:
        translation.choose("algorithm.importance_sampling_cap", cap, translation.origin(names[2]))
    if floor is not None:
        translation.choose(
            "algorithm.importance_sampling_floor", floor, translation.origin(names[3])
        )


def _translate_schedule(translation: Translation) -> None:
    _choose_or_default(translation, "training.learning_rate", "learning_rate", TRL_LEARNING_RATE)
    schedule = str(translation.take("lr_scheduler_type", "linear")).rpartition(".")[2].lower()
    scheduler_args = translation.take("lr_scheduler_kwargs", {})
    if isinstance(scheduler_args, str):
        with suppress(ValueError):
            scheduler_args = json.loads(scheduler_args)
    scheduler, default_args, difference = SCHEDULES.get(
        schedule, ("linear", {}, "is not a schedule of transformers")
    )
    if "lr_scheduler_type" in translation.settings:
        translation.choose(
            "training.lr_scheduler_type", scheduler, translation.origin("lr_scheduler_type")
        )
        if difference:
            translation.lose(
                "lr_scheduler_type", f"{schedule} {difference}; {scheduler} replaces it"
            )
    unsupported_args = (
        {
            name: value
            for name, value in cast("Mapping[str, Any]", scheduler_args).items()
            if value != default_args.get(name)
        }
        if isinstance(scheduler_args, Mapping)
        else cast("Any", scheduler_args)
    )
    if unsupported_args:
        floor = (
            "cosine ends at 0 here"
            if "min_lr" in str(unsupported_args)
            else f"{scheduler} has no such argument"
        )
        translation.lose(
            "lr_scheduler_kwargs",
            f"{shorten(repr(unsupported_args), 80)} is not taken over: {floor}",
        )
    _translate_warmup(translation, schedule)


def _translate_warmup(translation: Translation, schedule: str) -> None:
    warmup = translation.take("warmup_steps", 0)
    if "warmup_steps" in translation.settings:
        key = "warmup_ratio" if warmup < 1 else "warmup_steps"
        translation.choose(f"training.{key}", warmup, translation.origin("warmup_steps"))
        if "warmup_ratio" in translation.settings:
            translation.key_statuses["warmup_ratio"] = (
                "no effect"  # the steps have priority, in TRL as well
            )
    if schedule == "constant" and translation.settings.keys() & {"warmup_steps", "warmup_ratio"}:
        for name in ("warmup_steps", "warmup_ratio"):
            translation.choices.pop(f"training.{name}", None)
            if name in translation.settings:
                translation.key_statuses[name] = "no effect"
        translation.remark(
            "lr_scheduler_type", "constant has no warm-up in transformers, so none is taken over"
        )


def _translate_optimiser(translation: Translation) -> None:
    optimiser = str(translation.take("optim", "adamw"))
    if "adamw" not in optimiser:
        translation.lose("optim", f"{optimiser} is not taken over: the optimiser is AdamW")
    elif "8bit" in optimiser:
        translation.remark(
            "optim", f"{optimiser} holds its state in 8 bits; AdamW does so in float32 here"
        )


def _translate_rewards(translation: Translation) -> None:
    names = translation.take("reward_funcs", list(OPEN_R1_REWARDS) if translation.open_r1 else [])
    reward_names = cast("list[Any]", names) if isinstance(names, list) else [names]
    module = translation.own_module
    entries: list[Any] = []
    weights: list[Any] = []
    for name, weight in zip(
        reward_names, _reward_weights(translation, len(reward_names)), strict=True
    ):
        entry, remark, is_lost = reward_entry(
            name, module, translation.settings, translation.open_r1
        )
        if entry is not None and entry in entries:
            remark, is_lost = (
                f"`{name}` is not taken over: `{entry}` does the same, and is there already",
                True,
            )
        elif entry is not None:
            entries.append(entry)
            weights.append(weight)
        if remark:
            (translation.lose if is_lost else translation.remark)("reward_funcs", remark)
    _choose_rewards(translation, entries, weights)
    is_unwritten = translation.file.suffix == ".ipynb" and module.endswith("rewards.py")
    if is_unwritten and any(str(name).startswith(":") for name in reward_names):
        translation.remark(
            "reward_funcs",
            f"are functions of the notebook: write them into {module} beside the config",
        )
    if (
        translation.open_r1
        and translation.names_data
        and {*CODE_REWARDS} & {*map(str, reward_names)}
    ):
        translation.choose(
            "data.columns",
            {"test_cases": "verification_info.test_cases"},
            "Where the data of open-r1 have the tests of code.",
        )
    modules = {str(item).rpartition(":")[0] for item in entries}
    for module in sorted(name for name in modules if name.endswith(".py")):
        path = Path(module)
        statement = trains_when_imported(path.read_bytes()) if path.is_file() else None
        if statement is not None:
            translation.findings.append(
                Finding(
                    "reward_funcs",
                    "warning",
                    f"{module} trains when it is imported ({statement}), as it is for its rewards",
                    "the run would begin with that training",
                    'put it below `if __name__ == "__main__":`, or the rewards into a file of their own',
                )
            )


def _translate_callbacks(translation: Translation) -> None:
    callbacks: list[Any] = []
    for entry in cast("list[Any]", translation.take("callbacks") or []):
        if isinstance(entry, Unread):
            text = f"`{shorten(entry.written, 60)}` is not taken over: {entry.explanation}. {entry.remedy}"
            translation.lose("callbacks", text)
            continue
        name = entry_name(entry)
        path = f"{translation.own_module}{name}" if name.startswith(":") else name
        callbacks.append({**entry, "name": path} if isinstance(entry, dict) else path)
    if callbacks:
        translation.choose("callbacks", callbacks, translation.origin("callbacks"))
        translation.key_statuses["callbacks"] = "taken"


def _choose_rewards(translation: Translation, rewards: list[Any], weights: list[Any]) -> None:
    # Keys of the file that became parameters of a reward are taken; the others equal the default.
    dict_entries = [cast("dict[str, Any]", entry) for entry in rewards if isinstance(entry, dict)]
    entries_text: list[str] = []
    for reward, parameters in PARAMETERS.items():
        for name, (key, default) in parameters.items():
            if name in translation.settings:
                is_used = any(entry["name"] == reward and key in entry for entry in dict_entries)
                unused = "default" if translation.settings[name] == default else "no effect"
                translation.key_statuses.setdefault(name, "taken" if is_used else unused)
                entries_text += [name] if is_used else []
    if not rewards:
        if "reward_funcs" in {*translation.settings, *translation.key_statuses}:
            missing = Finding(
                "reward_funcs",
                "warning",
                "no rewards were taken over",
                "the config cannot train yet",
                "Name them under rewards.reward_funcs, as FILE.py:FUNCTION",
            )
            translation.findings.insert(0, missing)
        if "reward_weights" in translation.settings:
            translation.lose(
                "reward_weights", "is not taken over: no reward is left that it weighs"
            )
        return
    is_given = "reward_funcs" in translation.settings
    origin = translation.origin("reward_funcs") if is_given else "open-r1's default."
    if entries_text:
        origin += f" Their parameters are from {', '.join(entries_text)}."
    translation.choose("rewards.reward_funcs", rewards, origin)
    translation.key_statuses |= {"reward_funcs": "taken"} if is_given else {}
    is_weighted = None not in weights
    if is_weighted:
        translation.choose("rewards.reward_weights", weights, translation.origin("reward_weights"))
    if len(rewards) > 1 or (is_weighted and weights != [1]):
        _choose_success_part(translation, rewards)


def _choose_success_part(translation: Translation, rewards: list[Any]) -> None:
    """Name the reward that says whether a completion is right: the weighted total of several can reach 1 although it is wrong."""
    texts = [
        str(cast("dict[str, Any]", entry)["name"] if isinstance(entry, dict) else entry)
        for entry in rewards
    ]
    names = [text.rpartition(":")[2] for text in texts]
    by_word = (name for name in names if re.search(r"correct|exact|right|solved", name))
    part = part_of_success(names) or next(by_word, None)
    if part is None:
        translation.remark(
            "eval.success_part",
            "is not set: pass@k counts a completion as solved if the weighted total reaches 0.999. If one of "
            f"{', '.join(names)} is 1 for a right answer, name it there and as signals.accuracy_part",
        )
    else:
        translation.choose(
            "eval.success_part", part, "pass@k asks this reward, not the weighted total."
        )
        translation.choose(
            "signals.accuracy_part", part, "The signals and held-out results follow this reward."
        )


def _reward_weights(translation: Translation, count: int) -> list[Any]:
    """The weight of each reward, in order; all None if the file has no usable weights."""
    weights = translation.take("reward_weights")
    if weights is None:
        return [None] * count
    weight_list = cast("list[Any]", weights) if isinstance(weights, list) else [weights]
    numbers = all(isinstance(weight, int | float) for weight in weight_list)
    if len(weight_list) == count and numbers:
        return weight_list
    translation.lose(
        "reward_weights",
        f"{shorten(repr(weight_list), 60)} is not taken over: there are {count} rewards, and each has one number",
    )
    return [None] * count


def _translate_data(translation: Translation) -> None:
    name = "dataset_mixture" if "dataset_mixture" in translation.settings else "datasets"
    mixture: Any = translation.take(name)
    if isinstance(mixture, list):  # in TRL, the keys of a mixture are at the top level
        mixture = {
            "datasets": cast("Any", mixture),
            "test_split_size": translation.take("test_split_size"),
        }
    options = cast("Mapping[str, Any]", mixture if isinstance(mixture, Mapping) else {})
    sets = list(_translate_datasets(translation, name, options.get("datasets")))
    if sets:
        translation.choose("data.dataset_mixture", sets, translation.origin(name))
        for key in ("seed", "test_split_size"):
            if (value := options.get(key)) is not None:
                translation.choose(f"data.{key}", value, translation.origin(f"{name}, {key},"))
        for key in ("dataset_name", "dataset_config", "dataset_test_split"):
            if key in translation.settings:
                translation.lose(key, f"is not taken over: {name} names the data")
    elif "dataset_name" in translation.settings:
        translation.choose(
            "data.dataset_name",
            translation.take("dataset_name"),
            translation.origin("dataset_name"),
        )
    if mixture is not None and not sets:
        translation.lose(
            name, f"{shorten(repr(cast('Any', mixture)), 40)} is not taken over: it holds no sets"
        )
    if translation.open_r1 and translation.names_data:
        translation.choose(
            "data.prompt_format", "chat", "open-r1 makes each prompt what a user says in a chat."
        )


def _translate_split(translation: Translation) -> None:
    """Hold out the share of rows that a script's `train_test_split` holds out; datasets and we draw different rows."""
    if (share := translation.take(SPLIT)) is not None:
        translation.choose(
            "data.test_split_size",
            share,
            f"The share of {SPLIT} in {translation.file.name}, but of other rows. For the same rows, call save_to_disk('FOLDER') on its "
            "result there, and set data.dataset_name: FOLDER and data.dataset_test_split: test here, in place of this key.",
        )


def _evaluates(translation: Translation) -> bool:
    return translation.settings.get("eval_strategy", "no") not in ("no", False)


def _translate_datasets(
    translation: Translation, name: str, datasets: Any
) -> Iterator[dict[str, Any]]:
    """The datasets of a mixture, in the notation of open-r1 (`id`, `config`) or TRL (`path`, `name`)."""
    for dataset in cast("Sequence[Any]", datasets if isinstance(datasets, list) else ()):
        if not isinstance(dataset, Mapping):
            translation.lose(
                name, f"{shorten(repr(dataset), 40)} is not taken over: it is not a set"
            )
            continue
        options = {
            key: value
            for key, value in cast("Mapping[str, Any]", dataset).items()
            if value is not None
        }
        source = options.pop("id", None) or options.pop("path", None)
        entry: dict[str, Any] = {"source": source}
        for own_key, their_key in (
            ("config", "config"),
            ("config", "name"),
            ("split", "split"),
            ("weight", "weight"),
            ("weight", "fraction"),
        ):
            if their_key in options:
                entry[own_key] = options.pop(their_key)
        if columns := options.pop("columns", None):
            translation.remark(
                name,
                f"the columns {columns} of {source} are kept as all others are",
            )
        for key in options:
            translation.lose(name, f"{key} of {source} is not taken over: no set here has it")
        yield entry


def _translate_run(translation: Translation) -> None:
    output_dir = translation.take("output_dir")
    if isinstance(output_dir, str) and output_dir.strip("./ "):
        folder, origin = Path(output_dir), translation.origin("output_dir")
        parent = folder.parent if folder.parent != Path() else Path("runs")
        if translation.settings.get("run_name"):
            translation.choose("run.dir", str(folder), origin)
        else:
            translation.choose("run.dir", str(parent), origin)
            translation.choose("run.name", folder.name, origin)
    evaluates = translation.settings.get("do_eval") or _evaluates(translation)
    if "dataset_test_split" in translation.settings and not evaluates:
        translation.key_statuses["dataset_test_split"] = "no effect"
        translation.remark(
            "dataset_test_split",
            "is not taken over: without eval_strategy nothing is evaluated on it",
        )
    _translate_sinks(translation)
    eval_steps = translation.take("eval_steps")
    strategy = translation.take("eval_strategy")
    if _evaluates(translation) and "num_generations_eval" not in translation.settings:
        translation.remark(
            "eval_strategy",
            "TRL draws num_generations completions of each held-out prompt, at the temperature of training. Here it is one, always "
            "the most probable token; eval.samples_per_prompt and eval.temperature change that",
        )
    if strategy == "steps":
        steps_key = "eval_steps" if eval_steps else "logging_steps"
        steps = translation.take(steps_key, 10)
        origin = (
            translation.origin(steps_key) if steps_key in translation.settings else "TRL's default."
        )
        translation.choose("eval.eval_steps", steps, f"{origin} eval_strategy is steps.")
    else:
        translation.key_statuses |= {"eval_steps": "no effect"} if eval_steps else {}
        if _evaluates(translation):
            translation.lose(
                "eval_strategy", f"{strategy} is not taken over: eval.eval_steps counts steps"
            )
    if (
        translation.settings.get("push_to_hub") is not True
        or "hub_model_id" not in translation.settings
    ):
        for name in translation.settings.keys() & {
            "hub_model_id",
            "hub_model_revision",
            "hub_private_repo",
        }:
            translation.key_statuses[name] = "no effect"


def _translate_eval_temperature(translation: Translation) -> None:
    samples = translation.settings.get("num_generations_eval")
    if isinstance(samples, int) and samples > 1:
        temperature = translation.settings.get("temperature", 1.0)
        translation.choose("eval.temperature", temperature, "TRL evaluates as it trains.")


def _translate_sinks(translation: Translation) -> None:
    sinks = translation.take("report_to")
    sink_names = cast("list[Any]", sinks) if isinstance(sinks, list) else [sinks]
    supported = [
        sink for sink in sink_names if sink in ("wandb", "tensorboard", "trackio", "mlflow")
    ]
    if supported:
        translation.choose("run.report_to", supported, translation.origin("report_to"))
    for sink in sink_names:
        if sink not in (*supported, None, "none"):
            text = "is not taken over: there are wandb, tensorboard, trackio, mlflow"
            translation.lose("report_to", f"{sink} {text}")
    tables = {*supported} - {"tensorboard"}
    names = (
        {"wandb_project", "wandb_entity", "wandb_run_group"}
        if "wandb" not in supported
        else set[str]()
    )
    for name in translation.settings.keys() & (
        names | (set() if tables else {"log_unique_prompts"})
    ):
        translation.key_statuses[name] = "no effect"
        translation.remark(name, "is not taken over: report_to names no such sink")
