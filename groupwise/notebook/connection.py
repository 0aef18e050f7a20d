"""The same functions with a training server: it samples and learns; everything else runs on this machine.

    remote = connect("http://gpu-machine:8000")
    session = remote.prepare_session(config)
    trainer_state = remote.train_grpo(config, session)

Data, rewards, record and checkpoints are on this machine, and the trained policy equals one trained directly on the server's
machine. See docs/operate/train-elsewhere.md.

Client code reads the key from one environment variable. So each call sets the variable to the key of its own connection and leaves
it set, because `session.sampler` needs it later.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from groupwise.api.client import TrainingClient
from groupwise.api.schemas.keys import VARIABLE
from groupwise.core.errors import UsageError
from groupwise.engine.backends.remote.session import FIRST_RETRY_TIMEOUT
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.datasets import format_prompt, prepare_datasets, register_dataset
from groupwise.notebook.evaluation import evaluate
from groupwise.notebook.export import export_checkpoint
from groupwise.notebook.hyperparameter_search import search
from groupwise.notebook.quick import quick_test, run_full_pipeline
from groupwise.notebook.rewards import RewardList, create_reward_functions, register_reward
from groupwise.notebook.search_space import Space
from groupwise.notebook.session import Session, prepare_session
from groupwise.notebook.study import Search
from groupwise.notebook.training import TrainerState, train_grpo

_given: set[str | None] = set()
"""Keys that the user passed with a URL; they are not sent to any other server."""
_outside: list[str | None] = [None]
"""The key that was originally in the environment."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A training server. Sessions that it prepares are trained, tested and evaluated there; others are refused."""

    url: str
    key: str | None = field(default=None, repr=False)
    """None: the server requires no key."""

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
        reward_functions: RewardList | None = None,
        extra_reward_functions: RewardList = (),
        resume: bool = True,
    ) -> TrainerState:
        """See `groupwise.notebook.train_grpo`."""
        return train_grpo(
            config,
            self._check_session(session),
            reward_functions=reward_functions,
            extra_reward_functions=extra_reward_functions,
            resume=resume,
        )

    def quick_test(
        self, config: TrainingConfig, session: Session, test_question: str | None = None
    ) -> str:
        """See `groupwise.notebook.quick_test`."""
        return quick_test(config, self._check_session(session), test_question)

    def evaluate(
        self,
        config: TrainingConfig,
        session: Session,
        *,
        samples_per_prompt: int | None = None,
        reward_functions: RewardList | None = None,
        extra_reward_functions: RewardList = (),
    ) -> dict[str, float]:
        """See `groupwise.notebook.evaluate`."""
        return evaluate(
            config,
            self._check_session(session),
            samples_per_prompt=samples_per_prompt,
            reward_functions=reward_functions,
            extra_reward_functions=extra_reward_functions,
        )

    def run_full_pipeline(
        self,
        config: TrainingConfig,
        *,
        reward_functions: RewardList | None = None,
        extra_reward_functions: RewardList = (),
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
        reward_functions: RewardList | None = None,
        extra_reward_functions: RewardList = (),
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

    def _check_session(self, session: Session) -> Session:
        """The session, if it belongs to this server. Raises UsageError otherwise, because it would silently be computed elsewhere."""
        # If it is not a session at all, the called function reports that.
        if getattr(session, "server", self.url) != self.url:
            owner = "this machine" if session.server is None else session.server
            raise UsageError(
                f"The session was prepared to compute on {owner}, not on {self.url}. Prepare one with the connection that is to train: "
                "session = remote.prepare_session(config). To compute where it was prepared, call what it was prepared with."
            )
        _use(self.key)
        return session


def connect(url: str, api_key: str | None = None) -> Connection:
    """The connection to the server at this URL, once it has answered. Without `api_key`, the key is read from GROUPWISE_API_KEY.

    Raises UsageError if `url` is not text, ClientError if the server does not answer or refuses the key; the environment is then
    restored.
    """
    value: Any = url
    if not isinstance(value, str):
        raise UsageError(
            f"url is {value!r}; give the address of a training server, as in connect('http://gpu-machine:8000')."
        )
    previous_key = os.environ.get(VARIABLE)
    if previous_key not in _given:
        _outside[0] = previous_key
    if api_key is not None:
        _given.add(api_key)
    key = _outside[0] if api_key is None else api_key
    _use(key)
    try:
        with TrainingClient(url, retry_timeout=FIRST_RETRY_TIMEOUT) as client:
            client.status()
            return Connection(client.connection.url, key)
    except BaseException:
        _use(previous_key)
        raise


def _use(key: str | None) -> None:
    """Put a key into the environment variable that client code reads. None removes it, so no server receives the key of another."""
    if key is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = key
