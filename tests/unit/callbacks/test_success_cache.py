"""Which prompts the callback has kept, and the runs in which it could do nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.callbacks.success_cache import SuccessCache
from groupwise.settings.view import View
from groupwise.types import Example, Group, RewardPart, Rollout, Segment


def group(draw: int, *members: tuple[float | None, float | None]) -> Group:
    """With a total reward and an accuracy for each member; None: not scored."""
    rollouts = [
        Rollout(
            draw,
            index,
            0,
            (1,),
            (Segment("policy", (2,)),),
            "",
            "failed" if total is None else "scored",
            None,
            total,
            () if accuracy is None else (RewardPart("my_accuracy", accuracy, 1.0),),
        )
        for index, (total, accuracy) in enumerate(members)
    ]
    return Group(draw, Example(draw, f"prompt {draw}"), tuple(rollouts))


GROUPS = [
    group(0, (0.2, None), (0.5, None)),
    group(1, (0.2, None), (0.7, None)),
    group(2, (None, None), (None, None)),
    group(3, (0.9, 0.0), (0.9, 0.0)),
    group(4, (0.1, 1.0), (0.1, 0.0)),
]


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({"threshold": 0.5}, [0, 1, 4, 9]),
        ({"threshold": 0.51}, [1, 4, 9]),
        ({"threshold": 0.5, "part": "my_accuracy"}, [4]),
        ({}, [4]),
    ],
)
def test_a_prompt_is_kept_whose_best_completion_reached_the_threshold(parameters, kept):
    told: list[int] = []
    run: Any = SimpleNamespace(keep_for_replay=told.extend)
    SuccessCache(**parameters).on_groups(run, GROUPS, [group(9, (0.6, None))])
    assert told == kept


def test_a_part_that_nobody_gives_is_told_once():
    said: list[str] = []
    run: Any = SimpleNamespace(keep_for_replay=list, say=said.append)
    cache = SuccessCache(part="nosuch")
    for _ in range(2):
        cache.on_groups(run, GROUPS, [])
    assert said == [
        "success_cache: part is 'nosuch', but no reward part so far is called so, so that nothing counts as solved. There are: "
        "my_accuracy"
    ]


def test_without_a_buffer_or_beside_its_own_threshold_it_is_refused():
    with pytest.raises(ValueError, match="there is none"):
        SuccessCache().check(View({"data": {"replay": None}}))
    with pytest.raises(ValueError, match="supervised runs have no such buffer"):
        SuccessCache().check(View({"data": {}}))
    with pytest.raises(ValueError, match=r"success_threshold is 0\.9, so the buffer chooses"):
        SuccessCache().check(View({"data": {"replay": {"success_threshold": 0.9}}}))
    SuccessCache().check(View({"data": {"replay": {"success_threshold": None}}}))
