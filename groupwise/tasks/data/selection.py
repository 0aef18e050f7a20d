"""Selects the example of each draw of a run: the next one, an easy one, or one that was solved before.

The draws of a block (a step, or as many draws as a step has) are chosen together, from the state at the start of the block. Each
slot first goes to the easy pool with that pool's probability; of the remaining slots, the last ones go to the replay buffer; the
rest take the next examples of the epoch, some of which a curriculum may skip. Examples that a block did not use, because few of its
groups had to be redrawn, go to the next block.

A committed step reports the results of its draws. Randomness depends only on the config's seed and the block. Everything else is
part of the checkpoint, including the choices of blocks in progress, so a resume repeats them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean
from typing import Any, Literal

from groupwise.core.types import Group, Origin
from groupwise.tasks.data.config import DataConfig
from groupwise.tasks.data.curriculum import Curriculum
from groupwise.tasks.data.order import Order, Stream
from groupwise.tasks.data.replay import Entry, ReplayBuffer
from groupwise.tasks.data.success import ConfiguredPart, successes

logger = logging.getLogger(__name__)

Pool = Literal["main", "easy"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The example of a draw."""

    origin: Origin
    pool: Pool
    index: int
    """Index of the example in its pool."""
    again: int | None = None
    """The earlier draw whose completions are reused for training; None if new completions are sampled."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the pools to choose from."""

    order: Order
    """Order of the examples."""
    easy: int
    block: int
    """Prompts per step."""


class Selection:
    """The example choices of one run, with the state they depend on."""

    def __init__(
        self, config: DataConfig, seed: int, sizes: Sizes, *, replay_from: int = 0
    ) -> None:
        """`replay_from`: the first step that may use the replay buffer."""
        self._config = config
        self._seed = seed
        self._sizes = sizes
        self._replay_from = replay_from
        self._cursor = 0
        """The next position in the order of the examples."""
        self._unused: list[int] = []
        """Examples whose turn came but that no draw used."""
        self._passed_over = 0
        """Number of turns that the curriculum skipped."""
        self._blocks: dict[int, list[Choice]] = {}
        self._choices_by_draw: dict[int, Choice] = {}
        """Choices by draw."""
        self._kept_draws: set[int] = set()
        """Draws of the current step whose prompts are kept regardless of `success_threshold`."""
        replay = config.replay
        self.replay = (
            ReplayBuffer(replay.capacity, replay.exploration, replay.mix_exploit_ratio)
            if replay
            else None
        )
        self.curriculum = Curriculum(config.curriculum) if config.curriculum else None
        self._configured_parts = [
            ConfiguredPart(key, name) for key, name in config.success_parts.items()
        ]

    @property
    def turns(self) -> int:
        """Number of turns in the order that were used or skipped."""
        return self._cursor - len(self._unused)

    @property
    def epochs(self) -> float:
        """Passes over the data so far."""
        return self.turns / self.turns_in_an_epoch

    @property
    def turns_in_an_epoch(self) -> int:
        """Turns per pass over the data."""
        return self._sizes.order.length

    def plan(self, block: int, step: int, slots: int) -> None:
        """Choose the examples for the slots of a block that starts at a step; a block that is already planned stays unchanged."""
        if block in self._blocks:
            return
        easy = [self._draw_easy(block, slot, step) for slot in range(slots)]
        open_slots = [slot for slot in range(self._sizes.block) if easy[slot] is None]
        entries = self._sample_replay(block, step, len(open_slots))
        replayed = dict(zip(open_slots[len(open_slots) - len(entries) :], entries, strict=True))
        self._blocks[block] = [
            easy[slot]
            or (_replay_choice(replayed[slot]) if slot in replayed else self._next_fresh())
            for slot in range(slots)
        ]

    def take(self, block: int, slot: int, draw: int) -> Choice:
        """The example for a draw, by its slot in a planned block."""
        choice = self._choices_by_draw[draw] = self._blocks[block][slot]
        return choice

    def finish(self, block: int, used: int) -> None:
        """End a block of which `used` slots were used; the unused examples go to later blocks."""
        unused = self._blocks.pop(block, [])[used:]
        self._unused = [
            choice.index for choice in unused if choice.origin == "fresh"
        ] + self._unused

    def keep(self, draws: Iterable[int]) -> None:
        """Keep the prompts of these draws for replay once their step is committed; does nothing without a replay buffer."""
        self._kept_draws.update(draws)

    def observe(self, groups: Iterable[Group]) -> None:
        """Update the pools with the results of a committed step's draws, in this order."""
        groups = list(groups)
        for part in self._configured_parts:
            if text := part.missing(groups):
                logger.warning("%s", text)
        for group in groups:
            choice = self._choices_by_draw.pop(group.draw, None)
            if choice is not None and group.scored:
                config = self._config.curriculum
                if (
                    self.curriculum is not None
                    and config is not None
                    and choice.pool == "main"
                    and choice.again is None
                ):
                    solved, members = successes(
                        group, config.success_threshold, config.success_part
                    )
                    self.curriculum.observe(choice.index, solved, members)
                self._note_for_replay(group, choice)
        self._kept_draws.clear()

    @property
    def replayable_draws(self) -> set[int]:
        """The draws whose completions may be trained on again."""
        entries = self.replay.entries if self.replay is not None else ()
        return {entry.payload[2] for entry in entries} - {None}

    def metrics(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """The share and success of each kind of group that a step trains, and statistics of the pools."""
        metrics: dict[str, float] = {}
        if self._config.easy_pool:
            metrics["data/easy_probability"] = self._config.easy_pool.probability(step)
        for origin in ("easy", "replay"):
            if (origin == "easy" and self._config.easy_pool) or (
                origin == "replay" and self.replay
            ):
                metrics[f"data/{origin}_share"] = fmean(g.origin == origin for g in groups)
        if metrics:
            rewards: dict[str, list[float]] = {}
            for group in groups:
                values = [rollout.reward for rollout in group.scored if rollout.reward is not None]
                rewards.setdefault(group.origin, []).extend(values)
            metrics |= {
                f"reward/{origin}": fmean(values) for origin, values in rewards.items() if values
            }
        if self.replay is not None:
            means = [entry.mean for entry in self.replay.entries if entry.count]
            metrics |= {
                "replay/size": float(len(self.replay)),
                "replay/evicted": float(self.replay.evicted),
                "replay/refused": float(self.replay.refused),
                **({"replay/mean_reward": fmean(means)} if means else {}),
            }
        if self.curriculum is not None:
            metrics |= self.curriculum.metrics()
            metrics["curriculum/passed_over"] = float(self._passed_over)
        return metrics

    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, as plain JSON."""
        return {
            "cursor": self._cursor,
            "unused": self._unused,
            "passed_over": self._passed_over,
            "blocks": {str(b): [list(astuple(c)) for c in cs] for b, cs in self._blocks.items()},
            "replay": self.replay.state() if self.replay else None,
            "curriculum": self.curriculum.state() if self.curriculum else None,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`; missing parts start empty."""
        self._cursor, self._unused = state["cursor"], list(state.get("unused", ()))
        self._passed_over = state.get("passed_over", 0)
        blocks = state.get("blocks", {})
        self._blocks = {int(b): [Choice(*c) for c in cs] for b, cs in blocks.items()}
        self._choices_by_draw.clear()
        if self.replay is not None and state.get("replay"):
            self.replay.load_state(state["replay"])
        if self.curriculum is not None and state.get("curriculum"):
            self.curriculum.load_state(state["curriculum"])

    # Choosing

    def _draw_easy(self, block: int, slot: int, step: int) -> Choice | None:
        pool = self._config.easy_pool
        if pool is None:
            return None
        stream = Stream("easy", self._seed, block, slot)
        if stream.uniform() >= pool.probability(step):
            return None
        return Choice("easy", "easy", stream.below(self._sizes.easy))

    def _sample_replay(self, block: int, step: int, free_slots: int) -> list[Entry]:
        config, replay = self._config.replay, self.replay
        if config is None or replay is None or step < self._replay_from:
            return []
        if len(replay) < config.warmup_entries:
            return []
        most = min(free_slots, int(config.max_share * self._sizes.block))
        return replay.sample(most, Stream("replay", self._seed, block))

    def _next_fresh(self) -> Choice:
        """An example that an earlier block left over, else the next in order that the curriculum accepts.

        If it accepts none in a whole round, the likeliest of them.
        """
        if self._unused:
            return Choice("fresh", "main", self._unused.pop(0))
        best, best_chance = None, -1.0
        for _ in range(self._sizes.order.length):
            turn, self._cursor = self._cursor, self._cursor + 1
            index = self._sizes.order.example(turn)
            chance = self.curriculum.chance(index) if self.curriculum else 1.0
            if Stream("curriculum", self._seed, turn).uniform() < chance:
                return Choice("fresh", "main", index)
            self._passed_over += 1
            if chance > best_chance:
                best, best_chance = index, chance
        assert best is not None, "there are examples"
        return Choice("fresh", "main", best)

    # Learning from the results

    def _note_for_replay(self, group: Group, choice: Choice) -> None:
        """Credit a prompt that is in the buffer with the result of its group; add one that was solved, or that `keep` named."""
        config, replay = self._config.replay, self.replay
        if replay is None or config is None:
            return
        prompt = group.example.prompt
        rewards = [rollout.reward for rollout in group.scored if rollout.reward is not None]
        worthy = group.draw in self._kept_draws
        if not worthy and config.success_threshold is not None:
            worthy = successes(group, config.success_threshold, config.success_part)[0] > 0
        if prompt in replay and (choice.again is not None or not worthy):
            replay.add_group(prompt, rewards)
        elif worthy:
            draw = group.draw if choice.again is None else choice.again
            draw_to_train = draw if config.mode == "completions" else None
            replay.add_group(prompt, rewards, [choice.pool, choice.index, draw_to_train])


def _replay_choice(entry: Entry) -> Choice:
    pool, index, draw = entry.payload
    return Choice("replay", pool, index, draw)
