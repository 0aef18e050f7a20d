"""Divides work among ranks: members of groups to sample, and rows to learn from.

Both divisions are functions of their arguments alone. Groups are kept whole as long as that keeps the ranks evenly busy, because each rank
computes the prompts of its own share.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.core.types import Row
from groupwise.engine.learner.layout import group_by_prompt

MAX_IMBALANCE = 1.1
"""Groups are cut if whole ones give a rank more than this times its fair share of tokens: computing a prompt twice costs less than ranks
that wait."""


@dataclass(frozen=True, slots=True)
class Share:
    """Some members of a group, and the rank that samples them."""

    rank: int
    start: int
    end: int
    """Index after the last of them."""

    @property
    def members(self) -> int:
        return self.end - self.start


def share_groups(sizes: Sequence[int], loads: Sequence[int]) -> list[list[Share]]:
    """Divide groups of the given sizes among ranks so that all have equally many members, counting `loads`, the members they already have.

    Returns the shares of each group, in the order of its members.
    """
    # Members that each rank takes, chosen so that the final loads are as equal as possible.
    capacities = [0] * len(loads)
    busy = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(busy)
    for _ in range(sum(sizes)):
        load, rank = busy[0]
        heapq.heapreplace(busy, (load + 1, rank))
        capacities[rank] += 1
    shares: list[list[Share]] = [[] for _ in sizes]
    for keep_whole in (True, False):
        for group in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            assigned = shares[group][-1].end if shares[group] else 0
            while assigned < sizes[group]:
                rank = max(range(len(capacities)), key=capacities.__getitem__)
                if keep_whole and capacities[rank] < sizes[group]:
                    break
                count = min(capacities[rank], sizes[group] - assigned)
                shares[group].append(Share(rank, assigned, assigned + count))
                capacities[rank] -= count
                assigned += count
    return shares


def shard_rows(rows: Sequence[Row], ranks: int) -> list[list[int]]:
    """Row indices of each rank, ascending. A rank may have none.

    The shares are balanced by computed tokens: a prompt counts once in each rank that has rows of it.
    """
    groups = [*group_by_prompt(rows).values()]
    costs = [_token_cost(rows, members) for members in groups]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(groups)), key=lambda index: -costs[index]):
        rank = min(range(ranks), key=loads.__getitem__)
        shares[rank] += groups[index]
        loads[rank] += costs[index]
    uneven = max(loads) > MAX_IMBALANCE * sum(loads) / ranks
    return [sorted(share) for share in (_cut_evenly(rows, groups, ranks) if uneven else shares)]


def _cut_evenly(
    rows: Sequence[Row], groups: Sequence[Sequence[int]], ranks: int
) -> list[list[int]]:
    """Lay the groups end to end and cut them into stretches of equal cost, even within a group."""
    order = [index for members in groups for index in members]
    firsts = {members[0] for members in groups}
    total = sum(_token_cost(rows, members) for members in groups)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    done = 0
    for index in order:
        cost = _token_cost(rows, [index]) if index in firsts else len(rows[index].completion_ids)
        shares[(2 * done + cost) * ranks // (2 * total + 1)].append(index)
        done += cost
    return shares


def _token_cost(rows: Sequence[Row], members: Sequence[int]) -> int:
    """Tokens of one prompt and its completions."""
    return len(rows[members[0]].prompt_ids) + sum(
        len(rows[index].completion_ids) for index in members
    )
