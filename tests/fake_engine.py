"""An engine small enough to read, for tests of whatever drives one: the fakes in place of a model, faults where they are asked for.

`FakeEngine` keeps the contract of `engine_protocol.Engine`: seeds that follow from the draw, a plan that is learnt from with centred
advantages, manifests and checkpoints on the disk (all of them atomic), and the way back to the last checkpoint. It needs no torch and
reads, of a config, only what `_Settings` names. Its run folder:

    <run.dir>/<name>/run.json         what is read of its config, the manifests of its steps, and their metrics
    <run.dir>/<name>/checkpoints/     step-N/table.json
    <run.dir>/<name>/policies/        vN/table.json, every published version
    <run.dir>/<name>/final/           table.json of a finished run

A call passes points, in this order: `begun`; `before_write` and `after_write` around what it writes to the disk, where it does (of a
step: its manifest; its checkpoint, if one is due, comes afterwards); `done`, just before it is answered. `hold` keeps calls at a point
until the test lets them go; a `Fault` has a call hang, fail or end the engine there.

`make` is the factory for an engine in a process of its own, told by the variable `GROUPWISE_FAKE_ENGINE` as JSON:

    {"pace": 0.01, "faults": [{"verb": "step", "kind": "die", "point": "after_write", "calls": [2], "once": "/tmp/it-happened"}]}
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NoReturn

from groupwise.algorithms.advantages import centred
from groupwise.core import atomic_files
from groupwise.core.errors import ModelError, RunError, RunNotFoundError, UsageError
from groupwise.core.types import (
    Completion,
    Example,
    Group,
    GroupRequest,
    LossSpec,
    OptimiserParams,
    Policy,
    Prompt,
    Rollout,
    RolloutCredit,
    SamplingParams,
)
from groupwise.engine.models.tokens import prompt_ids
from groupwise.runs import checkpoints
from groupwise.runs.records import StepRecord
from groupwise.server.engine.engine_protocol import (
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
from groupwise.server.engine.sampling_checks import (
    check_constraint,
    check_processing,
    refuse_unknown_tokens,
    stop_token_ids,
)
from groupwise.tasks.openai.sampling import Sampling
from groupwise.tasks.rollouts.rows import training_rows
from groupwise.tasks.rollouts.seeds import member_seed
from groupwise.tasks.rollouts.single import policy_segment
from groupwise.testing import ALPHABET, END_ID, TABLE, FakeLearner, FakeSampler, FakeTokenizer

VARIABLE = "GROUPWISE_FAKE_ENGINE"
NO_SUCH_MODEL = "no-such-model"
"""The one `model.name` that cannot be loaded."""
EXIT_CODE = 70
"""Exit code of a process that a fault ends."""

Verb = Literal[
    "open",
    "sample",
    "partial",
    "token_texts",
    "step",
    "metrics_of",
    "save",
    "tokens_of",
    "tokenizer_files",
    "close_run",
    "probe",
    "close",
]
Point = Literal["begun", "before_write", "after_write", "done"]

_Metrics = dict[int, dict[str, float]]
"""Metrics by step."""

_RECORD = "run.json"


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure to simulate, and when."""

    verb: Verb
    kind: Literal["hang", "block", "raise", "die"]
    """`hang`: the call waits for ever. `block`: so does the event loop. `raise`: RunError. `die`: the engine ends."""
    point: Point = "begun"
    calls: tuple[int, ...] = ()
    """Calls of the verb that fail, counted from 1 in the engine's life; empty: every one."""
    step: int | None = None
    """Limits a fault of `step` to the plan of this step."""
    once: str | None = None
    """A file that is created when the fault happens; if it exists, the fault has happened before, perhaps in an earlier process."""
    message: str = "A fault was asked for."

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", tuple(self.calls))  # from JSON it is a list


@dataclass(frozen=True, slots=True)
class _Settings:
    """Settings read from a config, with the defaults of the real one unless they are too large."""

    model: str
    max_steps: int
    seed: int
    members: int
    learning_rate: float
    longest_completion: int
    temperature: float
    save_steps: int
    runs: str
    name: str
    staleness: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Settings:
        model, training = config.get("model", {}), config.get("training", {})
        sampler, run = config.get("sampler", {}), config.get("run", {})
        return cls(
            model=model.get("name", "tiny"),
            max_steps=training.get("max_steps", 100),
            seed=training.get("seed", 0),
            members=training.get("num_generations", 8),
            learning_rate=training.get("learning_rate", 0.5),
            longest_completion=sampler.get("max_completion_length", 16),
            temperature=sampler.get("temperature", 1.0),
            save_steps=run.get("save_steps", 10),
            runs=run.get("dir", "runs"),
            name=run.get("name") or "run",
            staleness=training.get("max_off_policy_steps", 0),
        )


@dataclass(slots=True)
class _Run:
    """The run that is open."""

    settings: _Settings
    folder: Path
    longest_prompt: int
    learner: FakeLearner
    sampler: FakeSampler
    policy: Policy
    manifests: list[StepRecord]
    """Records of the committed steps."""
    metrics: _Metrics
    """Metrics by step, also of steps that a resume has undone."""
    closed: bool = False

    @property
    def step(self) -> int:
        return len(self.manifests)

    def write(self, manifests: Sequence[StepRecord]) -> None:
        _write_record(self.folder, self.settings, manifests, self.metrics)

    def save(self) -> Path:
        return _save_checkpoint(self.folder, self.step, self.learner)


@dataclass(slots=True)
class _Request:
    """A prompt that is being completed."""

    completions: tuple[Completion, ...] = ()
    shown: int = 0
    """Number of tokens of each completion that have been written so far."""


class FakeEngine:
    """See the module. `pace` is the time between two tokens of a request, in seconds, which `partial` then shows one by one.

    `ends_process` says what `die` is: the end of this process, or of this object alone, which is then lost for every call.
    """

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        *,
        pace: float = 0.0,
        ends_process: bool = False,
    ) -> None:
        self.calls: Counter[str] = Counter()
        """How often each verb was called."""
        self._faults = tuple(faults)
        self._pace = pace
        self._ends_process = ends_process
        self._gates: dict[tuple[str, str], asyncio.Event] = {}
        self._tokenizer = FakeTokenizer()
        self._run: _Run | None = None
        self._turn = asyncio.Lock()
        self._requests: dict[int, _Request] = {}
        self._phase = "idle"
        self._sampled_tokens = 0
        self._reason: str | None = None
        """The reason why no call is possible any more."""
        self._over = asyncio.Event()
        self._died = asyncio.Event()

    def hold(self, verb: Verb, point: Point = "begun") -> asyncio.Event:
        """Calls of the verb wait at the point from now on, until the event is set."""
        return self._gates.setdefault((verb, point), asyncio.Event())

    # --- the protocol ----------------------------------------------------------------------------

    async def open(self, request: OpenRun) -> Opened:
        """See `Engine.open`. As in the real one only once: another run gets another engine."""
        return await self._called("open", self._open, request)

    async def sample(self, request: GroupSampleRequest) -> Sampled:
        """See `Engine.sample`."""
        return await self._called("sample", self._sample, request)

    async def partial(self, draw: int) -> tuple[str, ...]:
        """See `Engine.partial`."""
        return await self._called("partial", self._partial, draw)

    async def token_texts(self, token_ids: tuple[int, ...]) -> tuple[str, ...]:
        """See `Engine.token_texts`."""
        return await self._called("token_texts", self._token_texts, token_ids)

    async def step(self, plan: Plan) -> StepDone:
        """See `Engine.step`."""
        return await self._called("step", self._step, plan, step=plan.step)

    async def metrics_of(self, step: int) -> Mapping[str, float]:
        """See `Engine.metrics_of`."""
        return await self._called("metrics_of", self._metrics_of, step)

    async def save(self) -> Saved:
        """See `Engine.save`."""
        return await self._called("save", self._save)

    async def tokens_of(self, prompt: Prompt) -> tuple[int, ...]:
        """See `Engine.tokens_of`."""
        return await self._called("tokens_of", self._tokens_of, prompt)

    async def tokenizer_files(self) -> Mapping[str, bytes]:
        """See `Engine.tokenizer_files`."""
        return await self._called("tokenizer_files", self._tokenizer_files)

    async def close_run(self, finished: bool) -> str:
        """See `Engine.close_run`."""
        return await self._called("close_run", self._close_run, finished)

    async def probe(self) -> Probe:
        """See `Engine.probe`."""
        return await self._called("probe", self._probe)

    async def lost(self) -> EngineLost:
        """See `Engine.lost`."""
        await self._died.wait()
        return EngineLost(str(self._reason))

    async def close(self) -> None:
        """See `Engine.close`. What is under way is lost. May be repeated, also when the engine is lost."""
        if self._reason is None:
            await self._called("close", self._close)
            self._end("The engine was closed.")

    # --- faults ----------------------------------------------------------------------------------

    async def _called(
        self, verb: Verb, do: Callable[..., Any], *arguments: Any, step: int | None = None
    ) -> Any:
        """Run the call. If the engine is lost before the answer, the call is cancelled."""
        self._check_alive()
        self.calls[verb] += 1
        point = _Points(self, verb, self.calls[verb], step)
        work = asyncio.ensure_future(self._between(point, do, *arguments))
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait((work, over), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            self._check_alive()
        finally:
            for each in (work, over):
                each.cancel()
            await asyncio.gather(work, over, return_exceptions=True)

    async def _between(self, point: _Points, do: Callable[..., Any], *arguments: Any) -> Any:
        await point("begun")
        answer = await do(point, *arguments)
        await point("done")
        return answer

    async def pass_point(self, verb: str, point: Point, call: int, step: int | None) -> None:
        """Apply `hold` and the faults to a call at this point."""
        gate = self._gates.get((verb, point))
        if gate is not None:
            await gate.wait()
        for fault in self._faults:
            if (fault.verb, fault.point) == (verb, point) and _happens(fault, call, step):
                await self._suffer(fault)

    async def _suffer(self, fault: Fault) -> None:
        match fault.kind:
            case "hang":
                await asyncio.Event().wait()
            case "block":
                threading.Event().wait()
            case "raise":
                raise RunError(fault.message)
            case "die":
                self._die(fault.message)

    def _die(self, message: str) -> NoReturn:
        if self._ends_process:
            os.write(1, f"{message}\n".encode())
            os._exit(EXIT_CODE)
        reason = f"The engine ended: {message}"
        self._end(reason)
        self._died.set()
        raise EngineLost(reason)

    def _end(self, reason: str) -> None:
        self._reason = reason
        self._over.set()

    def _check_alive(self) -> None:
        if self._reason is not None:
            raise EngineLost(self._reason)

    # --- what is asked ---------------------------------------------------------------------------

    async def _open(self, point: _Points, request: OpenRun) -> Opened:
        async with self._turn:
            assert self._run is None, "an engine hosts one run; a new run gets a new engine"
            self._phase = "loading"
            settings = _Settings.of(request.config)
            _check(settings, request)
            if request.run is None:
                folder, manifests, metrics, step = _free_folder(settings), (), {}, 0
            else:
                folder = Path(settings.runs, request.run)
                manifests, metrics, step = _stored(folder)
            await point("before_write")
            folder.mkdir(parents=True, exist_ok=True)
            _write_record(folder, settings, manifests[:step], metrics)
            await point("after_write")
            self._run = run = await _opened(settings, folder, request, manifests[:step], metrics)
            self._phase = "ready"
            return Opened(
                run=folder.name,
                folder=str(folder),
                step=step,
                max_steps=settings.max_steps,
                policy=run.policy,
                manifests=manifests,
                longest_prompt=request.longest_prompt,
                longest_completion=settings.longest_completion,
                longest_prompt_characters=request.longest_prompt,
                tokenizer_hash=_hash(_FILES),
                chat_template=self._tokenizer.chat_template,
            )

    async def _sample(self, _: _Points, request: GroupSampleRequest) -> Sampled:
        run = self._current
        ids = self._ids(request, run)
        params = _params(request, run.settings)
        seed, draw = run.settings.seed, request.draw
        if request.sampling.seed is not None:
            seed, draw = request.sampling.seed, 0
        members = run.settings.members if request.members is None else request.members
        if members < 1:
            raise UsageError(f"A group of {members} completions was asked for; at least 1.")
        seeds = tuple(member_seed(seed, draw, member) for member in range(members))
        progress = self._requests[request.draw] = _Request()
        try:
            prompt_logprobs = None
            if request.prompt_logprobs is not None:
                prompt_logprobs = await run.sampler.prompt_logprobs(ids, request.prompt_logprobs)
            wanted = run.step if request.policy_step is None else request.policy_step
            step = min(max(wanted, run.step - run.settings.staleness), run.step)
            sampler = run.sampler if step == run.step else _earlier_sampler(run, step)
            if params.max_tokens:
                progress.completions = await sampler.generate(
                    GroupRequest(request.draw, ids, seeds, params, request.top_logprobs)
                )
            step = run.step if sampler is run.sampler else step
            sampled = self._sampled(run, request, ids, params, progress.completions, step, sampler)
            if not params.max_tokens:
                nothing = [
                    Rollout(request.draw, member, 0, ids, (), "") for member in range(members)
                ]
                sampled = replace(sampled, group=replace(sampled.group, rollouts=tuple(nothing)))
            sampled = replace(sampled, prompt_logprobs=prompt_logprobs)
            await self._show(progress)
        finally:
            self._requests.pop(request.draw, None)
        self._sampled_tokens += sum(rollout.written for rollout in sampled.group.rollouts)
        return sampled

    async def _show(self, request: _Request) -> None:
        """Make the tokens appear one after another."""
        if not self._pace or not request.completions:
            return
        for shown in range(1, max(len(each.token_ids) for each in request.completions) + 1):
            request.shown = shown
            await asyncio.sleep(self._pace)

    def _sampled(
        self,
        run: _Run,
        request: GroupSampleRequest,
        ids: tuple[int, ...],
        params: SamplingParams,
        completions: Sequence[Completion],
        step: int,
        sampler: FakeSampler,
    ) -> Sampled:
        rollouts = tuple(
            Rollout(
                draw=request.draw,
                member=member,
                attempt=0,
                prompt_ids=ids,
                segments=(policy_segment(completion, params),),
                completion=self._text(completion.token_ids),
            )
            for member, completion in enumerate(completions)
        )
        prompt = self._text(request.prompt) if isinstance(request.prompt, tuple) else request.prompt
        seen = None if isinstance(prompt, str) else self._tokenizer.decode(ids)
        example = Example(request.draw, prompt, dict(request.columns))
        group = Group(request.draw, example, rollouts, prompt_seen=seen)
        best = tuple(completion.top_logprobs for completion in completions)
        return Sampled(group, step, sampler.version, sampler.fingerprint(), best)

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    async def _partial(self, _: _Points, draw: int) -> tuple[str, ...]:
        progress = self._requests.get(draw)
        if progress is None:
            return ()
        return tuple(self._text(each.token_ids[: progress.shown]) for each in progress.completions)

    async def _token_texts(self, _: _Points, token_ids: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(self._tokenizer.decode([token]) for token in token_ids)

    async def _step(self, point: _Points, plan: Plan) -> StepDone:
        async with self._turn:
            run = self._learning
            _check_plan(run, plan)
            self._phase = "learning"
            rate = run.settings.learning_rate if plan.learning_rate is None else plan.learning_rate
            before = list(run.learner.table)
            try:
                metrics, changed = await _learn(run, plan.groups, rate)
                version = run.policy.version + changed
                policy = await run.learner.publish(version) if changed else run.policy
                record = StepRecord(
                    step=plan.step,
                    version_in=run.policy.version,
                    version_out=version,
                    fingerprint_out=policy.fingerprint,
                    draws=tuple(group.draw for group in plan.groups),
                    learning_rate=rate,
                    finished_at=time.time(),
                )
                await point("before_write")
                run.metrics[plan.step] = metrics
                run.write([*run.manifests, record])
            except BaseException:  # also where the call is given up: the step was not taken
                run.learner.discard()
                run.learner.table = before
                self._phase = "ready"
                raise
            await run.sampler.load(
                policy
            )  # from here on without a pause: all of the step, or nothing
            run.policy = policy
            run.manifests.append(record)
            await point("after_write")
            if run.step % run.settings.save_steps == 0:
                run.save()
            self._phase = "ready"
            return StepDone(record, metrics, policy)

    async def _metrics_of(self, _: _Points, step: int) -> Mapping[str, float]:
        return dict(self._current.metrics.get(step, {}))

    async def _save(self, point: _Points) -> Saved:
        async with self._turn:
            run = self._learning
            await point("before_write")
            path = run.save()
            await point("after_write")
            return Saved(run.step, str(path))

    async def _tokens_of(self, _: _Points, prompt: Prompt) -> tuple[int, ...]:
        return self._tokens(prompt)

    async def _tokenizer_files(self, _: _Points) -> Mapping[str, bytes]:
        return dict(_FILES)

    async def _close_run(self, point: _Points, finished: bool) -> str:
        async with self._turn:
            run = self._learning
            await point("before_write")
            run.save()
            if finished:
                table = run.learner.table
                atomic_files.make_folder(
                    run.folder / "final", lambda folder: _write_table(folder, table), replace=True
                )
            await point("after_write")
            run.closed = True
            self._phase = "closed"
            return str(run.folder)

    async def _probe(self, _: _Points) -> Probe:
        return Probe(self._phase, None, len(self._requests), self._sampled_tokens)

    async def _close(self, _: _Points) -> None:
        """No file is held open; calls in progress end afterwards."""

    @property
    def _current(self) -> _Run:
        """The open run, for calls that sample."""
        if self._run is None:
            raise UsageError("No run is open in this engine.")
        return self._run

    @property
    def _learning(self) -> _Run:
        """The open run, for calls that write to it."""
        if self._current.closed:
            raise UsageError(f"The run {self._current.folder.name} is closed.")
        return self._current

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        return prompt_ids(self._tokenizer, prompt)

    def _ids(self, request: GroupSampleRequest, run: _Run) -> tuple[int, ...]:
        if isinstance(request.prompt, tuple):
            refuse_unknown_tokens(request.prompt, len(ALPHABET), "prompt")
            ids = request.prompt
        else:
            ids = self._tokens(request.prompt)
        if request.prompt_ids not in (None, ids):
            message = "The given tokens are not what this engine makes of the prompt."
            raise InvalidSampleRequest(message, "prompt_ids", "tokenizer_mismatch")
        if len(ids) > run.longest_prompt:
            message = f"The prompt has {len(ids)} tokens, and this run takes at most {run.longest_prompt}."
            raise InvalidSampleRequest(message, "prompt", "prompt_too_long")
        return ids


@dataclass(frozen=True, slots=True)
class _Points:
    """Reports the progress of one call."""

    engine: FakeEngine
    verb: str
    call: int
    step: int | None

    async def __call__(self, point: Point) -> None:
        await self.engine.pass_point(self.verb, point, self.call, self.step)


def make() -> FakeEngine:
    """The engine that the environment variables describe; see the module."""
    given = json.loads(os.environ.get(VARIABLE, "{}"))
    faults = [Fault(**each) for each in given.pop("faults", ())]
    return FakeEngine(faults, **given, ends_process=True)


def _happens(fault: Fault, call: int, step: int | None) -> bool:
    if fault.calls and call not in fault.calls:
        return False
    if fault.step is not None and fault.step != step:
        return False
    if fault.once is None:
        return True
    try:
        Path(fault.once).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


# --- the run on the disk --------------------------------------------------------------------------


def _write_record(
    folder: Path, settings: _Settings, manifests: Sequence[StepRecord], metrics: _Metrics
) -> None:
    """The one durable write of a step."""
    written = {
        "settings": asdict(settings),
        "manifests": [asdict(manifest) for manifest in manifests],
        "metrics": {str(step): values for step, values in metrics.items()},
    }
    atomic_files.write_json(folder / _RECORD, written)


def _save_checkpoint(folder: Path, step: int, learner: FakeLearner) -> Path:
    """The state after so many steps, in a folder that appears whole."""
    place, table = folder / "checkpoints", learner.table
    if not (place / f"step-{step}").is_dir():
        checkpoints.save(place, step, lambda made: _write_table(made, table))
    return place / f"step-{step}"


def _write_table(folder: Path, table: Sequence[float]) -> None:
    (folder / TABLE).write_text(json.dumps(table))


def _stored(folder: Path) -> tuple[tuple[StepRecord, ...], _Metrics, int]:
    """All manifests of an existing run, their metrics, and the step of its last checkpoint."""
    if not (folder / _RECORD).is_file():
        there = sorted(path.parent.name for path in folder.parent.glob(f"*/{_RECORD}"))
        raise RunNotFoundError(f"There is no run {folder.name}; there are: {', '.join(there)}.")
    found = json.loads((folder / _RECORD).read_text())
    manifests = tuple(_manifest(each) for each in found["manifests"])
    metrics = {int(step): values for step, values in found["metrics"].items()}
    saved = (folder / "checkpoints").glob("step-*")
    return manifests, metrics, max((int(path.name[5:]) for path in saved), default=0)


def _manifest(found: dict[str, Any]) -> StepRecord:
    listed = ("draws", "rejected")
    values: dict[str, Any] = {
        key: tuple(value) if key in listed else value for key, value in found.items()
    }
    return StepRecord(**values)


def _free_folder(settings: _Settings) -> Path:
    path = Path(settings.runs, settings.name)
    number = 1
    while path.exists():
        number += 1
        path = Path(settings.runs, f"{settings.name}-{number}")
    return path


async def _opened(
    settings: _Settings,
    folder: Path,
    request: OpenRun,
    manifests: Sequence[StepRecord],
    metrics: _Metrics,
) -> _Run:
    learner = FakeLearner(folder.name, folder / "policies")
    step = len(manifests)
    if step:
        learner.load(str(folder / "checkpoints" / f"step-{step}"))
    sampler = FakeSampler()
    policy = await learner.publish(manifests[-1].version_out if manifests else 0)
    await sampler.load(policy)
    return _Run(
        settings, folder, request.longest_prompt, learner, sampler, policy, [*manifests], metrics
    )


def _earlier_sampler(run: _Run, step: int) -> FakeSampler:
    """A sampler that serves the policy after `step` steps."""
    sampler = FakeSampler()
    sampler.version = run.manifests[step - 1].version_out if step else 0
    path = run.folder / "policies" / f"v{sampler.version}" / TABLE
    sampler.table = json.loads(path.read_text())
    return sampler


# --- learning -------------------------------------------------------------------------------------


async def _learn(run: _Run, groups: Sequence[Group], rate: float) -> tuple[dict[str, float], bool]:
    """Dr. GRPO's sums in one update; whether it changed the weights."""
    weights = [_weights(group) for group in groups]
    rows = [row for row in training_rows(groups, weights) if row.advantage]
    rewards = [rollout.reward for group in groups for rollout in group.scored]
    metrics = {"reward": fmean(each for each in rewards if each is not None)} if rewards else {}
    if not rows:
        return metrics, False
    denominators = {"policy": float(len(rewards) * run.settings.longest_completion)}
    sums = await run.learner.forward_backward(rows, LossSpec("policy"), denominators)
    result = await run.learner.update(OptimiserParams(rate))
    loss = sums["loss/policy"] / denominators["policy"]
    return {**metrics, "loss": loss, "grad_norm": result.grad_norm}, result.applied


def _weights(group: Group) -> tuple[RolloutCredit | None, ...]:
    rewards = [0.0 if each.reward is None else each.reward for each in group.scored]
    left = iter(centred(rewards))
    return tuple(
        RolloutCredit(next(left), 1.0) if rollout.outcome == "scored" else None
        for rollout in group.rollouts
    )


# --- what cannot be asked -------------------------------------------------------------------------


def _check(settings: _Settings, request: OpenRun) -> None:
    if settings.model == NO_SUCH_MODEL:
        raise ModelError(f"There is no model {settings.model}.")
    if request.longest_prompt < 1:
        raise UsageError(f"longest_prompt is {request.longest_prompt}; at least 1 token.")


def _check_plan(run: _Run, plan: Plan) -> None:
    if plan.step != run.step:
        raise RunError(
            f"The plan is for step {plan.step + 1}, but the run has taken {run.step} steps."
        )
    if run.step >= run.settings.max_steps:
        raise RunError(f"All {run.settings.max_steps} steps of the run are done.")
    unscored = [
        (rollout.draw, rollout.member)
        for group in plan.groups
        for rollout in group.rollouts
        if rollout.outcome == "pending" or (rollout.outcome == "scored" and not _finite(rollout))
    ]
    if unscored:
        raise UsageError(f"Rollouts without a reward (draw, member): {unscored}.")


def _finite(rollout: Rollout) -> bool:
    return rollout.reward is not None and math.isfinite(rollout.reward)


def _params(request: GroupSampleRequest, settings: _Settings) -> SamplingParams:
    asked = request.sampling
    own = SamplingParams(
        max_tokens=settings.longest_completion,
        temperature=settings.temperature,
        stop_token_ids=stop_token_ids(asked, (END_ID,), len(ALPHABET)),
        processing=asked.processing,
    )
    keys = ("temperature", "max_tokens", "min_tokens", "stop", "top_p", "top_k", "min_p")
    given = {key: value for key in keys if (value := getattr(asked, key)) is not None}
    params = replace(own, **given)
    check_processing(params, len(ALPHABET))
    if params.processing is not None and params.processing.is_constrained:
        check_constraint(params.processing)
    if request.trains:
        _check_learnable(asked)
    if not request.trains <= params.max_tokens <= settings.longest_completion:
        raise InvalidSampleRequest(
            f"A completion of up to {params.max_tokens} tokens was asked for; from 1 to {settings.longest_completion} there is room for.",
            "max_tokens",
        )
    if params.max_tokens and not 0 <= params.min_tokens <= params.max_tokens:
        raise InvalidSampleRequest(
            f"A completion was to have at least {params.min_tokens} tokens and at most {params.max_tokens}.",
            "min_tokens",
        )
    return params


def _check_learnable(asked: Sampling) -> None:
    restricting = [key for key in ("top_p", "top_k", "min_p") if getattr(asked, key) is not None]
    if asked.processing is not None:
        restricting.append("processing")
    if restricting:
        raise UsageError(f"Nothing could be learnt with {', '.join(restricting)}; leave it out.")
    if asked.temperature == 0:
        raise InvalidSampleRequest(
            "Nothing could be learnt at temperature 0; give one above it.", "temperature"
        )


_FILES: dict[str, bytes] = {"alphabet.json": json.dumps(ALPHABET).encode()}


def _hash(files: Mapping[str, bytes]) -> str:
    """Hash of names, lengths and contents, as the real engine computes it."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}|{len(content)}|".encode())
        digest.update(content)
    return digest.hexdigest()[:16]
