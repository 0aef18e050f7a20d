"""A prepared notebook session: config, data, and the model in the forms that people ask for.

`prepare_session` checks everything that can be found out before training, in seconds, and says what it did in a table. The model itself is
loaded when something asks for it (`session.ref_model`, `session.sampler`), and by the training; so there is never a second copy beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from groupwise.config import LoadedConfig, RunConfig
from groupwise.data.chat import Row, Rows
from groupwise.display.notebook import Table, show
from groupwise.errors import UsageError
from groupwise.notebook import credentials, drive
from groupwise.notebook.answering import answers
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.core import core_config
from groupwise.notebook.datasets import dataset_of, kind_of, prepare_datasets
from groupwise.notebook.record import Record
from groupwise.runs import find
from groupwise.tunix.environment import look, mesh_of
from groupwise.types import Prompt, SamplingParams


@dataclass
class Session:
    """What the functions of a notebook share. `train_dataset` and `test_dataset` may be replaced by other rows."""

    config: TrainingConfig
    train_dataset: Rows | Sequence[Row]
    test_dataset: Rows | Sequence[Row]
    server: str | None = None
    """The URL of the training server that computes; None for this machine."""
    folder: Path | None = None
    """The run's folder, once there has been a training."""

    @property
    def core(self) -> LoadedConfig:
        """What the config means to the core."""
        graded = kind_of(self.train_dataset) == "numeric"
        return core_config(self.config, graded=graded, server=self.server)

    @property
    def weights(self) -> Path | None:
        """The newest weights of the training; None before there are any."""
        return None if self.folder is None else find.newest_weights(self.folder)

    @property
    def run(self) -> Record:
        """The record of the run: metrics, rollouts, evaluations. Raises UsageError before the training."""
        if self.folder is None:
            raise UsageError("There is no run yet: call train_grpo(config, session).")
        return Record(self.folder)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer (transformers)."""
        from groupwise.models.tokenizer import load_tokenizer

        return load_tokenizer(self._settings.model)

    @cached_property
    def ref_model(self) -> Any:
        """The model as it was before the training (transformers), which the KL penalty refers to. Loaded when first asked for."""
        from groupwise.models.load import choose_dtype, load_model

        dtype = choose_dtype(self._settings.model, full=False, device="cpu")
        return load_model(self._settings.model, dtype).requires_grad_(False)

    @cached_property
    def model_config(self) -> Any:
        """The model's own configuration (transformers): layers, heads, vocabulary."""
        from groupwise.models.load import read_model_config

        return read_model_config(self._settings.model)

    @property
    def lora_policy(self) -> dict[str, Any]:
        """What is trained: rank, alpha, layers, number of parameters."""
        from groupwise.ranks import ahead

        settings = self._settings
        lora = settings.lora
        assert lora is not None, "the config sets a rank"
        trained = ahead.trained_parameters(settings.model, lora)
        return {**lora.model_dump(mode="json"), "parameters": trained}

    @property
    def mesh(self) -> dict[str, int] | None:
        """Devices by axis, `{"fsdp": …, "tp": …}`, of the backend tunix; torch has none."""
        model = self._settings.model
        if model.backend != "tunix":
            return None
        fsdp, tp = mesh_of(model.mesh)
        return {"fsdp": fsdp, "tp": tp}

    @property
    def sampler(self) -> Sampler:
        """Answers prompts with the newest weights."""
        return Sampler(self)

    @property
    def _settings(self) -> RunConfig:
        return self.core.config


ColabSession = Session


@dataclass(frozen=True, slots=True)
class Sampler:
    """Completes prompts with the newest weights of a session. The model is loaded for each call."""

    session: Session

    def __call__(
        self,
        prompts: Sequence[Prompt],
        total_generation_steps: int = 256,
        temperature: float = 0.7,
        top_k: int | None = 50,
        top_p: float | None = 0.95,
        seed: int | None = None,
    ) -> list[str]:
        """A completion of each prompt. A text is what the user says; messages are a chat."""
        if isinstance(prompts, str):
            raise UsageError("prompts is one text; give a list of them.")
        chats = [
            [{"role": "user", "content": each}] if isinstance(each, str) else each
            for each in prompts
        ]
        params = SamplingParams(
            max_tokens=total_generation_steps, temperature=temperature, top_k=top_k, top_p=top_p
        )
        session = self.session
        chosen = session.config.seed if seed is None else seed
        return answers(session.core.config, chats, session.weights, params, chosen)


def prepare_session(config: TrainingConfig, *, server: str | None = None) -> Session:
    """Credentials, Drive, the checkpoint folder, model and data: everything that a training needs, checked.

    `server` is the URL of a training server that is to compute; see `connect`. Raises UsageError for what cannot work. The config cannot
    be changed afterwards.
    """
    found = credentials.provide(config)
    mounted = drive.mount(config)
    session = make_session(config, server)
    rows: list[tuple[str, str]] = [
        ("backend", _computes(session)),
        ("model", session.core.config.model.name),
        (
            "adapter",
            f"rank {config.lora_rank}, {session.lora_policy['parameters']:,} parameters are trained",
        ),
        *_data(session),
        (
            "training",
            f"{config.max_steps} steps of {config.batch_size} prompts × {config.num_generations} completions",
        ),
        ("checkpoints", config.checkpoint_dir),
        *mounted,
        (
            "credentials",
            "; ".join(f"{name} from {place}" for name, place in found.items()) or "none found",
        ),
    ]
    show(Table("Session", rows))
    return session


def make_session(config: TrainingConfig, server: str | None = None) -> Session:
    """A session with its data, without a word; the config cannot be changed afterwards."""
    train, test = prepare_datasets(config)
    session = Session(config, train, test, server)
    _ = session.core  # refuses what cannot work
    config.prepared()
    return session


prepare_colab_session = prepare_session


def _computes(session: Session) -> str:
    if session.server is not None:
        return f"torch, on {session.server}"
    if session.mesh is None:
        return "torch"
    found = look()
    mesh = " × ".join(f"{axis} {count}" for axis, count in session.mesh.items())
    return f"tunix {found.tunix} with jax {found.jax}, {found.devices} × {found.device} as {mesh}"


def _data(session: Session) -> Iterator[tuple[str, str]]:
    train, test = session.train_dataset, session.test_dataset
    yield (
        "dataset",
        f"{dataset_of(session.config)}: {len(train)} rows to train on, {len(test)} to test",
    )
    left_out: Counter[str] = Counter()
    for part in (train, test):
        if isinstance(part, Rows):
            left_out.update(part.account.left_out)
    if left_out:
        yield "left out", "; ".join(f"{count} × {reason}" for reason, count in left_out.items())
