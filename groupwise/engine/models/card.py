"""Writes the model card: a README.md next to the weights, about their origin, training and results, and how to load them.

It is made only from the run's folder, by the run itself or by a later export. Two equal runs have equal cards, so it contains no times; and
it may be published, so it contains no path of this machine.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from groupwise.core.settings.credentials import holds_secret, is_secret
from groupwise.core.terminal.text import one_line
from groupwise.core.types import TINY
from groupwise.engine.models.artefact import is_adapter
from groupwise.engine.models.bundled import BUNDLED
from groupwise.engine.models.hub import may_be_hub_id
from groupwise.runs.folder import RECORD, is_served, read_config
from groupwise.runs.store import Store

OMITTED_SECTIONS = ("callbacks", "run")
"""Sections of the config that do not affect the weights."""
PACKAGES = ("groupwise", "torch", "transformers", "peft")
"""Packages whose versions a run records (`packages_used`)."""
METHODS = {"rl": "reinforcement learning", "sft": "supervised fine-tuning"}
"""The training commands, as phrases for the card."""
DIGITS = 4
_LOCAL = re.compile(r"(?:~|\.{1,2})?/[^\n]*/?[^\n/]+/?")
"""Matches strings that look like a path on this machine."""


@dataclass(frozen=True, slots=True)
class WeightsLocation:
    """Where a reader of the card finds the files."""

    name: str = "."
    """A relative folder, or an id on the hub."""
    revision: str | None = None
    """Revision of a hub id; None means `main`."""
    file: str | None = None
    """The single file of a model for llama.cpp (GGUF)."""


def model_card(
    run: Path,
    weights: Path,
    steps: int,
    *,
    location: WeightsLocation | None = None,
    results: Mapping[str, Any] | None = None,
    merged: bool = False,
) -> str:
    """The card for a run's weights after `steps` steps.

    `results` are those of the run's summary (`held_out`, losses). Without them the card has the evaluations before that step. Those at
    the step itself are included only if the run is finished: otherwise some may be missing, and a card must not depend on when it is
    written.
    `merged`: the adapter was added to its base.
    """
    config = read_config(run)
    with Store.open(run / RECORD, readonly=True) as store:
        facts = store.get_meta()
        through = steps if facts["state"] == "finished" else steps - 1
        earlier = [r for r in store.evaluations(rows=False) if r.step <= through and not results]
    base = _base_name(config, facts)
    adapter = is_adapter(weights) and not merged
    settings = {key: value for key, value in config.items() if key not in OMITTED_SECTIONS}
    if lineage := facts.get("lineage"):  # name copied weights by their policy, not by their path
        copied = "adapter" if config["model"].get("adapter") else "name"
        settings["model"] = {**config["model"], copied: lineage[-1]["policy"]}
    kind = facts.get("kind", "rl")
    method = METHODS[kind] + (f" ({config['algorithm']['type']})" if kind == "rl" else "")
    title = "A low-rank adapter for" if adapter else "A model made from"
    paragraphs = [
        _yaml_header(config, facts, base, adapter=adapter),
        f"# {_escape_markdown(run.name)}",
        f"{title} {_inline_code(base)}, trained by {method} on {_trained_on(facts)} for {steps} steps.",
        *_lineage_lines(config, facts),
        *_result_sections(results or {}),
        *_evaluation_sections([(f"{r.name}, {r.step} steps", r.metrics) for r in earlier]),
        "## How to load it",
        _loading_example(config, base, location or WeightsLocation(), adapter=adapter),
        "## How it was trained",
        _training_data(config, facts),
        f"```json\n{json.dumps(_without_secrets(settings), indent=2, ensure_ascii=False)}\n```",
    ]
    # The run's packages may differ from those installed here; runs of earlier versions recorded none.
    if used := facts.get("packages"):
        versions = [
            _escape_markdown(f"{package} {' and '.join(package_versions)}")
            for package, package_versions in used.items()
        ]
        paragraphs.append(f"Made with {', '.join(versions)}.")
    return "\n\n".join(paragraphs) + "\n"


def results_of(summary: Mapping[str, Any] | None) -> dict[str, Any]:
    """Select the results of a run's summary that belong in its card."""
    losses = ("eval_loss_first", "eval_loss_last", "eval_loss_best")
    return {key: value for key, value in (summary or {}).items() if key in ("held_out", *losses)}


def packages_used(recorded: Mapping[str, list[str]] | None = None) -> dict[str, list[str]]:
    """Versions of the packages that train a run: those in `recorded`, then the installed one if it differs."""
    versions: dict[str, list[str]] = {}
    for package in PACKAGES:
        try:
            earlier, installed = (recorded or {}).get(package, []), metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        versions[package] = earlier if installed in earlier else [*earlier, installed]
    return versions


def _base_name(config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The model that the weights were made from: the policy whose full weights the run started from, else the configured model."""
    lineage = facts.get("lineage")
    if lineage and not config["model"].get("adapter"):
        return lineage[-1]["policy"]
    return _model_name(config["model"]["name"])


def _model_name(name: str) -> str:
    """A model's hub id, or the last part of its path."""
    if name in BUNDLED:
        return BUNDLED[name].hub_id
    on_hub = may_be_hub_id(name) and not Path(name).exists()
    return name if on_hub else Path(name).name


def _yaml_header(
    config: Mapping[str, Any], facts: Mapping[str, Any], base: str, *, adapter: bool
) -> str:
    """The card's YAML header, which the hub reads."""
    from ruamel.yaml import YAML

    kind = facts.get("kind", "rl")
    header: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["groupwise", kind, *([config["algorithm"]["type"]] if kind == "rl" else [])],
    }
    lineage = facts.get("lineage")
    root = base if adapter or not lineage else _model_name(lineage[0].get("model") or base)
    if may_be_hub_id(root):
        header["base_model"] = root
    if licence := config["run"].get("license"):
        header["license"] = licence
    text = io.StringIO()
    YAML().dump(header, text)
    return f"---\n{text.getvalue()}---"


def _trained_on(facts: Mapping[str, Any]) -> str:
    """The task, or the dataset if the run recorded one as its task's name (`task_facts`)."""
    if is_served(facts):
        return "prompts and rewards of a training server's clients"
    dataset = facts.get("dataset")
    return (
        _inline_code(_without_path(dataset))
        if dataset
        else f"the task {_inline_code(facts.get('task'))}"
    )


def _lineage_lines(config: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[str]:
    """The policies that the run started from, the latest first; nothing if it started from the base model."""
    adapter = config["model"].get("adapter")
    lineage: list[dict[str, Any]] = facts.get("lineage") or (
        [{"policy": _without_path(adapter)}] if adapter else []
    )
    sources: list[str] = []
    for earlier in reversed(lineage):
        kind = earlier.get("kind")
        trained = f" ({METHODS[kind]} on {_trained_on(earlier)})" if kind else ""
        sources.append(f"{_inline_code(earlier['policy'])}{trained}")
    if sources:
        yield f"It started from {', which started from '.join(sources)}."


def _result_sections(results: Mapping[str, Any]) -> Iterator[str]:
    held_out = results.get("held_out")
    if held_out:
        yield f"## Results on {int(held_out['prompts'])} held-out prompts"
        titles = {"base": "the base model", "before": "before", "after": "after"}
        columns = {title: held_out[key] for key, title in titles.items() if key in held_out}
        rows = [
            [name, *(_format_interval(values[name]) for values in columns.values())]
            for name in held_out["after"]
        ]
        yield _markdown_table(["", *columns], rows)
        yield (
            f"Change of the reward, prompt by prompt: {_format_interval(held_out['change'])}. In brackets: 95 % intervals over the prompts."
        )
    losses = [
        [name.removeprefix("eval_loss_"), _format_number(value)]
        for name, value in results.items()
        if name.startswith("eval_loss_")
    ]
    if losses:
        yield "## Loss on held-out rows"
        yield _markdown_table(["", "nats per token"], losses)


def _evaluation_sections(evaluations: list[tuple[str, Mapping[str, float]]]) -> Iterator[str]:
    if evaluations:
        yield "## Evaluations on the way"
        names = list(dict.fromkeys(name for _, metrics in evaluations for name in metrics))
        rows = [
            [name, *(_format_number(metrics.get(name)) for _, metrics in evaluations)]
            for name in names
        ]
        yield _markdown_table(["", *(title for title, _ in evaluations)], rows)


def _markdown_table(head: list[str], rows: list[list[str]]) -> str:
    cells_of_rows = [[_escape_markdown(cell) for cell in cells] for cells in (head, *rows)]
    lines = [cells_of_rows[0], ["---"] * len(head), *cells_of_rows[1:]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _escape_markdown(text: str) -> str:
    """Escape a name for Markdown."""
    return re.sub(r"[\\`*|<>!#\[\]]", r"\\\g<0>", one_line(text))


def _inline_code(text: Any) -> str:
    return f"`{one_line(str(text)).replace('`', chr(39))}`"


def _format_interval(value: Mapping[str, float]) -> str:
    number = _format_number(value["value"])
    return (
        f"{number} [{_format_number(value['low'])}, {_format_number(value['high'])}]"
        if "low" in value
        else number
    )


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.{DIGITS}g}"


def _loading_example(
    config: Mapping[str, Any], base: str, location: WeightsLocation, *, adapter: bool
) -> str:
    """Example code. It runs unchanged if the files and the base can be found by the names in it."""
    if location.file is not None:
        return f"`{location.file}` is a model for llama.cpp: `llama-cli -m {location.file}`."
    revision_argument = f", revision={json.dumps(location.revision)}" if location.revision else ""
    revision = config["model"].get("revision")
    base_revision = f", revision={json.dumps(revision)}" if revision else ""
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    lines += [f"files = {json.dumps(location.name)}"]
    lines += [f"tokenizer = AutoTokenizer.from_pretrained(files{revision_argument})"]
    if adapter:
        lines.insert(0, "from peft import PeftModel")
        lines += [
            f'base = AutoModelForCausalLM.from_pretrained({json.dumps(base)}{base_revision}, dtype="float32")'
        ]
        lines += [f"model = PeftModel.from_pretrained(base, files{revision_argument})"]
    else:
        lines += [f"model = AutoModelForCausalLM.from_pretrained(files{revision_argument})"]
    code = "```python\n" + "\n".join(lines) + "\n```"
    if adapter and not may_be_hub_id(base):
        whose = "made by Groupwise itself" if base == TINY else "on the machine that trained it"
        code += f"\n\nThe base, {_inline_code(base)}, is {whose}; give the path of its folder."
    return code


def _training_data(config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    if is_served(facts):
        return f"Data: {_trained_on(facts)}. The config:"
    count = facts.get("examples")
    examples = f"{count} examples of {_trained_on(facts)}" if count else "the task's examples"
    sources = [config["data"].get("dataset_name")]
    sources += [dataset.get("source") for dataset in config["data"].get("dataset_mixture") or ()]
    sources_text = ", ".join(_inline_code(_without_path(source)) for source in sources if source)
    weights: Mapping[str, float] = facts.get("rewards") or {}
    rewards = ", ".join(
        f"{_inline_code(name)} (weight {_format_number(weight)})"
        for name, weight in weights.items()
        if weight
    )
    origin = f", from {sources_text}" if sources_text else ""
    return f"Data: {examples}{origin}{f', rewarded by {rewards}' if rewards else ''}. The config:"


def _without_secrets(value: Any, key: str = "") -> Any:
    """A copy without secrets and local paths."""
    if isinstance(value, Mapping):
        return {k: _without_secrets(v, k) for k, v in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_without_secrets(item, key) for item in cast("list[Any]", value)]
    if not isinstance(value, str):
        return value
    return "…" if is_secret(key) or holds_secret(value) else _without_path(value)


def _without_path(value: str) -> str:
    """The last part of a path on this machine; other values unchanged."""
    return Path(value).name if _LOCAL.fullmatch(value) else value
