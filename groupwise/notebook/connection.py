"""The same functions against a training server: it samples and learns, everything else stays here.

    remote = connect("http://gpu-machine:8000")
    session = remote.prepare_session(config)
    trainer_state = remote.train_grpo(config, session)

Data, rewards, record and checkpoints are those of this machine, and the policy is the one that the server's machine would have trained by
itself. See docs/how-to/train-elsewhere.md.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from groupwise.client.calls import status
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.evaluation import evaluate
from groupwise.notebook.export import export_checkpoint
from groupwise.notebook.quick import quick_test, run_full_pipeline
from groupwise.notebook.rewards import Given
from groupwise.notebook.session import Session, prepare_session
from groupwise.notebook.training import TrainerState, train_grpo
from groupwise.remote.session import FIRST_PATIENCE, Line
from groupwise.wire.keys import VARIABLE


@dataclass(frozen=True, slots=True)
class Connection:
    """A training server. Sessions that it prepares are trained, tested and evaluated there."""

    url: str

    train_grpo = staticmethod(train_grpo)
    export_checkpoint = staticmethod(export_checkpoint)
    quick_test = staticmethod(quick_test)
    evaluate = staticmethod(evaluate)

    def prepare_session(self, config: TrainingConfig) -> Session:
        """See `groupwise.notebook.prepare_session`."""
        return prepare_session(config, server=self.url)

    prepare_colab_session = prepare_session

    def run_full_pipeline(
        self,
        config: TrainingConfig,
        *,
        reward_functions: Given | None = None,
        extra_reward_functions: Given = (),
    ) -> tuple[Session, TrainerState, str]:
        """See `groupwise.notebook.run_full_pipeline`."""
        return run_full_pipeline(
            config,
            reward_functions=reward_functions,
            extra_reward_functions=extra_reward_functions,
            server=self.url,
        )


def connect(url: str, api_key: str | None = None) -> Connection:
    """The server at this URL, once it has answered. The key is else that of GROUPWISE_API_KEY.

    Raises UsageError for what is no URL, ClientError for a server that does not answer or refuses the key.
    """
    if api_key is not None:
        os.environ[VARIABLE] = api_key
    with Line(url) as line:
        line.now(line.ask(status(), patience=FIRST_PATIENCE))
    return Connection(url)
