"""A sampler and a learner small enough to read, for tests of whatever drives them: the smallest policy that can learn.

The policy is one softmax over a vocabulary of characters that does not look at its context: a table of logits. `FakeSampler` draws from
it, `FakeLearner` follows the gradient of REINFORCE with the weights that it is given, and publishes the table as a JSON file. Both
keep the contracts of `groupwise.core.types` and need no torch. They ignore what needs a real model: the clip, KL, AdamW's moments, and
top_k, top_p, min_p and what changes logits.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.core import atomic_files
from groupwise.core.errors import PolicyMismatchError
from groupwise.core.types import (
    Completion,
    GroupRequest,
    LossSpec,
    OptimiserParams,
    Policy,
    PolicyRole,
    Prediction,
    PromptLogprobs,
    Row,
    SamplingParams,
    TopLogprobs,
    UpdateResult,
)
from groupwise.tasks.data.order import Stream

END = "\n"
ALPHABET = END + "abcdefghijklmnopqrstuvwxyz "
END_ID = 0
TABLE = "table.json"


class FakeTokenizer:
    """A token for each character of the alphabet; other characters become spaces."""

    eos_token_id = END_ID
    bos_token_id = None
    chat_template = "plain"
    all_special_tokens: tuple[str, ...] = ()
    added_tokens_decoder: Mapping[int, object] = {}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [max(ALPHABET.find(letter), 0) for letter in text.lower()]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: object) -> str:
        letters = [ALPHABET[index] for index in ids]
        return "".join(letter for letter in letters if not (skip_special_tokens and letter == END))

    def get_chat_template(self, tools: object = None) -> str:
        return self.chat_template

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **_: object) -> str:
        return " ".join(message.get("content") or "" for message in messages)


class FakeSampler:
    """Draws characters from the table that it loaded; a `groupwise.core.types.Sampler`."""

    def __init__(self) -> None:
        self.table = [0.0] * len(ALPHABET)
        self.version = 0
        self.requests: list[GroupRequest] = []
        """All that was asked, in order."""

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        self.requests.append(request)
        await asyncio.sleep(0)
        return tuple(self._sample_completion(seed, request) for seed in request.seeds)

    async def prompt_logprobs(self, prompt_ids: tuple[int, ...], top: int) -> PromptLogprobs:
        logprobs = _logprobs(self.table, 1.0)
        following = prompt_ids[1:]
        best = (_most_probable(logprobs, top),) * len(following) if top else ()
        return PromptLogprobs(tuple(logprobs[token] for token in following), best)

    async def load(self, policy: Policy) -> None:
        self.table = json.loads((Path(policy.path) / TABLE).read_text())
        if self.fingerprint() != policy.fingerprint:
            raise PolicyMismatchError(
                f"{policy.run}@{policy.version}: {policy.path} has the fingerprint {self.fingerprint()}, not {policy.fingerprint}."
            )
        self.version = policy.version

    def fingerprint(self) -> str:
        return _table_fingerprint(self.table)

    def _sample_completion(self, seed: int, request: GroupRequest) -> Completion:
        params, best = request.params, list[TopLogprobs]()
        temperature = params.temperature or 1.0
        unmasked = _logprobs(self.table, temperature)
        masked = _logprobs(self.table, temperature, params.stop_token_ids)
        stream = Stream(seed)
        ids: list[int] = []
        token_logprobs: list[float] = []
        while len(ids) < params.max_tokens and not _is_complete(ids, params):
            logprobs = masked if len(ids) < params.min_tokens else unmasked
            ids.append(_sample_token(logprobs, stream, greedy=params.temperature == 0))
            token_logprobs.append(logprobs[ids[-1]])
            if request.top_logprobs:
                best.append(_most_probable(logprobs, request.top_logprobs))
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(token_logprobs),
            finish_reason="stop" if _is_complete(ids, params) else "length",
            seed=seed,
            policy_version=self.version,
            fingerprint=self.fingerprint(),
            top_logprobs=tuple(best),
        )


class FakeLearner:
    """Follows the policy gradient of its table by plain steps; a `groupwise.core.types.Learner`."""

    def __init__(self, run: str, folder: Path) -> None:
        self.run = run
        self.folder = folder
        self.table = [0.0] * len(ALPHABET)
        self.start = list(self.table)
        self.gradient = [0.0] * len(ALPHABET)
        self.trained: list[tuple[float, ...]] = []

    async def forward_backward(
        self, rows: Sequence[Row], loss: LossSpec, denominators: Mapping[str, float]
    ) -> dict[str, float]:
        sums = {"loss/policy": 0.0, "tokens": 0.0}
        self.trained = await self.logprobs(rows)
        for row in rows:
            await asyncio.sleep(0)
            self._add_gradient(row, denominators["policy"], sums)
        return sums

    async def trained_logprobs(self) -> list[tuple[float, ...]] | None:
        return self.trained

    async def update(self, params: OptimiserParams) -> UpdateResult:
        norm = math.sqrt(sum(value * value for value in self.gradient))
        applied = math.isfinite(norm)
        if applied:
            self.table = [
                weight - params.learning_rate * slope
                for weight, slope in zip(self.table, self.gradient, strict=True)
            ]
        self.discard()
        return UpdateResult(norm, applied)

    def discard(self) -> None:
        self.gradient = [0.0] * len(ALPHABET)
        self.trained = []

    async def publish(self, version: int) -> Policy:
        folder = self.folder / f"v{version}"
        with atomic_files.explaining_disk_errors(folder):
            self._write_table(folder)
        return Policy(self.run, version, _table_fingerprint(self.table), "full", str(folder))

    async def logprobs(
        self, rows: Sequence[Row], role: PolicyRole = "policy"
    ) -> list[tuple[float, ...]]:
        table = self.start if role == "reference" else self.table
        return [
            tuple(
                logprobs[index]
                for index, logprobs in zip(
                    row.target_ids, _logprobs_by_target(table, row), strict=True
                )
            )
            for row in rows
        ]

    async def predictions(self, rows: Sequence[Row]) -> list[Prediction]:
        likeliest = self.table.index(max(self.table))
        return [
            Prediction(logprobs, tuple(token == likeliest for token in row.target_ids))
            for row, logprobs in zip(rows, await self.logprobs(rows), strict=True)
        ]

    async def save(self, folder: str) -> None:
        self._write_table(Path(folder))

    def load(self, folder: str) -> None:
        self.table = json.loads((Path(folder) / TABLE).read_text())

    def _add_gradient(self, row: Row, denominator: float, sums: dict[str, float]) -> None:
        weight = row.advantage * row.scale
        at_targets = _logprobs_by_target(self.table, row)
        for token, counts, logprobs in zip(row.target_ids, row.mask, at_targets, strict=True):
            if not counts:
                continue
            probabilities = map(math.exp, logprobs)
            sums["loss/policy"] -= weight
            sums["tokens"] += 1
            for index, probability in enumerate(probabilities):
                slope = (index == token) - probability
                self.gradient[index] -= weight * slope / row.temperature / denominator

    def _write_table(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TABLE).write_text(json.dumps(self.table))


def _logprobs_by_target(table: Sequence[float], row: Row) -> list[list[float]]:
    """The log-probabilities of all letters at each target of a row."""
    table_by_token = [_logprobs(table, row.temperature)] * len(row.completion_ids)
    for stretch in row.withheld:
        masked_logprobs = _logprobs(table, row.temperature, stretch.token_ids)
        table_by_token[stretch.start : stretch.end] = [masked_logprobs] * (
            stretch.end - stretch.start
        )
    return [logprobs for logprobs in table_by_token for _ in range(row.targets_per_token)]


def _logprobs(
    table: Sequence[float], temperature: float, withheld: Sequence[int] = ()
) -> list[float]:
    scaled = [
        -math.inf if index in withheld else value / temperature for index, value in enumerate(table)
    ]
    peak = max(scaled)
    normaliser = peak + math.log(math.fsum(math.exp(value - peak) for value in scaled))
    return [value - normaliser for value in scaled]


def _most_probable(logprobs: Sequence[float], count: int) -> TopLogprobs:
    possible = [pair for pair in enumerate(logprobs) if pair[1] > -math.inf]
    return tuple(sorted(possible, key=lambda pair: -pair[1])[:count])


def _sample_token(logprobs: Sequence[float], stream: Stream, *, greedy: bool) -> int:
    if greedy:
        return max(range(len(logprobs)), key=logprobs.__getitem__)
    remaining = stream.next() / 2**64
    for index, logprob in enumerate(logprobs):
        remaining -= math.exp(logprob)
        if remaining < 0:
            return index
    return len(logprobs) - 1


def _is_complete(ids: Sequence[int], params: SamplingParams) -> bool:
    if len(ids) < params.min_tokens:
        return False
    text = "".join(ALPHABET[index] for index in ids)
    return bool(ids) and (ids[-1] in params.stop_token_ids or any(map(text.endswith, params.stop)))


def _table_fingerprint(table: Sequence[float]) -> str:
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()[:16]
