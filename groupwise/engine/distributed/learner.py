"""A learner whose work is done by ranks: each computes the gradient of some of the rows, and all make the same update.

The learners of the ranks add up their gradients among themselves (`groupwise.engine.learner.replicas`). Their weights must stay equal to
the bit, so their fingerprints are compared each time the weights are written to a file.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from groupwise.core.types import (
    LossSpec,
    OptimiserParams,
    Policy,
    PolicyRole,
    Prediction,
    Row,
    UpdateResult,
)
from groupwise.engine.distributed.rpc import RankCall, WorkerCalls, require_equal
from groupwise.engine.distributed.sharding import shard_rows


class RankLearner:
    """A `groupwise.core.types.Learner` over the `learner` that each rank hosts."""

    def __init__(self, ranks: WorkerCalls, *, sharded: bool = False) -> None:
        """`sharded`: each rank holds a part of every weight, so all take part in each computation (`groupwise.engine.learner.fsdp`)."""
        self._ranks = ranks
        self._sharded = sharded
        self._trained: list[list[int]] = []
        """Row indices of each rank, from the last call of `forward_backward`."""

    async def forward_backward(
        self, rows: Sequence[Row], loss: LossSpec, denominators: Mapping[str, float]
    ) -> dict[str, float]:
        """See `groupwise.core.types.Learner.forward_backward`. Sums are added up in the order of the ranks."""
        self._trained = shard_rows(rows, self._ranks.count)
        calls = [
            (rank, "learner.forward_backward", (_rows_at(rows, share), loss, dict(denominators)))
            for rank, share in enumerate(self._trained)
            if share or self._sharded
        ]
        sums: dict[str, float] = {}
        for rank_sums in await self._call_ranks(calls):
            for name, value in rank_sums.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    async def trained_logprobs(self) -> list[tuple[float, ...]] | None:
        """See `groupwise.core.types.Learner.trained_logprobs`. Each rank returns those of its own rows."""
        shares = {rank: share for rank, share in enumerate(self._trained) if share}
        answers = await self._ranks.call_each(
            [(rank, "learner.trained_logprobs", ()) for rank in shares], droppable=True
        )
        return _merge_shares([*shares.values()], answers)

    async def update(self, params: OptimiserParams) -> UpdateResult:
        """See `groupwise.core.types.Learner.update`. Raises RunError if the ranks report different gradient norms."""
        ranks = range(self._ranks.count)
        results: list[UpdateResult] = await self._ranks.call_together(
            [(rank, "learner.update", (params,)) for rank in ranks]
        )
        self._trained = []
        require_equal("the norms of the gradient", [repr(result.grad_norm) for result in results])
        return results[0]

    def discard(self) -> None:
        """See `groupwise.core.types.Learner.discard`."""
        self._trained = []
        if self._sharded and self._ranks.stuck:
            return  # waiting ranks would not answer; the run is over
        self._ranks.call_all_now("learner.discard")

    async def publish(self, version: int) -> Policy:
        """See `groupwise.core.types.Learner.publish`. The first rank writes; raises RunError if the ranks' weights differ."""
        calls = self._first_rank_calls("learner.publish", (version,), "learner.attend_publication")
        policy, *fingerprints = await self._ranks.call_together(calls)
        require_equal("the learners' weights", [policy.fingerprint, *fingerprints])
        return policy

    async def logprobs(
        self, rows: Sequence[Row], role: PolicyRole = "policy"
    ) -> list[tuple[float, ...]]:
        """See `groupwise.core.types.Learner.logprobs`."""
        return await self._by_row("learner.logprobs", rows, role)

    async def predictions(self, rows: Sequence[Row]) -> list[Prediction]:
        """See `groupwise.core.types.Learner.predictions`."""
        return await self._by_row("learner.predictions", rows)

    async def save(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.save`. The first rank writes; raises RunError if the ranks' weights differ."""
        ranks = range(self._ranks.count)
        fingerprints = await self._ranks.call_together(
            [(rank, "learner.fingerprint", ()) for rank in ranks]
        )
        require_equal("the learners' weights", fingerprints)
        await self._ranks.call_together(
            self._first_rank_calls("learner.save", (folder,), "learner.attend_save")
        )

    def load(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.load`. Each rank reads the files."""
        self._ranks.call_all_now("learner.load", folder)

    @contextmanager
    def trace(self) -> Generator[RankTrace]:
        """Context manager that traces the work of the first rank; see `groupwise.engine.models.profile`."""
        self._ranks.call_each_now([(0, "begin_trace", ())])
        try:
            yield RankTrace(self._ranks)
        finally:
            self._ranks.call_each_now([(0, "end_trace", ())])

    def _first_rank_calls(
        self, name: str, arguments: tuple[Any, ...], other_name: str
    ) -> list[RankCall]:
        """A call of the first rank, and the calls of `other_name` that the other ranks answer at the same time."""
        other_ranks = range(1, self._ranks.count)
        return [(0, name, arguments), *((rank, other_name, ()) for rank in other_ranks)]

    async def _call_ranks(self, calls: Sequence[RankCall]) -> list[Any]:
        """Make calls that each rank answers independently and that may be cancelled. With divided weights, all ranks answer together."""
        if self._sharded:
            return await self._ranks.call_together(calls)
        return await self._ranks.call_each(calls, droppable=True)

    async def _by_row(self, name: str, rows: Sequence[Row], *arguments: Any) -> list[Any]:
        """Results of the ranks for their rows, in the order of all rows."""
        shares = shard_rows(rows, self._ranks.count)
        calls = [
            (rank, name, (_rows_at(rows, share), *arguments))
            for rank, share in enumerate(shares)
            if share or self._sharded
        ]
        answers = await self._call_ranks(calls)
        return _merge_shares([share for share in shares if share or self._sharded], answers)


class RankTrace:
    """The trace held by the first rank; same interface as `groupwise.engine.models.profile.Trace`."""

    def __init__(self, ranks: WorkerCalls) -> None:
        self._ranks = ranks

    def write(self, file: Path) -> None:
        """See `groupwise.engine.models.profile.Trace.write`."""
        self._ranks.call_each_now([(0, "tracing.trace.write", (file,))])

    def table(self) -> str:
        """See `groupwise.engine.models.profile.Trace.table`."""
        return self._ranks.call_each_now([(0, "tracing.trace.table", ())])[0]


def _merge_shares(shares: Sequence[Sequence[int]], answers: Sequence[Sequence[Any]]) -> list[Any]:
    """Reorder answers from shares into the order of all rows."""
    merged: list[Any] = [None] * sum(map(len, shares))
    for share, values in zip(shares, answers, strict=True):
        for index, value in zip(share, values, strict=True):
            merged[index] = value
    return merged


def _rows_at(rows: Sequence[Row], share: Sequence[int]) -> list[Row]:
    return [rows[index] for index in share]
