"""The part of `groupwise doctor` that needs torch. Mistakes in config, task or model raise `UsageError`."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from groupwise.core.errors import RunError, TaskError
from groupwise.core.findings import Finding, Findings
from groupwise.core.interruption import run_to_end
from groupwise.core.types import Example, Group, Prompt, SamplingParams
from groupwise.engine.models.machine import (
    available_cores,
    describe_processor,
    has_bfloat16,
    has_tf32,
)
from groupwise.engine.models.plan import ModelPlan, prompt_room
from groupwise.engine.models.probes import free_memory, random_start
from groupwise.engine.models.tokenizer import load_tokenizer
from groupwise.engine.sampler.rules import uniform
from groupwise.tasks.configured import find_task
from groupwise.tasks.contract import Task
from groupwise.tasks.rollouts.prompts import PromptSet, tokenise
from groupwise.tasks.rollouts.seeds import member_seed
from groupwise.training import rollout_builder
from groupwise.training.assembly import prepare
from groupwise.training.assembly.parts import Parts
from groupwise.training.checks import doctor_cost, doctor_machine
from groupwise.training.checks.check_data import spread
from groupwise.training.checks.doctor_cost import Speeds
from groupwise.training.checks.doctor_engine import (
    PROMPTS,
    TOKENS,
    Engine,
    check_gap,
    check_invariance,
    check_publication,
    failed_check,
    judge_drift,
    judge_masks,
    judge_slopes,
    publish,
    rows_of,
)
from groupwise.training.checks.doctor_template import check_tokenizer, opening_messages, stop_tokens
from groupwise.training.config import LoadedConfig, RunConfig, view, with_task_schema
from groupwise.training.loops.rl_prepare import planned_sizes, training_layout
from groupwise.training.placement import Layout

MIB = 2**20
QUESTIONS = ("What is two plus three?", "Name a colour.", "Say the word yes, and nothing else.")
"""The prompts if there is no task."""


@dataclass(frozen=True, slots=True)
class DoctorSubject:
    """The config to examine, with everything that is known before the model is loaded."""

    config: RunConfig
    tokenizer: Any
    prompts: PromptSet
    task: Task | None
    layout: Layout
    sizes: ModelPlan

    @property
    def steps(self) -> int | None:
        """Number of steps of a run; None if only the task's data would determine it."""
        training = self.config.training
        if training.max_steps is not None:
            return training.max_steps
        if self.task is None or training.num_train_epochs is None:
            return None
        examples = len(self.prompts.examples)
        return max(1, math.ceil(training.num_train_epochs * examples / training.prompts_per_step))


def examine_all(
    loaded: LoadedConfig, task: object, load: float, findings: Findings
) -> tuple[str, dict[str, Any]]:
    """Examine machine, tokenizer, engine and cost, in this order. Returns a description of the subject, and the layout.

    `load` is the load by other programs, in cores, measured before anything was computed here.
    """
    has_data = task is not None or loaded.config.data.names_data
    subject = _load_subject(loaded, find_task(task, view(loaded.config)) if has_data else None)
    findings.extend(_examine_machine(subject, load))
    findings.extend(check_tokenizer(subject.tokenizer))
    longest_prompt = subject.prompts.longest
    if subject.task is not None:
        count = len(subject.prompts.examples)
        prompts = Finding(
            "prompts", "ok", f"{PROMPTS} of the task's {count:,}, of up to {longest_prompt} tokens"
        )
    else:
        prompts = Finding(
            "prompts",
            "ok",
            f"{len(QUESTIONS)} built-in ones, of up to {longest_prompt} tokens",
            "--task-module uses those of your task, and measures with their length",
        )
    findings.add(prompts)
    run_to_end(_examine_engine(subject, findings))
    description = f"{subject.config.model.name} on {subject.layout.device}"
    return description, {"layout": asdict(subject.layout)}


def _load_subject(loaded: LoadedConfig, task: Task | None) -> DoctorSubject:
    """Load everything except the model, as training would."""
    schema = task.config_schema() if task else None
    config = (loaded if schema is None else with_task_schema(loaded, schema)).config
    # This machine is examined, even if the run would be sent to a server.
    config = config.model_copy(update={"run": config.run.model_copy(update={"server": None})})
    prepare.refuse_services(config, "the doctor examines this machine")
    tokenizer = load_tokenizer(config.model)
    examples = _task_examples(config, task) if task else _builtin_examples(tokenizer)
    prompts = tokenise(
        tokenizer,
        examples,
        max_prompt_length=config.data.max_prompt_length,
        room=prompt_room(config.model, rollout_builder.longest_completion(config)),
        where=task.described if task else "The prompts of the doctor",
        tools=rollout_builder.check_rollouts(config, task, examples) if task else (),
    )
    layout = training_layout(config, prompts.longest)
    sizes = planned_sizes(config, layout)
    return DoctorSubject(config, tokenizer, prompts, task, layout, sizes)


def _task_examples(config: RunConfig, task: Task) -> list[Example]:
    """The task's prompts: those for training or, without them, for evaluation."""
    config_view = view(config)
    steps = config.training.max_steps
    if task.has("get_rl_dataset"):
        limit = None if steps is None else steps * config.training.prompts_per_step
        return task.rl_examples(config_view, limit=limit)
    if task.has("get_eval_dataset"):
        return task.eval_examples(config_view, limit=config.eval.max_prompts)
    raise TaskError(task.missing("get_rl_dataset", "rl"))


def _builtin_examples(tokenizer: Any) -> list[Example]:
    """Built-in questions, as chats if the tokenizer has a template."""
    chat = bool(getattr(tokenizer, "chat_template", None))
    prompts: list[Prompt] = []
    for question in QUESTIONS:
        opening = opening_messages(tokenizer) if chat else []
        prompts.append(
            [*opening[:-1], {"role": "user", "content": question}] if chat else f"{question}\n"
        )
    return [Example(index, prompt) for index, prompt in enumerate(prompts)]


def _examine_machine(subject: DoctorSubject, load: float) -> Iterator[Finding]:
    """Report everything about the machine that matters for the config."""
    config, layout = subject.config, subject.layout
    yield doctor_machine.cores(layout.all_threads, layout.processes, available_cores(), load)
    yield doctor_machine.device(
        describe_processor(layout.device),
        layout.device,
        layout.products_dtype,
        has_bfloat16(layout.device),
        has_tf32(layout.device),
    )
    free_bytes = free_memory(layout.device)
    yield doctor_machine.memory(
        subject.sizes.memory.total, None if free_bytes is None else free_bytes / MIB
    )
    steps = subject.steps or 1
    rollouts = steps * config.training.prompts_per_step * config.training.num_generations
    checkpoints_kept = config.run.save_total_limit or max(1, steps // config.run.save_steps)
    run_dir = Path(config.run.dir).expanduser().absolute()
    folder = next(path for path in (run_dir, *run_dir.parents) if path.is_dir())
    # A run stores `checkpoints_kept` checkpoints (one more while it is written) of weights and two moments, the final weights, and
    # 8 KiB per rollout.
    published = 4 * subject.sizes.trained_parameters
    needed_bytes = (checkpoints_kept + 1) * 3 * published + published + 8192 * rollouts
    yield doctor_machine.disk(folder, needed_bytes, shutil.disk_usage(folder).free)
    seed = member_seed(0, 0, 0)
    start = random_start(0, len(doctor_machine.FIRST_START))
    yield doctor_machine.random_numbers(seed, uniform(seed, 0), start)


# --- the engine ----------------------------------------------------------------------------------


async def _examine_engine(subject: DoctorSubject, findings: Findings) -> None:
    """Build sampler and learner, check them and measure their speed."""
    config = subject.config
    try:
        with _build_parts(subject) as parts:
            findings.add(stop_tokens(subject.tokenizer, parts.stop_token_ids, config.sampler.stop))
            await examine(await engine_of(subject, parts), parts, subject, findings)
    except RunError as error:
        findings.add(failed_check(error, "engine"))


async def measure_cost(subject: DoctorSubject) -> tuple[Speeds, float | None, int | None]:
    """Only measure, without checks: speeds on this machine, `usual_length`, and peak memory in bytes (None if unknown)."""
    with _build_parts(subject) as parts:
        engine = await engine_of(subject, parts)
        published = await publish(engine, 0)
        groups = await engine.sample()
        slots, version = subject.layout.all_slots, published.version + 1
        speeds = await doctor_cost.measure(engine, subject.config, slots, version)
        peak = parts.peak_memory(subject.layout.device)
    return speeds, usual_length(groups), peak


@contextmanager
def _build_parts(subject: DoctorSubject) -> Generator[Parts]:
    """Sampler and learner; their publications are removed afterwards."""
    from groupwise.training.assembly.start import publication_folder, training_parts

    config = subject.config
    with (
        publication_folder(config, Path(config.run.dir) / f"doctor-{os.getpid()}") as folder,
        closing(training_parts(config, subject.layout, "doctor", folder)) as parts,
    ):
        yield parts


async def engine_of(subject: DoctorSubject, parts: Parts) -> Engine:
    """The engine with a few prompts, spread over the data, with the openings of their environments."""
    config, task = subject.config, subject.task
    sampler = config.sampler
    examples = spread(subject.prompts.examples, PROMPTS)
    if task is not None:
        room = subject.layout.key_length
        prompts = await rollout_builder.first_prompts(
            config, task, subject.tokenizer, examples, room
        )
    else:
        prompts = spread(subject.prompts.prompts, PROMPTS)
    return Engine(
        sampler=parts.sampler,
        learner=parts.learner,
        tokenizer=subject.tokenizer,
        params=SamplingParams(
            max_tokens=min(TOKENS, sampler.max_completion_length),
            temperature=sampler.temperature,
            stop_token_ids=parts.stop_token_ids,
            stop=sampler.stop,
            min_tokens=sampler.min_completion_length,
        ),
        examples=tuple(examples),
        prompts=tuple(prompts),
        dtype=subject.layout.products_dtype,
        seed=config.training.seed,
    )


async def examine(engine: Engine, parts: Parts, subject: DoctorSubject, findings: Findings) -> None:
    """Run all checks of the engine, from the sampled tokens to the cost of a step."""
    config, layout = subject.config, subject.layout
    published = await publish(engine, 0)
    groups = await engine.sample()
    rows = rows_of(groups)
    findings.add(judge_masks(groups, rows, parts.stop_token_ids))
    findings.add(judge_drift(engine.tokenizer, groups))
    findings.add(await check_gap(engine, rows, "log-probability gap"))
    findings.add(await check_invariance(engine, groups))
    rate = config.training.learning_rate
    slopes = await parts.slopes(rate)
    if slopes:
        findings.add(
            judge_slopes([(slope.layer, slope.value, slope.error) for slope in slopes], rate)
        )
    findings.extend(await check_publication(engine, published, groups))
    speeds = await doctor_cost.measure(engine, config, layout.all_slots, published.version + 2)
    findings.add(doctor_cost.peak(subject.sizes.memory.total, parts.peak_memory(layout.device)))
    longest_prompt = subject.prompts.longest
    findings.add(
        doctor_cost.estimate(speeds, config, subject.steps, usual_length(groups), longest_prompt)
    )


def usual_length(groups: Sequence[Group]) -> float | None:
    """Mean length of completions in tokens; None if one was cut off, because its full length is unknown."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if any(rollout.truncated for rollout in rollouts):
        return None
    return fmean(len(rollout.completion_ids) for rollout in rollouts)
