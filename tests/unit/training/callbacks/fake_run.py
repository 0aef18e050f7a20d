"""A stand-in for a run, for tests of callbacks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from groupwise.core.types import Policy

CONFIG = {
    "training": {"learning_rate": 0.1, "prompts_per_step": 2, "num_generations": 4, "num_train_epochs": None},
    "algorithm": {"type": "grpo", "beta": 0.5}, "eval": {"eval_steps": 2, "before_and_after": True},
    "run": {"name": "toy", "dir": "runs", "save_steps": 2, "logging_steps": 1},
}  # fmt: skip


@dataclass
class ObservedRun:
    path: Path
    settings: dict[str, Any] = field(default_factory=lambda: CONFIG)
    max_steps: int = 10
    step: int = 0
    saved_step: int | None = None
    kind: str = "rl"
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    policy: Policy = field(default_factory=lambda: Policy("toy", 3, "f00d", "adapter", "there"))
    tokenizer: Any = "the tokenizer"
    interruption: Any = field(default_factory=lambda: SimpleNamespace(received_signal=None))

    @property
    def config(self) -> Any:
        return SimpleNamespace(model_dump=lambda mode: self.settings)

    @property
    def folder(self) -> Any:
        def metrics(names: Any, since: Any) -> dict[str, list[tuple[int, float]]]:
            wanted = self.curves if names is None else names
            return {name: self.curves[name] for name in wanted if name in self.curves}

        store = SimpleNamespace(get_meta=lambda: {"kind": self.kind}, metrics=metrics)
        checkpoints = self.path / "checkpoints"
        return SimpleNamespace(name="toy", path=self.path, checkpoints=checkpoints, store=store)

    def keep_for_replay(self, draws: Iterable[int]) -> None:
        raise AssertionError("no callback here fills a buffer")

    def epoch(self) -> float:
        return self.step / 4

    def say(self, text: str) -> None:
        self.said.append(text)
