"""Reasons why rollouts were not scored are counted by kind."""

from __future__ import annotations

from pathlib import Path

from groupwise.core.types import Example, Group, Outcome, Rollout
from groupwise.runs.records import FailureKind
from groupwise.runs.store import Store


def failed(draw: int, member: int, reason: str | None, outcome: Outcome = "failed") -> Rollout:
    return Rollout(draw, member, 0, (), (), "", outcome, reason=reason)


def test_kinds_are_counted_the_most_frequent_first(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run.db") as store:
        for draw in range(8):
            members = [
                failed(draw, 0, f"no number in 'text {draw}'"),
                failed(draw, 1, f"after {draw / 7} s \ud800", "timed_out"),
                Rollout(draw, 2, 0, (), (), "", "scored", reward=1.0),
            ]
            members += [failed(draw, 3, None)] * (draw < 3) + [failed(draw, 4, "x" * 999)] * (
                not draw
            )
            store.keep_unfinished([Group(draw, Example(0, "?"), tuple(members))])
        found = store.failures()
        assert [(each.reason[:14], each.count) for each in found] == [
            *(("after … s \ufffd\ufffd\ufffd", 8), ("no number in …", 8)),
            *(("no reason give", 3), ("x" * 14, 1)),
        ]
        assert found[1].example == "no number in 'text 7'", "the newest"
        assert store.draw_of(found[1].rollout) == 7
        assert len(found[3].reason) == 300
        assert store.failures(most=1) == found[:1]
        newest = store.failures(newest=3)
        assert sum(each.count for each in newest) == 3
        assert newest[0] == FailureKind(found[0].reason, 2, found[0].example, found[0].rollout)
