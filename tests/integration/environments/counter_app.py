"""A server of OpenEnv for tests, in its own Python: count to the number that the first observation names."""

# pyright: reportMissingImports=false
from typing import Any

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    number: str


class Heard(Observation):
    text: str = ""


class Counter(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._said = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Heard:
        self._said, self._end = 0, 2 + (seed or 0) % 3
        return Heard(text=f"Count to {self._end}.")

    def step(self, action: Say, timeout_s: float | None = None, **more: Any) -> Heard:
        right = action.number.strip() == str(self._said + 1)
        self._said += right
        done = self._said == self._end or not right
        return Heard(text="Go on." if right else "Wrong.", done=done, reward=float(right))

    @property
    def state(self) -> State:
        return State()


app = create_fastapi_app(Counter, Say, Heard, max_concurrent_envs=8)
