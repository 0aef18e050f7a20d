"""The rollout in two stages: reasoning of bounded length, then an answer that always gets its own room.

    prompt → reasoning, until the end tag or its limit
           → the end tag, if it is missing, and the start tag of the answer, both inserted
           → the answer, until a stop token or its limit

So even a policy that never stops reasoning answers. Inserted tokens are context and are not trained. The second stage is a separate
request for each member, whose prompt is everything before it, so this works with every sampler.

Stop tokens and the stop texts of the config (`sampler.stop`) end either stage, as they end a completion; reasoning that ends in
this way is also followed by an answer.

The end tag is searched for as text, because it may be several tokens. Sampled tokens are never changed: if the tag ends inside a
token, the rest of this token is kept too, and the answer's tag follows it; if a stop token or a stop text ended the reasoning, it
is kept, and the tags follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.core.interruption import gather_all
from groupwise.core.types import Completion, Group, Rollout, Sampler, Segment
from groupwise.engine.models.tokens import completion_text, text_ids
from groupwise.tasks.rollouts.config import RolloutConfig
from groupwise.tasks.rollouts.rollout_request import RolloutRequest
from groupwise.tasks.rollouts.single import policy_segment


class TwoStage:
    """Reasoning, then an answer; a `RolloutKind`."""

    unrepeatable = None

    def __init__(self, config: RolloutConfig, tokenizer: Any) -> None:
        self._config = config
        self._tokenizer = tokenizer

    async def start(self) -> None:
        """Does nothing."""

    async def sample(self, sampler: Sampler, request: RolloutRequest) -> Group:
        """See `RolloutKind.sample`."""
        sampler_request = request.sampler_request(
            request.prompt_ids,
            [request.seed(member, 0) for member in range(request.members)],
            max_tokens=self._config.max_reasoning_length,
            stop=(self._config.reasoning_end, *request.params.stop),
        )
        reasoned = await sampler.generate(sampler_request)
        rollouts = await gather_all(
            self._sample_answer(
                sampler, request, member, policy_segment(completion, sampler_request.params)
            )
            for member, completion in enumerate(reasoned)
        )
        return Group(request.draw, request.example, tuple(rollouts))

    async def close(self) -> None:
        """Does nothing."""

    async def _sample_answer(
        self, sampler: Sampler, request: RolloutRequest, member: int, reasoning: Segment
    ) -> Rollout:
        text = self._tokenizer.decode(list(reasoning.token_ids), skip_special_tokens=False)
        end = "" if self._config.reasoning_end in text else self._config.reasoning_end
        inserted = text_ids(self._tokenizer, end + self._config.answer_start)
        sampler_request = request.sampler_request(
            (*request.prompt_ids, *reasoning.token_ids, *inserted),
            [request.seed(member, 1)],
            max_tokens=self._config.max_answer_length,
        )
        completions: Sequence[Completion] = await sampler.generate(sampler_request)
        answer = policy_segment(completions[0], sampler_request.params)
        segments = (reasoning, *((Segment("inserted", inserted),) if inserted else ()), answer)
        ids = [token for segment in segments for token in segment.token_ids]
        return Rollout(
            draw=request.draw,
            member=member,
            attempt=0,
            prompt_ids=request.prompt_ids,
            segments=segments,
            completion=completion_text(self._tokenizer, ids),
        )
