"""Sampler and learner in Tunix's environment, made by `groupwise.training.assembly.services` for `model.backend: tunix`.

fits.py          checks that Tunix computes a model as transformers does
environment.py   finds and creates the environment
process.py       the worker that runs there
messages.py      messages in both directions
worker/          the worker itself: JAX, Tunix's models, qwix, Orbax; nothing else imports it

The loop, rewards, record and checkpoints are the same as in every run. The worker receives rows and prompts, and writes publications
and states into the folders that the messages name.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from groupwise.api.schemas.parts import (
    Discard,
    Generate,
    Load,
    Publish,
)
from groupwise.core.errors import UsageError
from groupwise.core.types import (
    Completion,
    GroupRequest,
    Policy,
    SamplingParams,
)
from groupwise.engine.backends.tunix import fits
from groupwise.engine.backends.tunix.environment import start_worker
from groupwise.engine.backends.tunix.messages import Open, Opened, Restore, Save
from groupwise.engine.backends.tunix.process import WorkerProcess
from groupwise.engine.backends.verb_learner import Verb, VerbLearner
from groupwise.engine.sampler.rules import ends_with_stop, refuse_changed_draws
from groupwise.runs import publications

_COMPLETIONS = TypeAdapter(tuple[Completion, ...])
_POLICY = TypeAdapter(Policy)


class TunixSampler:
    """A `groupwise.core.types.Sampler` that calls the worker."""

    def __init__(self, worker: WorkerProcess, fingerprint: str, tokenizer: Any) -> None:
        self._worker = worker
        self._fingerprint = fingerprint
        self._tokenizer = tokenizer

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        """See `groupwise.core.types.Sampler.generate`. The worker does not know stop texts; tokens after one are removed here."""
        refuse_changed_draws(request, "model.backend tunix")
        completions = _COMPLETIONS.validate_python(
            await self._worker.call(Generate(request=request))
        )
        if not request.params.stop:
            return completions
        return tuple(self._cut_at_stop(completion, request.params) for completion in completions)

    def _cut_at_stop(self, completion: Completion, params: SamplingParams) -> Completion:
        text_of = partial(self._tokenizer.decode, skip_special_tokens=False)
        for count in range(1, len(completion.token_ids) + 1):
            ids = completion.token_ids[:count]
            if ends_with_stop(ids, params, text_of):
                return replace(
                    completion,
                    token_ids=ids,
                    logprobs=completion.logprobs[:count],
                    finish_reason="stop",
                )
        return completion

    async def load(self, policy: Policy) -> None:
        """See `groupwise.core.types.Sampler.load`."""
        self._fingerprint = str(await self._worker.call(Load(policy=policy)))

    def fingerprint(self) -> str:
        """Fingerprint of the weights in the worker's memory, as they were when they were loaded."""
        return self._fingerprint


class TunixLearner(VerbLearner):
    """A `groupwise.core.types.Learner` that calls the worker."""

    def __init__(self, worker: WorkerProcess, publish_folder: Path, keep_publications: int) -> None:
        """`keep_publications`: how many of the latest publications keep their files."""
        self._worker = worker
        self._publish_folder = publish_folder
        self._keep = keep_publications

    async def _call_verb(self, verb: Verb) -> Any:
        """See `VerbLearner._call_verb`. UsageError for several targets for one token, which Tunix's worker cannot compute."""
        for row in getattr(verb, "rows", ()):
            if row.targets_per_token > 1:
                raise UsageError(
                    f"A row has {row.targets_per_token} targets for each token; the backend tunix computes one. Use model.backend: torch."
                )
        return await self._worker.call(verb)

    def discard(self) -> None:
        """See `groupwise.core.types.Learner.discard`."""
        self._worker.tell(Discard())

    async def publish(self, version: int) -> Policy:
        """See `groupwise.core.types.Learner.publish`. Old publications' files are removed."""
        policy = _POLICY.validate_python(await self._worker.call(Publish(version=version)))
        publications.remove_old(self._publish_folder, version, self._keep)
        return policy

    async def save(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.save`. Orbax writes the optimiser's state, into its own folder."""
        await self._worker.call(Save(folder=folder))

    def load(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.load`."""
        self._worker.call_now(Restore(folder=folder))


async def start(
    order: Open, tokenizer: Any, threads: int | None, keep_publications: int
) -> tuple[WorkerProcess, TunixSampler, TunixLearner]:
    """Start a worker with a model. Raises UsageError for a model that cannot be loaded; on any error the worker is ended."""
    await asyncio.to_thread(fits.check, order)
    worker = start_worker(threads, order.mesh)
    try:
        opened = Opened.model_validate(await worker.call(order))
    except BaseException:
        worker.close()
        raise
    learner = TunixLearner(worker, Path(order.publish_folder), keep_publications)
    return worker, TunixSampler(worker, opened.fingerprint, tokenizer), learner
