"""The real engine: a model with its sampler and learner, and one run that takes the steps that its driver plans.

The engine is opened once, hosts one run until its process ends, and contains no maths of its own: a step is
`groupwise.training.loops.rl.take_step`, and completions come from the same samplers as in `groupwise rl`, with seeds derived from the
draw. It writes an ordinary run folder. It does not track client requests: its driver has them on disk and repeats those that came after the
last checkpoint.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from groupwise.api.schemas.template_columns import TOOLS
from groupwise.core import atomic_files
from groupwise.core.errors import ConfigError, TaskError, UsageError
from groupwise.core.interruption import Interruption
from groupwise.core.types import (
    Example,
    GroupRequest,
    Policy,
    Prompt,
    PromptLogprobs,
    Rollout,
    SamplingParams,
)
from groupwise.engine.distributed import prefork
from groupwise.engine.models.card import packages_used
from groupwise.engine.models.identity import identity
from groupwise.engine.models.tokens import call_markers, completion_text, prompt_ids, render_prompt
from groupwise.runs import checkpoints
from groupwise.runs.folder import CLIENTS, RECORD, RunFolder
from groupwise.runs.records import StepRecord
from groupwise.runs.store import Store
from groupwise.server.engine.engine_protocol import (
    PART,
    EngineLost,
    GroupSampleRequest,
    InvalidSampleRequest,
    Opened,
    OpenRun,
    Plan,
    Probe,
    Sampled,
    Saved,
    StepDone,
)
from groupwise.server.engine.hosted_parts import EngineParts
from groupwise.server.engine.sampling_checks import (
    LONG,
    check_characters,
    check_constraint,
    check_processing,
    refuse_unknown_tokens,
    stop_token_ids,
    texts_of,
)
from groupwise.server.engine.served_run import Phase, ServedRun
from groupwise.server.engine.trained_adapters import EngineModels, Shared
from groupwise.tasks.contract import Task
from groupwise.tasks.data.messages import Unusable, messages_of
from groupwise.tasks.data.reward_hacking import Signals
from groupwise.tasks.openai.sampling import Sampling
from groupwise.tasks.rollouts.dialogue import first_ids
from groupwise.tasks.rollouts.seeds import member_seed
from groupwise.tasks.rollouts.single import group_of
from groupwise.training import rollout_builder
from groupwise.training.assembly.parts import Parts
from groupwise.training.assembly.prepare import build_algorithm, check_stop_tokens, expect_ranks
from groupwise.training.assembly.start import publication_folder, start_training
from groupwise.training.config import LoadedConfig, RunConfig, load_config
from groupwise.training.loops.group_sampling import check_served
from groupwise.training.loops.metrics import Timings
from groupwise.training.loops.outcome import end, first_and_last, summarise, write_curve
from groupwise.training.loops.prepare import Prepared, check_start
from groupwise.training.loops.resume import (
    ResumePoint,
    check_resume,
    copy_start_weights,
    find_resume_point,
    open_folder,
    restore_checkpoint,
    start_weights_to_copy,
    use_copied_start,
)
from groupwise.training.loops.rl import publish, take_step
from groupwise.training.loops.rl_prepare import training_layout
from groupwise.training.loops.run import StepBatch
from groupwise.training.loops.training import save_checkpoint
from groupwise.training.placement import refuse_on_server

logger = logging.getLogger(__name__)

KIND = "rl"
"""The run kind noted in its folder: `groupwise rl` and a server leave the same kind of run."""
METRIC = "reward"
INCOMPLETE = "\ufffd"
"""Replacement character that a tokenizer writes for bytes that are not, or not yet, a whole character."""


@dataclass(frozen=True, slots=True)
class _LoadedRun:
    """An open run and the parts that it was built from."""

    run: ServedRun
    prepared: _Prepared
    parts: Parts
    progress: Phase
    longest_prompt: int
    longest_token: int
    """Length in characters."""
    begun: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared(Prepared):
    """A served run that is checked but not built."""

    @property
    def config(self) -> RunConfig:
        return self.loaded.config


class EngineCore:
    """A `groupwise.server.engine.engine_protocol.Engine` whose model and run are in this process."""

    def __init__(self) -> None:
        self._opened: _LoadedRun | None = None
        self._scope = AsyncExitStack()
        self._sampled_tokens = 0
        self._fresh_tokens = 0
        """Tokens sampled since the last step."""
        self._call_markers: dict[int, frozenset[int]] = {}
        """Special tokens that stay in the text, by draw, for requests in progress with tools."""
        self._undone_metrics: dict[int, dict[str, float]] = {}
        """Metrics, by step, of steps that were committed after the checkpoint and are undone by resuming from it."""
        self._oldest = 0
        """Step count of the oldest checkpoint that is kept; 0 if there is none."""
        self.models = EngineModels(self._shared_model, self._scope)
        """Models trained alongside the run, or without one."""
        self.parts = EngineParts(self._scope)
        """Sampler and learner for a training loop in another process, in an engine without a run."""
        self._is_closing = False
        self._tokenising = asyncio.Lock()
        """Held while a long prompt is tokenised in a thread: one at a time."""
        self._run_lock = asyncio.Lock()
        """Held while the run is changed: one step, save or end at a time."""

    async def open(self, request: OpenRun) -> Opened:
        """See `Engine.open`. Only once: another run gets another engine."""
        async with self._run_lock:
            assert self._opened is None, "an engine hosts one run; a new run gets a new engine"
            try:
                return await self._load_run(request)
            except BaseException:
                await self._scope.aclose()
                raise

    async def _load_run(self, request: OpenRun) -> Opened:
        loaded = load_config(dict(request.config))
        refuse_on_server(loaded.config)
        expect_ranks(loaded.config)
        self._scope.callback(prefork.end_zygote)
        point = find_resume_point(loaded, True, request.run) if request.run is not None else None
        manifests, self._undone_metrics = _committed_steps(point)
        if point is not None:
            loaded = use_copied_start(loaded, point)
        prepared = _prepare_run(loaded, request.longest_prompt)
        resumption = check_resume(point, prepared) if point is not None else None
        folder, prepared = self._open_run_folder(prepared, point)
        config = prepared.config
        publish_folder = self._scope.enter_context(publication_folder(config, folder.path))
        progress = Phase(folder.name, prepared.max_steps)
        self._scope.callback(progress.close)
        parts = await start_training(config, prepared.layout, folder.name, publish_folder)
        self._scope.callback(parts.close)
        run = _assemble_run(prepared, folder, parts, progress, publish_folder)
        if resumption is not None:
            restore_checkpoint(run, prepared, resumption)
        elif request.start_from is not None:
            run.learner.load(request.start_from)
            await save_checkpoint(run)  # from now on it does not need the other run's checkpoint
        await publish(run, run.policy.version)
        if (prepare_schemas := getattr(run.sampler, "prepare_schemas", None)) is not None:
            await prepare_schemas()
        run.gate.open()
        progress.phase("ready")
        self._opened = _LoadedRun(
            run,
            prepared,
            parts,
            progress,
            request.longest_prompt,
            max(map(len, run.tokenizer.get_vocab())),
            time.perf_counter(),
        )
        self._note_oldest_checkpoint()
        inexact = None
        if prepared.layout.device != "cpu":
            inexact = f"steps taken again on {prepared.layout.device} differ in their last bits"
        elif resumption is not None and resumption.warnings:
            inexact = "the layout of the work has changed since the run was started"
        return Opened(
            run=folder.name,
            folder=str(folder.path),
            step=run.step,
            max_steps=run.max_steps,
            policy=run.policy,
            manifests=manifests,
            longest_prompt=request.longest_prompt,
            longest_completion=config.sampler.max_completion_length,
            tokenizer_hash=self._tokenizer_hash,
            longest_prompt_characters=request.longest_prompt * self._opened.longest_token,
            stop_token_ids=parts.stop_token_ids,
            inexact=inexact,
            chat_template=str(
                run.tokenizer.get_chat_template(tools=[{}]) if run.tokenizer.chat_template else ""
            ),
        )

    def _open_run_folder(
        self, prepared: _Prepared, point: ResumePoint | None
    ) -> tuple[RunFolder, _Prepared]:
        """The run's folder, locked until the engine ends. The adapter that a new run starts from is copied into it."""
        adapter = prepared.config.model.adapter
        noted = {
            "kind": KIND,
            "model": prepared.config.model.name,
            "task_module": None,
            "init_from": adapter,
            "packages": packages_used(),
        }
        folder = open_folder(prepared, point, noted)

        def release() -> None:
            folder.close()
            if point is None and self._opened is None:  # a new run that could not start
                atomic_files.remove_folder(folder.path)

        self._scope.callback(release)
        weights = start_weights_to_copy(point) if point is not None else adapter
        if weights is not None:
            start = copy_start_weights(folder, prepared.loaded, Path(weights))
            prepared = replace(prepared, loaded=start)
        if prepared.config.run.keep_tokens:
            folder.keep_tokenizer(prepared.tokenizer.save_pretrained)
        return folder, prepared

    def _shared_model(self) -> Shared | None:
        if self._opened is None:
            return None
        prepared = self._opened.prepared
        config = prepared.config
        return Shared(
            name=self._opened.run.folder.name,
            model=config.model,
            trains_all=config.lora is None,
            parts=self._opened.parts,
            layout=prepared.layout,
        )

    @property
    def _loaded_run(self) -> _LoadedRun:
        if self._is_closing:
            raise EngineLost("This engine is being closed.")
        if self._opened is None:
            raise UsageError("No run is open in this engine.")
        return self._opened

    # --- sampling --------------------------------------------------------------------------------

    async def sample(self, request: GroupSampleRequest) -> Sampled:
        """See `Engine.sample`."""
        run = self._loaded_run.run
        ids = await self._prompt_ids(request)
        params = self._sampling_params(request, len(ids))
        if params.processing is not None and params.processing.is_constrained:
            await asyncio.to_thread(check_constraint, params.processing)
        training = run.config.training
        seed, draw = training.seed, request.draw
        if request.sampling.seed is not None:  # the same completions, for any draw
            seed, draw = request.sampling.seed, 0
        keep = call_markers(run.tokenizer) if request.columns.get(TOOLS) else frozenset[int]()
        members = range(request.members or training.num_generations)
        seeds = tuple(member_seed(seed, draw, member) for member in members)
        group_request = GroupRequest(request.draw, ids, seeds, params, request.top_logprobs)
        self._call_markers[request.draw] = keep
        try:
            async with run.sampled_by(request.policy_step) as (step, policy):
                prompt_logprobs = await self._prompt_logprobs(request, ids)
                completions = await run.sampler.generate(group_request) if params.max_tokens else ()
        finally:
            self._call_markers.pop(request.draw, None)
        prompt = request.prompt
        if isinstance(prompt, tuple):
            prompt = render_prompt(run.tokenizer, ids)
        example = Example(request.draw, prompt, dict(request.columns))

        def text_of(token_ids: Sequence[int]) -> str:
            return completion_text(run.tokenizer, token_ids, keep)

        group = group_of(example, group_request, completions, text_of)
        if not params.max_tokens:
            nothing = [Rollout(request.draw, member, 0, ids, (), "") for member in members]
            group = replace(group, rollouts=tuple(nothing))
        check_served(policy, group)
        tokens = sum(rollout.written for rollout in group.rollouts)
        self._sampled_tokens += tokens
        self._fresh_tokens += tokens
        if not isinstance(prompt, str):
            group = replace(group, prompt_seen=render_prompt(run.tokenizer, ids))
        return Sampled(
            group,
            step,
            policy.version,
            policy.fingerprint,
            tuple(completion.top_logprobs for completion in completions),
            prompt_logprobs,
        )

    async def _prompt_logprobs(
        self, request: GroupSampleRequest, ids: tuple[int, ...]
    ) -> PromptLogprobs | None:
        """The log-probabilities of the prompt, if the request asks for them. Raises UsageError if the run's sampler cannot tell."""
        if request.prompt_logprobs is None:
            return None
        run = self._loaded_run.run
        ask = getattr(run.sampler, "prompt_logprobs", None)
        if ask is None:
            raise UsageError(
                "Log-probabilities of a prompt (echo with logprobs) are not available from this run's sampler. Leave echo out, or start "
                "the server with sampler.engine torch or vllm and no other model.backend."
            )
        return await ask(ids, request.prompt_logprobs)

    async def partial(self, draw: int) -> tuple[str, ...]:
        """See `Engine.partial`."""
        so_far = getattr(self._loaded_run.run.sampler, "so_far", None)
        if so_far is None:
            return ()
        texts_so_far = so_far(draw)
        members: tuple[tuple[int, ...], ...] = (
            await texts_so_far if inspect.isawaitable(texts_so_far) else texts_so_far
        )
        tokenizer = self._loaded_run.run.tokenizer
        keep = self._call_markers.get(draw, frozenset())
        return tuple(completion_text(tokenizer, ids, keep).rstrip(INCOMPLETE) for ids in members)

    async def token_texts(self, token_ids: tuple[int, ...]) -> tuple[str, ...]:
        """See `Engine.token_texts`."""
        tokenizer = self._loaded_run.run.tokenizer
        return tuple(render_prompt(tokenizer, [token]) for token in token_ids)

    @cached_property
    def _tokenizer_for_thread(self) -> Any:
        """A copy, because a tokenizer cannot be used by two threads at once."""
        return copy.deepcopy(self._loaded_run.run.tokenizer)

    async def _prompt_ids(self, request: GroupSampleRequest) -> tuple[int, ...]:
        """The prompt's tokens. Raises InvalidSampleRequest if there are too many, or if they differ from the client's."""
        prompt, current = request.prompt, self._loaded_run
        longest = current.longest_prompt
        if isinstance(prompt, tuple):
            refuse_unknown_tokens(prompt, len(current.run.tokenizer), "prompt")
            if not 1 <= len(prompt) <= longest:
                raise InvalidSampleRequest(
                    f"The prompt has {len(prompt)} tokens, and this run takes 1 to {longest} (max_prompt_length). Shorten it, or start "
                    "the run with a higher one.",
                    "prompt",
                    "prompt_too_long" if prompt else UsageError.code,
                )
            return prompt
        try:
            if not isinstance(prompt, str):
                prompt = messages_of(prompt)
            most = longest * current.longest_token
            check = partial(check_characters, longest=longest, most=most)
            check(*texts_of(prompt))
            # Tools, their calls and arguments of the template are written into a prompt, too, so it is checked again once it is rendered.
            if len(json.dumps([prompt, dict(request.columns)])) <= LONG:
                ids = first_ids(current.run.tokenizer, prompt, (), request.columns, check)
            else:
                async with self._tokenising:
                    tokenizer, columns = self._tokenizer_for_thread, request.columns
                    ids = await asyncio.to_thread(first_ids, tokenizer, prompt, (), columns, check)
        except (TaskError, Unusable) as error:  # no tokens, or the chat template rejects them
            raise InvalidSampleRequest(str(error), "prompt") from None
        if request.prompt_ids is not None and request.prompt_ids != ids:
            raise InvalidSampleRequest(
                f"prompt_tokens are not what this server makes of the prompt: {_first_difference(request.prompt_ids, ids)}. Compare "
                "tokenizer and chat template with GET /tokenizer, or leave prompt_tokens out.",
                "prompt_ids",
                "tokenizer_mismatch",
            )
        if len(ids) > longest:
            raise InvalidSampleRequest(
                f"The prompt has {len(ids)} tokens, and this run takes at most {longest} (max_prompt_length). Shorten it, or start "
                "the run with a higher one.",
                "prompt",
                "prompt_too_long",
            )
        return ids

    def _sampling_params(self, request: GroupSampleRequest, prompt_length: int) -> SamplingParams:
        """The run's sampling settings, overridden by those of the request. Raises UsageError for impossible combinations."""
        current, requested = self._loaded_run, request.sampling
        if request.trains:
            _refuse_unlearnable(requested)
        sampler = current.run.config.sampler
        params = SamplingParams(
            max_tokens=sampler.max_completion_length,
            temperature=sampler.temperature_at(current.run.step),
            stop_token_ids=stop_token_ids(
                requested, current.parts.stop_token_ids, len(current.run.tokenizer)
            ),
            processing=requested.processing,
            stop=sampler.stop,
            min_tokens=sampler.min_completion_length,
        )
        names = ("temperature", "max_tokens", "min_tokens", "stop", "top_p", "top_k", "min_p")
        overrides = {name: getattr(requested, name) for name in names}
        params = replace(
            params, **{name: value for name, value in overrides.items() if value is not None}
        )
        check_processing(params, len(current.run.tokenizer))
        room = current.prepared.layout.key_length - prompt_length
        if params.max_tokens > room:
            raise InvalidSampleRequest(
                f"A completion of up to {params.max_tokens} tokens was asked for, but beside this prompt there is room for {room}. Ask "
                "for fewer, or start the run with a higher max_completion_length.",
                "max_tokens",
            )
        if request.trains and not params.max_tokens:
            raise InvalidSampleRequest(
                "A completion of 0 tokens was asked for, of which nothing can be learnt. Give max_tokens of 1 or more.",
                "max_tokens",
            )
        if params.max_tokens and params.min_tokens > params.max_tokens:
            raise InvalidSampleRequest(
                f"A completion was to have at least {params.min_tokens} tokens and at most {params.max_tokens}.",
                "min_tokens",
            )
        return params

    # --- steps -----------------------------------------------------------------------------------

    async def step(self, plan: Plan) -> StepDone:
        """See `Engine.step`."""
        async with self._run_lock:
            run = self._loaded_run.run
            if plan.step != run.step:
                raise UsageError(
                    f"The plan is for step {plan.step + 1}, but the run has taken {run.step} steps."
                )
            run.timings = Timings()
            shaped = [run.algorithm.shaped(group, run.longest_completion) for group in plan.groups]
            # Everything sampled since the previous step; this may include groups of later steps.
            tokens, self._fresh_tokens = self._fresh_tokens, 0
            sampling = run.gate.busy()
            batch = StepBatch(shaped, sampling=sampling, sampled_tokens=tokens)
            with run.taking_a_step():
                if self._loaded_run.prepared.layout.frees_cache:
                    await run.settle()  # a request that came now would need the memory back
                # The seconds of a step are those of sampling and learning, without what clients take in between.
                begun = time.perf_counter() - sampling
                metrics = await take_step(run, batch, begun, plan.learning_rate)
            if run.step % run.config.run.save_steps == 0:
                await self._save()
            self._loaded_run.progress.phase("ready")
            record = run.folder.store.step(run.step - 1)
            return StepDone(record, metrics, run.policy, self._oldest, tuple(run.warned))

    async def _save(self) -> None:
        await save_checkpoint(self._loaded_run.run)
        self._note_oldest_checkpoint()

    def _note_oldest_checkpoint(self) -> None:
        found_checkpoints = checkpoints.complete(self._loaded_run.run.folder.checkpoints)
        self._oldest = found_checkpoints[0].step if found_checkpoints else 0

    async def metrics_of(self, step: int) -> Mapping[str, float]:
        """See `Engine.metrics_of`."""
        return self._undone_metrics.get(step) or self._loaded_run.run.folder.store.step_metrics(
            step
        )

    async def save(self) -> Saved:
        """See `Engine.save`."""
        async with self._run_lock:
            run = self._loaded_run.run
            await self._save()
            return Saved(run.step, str(run.folder.checkpoints / f"step-{run.step}"))

    async def close_run(self, finished: bool) -> str:
        """See `Engine.close_run`."""
        async with self._run_lock:
            current = self._loaded_run
            run = current.run
            await self._save()

            def write_final(folder: Path) -> None:
                shutil.copytree(run.policy.path, folder, dirs_exist_ok=True)
                run.tokenizer.save_pretrained(folder)

            if finished:
                run.folder.write_final(write_final)
            write_curve(run, METRIC)
            summary = summarise(run, current.prepared, current.begun)
            first, last = first_and_last(run, METRIC)
            if first is not None:
                summary |= {"reward_first": first, "reward_last": last}
            await end(run, "finished" if finished else "stopped", summary)
            return str(run.folder.path)

    # --- tokenizer, state, end -------------------------------------------------------------------

    async def tokens_of(self, prompt: Prompt) -> tuple[int, ...]:
        """See `Engine.tokens_of`."""
        return prompt_ids(self._loaded_run.run.tokenizer, prompt)

    async def tokenizer_files(self) -> Mapping[str, bytes]:
        """See `Engine.tokenizer_files`."""
        return self._tokenizer_files

    @cached_property
    def _tokenizer_files(self) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            self._loaded_run.run.tokenizer.save_pretrained(folder)
            files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            return {str(path.relative_to(folder)): path.read_bytes() for path in files}

    @cached_property
    def _tokenizer_hash(self) -> str:
        digest = hashlib.sha256()
        for name, content in self._tokenizer_files.items():
            digest.update(f"{name}|{len(content)}|".encode())
            digest.update(content)
        return digest.hexdigest()[:16]

    async def probe(self) -> Probe:
        """See `Engine.probe`."""
        if self._opened is None:
            return Probe("idle", None, 0, 0)
        run, parts = self._opened.run, self._opened.parts
        memory = parts.peak_memory(self._opened.prepared.layout.device)
        return Probe(self._opened.progress.name, memory, run.gate.inside, self._sampled_tokens)

    async def lost(self) -> EngineLost:
        """See `Engine.lost`: anything that runs in this process ends with the process, so this never returns."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """See `Engine.close`."""
        self._is_closing = True  # a request that waits for the step's end gets no half-closed parts
        await self._scope.aclose()
        self._opened = None


# --- from a request to a run ----------------------------------------------------------------------


def _committed_steps(
    point: ResumePoint | None,
) -> tuple[tuple[StepRecord, ...], dict[int, dict[str, float]]]:
    """All steps that a run has committed, and the metrics of those that resuming will undo."""
    if point is None:
        return (), {}
    with Store.open(point.path / RECORD, readonly=True) as store:
        steps = tuple(store.steps())
        undone = (record.step for record in steps if record.step >= point.step)
        return steps, {step: store.step_metrics(step) for step in undone}


def _prepare_run(loaded: LoadedConfig, longest_prompt: int) -> _Prepared:
    """Check everything in a config that can be wrong before the model is loaded."""
    config = loaded.config
    check_start(loaded)
    tokenizer = prefork.load_tokenizer(config.model)
    check_stop_tokens(config, tokenizer)
    algorithm = build_algorithm(config)
    try:
        algorithm.check(rollout_builder.longest_written(config), (PART,))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if algorithm.resample_rounds:
        raise ConfigError(
            f"algorithm {config.algorithm.type} as it is set draws other groups in place of those without signal, which only the "
            "client can do here. Set dynamic_sampling to false, and give such groups up (DELETE /completions/{group_id})."
        )
    room = prefork.prompt_room(config.model, rollout_builder.longest_completion(config))
    if longest_prompt > room:
        raise ConfigError(
            f"max_prompt_length is {longest_prompt}, but beside a completion of {config.sampler.max_completion_length} tokens "
            f"{config.model.name} has room for a prompt of {max(room, 0)}. Lower one of the two."
        )
    assert config.training.max_steps is not None, "a served run has no epochs"
    return _Prepared(
        loaded=loaded,
        task=Task(object(), CLIENTS, None, None),
        tokenizer=tokenizer,
        max_steps=config.training.max_steps,
        layout=training_layout(config, longest_prompt),
        facts={"task": CLIENTS, "task_file": "", "base": identity(config.model)},
    )


def _assemble_run(
    prepared: _Prepared,
    folder: RunFolder,
    parts: Parts,
    progress: Phase,
    publish_folder: Path,
) -> ServedRun:
    config = prepared.config
    nothing_yet = Policy(folder.name, 0, "", "adapter", "")
    return ServedRun(
        config=config,
        max_steps=prepared.max_steps,
        algorithm=build_algorithm(config),
        sampler=parts.sampler,
        learner=parts.learner,
        tokenizer=prepared.tokenizer,
        signals=Signals(config.signals) if config.signals else None,
        folder=folder,
        progress=progress,
        interruption=Interruption(),
        policy=nothing_yet,
        serving=nothing_yet,
        publications=publish_folder,
    )


def _refuse_unlearnable(sampling: Sampling) -> None:
    restricting = [key for key in ("top_p", "top_k", "min_p") if getattr(sampling, key) is not None]
    if sampling.processing is not None:
        restricting.append("processing")
    if restricting:
        raise UsageError(
            f"{', '.join(restricting)} would draw completions from another distribution than the one whose log-probabilities the learner "
            "computes, so nothing could be learnt from them. Leave it out, or ask for completions that are not kept."
        )
    if sampling.temperature == 0:
        raise InvalidSampleRequest(
            "temperature 0 draws the same completion each time, from which nothing can be learnt. Give one above 0.",
            "temperature",
        )


def _first_difference(client_ids: tuple[int, ...], server_ids: tuple[int, ...]) -> str:
    position = next(
        (
            index
            for index, pair in enumerate(zip(client_ids, server_ids, strict=False))
            if pair[0] != pair[1]
        ),
        min(len(client_ids), len(server_ids)),
    )
    return (
        f"{len(client_ids)} tokens were given and {len(server_ids)} are expected, and they differ from token {position} on "
        f"({list(client_ids[position : position + 3])} instead of {list(server_ids[position : position + 3])})"
    )
