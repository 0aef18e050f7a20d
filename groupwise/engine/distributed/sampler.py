"""A sampler that distributes its work over ranks.

Groups that are requested within a few milliseconds are divided among the ranks together. Clients may request the groups of a step one by
one, and this avoids cutting them more than necessary. A member's draw does not depend on its rank nor on other members, so the division
changes no bit.

If vLLM servers sample for several learners, `RankPolicy` asks the first learner's model for log-probabilities under the published weights;
learners with a part of the weights each compute them together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from groupwise.core.types import Completion, GroupRequest, Policy, PromptLogprobs, RouterShape
from groupwise.engine.distributed.rpc import RankCall, WorkerCalls, require_equal
from groupwise.engine.distributed.sharding import Share, share_groups
from groupwise.engine.sampler.servers.probe import Answer

_SERVED = "the samplers' weights"
GATHER_SECONDS = 0.003
"""Seconds for which groups are gathered before they are divided: a thousandth of a small step's time."""


@dataclass(slots=True, eq=False)
class _Ticket:
    """A requested group."""

    request: GroupRequest
    dealt: asyncio.Future[None]
    shares: list[Share]
    """Empty until the group has been divided."""


class RankSampler:
    """A `groupwise.core.types.Sampler` over the `sampler` that each rank hosts."""

    def __init__(self, ranks: WorkerCalls, *, frees_cache: bool = False) -> None:
        """`frees_cache`: the samplers of the ranks free their keys and values in `rest`."""
        self._ranks = ranks
        self._frees_cache = frees_cache
        self._loads = [0] * ranks.count
        self._waiting: list[_Ticket] = []
        self._dealt: list[_Ticket] = []
        self._fingerprint = require_equal(_SERVED, ranks.call_all_now("sampler.fingerprint"))

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        """See `groupwise.core.types.Sampler.generate`."""
        loop = asyncio.get_running_loop()
        ticket = _Ticket(request, loop.create_future(), [])
        if not self._waiting:
            loop.call_later(GATHER_SECONDS, self._deal)
        self._waiting.append(ticket)
        try:
            await ticket.dealt
            self._dealt.append(ticket)
            return await self._generate_shares(ticket)
        finally:
            for tickets in (self._waiting, self._dealt):
                if ticket in tickets:
                    tickets.remove(ticket)
            for share in ticket.shares:
                self._loads[share.rank] -= share.members

    async def so_far(self, draw: int) -> tuple[tuple[int, ...], ...]:
        """See `groupwise.engine.sampler.torch_sampler.TorchSampler.so_far`."""
        ticket = next((ticket for ticket in self._dealt if ticket.request.draw == draw), None)
        if ticket is None:
            return ()
        calls = ((share.rank, "sampler.so_far", (draw,)) for share in ticket.shares)
        answers = await self._ranks.call_each(calls)
        shares = zip(ticket.shares, answers, strict=True)
        return tuple(ids for share, members in shares for ids in members or ((),) * share.members)

    async def prompt_logprobs(self, prompt_ids: tuple[int, ...], top: int) -> PromptLogprobs:
        """See `groupwise.engine.sampler.torch_sampler.TorchSampler.prompt_logprobs`. The rank with the least work computes them."""
        rank = min(range(len(self._loads)), key=self._loads.__getitem__)
        call = (rank, "sampler.prompt_logprobs", (prompt_ids, top))
        (result,) = await self._ranks.call_each([call], droppable=True)
        return result

    async def prepare_schemas(self) -> None:
        """See `groupwise.engine.sampler.queued.QueuedSampler.prepare_schemas`."""
        await self._ranks.call_all("sampler.prepare_schemas")

    async def load(self, policy: Policy) -> None:
        """See `groupwise.core.types.Sampler.load`. Each rank reads the files."""
        await self._ranks.call_all("sampler.load", policy)
        self._fingerprint = require_equal(
            _SERVED, await self._ranks.call_all("sampler.fingerprint")
        )

    async def release_memory(self) -> None:
        """See `groupwise.core.types.SharesDevice.release_memory`."""
        if self._frees_cache and not self._waiting and not self._dealt:
            await self._ranks.call_all("sampler.release_memory")

    def fingerprint(self) -> str:
        """Fingerprint of the weights in the memory of all ranks, as they were when they were loaded."""
        return self._fingerprint

    def _deal(self) -> None:
        tickets, self._waiting = self._waiting, []
        shares_by_ticket = share_groups(
            [len(ticket.request.seeds) for ticket in tickets], self._loads
        )
        for ticket, shares in zip(tickets, shares_by_ticket, strict=True):
            if ticket.dealt.cancelled():
                continue
            ticket.shares = shares
            for share in shares:
                self._loads[share.rank] += share.members
            ticket.dealt.set_result(None)

    async def _generate_shares(self, ticket: _Ticket) -> tuple[Completion, ...]:
        seeds = ticket.request.seeds
        calls = [
            (
                share.rank,
                "sampler.generate",
                (replace(ticket.request, seeds=seeds[share.start : share.end]),),
            )
            for share in ticket.shares
        ]
        results = await self._ranks.call_each(calls, droppable=True)
        return tuple(completion for completions in results for completion in completions)


class RankPolicy:
    """A `groupwise.engine.sampler.servers.probe.LocalPolicy` over the `local_policy` that the first rank hosts.

    All calls block their thread: servers are compared with the learner between two pieces of work.
    """

    def __init__(self, ranks: WorkerCalls, *, sharded: bool = False) -> None:
        """`sharded`: each rank holds a part of every weight (`groupwise.engine.learner.fsdp`)."""
        self._ranks = ranks
        self._holders = range(ranks.count if sharded else 1)
        """The ranks that hold the weights, or a part of them."""
        self.vocabulary = int(self._call("vocabulary"))
        """See `LocalPolicy`."""
        self.rank: int | None = self._call("rank")
        """See `LocalPolicy`."""
        self.adapts_experts = bool(self._call("adapts_experts"))
        """See `LocalPolicy`."""

    def read(self, folder: str) -> None:
        """See `LocalPolicy.read`."""
        self._ranks.call_each_now(self._calls("read", folder))

    def fingerprint(self) -> str:
        """See `LocalPolicy.fingerprint`."""
        return require_equal(_SERVED, self._ranks.call_together_now(self._calls("fingerprint")))

    def ipc_handles(self) -> Mapping[str, Any]:
        """See `LocalPolicy.ipc_handles`."""
        return self._call("ipc_handles")

    def router_shape(self) -> RouterShape:
        """See `LocalPolicy.router_shape`."""
        return self._call("router_shape")

    def write_by_expert(self, folder: str) -> None:
        """See `LocalPolicy.write_by_expert`."""
        self._call("write_by_expert", folder)

    def weight_info(self) -> Mapping[str, Any]:
        """See `LocalPolicy.weight_info`."""
        return self._call("weight_info")

    def pickled_tensors(self) -> str:
        """See `LocalPolicy.pickled_tensors`."""
        return str(self._call("pickled_tensors"))

    def open_group(self, server: str) -> str:
        """See `LocalPolicy.open_group`."""
        return str(self._call("open_group", server))

    def join_group(self, server: str, world: int, timeout: float) -> None:
        """See `LocalPolicy.join_group`."""
        self._call("join_group", server, world, timeout)

    def broadcast_weights(self, server: str, timeout: float) -> None:
        """See `LocalPolicy.broadcast_weights`."""
        sending, *contributing = self._calls("contribute_shards")
        sending = (0, "local_policy.broadcast_weights", (server, timeout))
        self._ranks.call_each_now([sending, *contributing])

    def close_group(self, server: str) -> None:
        """See `LocalPolicy.close_group`. It waits for a call that is under way, which has a time-out."""
        self._call("close_group", server)

    def give_back_memory(self) -> None:
        """See `LocalPolicy.give_back_memory`."""
        self._call("give_back_memory")

    def logprobs(
        self, answers: Sequence[Answer], temperatures: Sequence[float], plain: bool = False
    ) -> list[list[float]]:
        """See `LocalPolicy.logprobs`."""
        calls = self._calls("logprobs", answers, temperatures, plain)
        return self._ranks.call_together_now(calls)[0]

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._ranks.call_each_now(self._calls(method, *arguments)[:1])[0]

    def _calls(self, method: str, *arguments: Any) -> list[RankCall]:
        return [(rank, f"local_policy.{method}", arguments) for rank in self._holders]
