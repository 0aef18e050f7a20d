"""A policy that writes given texts, for tests of rollouts without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from groupwise.core.types import Completion, Example, GroupRequest, Policy, Prompt, SamplingParams
from groupwise.tasks.rollouts.rollout_request import RolloutRequest
from groupwise.tasks.rollouts.seeds import member_seed

Say = Callable[[int, str], str]
"""(seed, the text that the policy sees) -> the text that it writes."""

SEED = 7
"""The seed of the runs in these tests."""


class ScriptedSampler:
    """Writes what `say` returns; stop texts, stop tokens and the length limit cut it off as they would a real completion."""

    def __init__(self, tokenizer: Any, say: Say) -> None:
        self.tokenizer = tokenizer
        self.say = say
        self.requests: list[GroupRequest] = []

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        assert request.params.max_tokens >= 1
        self.requests.append(request)
        await asyncio.sleep(0)
        seen = self.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)
        return tuple(self._completion(seed, seen, request.params) for seed in request.seeds)

    async def load(self, policy: Policy) -> None:
        raise NotImplementedError

    def fingerprint(self) -> str:
        return "f"

    def _completion(self, seed: int, seen: str, params: SamplingParams) -> Completion:
        wanted = self.tokenizer(self.say(seed, seen), add_special_tokens=False)["input_ids"]
        ids: list[int] = []
        while (
            len(ids) < len(wanted) and len(ids) < params.max_tokens and not self._ended(ids, params)
        ):
            ids.append(wanted[len(ids)])
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(-0.01 * (place + 1) for place in range(len(ids))),
            finish_reason="stop" if self._ended(ids, params) else "length",
            seed=seed,
            policy_version=3,
            fingerprint="f",
        )

    def _ended(self, ids: Sequence[int], params: SamplingParams) -> bool:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        stopped = any(stop in text for stop in params.stop)
        return bool(ids) and (stopped or ids[-1] in params.stop_token_ids)


def ask_for(
    tokenizer: Any,
    prompt: Prompt,
    prompt_ids: Sequence[int],
    *,
    members: int = 1,
    draw: int = 5,
    max_tokens: int = 50,
    stop: tuple[str, ...] = (),
    **columns: Any,
) -> RolloutRequest:
    """A rollout request as the loop makes it."""
    return RolloutRequest(
        draw=draw,
        example=Example(2, prompt, columns),
        prompt_ids=tuple(prompt_ids),
        members=members,
        seed=lambda member, segment: member_seed(SEED, draw, member, segment),
        params=SamplingParams(max_tokens, 0.7, (tokenizer.eos_token_id,), stop),
    )


class Pieces:
    """A tokenizer over given pieces of text, the longest first; other characters are tokens of their own."""

    bos_token_id = None
    eos_token_id = 0
    chat_template = None

    def __init__(self, *pieces: str) -> None:
        characters = [chr(code) for code in range(32, 127)]
        self.pieces = ["<eos>", *sorted(pieces, key=len, reverse=True), *characters, "\n"]

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids: list[int] = []
        while text:
            ids.append(next(i for i, piece in enumerate(self.pieces) if text.startswith(piece)))
            text = text[len(self.pieces[ids[-1]]) :]
        return {"input_ids": ids}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return "".join(self.pieces[i] for i in ids if i or not skip_special_tokens)
