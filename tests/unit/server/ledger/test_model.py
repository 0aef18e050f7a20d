"""Any order of operations against a plain model of what the ledger promises.

1. No acknowledged reward is lost or changed; a second post gets the answer of the first.
2. Groups move along the table of states alone; what is refused changes nothing.
3. A group is in one plan at most, a step has one living plan, a draw one living group.
4. All of it holds after the file was closed and opened again.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from groupwise.api.schemas.problems import Refusal
from groupwise.server.ledger.group_states import FINAL_STATES, State, transitions
from groupwise.server.ledger.groups import add_groups, expire_overdue, give_up, mark_stale
from groupwise.server.ledger.plans import Trained, make_plan, mark_trained, quarantine
from groupwise.server.ledger.rewards import Post, accept_rewards
from groupwise.server.ledger.writer import Ledger
from tests.unit.server.ledger.making import RUN, FakeTime, begin, new

DRAWS = st.integers(0, 5)
PICKS = st.integers(0, 2**16)
REWARDS = st.sampled_from([(1.0, 0.0), (0.5, None)])
INCLUDE = st.sampled_from(["next", "hold"])


@dataclass
class Known:
    """What the model knows of a group."""

    draw: int
    step: int
    lease_end: float
    state: State = "open"
    rewards: tuple[float | None, ...] | None = None
    answer: int | None = None
    plan: int | None = None


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.time = FakeTime()
        self.runner = asyncio.Runner()
        self.ledger = Ledger.open(self.folder / "server.db", self.time.timing)
        self.do(begin)
        self.groups: dict[str, Known] = {}
        self.plans: dict[int, tuple[str, ...]] = {}
        self.living: dict[int, int] = {}
        self.uptime = 0.0
        self.posts = 0
        self.before: dict[str, State] = {}

    def teardown(self) -> None:
        self.runner.run(self.ledger.close())
        self.runner.close()
        shutil.rmtree(self.folder)

    def do(self, *call: Any, **named: Any) -> Any:
        """What an operation returns, or the code of its refusal."""
        try:
            return self.runner.run(self.ledger.do(*call, **named))
        except Refusal as refused:
            return refused.code

    def named(self, pick: int) -> tuple[str, Known]:
        return sorted(self.groups.items())[pick % len(self.groups)]

    @property
    def steps(self) -> int:
        return len(self.living)

    @rule(draw=DRAWS, lease=st.sampled_from([5.0, 50.0]))
    def sample(self, draw: int, lease: float) -> None:
        name = f"g-{len(self.groups):03}"
        outcome = self.do(
            add_groups, RUN, [new(draw, self.steps, name=name)], key_id="k", lease=lease
        )
        taken = {each.draw for each in self.groups.values() if each.state not in _FREE}
        assert (outcome == "draw_taken") == (draw in taken)
        if draw not in taken:
            self.groups[name] = Known(draw, self.steps, self.uptime + lease)

    @precondition(lambda self: self.groups)
    @rule(pick=PICKS, rewards=REWARDS, include=INCLUDE)
    def post(self, pick: int, rewards: Any, include: Any) -> None:
        name, known = self.named(pick)
        self.posts += 1
        outcome = self.do(accept_rewards, RUN, Post(name, rewards, {"n": self.posts}, include))
        if known.state == "given_up":
            assert outcome == "group_given_up"
        elif known.rewards is None and (known.state == "expired" or known.lease_end <= self.uptime):
            assert outcome == "lease_expired"
        elif known.rewards not in (None, rewards):
            assert outcome == "already_rewarded"
        else:
            now = known.rewards is None or (known.state, include) == ("held", "next")
            if now:
                known.state = "held" if include == "hold" else "rewarded"
                known.rewards, known.answer = rewards, self.posts
            assert (outcome.accepted, outcome.answer) == (now, {"n": known.answer})

    @precondition(lambda self: self.groups)
    @rule(pick=PICKS)
    def leave(self, pick: int) -> None:
        name, known = self.named(pick)
        outcome = self.do(give_up, name)
        if known.state in ("open", "held", "given_up"):
            known.state = "given_up"
            assert outcome.state == "given_up"
        else:
            assert outcome == ("lease_expired" if known.state == "expired" else "group_in_use")

    @rule(seconds=st.sampled_from([1.0, 4.0, 50.0]))
    def wait(self, seconds: float) -> None:
        self.time.pass_(seconds)
        self.uptime += seconds

    @rule()
    def sweep(self) -> None:
        over = [
            name
            for name, known in self.groups.items()
            if known.state == "open" and known.lease_end <= self.uptime
        ]
        assert sorted(row.id for row in self.do(expire_overdue)) == over
        for name in over:
            self.groups[name].state = "expired"

    @rule(staleness=st.integers(0, 2))
    def outrun(self, staleness: int) -> None:
        first = self.steps - staleness
        over = [
            name
            for name, known in self.groups.items()
            if known.state in ("rewarded", "held") and known.step < first
        ]
        assert sorted(row.id for row in self.do(mark_stale, RUN, first)) == over
        for name in over:
            self.groups[name].state = "stale"

    @precondition(lambda self: self.groups)
    @rule(picks=st.lists(PICKS, min_size=1, max_size=3))
    def plan(self, picks: list[int]) -> None:
        names = [self.named(pick)[0] for pick in picks]
        outcome = self.do(make_plan, RUN, self.steps, names, {})
        free = all(self.groups[name].state in ("rewarded", "held") for name in names)
        if isinstance(outcome, str):
            assert not free or len(set(names)) < len(names)
            return
        assert free
        assert outcome.groups == tuple(names)
        self.living[self.steps] = outcome.id
        self.plans[outcome.id] = outcome.groups
        for name in names:
            self.groups[name].state, self.groups[name].plan = "planned", outcome.id

    def untrained(self) -> list[int]:
        return [
            step
            for step, plan in self.living.items()
            if self.groups[self.plans[plan][0]].state == "planned"
        ]

    @precondition(lambda self: self.untrained())
    @rule()
    def train(self) -> None:
        step = self.untrained()[0]
        self.do(mark_trained, RUN, step, Trained("f", step + 1, "/p", {}))
        for name in self.plans[self.living[step]]:
            self.groups[name].state = "trained"

    @precondition(lambda self: self.untrained())
    @rule()
    def put_aside(self) -> None:
        step = self.untrained()[-1]
        self.do(quarantine, RUN, step, "why")
        for name in self.plans[self.living.pop(step)]:
            self.groups[name].state = "quarantined"

    @rule()
    def reopen(self) -> None:
        self.runner.run(self.ledger.close())
        self.time.pass_(1000.0)  # nothing of which counts
        self.ledger = Ledger.open(self.folder / "server.db", self.time.timing)

    @invariant()
    def the_ledger_is_as_the_model_has_it(self) -> None:
        def everything(transaction: Any) -> list[Any]:
            return transaction.all(
                "SELECT id, draw, state, json(rewards), json_extract(answer, '$.n'), plan FROM groups ORDER BY id"
            )

        assert self.do(everything) == [
            (name, known.draw, known.state, _json(known.rewards), known.answer, known.plan)
            for name, known in sorted(self.groups.items())
        ]

    @invariant()
    def groups_only_move_along_the_table(self) -> None:
        for name, known in self.groups.items():
            was = self.before.get(name, "open")
            assert was == known.state or (was, known.state) in transitions()
            assert was == known.state or was not in FINAL_STATES
            self.before[name] = known.state


_FREE = ("expired", "given_up")


def _json(rewards: tuple[float | None, ...] | None) -> str | None:
    if rewards is None:
        return None
    return f"[{','.join('null' if value is None else str(value) for value in rewards)}]"


TestModel = Machine.TestCase
TestModel.settings = settings(max_examples=10, stateful_step_count=30, deadline=None)


@pytest.mark.soak(suite="server")
class TestModelAtLength(Machine.TestCase):
    settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
