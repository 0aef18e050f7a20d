"""Asks the first learner's model what the published weights say, if vLLM servers sample for several learners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.engine.distributed.rpc import Calls


class RankWitness:
    """A `groupwise.engine.sampler.vllm.sampler.Knows` over the `witness` that the first rank hosts.

    All calls block: servers are compared with the learner between two pieces of work, and nothing continues before that is done.
    """

    def __init__(self, ranks: Calls) -> None:
        self._ranks = ranks
        self._fingerprint = str(self._asked("fingerprint"))
        self.vocabulary = int(self._asked("vocabulary"))
        """See `Knows`."""
        self.rank = int(self._asked("rank"))
        """See `Knows`."""

    def read(self, folder: str) -> None:
        """See `Knows.read`."""
        self._asked("read", folder)
        self._fingerprint = str(self._asked("fingerprint"))

    def fingerprint(self) -> str:
        """Fingerprint of the tensors in that rank's memory, as they were when they were read."""
        return self._fingerprint

    def logprobs(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        temperature: float,
        plain: bool = False,
    ) -> list[float]:
        """See `Knows.logprobs`."""
        return self._asked("logprobs", tuple(prompt_ids), tuple(token_ids), temperature, plain)

    def _asked(self, what: str, *arguments: Any) -> Any:
        return self._ranks.call_each_now([(0, f"witness.{what}", arguments)])[0]
