"""A prepared notebook session: config, data, and the model in the forms that people use.

`prepare_session` checks everything that can be found out before training, in seconds, and says what it did in a table. The model
itself is loaded on first use (`session.ref_model`, `session.sampler`) and by the training, so a second copy is never held at the
same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from groupwise.core.errors import UsageError
from groupwise.core.terminal.notebook import Table, show, tell
from groupwise.core.terminal.quantities import counted
from groupwise.engine.backends.tunix.environment import mesh_of, query_worker
from groupwise.engine.distributed import prefork
from groupwise.notebook import credentials, drive
from groupwise.notebook.config import SECRETS, TrainingConfig
from groupwise.notebook.core import by_own_names, core_config, model_of, run_folder
from groupwise.notebook.datasets import (
    dataset_of,
    prepare_datasets,
    refuse_shared,
    replacement_rows,
)
from groupwise.notebook.identity import facts_of
from groupwise.notebook.previous_runs import describe_run, free_name, newest_alike
from groupwise.notebook.record import Record
from groupwise.notebook.rewards import RewardList
from groupwise.notebook.rows import kind_of
from groupwise.notebook.sampler import Sampler
from groupwise.runs import find
from groupwise.tasks.data.chat import Row, Rows
from groupwise.tasks.data.examples import examples_from_rows
from groupwise.tasks.rollouts.prompts import tokenise
from groupwise.training.config import LoadedConfig, RunConfig
from groupwise.training.rollout_builder import longest_completion


@dataclass
class Session:
    """State shared by a notebook's functions. `train_dataset` and `test_dataset` may be replaced by other rows, with or without prompts."""

    config: TrainingConfig
    train_dataset: Rows | Sequence[Row] = field(repr=False)
    test_dataset: Rows | Sequence[Row] = field(repr=False)
    server: str | None = None
    """The URL of the training server that computes; None for this machine."""
    folder: Path | None = None
    """The run's folder: of the training, or of an earlier one with the same config and rows."""
    given_rewards: tuple[RewardList | None, RewardList] = field(default=(None, ()), repr=False)
    """`reward_functions` and `extra_reward_functions` of the last training with this session; an evaluation uses them too."""

    assigned: set[str] = field(default_factory=set[str], init=False, repr=False)
    """The parts to which the user assigned rows: train_dataset, test_dataset."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("train_dataset", "test_dataset"):
            value = replacement_rows(name, value, self.config)
            if name in vars(self):
                self.assigned.add(name)
        object.__setattr__(self, name, value)
        if name in vars(self).get("assigned", ()):
            # Not an error yet: the other part may be assigned next.
            try:
                refuse_shared(self.train_dataset, self.test_dataset)
            except UsageError as error:
                tell(f"{error.message} Until then, train_grpo and evaluate refuse the session.")

    @property
    def dataset(self) -> str:
        """The name of the data, for the user: that of the config, or own rows if they were assigned."""
        names = [
            "own rows" if part in self.assigned else dataset_of(self.config)
            for part in ("train_dataset", "test_dataset")
        ]
        return ", tested on ".join(dict.fromkeys(names))

    @property
    def core(self) -> LoadedConfig:
        """The core's config, which also depends on the rows."""
        graded = kind_of(self.train_dataset) == "numeric"
        return core_config(self.config, graded=graded, server=self.server)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts, in addition to the core's config, that must be equal for another training to count as this one."""
        return facts_of(self.config, self.train_dataset, self.test_dataset)

    @property
    def weights(self) -> Path | None:
        """The newest weights of the training; None before there are any. Raises UsageError if the run's folder no longer exists."""
        return None if self.folder is None else find.newest_weights(_existing_folder(self.folder))

    @property
    def next_folder(self) -> Path:
        """The folder of a training that does not continue an earlier one."""
        name = free_name(self.settings, drive.run_names(self.config))
        return run_folder(self.config).with_name(name)

    @property
    def run(self) -> Record:
        """The record of the run: metrics, rollouts, evaluations. Raises UsageError before the training, or if its folder no longer
        exists.
        """
        if self.folder is None:
            raise UsageError("There is no run yet: call train_grpo(config, session).")
        return Record(_existing_folder(self.folder))

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer (transformers)."""
        from groupwise.engine.models.tokenizer import load_tokenizer

        return load_tokenizer(self.settings.model)

    @cached_property
    def ref_model(self) -> Any:
        """The model as it was before the training (transformers), which the KL penalty refers to. Loaded when first asked for."""
        from groupwise.engine.models.load import load_model
        from groupwise.engine.models.machine import choose_dtype

        dtype = choose_dtype(self.settings.model, full=False, device="cpu")
        return load_model(self.settings.model, dtype).requires_grad_(False)

    @cached_property
    def model_config(self) -> Any:
        """The model's own configuration (transformers): layers, heads, vocabulary."""
        from groupwise.engine.models.load import read_model_config

        return read_model_config(self.settings.model)

    @property
    def lora_policy(self) -> dict[str, Any]:
        """The trained adapter: rank, alpha, layers, number of parameters."""
        settings = self.settings
        lora = settings.lora
        assert lora is not None, "the config sets a rank"
        trained = prefork.trained_parameters(settings.model, lora)
        return {**lora.model_dump(mode="json"), "parameters": trained}

    @property
    def mesh(self) -> dict[str, int] | None:
        """Devices by axis, `{"fsdp": …, "tp": …}`, of the backend tunix; torch has none."""
        model = self.settings.model
        if model.backend != "tunix":
            return None
        fsdp, tp = mesh_of(model.mesh)
        return {"fsdp": fsdp, "tp": tp}

    @property
    def sampler(self) -> Sampler:
        """Answers prompts with the newest weights."""
        return Sampler(self)

    @property
    def policy(self) -> str:
        """A label of the model that answers, for the user."""
        if self.weights is None:
            return "the model as it was, before any training"
        return find.label_of(self.folder, self.weights) if self.folder else ""

    @property
    def settings(self) -> RunConfig:
        """The settings that do not depend on the rows."""
        return core_config(self.config, server=self.server).config

    def _repr_html_(self) -> str:
        return self.table().as_html()

    def table(self) -> Table:
        """A table of the prepared session."""
        return Table("Session", list(_session_rows(self)))


ColabSession = Session


def _existing_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise UsageError(
            f"The run's folder is gone: {folder.absolute()} is not there. Put it back (after os.chdir, go back to where the session was "
            "prepared), or prepare another session: session = prepare_session(config). It finds existing runs, or starts a new one."
        )
    return folder


def prepare_session(config: TrainingConfig, *, server: str | None = None) -> Session:
    """Credentials, Drive, the checkpoint folder, model and data: everything that a training needs, checked.

    An earlier run of the experiment with the same config and rows is found again: its weights answer, its record is `session.run`.
    `server` is the URL of a training server that is to compute; see `connect`. Raises UsageError for what cannot work. The config cannot
    be changed afterwards.
    """
    refuse_no_config(config)
    credential_sources = credentials.provide(config)
    drive_rows = drive.mount(config)
    session = make_session(config, server)
    with by_own_names(config):
        run = newest_alike(session.core.config, session.facts)
        session.folder = run.path if run is not None else None
        rows = list(_session_rows(session))
    if run is not None:
        rows.append(("earlier run", describe_run(run)))
    sources = "; ".join(f"{name} from {source}" for name, source in credential_sources.items())
    show(Table("Session", [*rows, *drive_rows, ("credentials", sources or "none found")]))
    config.prepared()
    return session


def make_session(config: TrainingConfig, server: str | None = None) -> Session:
    """A session with its data; shows nothing."""
    train, test = prepare_datasets(config)
    session = Session(config, train, test, server)
    with by_own_names(config):
        core = session.core.config  # rejects what the config forbids
        if core.model.backend == "tunix":
            from groupwise.training.assembly.services import check_tunix

            check_tunix(core)
    return session


prepare_colab_session = prepare_session


def refuse_no_config(config: object) -> None:
    """Raise UsageError if this is not a config."""
    if not isinstance(config, TrainingConfig):
        raise UsageError(
            f"Expected a TrainingConfig first, got {type(config).__name__}: config = TrainingConfig(dataset='arithmetic')."
        )


def refuse_other(config: TrainingConfig, session: object) -> None:
    """Raise UsageError unless the session was prepared with this config, or one that is equal to it."""
    refuse_no_config(config)
    if not isinstance(session, Session):
        raise UsageError(
            f"Expected a session second, got {type(session).__name__}: session = prepare_session(config)."
        )
    if fields := differing(config, session.config):
        raise UsageError(
            f"The session was prepared with another config, with other values of {fields}. Prepare one with this config: "
            "session = prepare_session(config)."
        )


def differing(config: TrainingConfig, other: TrainingConfig) -> str:
    """The names of the fields that differ, except credentials; empty if the configs are equal."""
    field_values, other_values = (
        compared.model_dump(exclude={*SECRETS}) for compared in (other, config)
    )
    return ", ".join(
        name
        for name in {**field_values, **other_values}
        if field_values.get(name) != other_values.get(name)
    )


def _session_rows(session: Session) -> Iterator[tuple[str, str]]:
    """Lines of the table that `prepare_session` shows: name and value."""
    config, train, test = session.config, session.train_dataset, session.test_dataset
    if session.server is not None:
        yield "backend", f"torch, on {session.server}"
    elif session.mesh is None:
        yield "backend", "torch"
    else:
        tunix_info = query_worker()
        mesh = " × ".join(f"{axis} {count}" for axis, count in session.mesh.items())
        yield (
            "backend",
            f"tunix {tunix_info.tunix} with jax {tunix_info.jax}, {tunix_info.devices} × {tunix_info.device} as {mesh}",
        )
    yield "model", model_of(config)
    policy = session.lora_policy
    yield "adapter", f"rank {policy['r']}, {policy['parameters']:,} parameters are trained"
    evaluation = session.settings.eval
    too_long = [_too_long(session, "train_dataset"), 0]
    if evaluation.before_and_after or evaluation.eval_steps is not None:
        too_long[1] = _too_long(session, "test_dataset", evaluation.max_prompts)
    train_count, test_count = len(train) - too_long[0], len(test) - too_long[1]
    yield (
        "dataset",
        f"{session.dataset}: {counted(train_count, 'row')} to train on, {test_count} to test",
    )
    left_out: Counter[str] = Counter()
    for part in (train, test):
        if isinstance(part, Rows):
            left_out.update(part.account.left_out)
    if any(too_long):
        limit = session.settings.data.max_prompt_length
        left_out[f"longer than max_prompt_length = {limit} tokens"] = sum(too_long)
    if left_out:
        yield "left out", "; ".join(f"{count} × {reason}" for reason, count in left_out.items())
    training = session.settings.training
    prompts, completions = training.prompts_per_step, training.num_generations
    of_a_step = f"{counted(prompts, 'prompt')} × {counted(completions, 'completion')}"
    length = (
        counted(training.max_steps, "step")
        if training.max_steps
        else f"{training.num_train_epochs} epochs"
    )
    yield "training", f"{length} of {of_a_step}"
    yield "run", str(session.folder or session.next_folder)


def _too_long(session: Session, part: str, limit: int | None = None) -> int:
    """Number of prompts of a part, or of its first `limit`, that the training leaves out. Raises TaskError if it would refuse them."""
    settings = session.settings
    prompts = tokenise(
        prefork.load_tokenizer(settings.model),
        examples_from_rows(getattr(session, part)[:limit], where=part),
        max_prompt_length=settings.data.max_prompt_length,
        room=prefork.prompt_room(settings.model, longest_completion(settings)),
        where=part,
        strict=settings.data.strict,
        check_only=True,
    )
    return prompts.dropped
