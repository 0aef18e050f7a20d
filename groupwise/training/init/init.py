"""The command `groupwise init`: writes a config for a task and a model on this machine, with a reason for each value.

    task        its hooks decide between a config of `groupwise rl` and one of `groupwise sft`
    lengths     measured on its rows with the model's tokenizer
    memory      a dry run's plan is compared with the free memory, from the fastest settings to the most economical
    speed       measured as by `groupwise doctor`; a step that would take minutes is made smaller
    file        YAML with a comment above each key (config_file); the choices themselves are in choices

Mistakes in task, model or data raise `UsageError` as in `groupwise rl`, because the same preparation runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from groupwise.core.errors import TaskError, UsageError
from groupwise.core.findings import Finding, Findings, OnFinding, Report
from groupwise.core.interruption import run_to_end
from groupwise.core.settings.view import View
from groupwise.core.types import Example
from groupwise.engine.models.machine import available_cores, choose_device, has_bfloat16
from groupwise.engine.models.plan import all_parameters, prompt_room
from groupwise.engine.models.probes import free_memory
from groupwise.engine.models.tokenizer import load_tokenizer
from groupwise.tasks.contract import Task, load_task, require
from groupwise.tasks.rollouts.config import TURNS
from groupwise.tasks.rollouts.teacher import read_lessons
from groupwise.training import placement, rollout_builder
from groupwise.training.checks import doctor_cost, doctor_machine
from groupwise.training.checks.check_data import check_hooks, prompt_lengths, spread, suffices
from groupwise.training.checks.check_gold import GOLD_COMPLETION, accepted_forms, gold_column
from groupwise.training.checks.doctor_examination import DoctorSubject, measure_cost
from groupwise.training.config import RunConfig, resolved_values, stem_of, view
from groupwise.training.init.choices import (
    BUDGETS,
    MIN_GENERATIONS,
    SLOTS,
    Answers,
    Draft,
    Kind,
    choose_completion_length,
    choose_dtype,
    choose_lengths,
    choose_required_keys,
    choose_run_length,
    choose_sft_step,
    choose_step,
    choose_trainable,
    fit_memory,
    fit_time,
    mention_load,
)
from groupwise.training.init.config_file import WARM_UP, WARM_UP_UNTIL, commands, render
from groupwise.training.loops.rl_prepare import (
    RlPrepared,
    planned_sizes,
    prepare_rl,
    training_layout,
)
from groupwise.training.loops.sft_prepare import (
    SftPrepared,
    planned_sft_sizes,
    prepare_sft,
    teacher_settings,
)
from groupwise.training.sft_config import LoadedSftConfig, load_sft_config

CODE = "init_failed"
MAX_MEASURED_ROWS = 500
"""Number of supervised rows, evenly spread, whose length is measured to choose the completion length of an RL config."""
LONG_RUN_SECONDS = 30 * 60
"""If a run would take longer than this, `init` says which settings make it shorter."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Cost:
    """The layout of a run with the config, and findings about its cost."""

    layout: placement.Layout
    findings: tuple[Finding, ...]
    """Findings about memory and speed."""


def init(
    task: str,
    model: str,
    *,
    kind: Kind | None = None,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    force: bool = False,
    measure: bool = True,
    on_finding: OnFinding | None = None,
) -> Report:
    """Write a config for this machine: the command `groupwise init`.

    `kind` chooses the command if a task has the hooks of both; None prefers rl. `out` is the file, by default named after the task in
    the current folder; an existing file is kept unless `force`. Without `measure`, no weights are loaded and the speed is not estimated.
    Raises `UsageError`.
    """
    findings = Findings(on_finding)
    load = os.getloadavg()[0]  # by other programs: nothing has been computed yet
    loaded_task = load_task(task)
    findings.add(check_hooks(loaded_task))
    # Prefer RL if the task has rows for it, otherwise SFT; `require` reports missing hooks.
    kind = kind or (
        "rl" if loaded_task.has("get_rl_dataset") or not suffices(loaded_task, "sft") else "sft"
    )
    require(loaded_task, kind)
    file = out or Path(f"{stem_of(Path(loaded_task.name))}{'-sft' if kind == 'sft' else ''}.yaml")
    if file.is_dir():
        raise UsageError(f"--out {file} is a folder; give the name of a file in it.")
    if not file.parent.is_dir():
        raise UsageError(f"--out {file}: there is no folder {file.parent}. Make it first.")
    if file.exists() and not force:
        raise UsageError(
            f"{file} exists and is kept. Give --force to overwrite it, or another name with --out."
        )
    draft = Draft(kind, model, tuple(overrides), loaded_task.config_schema())
    choose_required_keys(draft)
    choose = _choose_rl if kind == "rl" else _choose_sft
    cost = choose(draft, loaded_task, task, measure)
    layout = cost.layout
    if load > doctor_machine.BUSY * available_cores():
        mention_load(draft, load)
    for choice in draft.choices():
        findings.add(Finding(choice.key, "ok", json.dumps(choice.value), choice.reason))
    cores = doctor_machine.cores(layout.all_threads, layout.processes, available_cores(), load)
    if measure and cores.level == "warning":
        # Steps were made smaller for speeds that may be too low.
        findings.add(cores)
    findings.add(*cost.findings)
    evaluates = suffices(loaded_task, "eval")
    words = commands(kind, task, str(file), evaluates=evaluates)
    has_rows, warm_up = loaded_task.has("get_sft_dataset"), ""
    if kind == "rl" and draft.config.warm_up is None:
        warm_up = (WARM_UP_UNTIL if evaluates else WARM_UP) if has_rows else ""
        needed = "if hardly any sampled answer is right at first"
        if evaluates:
            needed += " (the command `groupwise eval` at the top of the file says so)"
        do = "make the section `warm_up:` at the end of the file active by removing its #"
        findings.add(
            Finding(
                "warm-up",
                "ok",
                f"none; the task has {'get_sft_dataset for one' if has_rows else 'no get_sft_dataset'}",
                f"{needed}, {do if has_rows else 'add that hook: its right answers can be trained on first'}",
            )
        )
    config = draft.load().config
    machine = cost.layout.processor or cost.layout.device
    title = (
        f"Written by groupwise init for {loaded_task.name} with {config.model.name} on {machine}."
    )
    try:
        file.write_text(render(title, words, draft.choices(), warm_up), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}.") from error
    return Report(
        f"{file} for {loaded_task.described}",
        tuple(findings.found),
        CODE,
        {
            "file": str(file),
            "command": kind,
            "config": resolved_values(config),
            "layout": asdict(cost.layout),
            "next": words,
        },
    )


# --- groupwise rl --------------------------------------------------------------------------------


def _choose_rl(draft: Draft, task: Task, source: str, measure: bool) -> Cost:
    path = ("rollout", "type")
    chosen = draft.chosen.get(path)
    if task.played_by is not None and (chosen is None or chosen.value in TURNS):
        hook = "get_program" if task.played_by == "external" else "get_environment"
        draft.choose(path, task.played_by, f"the task has {hook}, which leads each rollout")
    choose_trainable(draft, all_parameters(draft.load().config.model))
    config = draft.config
    tokenizer = load_tokenizer(config.model)
    training = config.training
    # From a stream without a length, read as many rows as a run of the first draft would.
    limit = None if training.max_steps is None else training.max_steps * training.prompts_per_step
    examples = task.rl_examples(view(config), limit=limit)
    tools = rollout_builder.check_rollouts(config, task, examples)
    lengths, _ = prompt_lengths(examples, tokenizer, tools)
    device = choose_device()
    choose_step(draft, device, len(examples))
    choose_lengths(
        draft,
        lengths,
        f"the longest of {len(lengths):,} prompts has {max(lengths)} tokens",
        choose_completion_length(
            known_answers(draft, task, tokenizer, examples), task.played_by is not None
        ),
        prompt_room(config.model, 0),
    )
    prepared = prepare_rl(draft.load(), source)
    longest_prompt = _longest_prompt(prepared)
    free_mib = _free_mib(device)
    fit_memory(
        draft, lambda: _planned_memory(draft, longest_prompt), free_mib, BUDGETS[device], SLOTS
    )
    choose_dtype(draft, prepared.layout.dtype, has_bfloat16(device))
    layout = training_layout(draft.config, longest_prompt)
    return _estimate_cost(
        draft, replace(prepared, loaded=draft.load(), layout=layout), free_mib, measure
    )


def _longest_prompt(prepared: RlPrepared) -> int:
    """Number of tokens of the longest prompt for training or evaluation."""
    held_out = prepared.held_out_prompts
    return max(prepared.prompts.longest, held_out.longest if held_out else 0)


def _planned_memory(draft: Draft, longest_prompt: int) -> float:
    """Memory of a step in MiB, by the plan."""
    config = draft.config
    return planned_sizes(config, training_layout(config, longest_prompt)).memory.total


def _free_mib(device: str) -> float | None:
    free_bytes = free_memory(device)
    return None if free_bytes is None else free_bytes / MIB


def _estimate_cost(
    draft: Draft, prepared: RlPrepared, free_mib: float | None, measure: bool
) -> Cost:
    """Estimate memory by the plan, and speed by measuring it, which may make a step smaller."""
    layout, longest_prompt = prepared.layout, _longest_prompt(prepared)
    sizes = planned_sizes(prepared.config, layout)
    memory = doctor_machine.memory(sizes.memory.total, free_mib)
    if not measure or memory.level == "problem":
        return Cost(layout, (*_report_dropped(prepared), memory, _skip_speed(memory)))
    subject = DoctorSubject(
        prepared.config, prepared.tokenizer, prepared.prompts, prepared.task, layout, sizes
    )
    speeds, usual_length, peak = run_to_end(measure_cost(subject))

    def step_seconds() -> float:
        speed = doctor_cost.estimate(speeds, draft.config, None, None, longest_prompt)
        return float(speed.data["step_seconds_at_most"])

    fit_time(draft, step_seconds)
    choose_run_length(draft, len(prepared.prompts.examples) + prepared.prompts.dropped)
    config = draft.config
    planned_mib = _planned_memory(draft, longest_prompt)
    memory = doctor_machine.memory(planned_mib, free_mib)
    is_smaller = planned_mib < sizes.memory.total
    step = "the larger step that was measured" if is_smaller else "a whole step"
    measured_peak = doctor_cost.peak(sizes.memory.total, peak, step)
    speed = doctor_cost.estimate(
        speeds, config, config.training.max_steps, usual_length, longest_prompt
    )
    findings = (*_report_dropped(prepared), memory, measured_peak, speed)
    return Cost(
        training_layout(config, longest_prompt), (*findings, *_report_long_run(config, speed))
    )


def _report_long_run(config: RunConfig, speed: Finding) -> Iterator[Finding]:
    """Report which settings make a run shorter that would take longer than `LONG_RUN_SECONDS`."""
    steps, training = config.training.max_steps, config.training
    seconds = speed.data.get("run_seconds_usual") or speed.data.get("run_seconds_at_most", 0)
    if steps is None or seconds <= LONG_RUN_SECONDS:
        return
    halves = {
        "max_steps": (steps, 1),
        "prompts_per_step": (training.prompts_per_step, training.minibatches),
        "num_generations": (training.num_generations, MIN_GENERATIONS),
    }
    words = [
        f"training.{key}={value // 2}"
        for key, (value, least) in halves.items()
        if value // 2 >= least
    ]
    yield Finding(
        "shorter",
        "ok",
        f"about half the time each: {', '.join(words)}",
        "fewer steps first; fewer prompts or completions make each step less certain. A lower sampler.max_completion_length shortens "
        "it too, if the right answers fit",
    )


def _report_dropped(prepared: RlPrepared) -> Iterator[Finding]:
    """Report examples whose prompts are too long."""
    dropped, kept = prepared.prompts.dropped, len(prepared.prompts.examples)
    if dropped:
        yield Finding(
            "left out",
            "warning",
            f"{dropped:,} of {dropped + kept:,} examples: their prompts are longer than data.max_prompt_length",
            "they are not trained on",
            "raise it if the model has room, or shorten the prompts",
            {"dropped": dropped, "kept": kept},
        )


def _skip_speed(memory: Finding) -> Finding:
    why = (
        "the model does not fit into the free memory"
        if memory.level == "problem"
        else "--no-measure was given"
    )
    return Finding("speed", "skipped", f"not measured: {why}", "no weights were loaded")


def known_answers(
    draft: Draft, task: Task, tokenizer: Any, examples: Sequence[Example]
) -> Answers | None:
    """The length of right answers, from a column of completions, from supervised rows, or from bare results; None if none is known."""
    if task.played_by is not None:
        return None  # an answer there is spread over several turns
    column = gold_column(examples)
    if column != GOLD_COMPLETION:
        answers = _teacher_answers(draft, task, tokenizer)
        if answers is not None:
            return answers
    if column is None:
        return None
    texts = [
        form
        for example in spread(examples, MAX_MEASURED_ROWS)
        for form in accepted_forms(example.columns.get(column))
    ]
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1 for text in texts]
    is_whole = column == GOLD_COMPLETION
    return Answers(max(lengths), f"column `{column}`", is_whole, len(lengths)) if lengths else None


def _teacher_answers(draft: Draft, task: Task, tokenizer: Any) -> Answers | None:
    """Measure the completions of the task's supervised rows, if it has any that can be read."""
    if not suffices(task, "sft"):
        return None
    model = draft.config.model.model_dump(mode="json", exclude_unset=True)
    values = {"model": model, "task": draft.config.task}
    config = load_sft_config(values).config
    hook = "get_sft_dataset"
    try:
        rows = task.sft_rows(hook, View(resolved_values(config)), tokenizer, MAX_MEASURED_ROWS)
        settings = teacher_settings(config, task, tokenizer)
        lessons = read_lessons(
            tokenizer, spread(rows, MAX_MEASURED_ROWS), settings, where=hook
        ).lessons
    except TaskError:  # `groupwise sft` would refuse them; rewards do not need them
        return None
    lengths = [sum(row.mask) for lesson in lessons for row in lesson.rows]
    return Answers(max(lengths), hook, True, len(lengths))


# --- groupwise sft -------------------------------------------------------------------------------


def _choose_sft(draft: Draft, task: Task, source: str, measure: bool) -> Cost:
    choose_trainable(draft, all_parameters(draft.load().config.model))
    initial = prepare_sft(cast("LoadedSftConfig", draft.load()), source)
    longest_row = initial.lessons.longest
    choose_sft_step(draft, len(initial.lessons.lessons))
    device = initial.layout.device
    free_mib = _free_mib(device)

    def planned_memory() -> float:
        config = draft.sft_config
        return planned_sft_sizes(
            config, placement.supervised_layout(config), longest_row
        ).memory.total

    fit_memory(draft, planned_memory, free_mib, BUDGETS[device])
    choose_dtype(draft, initial.layout.dtype, has_bfloat16(device))
    prepared = prepare_sft(cast("LoadedSftConfig", draft.load()), source)
    planned_mib = planned_sft_sizes(prepared.config, prepared.layout, longest_row).memory.total
    memory = doctor_machine.memory(planned_mib, free_mib)
    findings = (*_report_cut_rows(prepared), memory)
    if not measure or memory.level == "problem":
        return Cost(prepared.layout, (*findings, _skip_speed(memory)))
    from groupwise.training.assembly.start import supervised_parts

    config, layout, lessons = prepared.config, prepared.layout, prepared.lessons
    unused_folder = Path(config.run.dir) / "init"
    with closing(supervised_parts(config, layout, "init", unused_folder)) as parts:
        speeds = run_to_end(doctor_cost.measure_lessons(parts.learner, lessons, config))
        peak = parts.peak_memory(layout.device)
    speed = doctor_cost.estimate_lessons(speeds, lessons, config, prepared.max_steps)
    return Cost(prepared.layout, (*findings, doctor_cost.peak(planned_mib, peak), speed))


def _report_cut_rows(prepared: SftPrepared) -> Iterator[Finding]:
    """Report rows that are longer than the model's limit."""
    cut, dropped = prepared.lessons.cut, prepared.lessons.dropped
    if cut or dropped:
        yield Finding(
            "too long",
            "warning",
            f"{cut:,} rows are cut, {dropped:,} are left out: they are longer than data.max_length",
            "what is cut off is not learnt",
            "raise it, where the model has room, or shorten the rows",
            {"cut": cut, "dropped": dropped},
        )
