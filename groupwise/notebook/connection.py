"""The same functions against a training server: it samples and learns, everything else stays here.

    remote = connect("http://gpu-machine:8000")
    session = remote.prepare_session(config)
    trainer_state = remote.train_grpo(config, session)

Data, rewards, record and checkpoints are those of this machine, and the policy is the one that the server's machine would have trained by
itself. See docs/how-to/train-elsewhere.md.

What speaks with a server finds its key in the environment, which has one place for it. So each call puts the key of its own connection
there, and there it stays, for `session.sampler` to find.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from groupwise.api.client import TrainingClient
from groupwise.api.schemas.keys import VARIABLE
from groupwise.core.errors import UsageError
from groupwise.engine.backends.remote.session import FIRST_PATIENCE
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.datasets import format_prompt, prepare_datasets, register_dataset
from groupwise.notebook.evaluation import evaluate
from groupwise.notebook.export import export_checkpoint
from groupwise.notebook.hyperparameter_search import search
from groupwise.notebook.quick import quick_test, run_full_pipeline
from groupwise.notebook.rewards import Given, create_reward_functions, register_reward
from groupwise.notebook.search_space import Space
from groupwise.notebook.session import Session, prepare_session
from groupwise.notebook.study import Search
from groupwise.notebook.training import TrainerState, train_grpo

_given: set[str | None] = set()
"""Keys that the user gave with a URL; they are sent to no other server."""
_outside: list[str | None] = [None]
"""The key that was in the environment before."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A training server. Sessions that it prepares are trained, tested and evaluated there; others are refused."""

    url: str
    key: str | None = field(default=None, repr=False)
    """None: the server asks for none."""

    export_checkpoint = staticmethod(export_checkpoint)
    format_prompt = staticmethod(format_prompt)
    prepare_datasets = staticmethod(prepare_datasets)
    create_reward_functions = staticmethod(create_reward_functions)
    register_dataset = staticmethod(register_dataset)
    register_reward = staticmethod(register_reward)

    def prepare_session(self, config: TrainingConfig) -> Session:
        """See `groupwise.notebook.prepare_session`."""
        _use(self.key)
        return prepare_session(config, server=self.url)

    prepare_colab_session = prepare_session

    def train_grpo(
        self,
        config: TrainingConfig,
        session: Session,
        *,
        reward_functions: Given | None = None,
        extra_reward_functions: Given = (),
        resume: bool = True,
    ) -> TrainerState:
        """See `groupwise.notebook.train_grpo`."""
        return train_grpo(
            config,
            self._own(session),
            reward_functions=reward_functions,
            extra_reward_functions=extra_reward_functions,
            resume=resume,
        )

    def quick_test(
        self, config: TrainingConfig, session: Session, test_question: str | None = None
    ) -> str:
        """See `groupwise.notebook.quick_test`."""
        return quick_test(config, self._own(session), test_question)

    def evaluate(
        self,
        config: TrainingConfig,
        session: Session,
        *,
        samples_per_prompt: int | None = None,
        reward_functions: Given | None = None,
        extra_reward_functions: Given = (),
    ) -> dict[str, float]:
        """See `groupwise.notebook.evaluate`."""
        return evaluate(
            config,
            self._own(session),
            samples_per_prompt=samples_per_prompt,
            reward_functions=reward_functions,
            extra_reward_functions=extra_reward_functions,
        )

    def run_full_pipeline(
        self,
        config: TrainingConfig,
        *,
        reward_functions: Given | None = None,
        extra_reward_functions: Given = (),
        resume: bool = True,
    ) -> tuple[Session, TrainerState, str]:
        """See `groupwise.notebook.run_full_pipeline`."""
        _use(self.key)
        return run_full_pipeline(
            config,
            reward_functions=reward_functions,
            extra_reward_functions=extra_reward_functions,
            resume=resume,
            server=self.url,
        )

    def search(
        self,
        config: TrainingConfig,
        space: Space,
        trials: int = 20,
        *,
        metric: str = "reward",
        prune: bool = True,
        reward_functions: Given | None = None,
        extra_reward_functions: Given = (),
    ) -> Search:
        """See `groupwise.notebook.search`."""
        _use(self.key)
        return search(
            config,
            space,
            trials,
            metric=metric,
            prune=prune,
            reward_functions=reward_functions,
            extra_reward_functions=extra_reward_functions,
            server=self.url,
        )

    def _own(self, session: Session) -> Session:
        """The session, if this server is to compute for it. Raises UsageError: it would silently be done elsewhere."""
        # The function itself tells what is no session.
        if getattr(session, "server", self.url) != self.url:
            where = "this machine" if session.server is None else session.server
            raise UsageError(
                f"The session was prepared to compute on {where}, not on {self.url}. Prepare one with the connection that is to train: "
                "session = remote.prepare_session(config). To compute where it was prepared, call what it was prepared with."
            )
        _use(self.key)
        return session


def connect(url: str, api_key: str | None = None) -> Connection:
    """The server at this URL, once it has answered. The key is else that of GROUPWISE_API_KEY.

    Raises UsageError for what is no URL, ClientError for a server that does not answer or refuses the key; the environment is then as
    it was before.
    """
    given: Any = url
    if not isinstance(given, str):
        raise UsageError(
            f"url is {given!r}; give the address of a training server, as in connect('http://gpu-machine:8000')."
        )
    before = os.environ.get(VARIABLE)
    if before not in _given:
        _outside[0] = before
    if api_key is not None:
        _given.add(api_key)
    key = _outside[0] if api_key is None else api_key
    _use(key)
    try:
        with TrainingClient(url, patience=FIRST_PATIENCE) as client:
            client.status()
            return Connection(client.connection.url, key)
    except BaseException:
        _use(before)
        raise


def _use(key: str | None) -> None:
    """Put a key where whatever speaks with a server looks for it; None: let none be there, so that no server hears that of another."""
    if key is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = key
