"""Plays text games of TextArena, and any that are registered with it, in the Python that they are installed in.

`name` is the id of a game (`TicTacToe-v0`). The policy sits in all seats. Each seat is an example of its own, so a group compares one seat
of the same game; only its turns teach, and its reward is the group's. `args`:

    players     seats; null: 1 if the game takes that, or else 2
    episodes    games by seed, each of which is an example for each seat; every tenth is held out
    settings    further arguments of `textarena.make`

The game's messages to a seat are messages of the user; its own moves are those of the assistant.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.metadata
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import groupwise_bridge

try:
    import numpy.random as numpy_random
except ImportError:  # only some games need it
    numpy_random = None

TRAIN, HELD_OUT = "train", "eval"
HELD_OUT_EVERY = 10
EPISODES = 1000


class TextArena:
    """One game."""

    def open(
        self, protocol: int, name: str, args: dict[str, Any], eval_args: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Make a game once, to see that it can be played."""
        unknown = {*args, *(eval_args or {})} - {"players", "episodes", "settings"}
        if unknown:
            raise ValueError(
                f"args has {sorted(unknown)}; known are players, episodes and settings"
            )
        self._name = name
        self._args = {TRAIN: args, HELD_OUT: args if eval_args is None else eval_args}
        self._has_eval_args = eval_args is not None
        self._players = {split: self._seats(args) for split, args in self._args.items()}
        return {"library": f"textarena {importlib.metadata.version('textarena')}", "repeats": True}

    def examples(self, split: str, offset: int, limit: int) -> dict[str, Any]:
        """Each seat of each seed, with what the game tells it first."""
        episodes = self._args[split].get("episodes", EPISODES)
        seeds = [
            seed
            for seed in range(episodes)
            if self._has_eval_args
            or (seed % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == (split == HELD_OUT)
        ]
        seats = [(seed, seat) for seed in seeds for seat in range(self._players[split])]
        found = [
            {"prompt": prompt, "columns": {"game_seed": seed, "seat": seat, "split": split}}
            for seed, seat in seats[offset : offset + limit]
            for prompt in [[{"role": "user", "content": f"{self._name}, seat {seat}, game {seed}"}]]
        ]
        return {"examples": found, "more": offset + limit < len(seats)}

    async def rollout(self, call: dict[str, Any]) -> dict[str, Any]:
        """One game to its end, all seats played by the policy."""
        columns = call["example"]["columns"]
        learner, split = columns["seat"], columns["split"]
        numbers = _RandomNumbers(columns["game_seed"])
        with numbers.own():
            game = self._make(self._args[split])
            game.reset(num_players=self._players[split], seed=columns["game_seed"])
        dialogues: dict[int, list[dict[str, Any]]] = {}
        ids: list[str] = []
        done = truncated = False
        while not done:
            with numbers.own():
                seat, observation = game.get_observation()
            dialogue = dialogues.setdefault(seat, [])
            dialogue.append(
                {"role": "user", "content": _observation_text(observation, seat) or "Your turn."}
            )
            try:
                id, message = await groupwise_bridge.chat(call, dialogue)
            except groupwise_bridge.Refused:
                truncated = True
                break
            move = message["content"] or ""
            dialogue.append({"role": "assistant", "content": move})
            ids += [id] if seat == learner else []
            with numbers.own():
                done, _ = game.step(action=move)
        rewards, info = game.close() if done else ({}, {})
        about = (info or {}).get(learner) or {}
        return {
            "rewards": [{"name": "game", "value": float((rewards or {}).get(learner, 0.0))}],
            "metrics": {
                "turns": len(ids),
                "invalid_move": float(bool(about.get("invalid_move", False))),
            },
            "completions": ids,
            "truncated": truncated,
            "stopped": str(about.get("reason") or ("cut off" if truncated else "done")),
        }

    async def close(self) -> None:
        """Games hold nothing."""

    def _make(self, args: dict[str, Any]) -> Any:
        """A game whose messages are not joined into one text. Moves are put into brackets where the game's own wrappers do so."""
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

        if self._name not in ENV_REGISTRY:
            raise ValueError(
                f"textarena has no game {self._name}. It has: {', '.join(ENV_REGISTRY)}"
            )
        raw = f"{self._name}-raw"
        game = textarena.make(
            raw if raw in ENV_REGISTRY else self._name, **args.get("settings", {})
        )
        formatting = textarena.wrappers.ActionFormattingWrapper
        wrappers = ENV_REGISTRY[self._name].default_wrappers or []
        return formatting(game) if raw in ENV_REGISTRY and formatting in wrappers else game

    def _seats(self, args: dict[str, Any]) -> int:
        wanted = args.get("players")
        for players in (1, 2) if wanted is None else (wanted,):
            try:
                self._make(args).reset(num_players=players, seed=0)
                return players
            except (AssertionError, ValueError, KeyError, IndexError) as error:
                problem = error
        raise ValueError(
            f"{self._name} cannot be played by {wanted or '1 or 2'}: {problem}. Set args.players."
        )


class _RandomNumbers:
    """The random numbers of one game: games draw from the process's, which others that are played meanwhile would shift."""

    def __init__(self, seed: int) -> None:
        self._states: tuple[Any, Any] = _random_states()
        with self.own():
            random.seed(seed)
            if numpy_random is not None:
                numpy_random.seed(seed)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Within the block the process's numbers are those of this game."""
        others = _random_states()
        _take(self._states)
        try:
            yield
        finally:
            self._states = _random_states()
            _take(others)


def _random_states() -> tuple[Any, Any]:
    return random.getstate(), numpy_random and numpy_random.get_state()


def _take(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if numpy_random is not None:
        numpy_random.set_state(states[1])


def _observation_text(observation: Any, seat: int) -> str:
    """What a seat is told since its last turn, without its own moves."""
    if isinstance(observation, str):
        return observation
    return "\n".join(str(message) for sender, message, _ in observation if sender != seat)


if __name__ == "__main__":
    groupwise_bridge.serve(TextArena())
