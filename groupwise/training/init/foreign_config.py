"""Reads the GRPO configs of TRL, open-r1 and Unsloth, in several file formats.

    .yaml, .yml, .json    its keys, also those inside sections; includes the output of GRPOConfig.to_dict()
    .sh, .txt             the flags of a command, `--num_generations 8`, the keys of the file that its `--config` names, and the rewards and
                          rows of the Python file that it runs
    .py, .ipynb           the literal arguments of GRPOConfig, LoraConfig, GRPOTrainer and Unsloth's loaders (foreign_python.py)

No file is executed. A config of another framework is refused by name, with the equivalents of its keys.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from groupwise.core.errors import ConfigError, UsageError
from groupwise.core.settings.tree import read_yaml
from groupwise.core.terminal.text import shorten
from groupwise.training.foreign_keys import foreign_to_rl
from groupwise.training.init.foreign_names import (
    ALIASES,
    DEFAULTS,
    NO_EQUIVALENT,
    SAME_MEANING,
    SECTION_ALIASES,
    WITHOUT_EFFECT,
)
from groupwise.training.init.foreign_python import (
    FLAG_USES,
    OWN_FUNCTIONS,
    Unread,
    of_notebook,
    of_python,
)

MAPPINGS = frozenset(
    {"chat_template_kwargs", "dataset_mixture", "dataset_mixer", "lr_scheduler_kwargs"}
)
"""Keys whose values are mappings, not sections."""
SECTIONS = frozenset(
    {
        "model_init_kwargs",
        "generation_kwargs",
        "peft_config",
        "quantization_config",
        "dataset",
        "args",
    }
)
"""Keys that may also be sections (in our configs or theirs), whose keys are read one by one."""
MAX_SHOWN_KEYS = 12
"""Largest number of another framework's keys that an error explains."""
GRPO_KEYS = frozenset(
    "num_generations max_completion_length reward_funcs beta loss_type max_prompt_length".split()
)  # fmt: skip
"""Every GRPO config has at least one of these keys."""


DEFAULT_FLAGS: Mapping[str, Any] = {
    "dataset_config": None,
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "eval_strategy": "no",
}
"""Flags of TRL's own scripts that decide about the rows, with their defaults."""


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework other than TRL, with the signs by which its files are recognised."""

    name: str
    keys: tuple[str, ...]
    """Paths of keys, one of which must exist; `&` joins keys that must exist together."""
    words: str = r"$^"
    """A regular expression for scripts; the default matches nothing."""


OTHER_FRAMEWORKS = (
    Framework("verl", ("actor_rollout_ref", "algorithm/adv_estimator"), r"\bverl\.trainer|^(from|import) verl\b"),
    Framework("SkyRL", ("trainer/algorithm", "trainer&generator", "environment/env_class"), r"\bskyrl(_train|_gym)?\b"),
    Framework("OpenRLHF", ("n_samples_per_prompt", "micro_rollout_batch_size", "actor_num_nodes"), r"\bopenrlhf\b"),
    Framework(
        "prime-rl",
        ("orchestrator", "rollouts_per_example", "max_async_level", "trainer&inference"),
        r"^(from|import) prime_rl\b|\buv run rl\b",
    ),
    Framework("ART", ("trajectory_groups",), r"^(from|import) art\b"),
    Framework("NeMo-RL", ("grpo/num_prompts_per_step", "policy&grpo"), r"\bnemo_rl\b"),
    Framework("Axolotl", ("base_model&trl", "base_model&rl"), r"\baxolotl train\b"),
    Framework("ms-swift", ("rlhf_type",), r"\bswift rlhf\b"),
    Framework("LLaMA-Factory", ("stage&finetuning_type",), r"\bllamafactory-cli\b"),
    Framework("tinker-cookbook", (), r"^(from|import) tinker(_cookbook)?\b"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ForeignConfig:
    """A foreign config as it is read."""

    settings: dict[str, Any]
    """The keys with their values, under their usual names."""
    written: dict[str, str]
    """Usual name → name in the file, of the keys that have another one there: `lora_r` → `r`."""
    own_functions: str | None = None
    """The source of a module with copies of the file's own functions, if they can be copied."""
    flag_uses: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the script does with each flag of the command that is its own, such as `line 12 reads it`."""


def read_foreign(file: Path) -> ForeignConfig:
    """The keys of a foreign config with their values. Raises UsageError for a file without any."""
    if not file.is_file():
        raise UsageError(f"--from: there is no file {file}.")
    try:
        text = file.read_text()
        tree = _parse_file(file, text)
    except ConfigError:
        raise
    except (SyntaxError, RecursionError, ValueError) as error:
        kind = {".py": "Python", ".ipynb": "a notebook", ".json": "JSON", ".toml": "TOML"}
        raise UsageError(
            f"--from: {file} is not {kind.get(file.suffix, 'text')}: {error}."
        ) from error
    if not isinstance(tree, Mapping):
        raise UsageError(f"--from: {file} holds {type(tree).__name__}, not keys with values.")
    tree = cast("Mapping[str, Any]", tree)
    paths = dict(_key_paths(tree))
    for framework in OTHER_FRAMEWORKS:
        keys = [key.replace("/", ".") for key in framework.keys]
        marks = [key for key in keys if all(part in paths for part in key.split("&"))]
        match = None if "GRPOTrainer" in text else re.search(framework.words, text, re.MULTILINE)
        if marks or (match and file.suffix in (".py", ".ipynb", ".sh", ".bash", ".txt")):
            evidence = marks[0].replace("&", " and ") if marks else match and match[0]
            hints = [
                f"\n  {path} {value}: {key.advice}"
                for path, value in paths.items()
                if isinstance(value, str | int | float)
                and not path.startswith("critic")
                and (key := foreign_to_rl().get(path.rpartition(".")[2])) is not None
                and key.kind == "renamed"
            ]
            raise UsageError(
                f"--from: {file} is a config of {framework.name} (it has {evidence}), and this reads those of TRL, open-r1 and Unsloth. "
                "Begin with `groupwise init --task-module TASK --model MODEL`, and write its values where they belong."
                + "".join(hints[:MAX_SHOWN_KEYS])
            )
    own_functions, flag_uses = tree.get(OWN_FUNCTIONS), tree.get(FLAG_USES, {})
    written: dict[str, str] = {}
    keys = {name: value for name, value in tree.items() if name not in (OWN_FUNCTIONS, FLAG_USES)}
    settings = _flatten(keys, written)
    if not settings.keys() & GRPO_KEYS:
        raise UsageError(
            f"--from: {file} has no key of a GRPO config (num_generations, max_completion_length, reward_funcs …). It has: "
            f"{', '.join(list(settings)[:12]) or 'none'}."
        )
    return ForeignConfig(settings, written, own_functions, flag_uses)


def _parse_file(file: Path, text: str) -> Any:
    match file.suffix:
        case ".py":
            return of_python(text)
        case ".ipynb":
            return of_notebook(json.loads(text).get("cells", ()))
        case ".json":
            return json.loads(text)
        case ".toml":
            return tomllib.loads(text)
        case ".sh" | ".bash" | ".txt":
            return _parse_command(file, text)
        case _:
            return _parse_yaml(file)


_YAML_1_1 = {"yes": True, "on": True, "no": False, "off": False}
"""Words that the YAML parser of transformers reads as true and false."""


def _parse_yaml(file: Path) -> dict[str, Any]:
    tree = read_yaml(file, "a config of TRL is a mapping of keys")
    unread_values = {
        ".".join(path): Unread("", 0, "no config can hold its value") for path in tree.unread
    }
    return {
        name: value
        if name.endswith("_strategy") or not isinstance(value, str)
        else _YAML_1_1.get(value.lower(), value)
        for name, value in tree.values.items()
    } | unread_values


def _parse_command(file: Path, text: str) -> dict[str, Any]:
    """The flags of a script: `--name value`, `--name=value`, a bare `--name` (true), and `some.key=value`."""
    flags: dict[str, Any] = {}
    scripts: list[str] = []
    for words in _split_commands(text):
        name = ""
        for word in words:
            flag = re.fullmatch(
                r"(?s)(?:--([A-Za-z][\w.-]*)|\+{0,2}(\w+\.[\w.]+)(?==))(?:=(.*))?", word
            )
            if flag:
                name = (flag[1] or flag[2]).replace("-", "_")
                flags[name] = True if flag[3] is None else _parse_scalar(flag[3])
                name = "" if flag[3] is not None else name
            elif word.endswith(".py") or word == "-m":
                name = ""  # earlier flags belonged to the launcher
                scripts += [word] if word.endswith(".py") else []
            elif name:
                previous = flags[name]
                if previous is True:
                    flags[name] = _parse_scalar(word)
                else:
                    values = (
                        cast("list[Any]", previous) if isinstance(previous, list) else [previous]
                    )
                    flags[name] = [*values, _parse_scalar(word)]
    config_path = flags.get("config")
    for path in (Path(str(config_path)), file.parent / str(config_path)):
        if config_path is not None and path.is_file() and path.suffix in (".yaml", ".yml"):
            flags = _parse_yaml(path) | flags
            break
    return _of_scripts(file, scripts, flags) | flags


def _of_scripts(file: Path, scripts: Sequence[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the Python file that makes the trainer, of those that a command runs with these flags."""
    places = [(Path(script), file.parent / script) for script in scripts]
    found = [next(filter(Path.is_file, paths), None) for paths in places]
    path = next((path for path in found if path and "GRPOTrainer" in path.read_text()), None)
    if path is None:
        missing = ", ".join(script for script, path in zip(scripts, found, strict=True) if not path)
        why = "the command runs `{}`, and there is no such file"
        unread = Unread(missing, 0, why, "Write the rewards into the config")
        return {"reward_funcs": unread} if missing else {}
    settings = of_python(path.read_text(), {**DEFAULT_FLAGS, **flags})
    settings.pop("args", None)  # the trainer's arguments are the flags themselves
    if "get_peft_config" in getattr(settings.get("peft_config"), "written", ""):
        del settings["peft_config"]  # and so is its adapter
    if OWN_FUNCTIONS not in settings and isinstance(settings.get("reward_funcs"), list):
        settings["reward_funcs"] = [
            f"{path}{name}" if str(name).startswith(":") else name
            for name in settings["reward_funcs"]
        ]
    return settings


def _split_commands(text: str) -> Iterator[list[str]]:
    """The words of each command; quoted text may extend over several lines."""
    buffer = ""
    for line in text.replace("\\\n", " ").splitlines():
        buffer += f"{line}\n"
        try:
            words = shlex.split(buffer, comments=True)
        except ValueError:
            continue
        yield words
        buffer = ""


def _parse_scalar(text: str) -> Any:
    if "$" in text:
        return Unread(text, 0, "only running the command tells what `{}` is")
    if re.fullmatch(r"(?i)true|false", text):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# Other frameworks


def _key_paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        for depth in range(len(parts := f"{prefix}{name}".split("."))):
            if depth < len(parts) - 1:
                yield ".".join(parts[: depth + 1]), {}
        yield f"{prefix}{name}", value
        if isinstance(value, Mapping):
            yield from _key_paths(cast("Mapping[str, Any]", value), f"{prefix}{name}.")


# TRL's


def _flatten(tree: Mapping[str, Any], written: dict[str, str], section: str = "") -> dict[str, Any]:
    """Flatten sections, except keys whose value is a mapping. If two keys have the same name, both are kept.

    Adds to `written` the names of the file for keys that are usually called otherwise.
    """
    settings: dict[str, Any] = {}
    alias_values: dict[str, Any] = {}
    for name, value in tree.items():
        is_key = name in {*MAPPINGS, *SAME_MEANING, *WITHOUT_EFFECT, *NO_EQUIVALENT, *DEFAULTS}
        if isinstance(value, Mapping) and (name in SECTIONS or not is_key):
            inner = _flatten(cast("Mapping[str, Any]", value), written, name)
            for key, inner_value in inner.items():
                _add_setting(settings, key, f"{name}.{key}", inner_value)
        elif (canonical_name := SECTION_ALIASES.get(section, {}).get(name, name)) in ALIASES:
            alias_values[canonical_name] = value
        else:
            _add_setting(settings, canonical_name, f"{section}.{name}", value)
    for name, value in alias_values.items():
        unsloth = name.endswith("checkpointing") and value == "unsloth"
        if ALIASES[name] not in settings:
            written[ALIASES[name]] = name
        _add_setting(settings, ALIASES[name], name, True if unsloth else value)
    return settings


def _add_setting(settings: dict[str, Any], name: str, long_name: str, value: Any) -> None:
    """Add a value under its name, or under the longer name if the short one already has another value."""
    previous = settings.get(name)
    if (
        name not in settings
        or previous is None
        or (isinstance(previous, Unread) and not isinstance(value, Unread))
    ):
        settings[name] = value
    elif previous != value and value is not None and not isinstance(value, Unread):
        settings[long_name] = Unread(
            str(value), 0, f"{name} says {shorten(repr(previous), 40)}, and that is taken"
        )
