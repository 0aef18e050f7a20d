"""The `data` section: which data are trained on, what of them is used, and in which order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ValidationError

from groupwise.core.settings.field_errors import field_errors
from groupwise.core.settings.schema import Conflict, Strict, refuse, setting
from groupwise.core.settings.wording import as_given
from groupwise.tasks.data.chat import Prefill, PromptFormat
from groupwise.tasks.data.curriculum import CurriculumConfig, EasyPoolConfig
from groupwise.tasks.data.mixture import Join
from groupwise.tasks.data.replay import ReplayConfig


class MixtureEntry(Strict):
    """One set of `data.dataset_mixture`: a source of rows, or a whole task."""

    refused: ClassVar[Mapping[str, str]] = {
        "id": "did you mean source",
        "path": "did you mean source",
        "name": "did you mean config",
        "fraction": "did you mean weight",
    }

    source: str | None = setting(None, "Hub id, file or folder.", min_length=1)
    task: str | None = setting(
        None, "Instead of a source: a task, with its own data and rewards.", min_length=1
    )
    config: str | dict[str, Any] | None = setting(
        None, "Configuration of a source on the hub; of a task, its section `task`."
    )
    split: str | None = setting(None, "Split of a source; null: data.dataset_split.")
    test_split: str | None = setting(None, "Held-out split of a source.")
    revision: str | None = setting(None, "Commit, tag or branch of a source on the hub.")
    columns: dict[str, str] = setting({}, "Further names for the columns of a source.")
    label: str | None = setting(
        None,
        "Task label of its rows, by which the router gives them rewards; null: the name of the task, none for a source.",
        min_length=1,
    )
    weight: float = setting(
        1.0,
        "How often each row comes in an epoch. 0.5: half of the rows, in the next epoch the other half. 2: each row twice.",
        gt=0,
    )

    @property
    def name(self) -> str:
        """Name of the set in messages, and in the column `dataset_name`."""
        return self.source or self.task or ""

    def problems(self) -> Iterator[str]:
        """Yields conflicts among its keys."""
        if (self.source is None) == (self.task is None):
            yield "give either `source` or `task`"
        elif self.task is not None:
            for key in ("split", "test_split", "revision", "columns"):
                if getattr(self, key):
                    yield f"`{key}` has no effect on a task, which brings its own rows; leave it out"
            if isinstance(self.config, str):
                yield "`config` of a task is its section `task`, with keys of its own"
        elif isinstance(self.config, dict):
            yield "`config` of a source is a name, not a section"


def mixture_entry(value: Mapping[str, Any]) -> MixtureEntry:
    """An entry of `data.dataset_mixture`. Raises ValidationError."""
    return MixtureEntry.model_validate_json(json.dumps(value))


def _check_entries(entries: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    if not entries:
        raise ValueError("the list is empty; give at least one set, or null.")
    refuse(
        f"set {number}: {problem}."
        for number, entry in enumerate(entries)
        for problem in _entry_problems(entry)
    )
    return entries


def _entry_problems(value: dict[str, Any]) -> Iterator[str]:
    try:
        entry = mixture_entry(value)
    except ValidationError as error:
        for field_error in field_errors(error, MixtureEntry):
            if field_error.field.split(".")[0] in MixtureEntry.model_fields:
                yield f"{field_error.field} is {as_given(field_error.given)}; it {field_error.message}"
            else:
                yield f"{field_error.field!r} {field_error.message.removesuffix('?')}"
    else:
        yield from entry.problems()


MixtureEntries = Annotated[tuple[dict[str, Any], ...], AfterValidator(_check_entries)]


class DatasetConfig(Strict):
    """Which data a run is about, where no task brings them; every command has these keys."""

    refused: ClassVar[Mapping[str, str]] = {
        "mixture": "here it is data.dataset_mixture",
        "dataset_mixer": "here it is data.dataset_mixture",
        "dataset_train_split": "here it is data.dataset_split",
    }

    dataset_name: str | None = setting(
        None,
        "The data, if no task brings them: a hub id, a file (.jsonl, .json, .parquet, .csv, .tsv, .txt) or a folder of these.",
        min_length=1,
    )
    dataset_config: str | None = setting(None, "Configuration of a dataset on the hub.")
    dataset_split: str = setting(
        "train", "The split that is trained on; a part of it as in train[:90%].", min_length=1
    )
    dataset_test_split: str | None = setting(
        None,
        "Held-out split of dataset_name; each set of a mixture has a test_split of its own.",
        on_resume="free",
    )
    dataset_revision: str | None = setting(
        None, "Commit, tag or branch of a dataset on the hub; a commit never changes."
    )
    dataset_mixture: MixtureEntries | None = setting(
        None,
        "Instead of dataset_name: a list of sets, each with `source` (or `task`), config, split, test_split, revision, columns, "
        "label and weight.",
    )
    mixture_columns: Join = setting(
        "same",
        "Columns that only some sources of a mixture have. same: they are refused. common: they are left out. all: they are null in "
        "the other sources.",
    )
    test_split_size: float | None = setting(
        None,
        "Share of the rows that is held out, chosen by prompt before anything else; null: none, or dataset_test_split.",
        gt=0,
        lt=1,
    )
    seed: int = setting(
        0,
        "Seed that decides which rows are held out and how a mixture is drawn; training.seed is another.",
        ge=0,
    )
    columns: dict[str, str] = setting(
        {},
        "Further names for columns: with `answer: solution` the column `solution` is also the answer; `answer: meta.gold` takes it "
        "from within `meta`.",
    )
    prompt_column: str | None = setting(
        None, "The column that holds the prompt; null: prompt.", min_length=1
    )
    answer_column: str | None = setting(
        None,
        "The column that holds the answer: for rl and eval it is also called `answer`, for sft `completion`.",
        min_length=1,
    )
    preprocessing_pipeline: str | None = setting(
        None,
        "What each row goes through before its prompt is made: generic (text, its answer also as `reference`), deepseek (a chat), "
        "`module:function` or `file.py:function` (takes a row and returns a row, or None to leave it out), or the name of an "
        "installed one.",
        min_length=1,
    )
    prompt_format: PromptFormat | None = setting(
        None,
        "What becomes of a prompt that is text. text: it stays text. chat: it becomes the user's message of a chat. null: chat if "
        "there is a system_prompt, else text.",
    )
    system_prompt: str | None = setting(
        None, "System prompt of all chats that have none.", min_length=1
    )
    prompt_lines: tuple[str, ...] = setting(
        (), "Columns that are added to the user's text, each as a line `name: value`."
    )
    prefill: Prefill = setting(
        "continue",
        "If a prompt ends with words of the assistant. continue: the completion goes on after them. drop: they are left out, as an "
        "earlier answer.",
    )
    strip_tags: tuple[str, ...] = setting(
        (), "Tags, such as think, whose blocks are removed from earlier turns in prompts."
    )
    strip_roles: tuple[Literal["user", "assistant"], ...] = setting(
        ("assistant",), "The roles from whose turns strip_tags removes blocks: assistant, user."
    )
    drop_duplicates: bool = setting(
        False,
        "Leave out rows whose prompt an earlier row has already; for sft, prompt and completion.",
    )
    strict: bool = setting(
        False, "Refuse to start if a row cannot be used. false: such rows are left out and counted."
    )

    @property
    def names_data(self) -> bool:
        """True if the config names data."""
        return self.dataset_name is not None or self.dataset_mixture is not None

    @property
    def mixture(self) -> tuple[MixtureEntry, ...]:
        """All sets of the mixture; a single one without a mixture."""
        if self.dataset_mixture is not None:
            return tuple(map(mixture_entry, self.dataset_mixture))
        return (
            MixtureEntry(
                source=self.dataset_name,
                config=self.dataset_config,
                test_split=self.dataset_test_split,
                revision=self.dataset_revision,
            ),
        )

    def renamed_columns(self, answer: str) -> dict[str, str]:
        """All columns that are renamed, the prompt's and the answer's among them; the latter is called `answer`."""
        required = {"prompt": self.prompt_column, answer: self.answer_column}
        return {**self.columns, **{name: column for name, column in required.items() if column}}

    def unused_with_task(self) -> list[str]:
        """The set keys that select data or define how rows become prompts, and so have no effect with a task."""
        return [
            key
            for key, field in DatasetConfig.model_fields.items()
            if key != "strict" and getattr(self, key) != field.default
        ]

    def conflicts(self) -> Iterator[Conflict]:
        """Keys that contradict each other, and keys without effect."""
        if self.dataset_name is not None and self.dataset_mixture is not None:
            yield Conflict(
                "dataset_name and dataset_mixture both say which data are meant; leave one out.",
                ("dataset_name", "dataset_mixture"),
            )
        elif not self.names_data:
            if idle := self.unused_with_task():
                yield Conflict(
                    f"{', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect without dataset_name or dataset_mixture, "
                    "which say where the rows come from.",
                    (*idle, "dataset_name", "dataset_mixture"),
                )
            return
        yield from self._of_one_source_only()
        splits = [entry.test_split for entry in self.mixture if entry.test_split]
        if splits and self.test_split_size is not None:
            yield Conflict(
                f"the split {splits[0]} is held out, and test_split_size takes a share of what is trained on; leave one out.",
                ("dataset_test_split", "dataset_mixture", "test_split_size"),
            )
        for key, name in (("prompt_column", "prompt"), ("answer_column", "answer")):
            if getattr(self, key) is not None and name in self.columns:
                yield Conflict(
                    f"{key} and columns.{name} both say which column is meant; leave one out.",
                    (key, "columns"),
                )
        if self.strip_roles != ("assistant",) and not self.strip_tags:
            yield Conflict(
                "strip_roles has no effect without strip_tags; leave it out.",
                ("strip_roles", "strip_tags"),
            )

    def _of_one_source_only(self) -> Iterator[Conflict]:
        if self.dataset_mixture is None:
            if self.mixture_columns != "same":
                yield Conflict(
                    "mixture_columns has no effect without dataset_mixture; leave it out.",
                    ("mixture_columns", "dataset_mixture"),
                )
            return
        for key, entry_key in (
            ("dataset_config", "config"),
            ("dataset_revision", "revision"),
            ("dataset_test_split", "test_split"),
        ):
            if getattr(self, key) is not None:
                yield Conflict(
                    f"{key} has no effect on dataset_mixture; give `{entry_key}` to each set.",
                    (key, "dataset_mixture"),
                )
        sources = [entry for entry in self.mixture if entry.source]
        if not sources and self.test_split_size is not None:
            yield Conflict(
                "test_split_size has no effect on tasks, which bring their own held-out rows; leave it out.",
                ("test_split_size", "dataset_mixture"),
            )


class DataConfig(DatasetConfig):
    """The rows come from the task's `get_rl_dataset`, or from where `dataset_name` or `dataset_mixture` says."""

    max_prompt_length: int | None = setting(
        None,
        "Longest prompt in tokens; examples with longer ones are left out and counted. "
        "null: only the model's own limit.",
        ge=1,
    )
    shuffle: bool = setting(
        True,
        "Draw the examples in random order, a new one for each epoch, which follows from the seed.",
    )
    easy_pool: EasyPoolConfig | None = setting(
        None,
        "A second source of easy examples, mixed in with a falling probability; {} takes all defaults.",
    )
    replay: ReplayConfig | None = setting(None, "Draw solved prompts again; {} takes all defaults.")
    curriculum: CurriculumConfig | None = setting(
        None, "Draw examples near a success rate; {} takes all defaults."
    )

    @property
    def success_parts(self) -> dict[str, str | None]:
        """The reward parts that measure success, by the config keys that name them; None if a key is not set, so the part is found
        by its name.
        """
        sections = {"replay": self.replay, "curriculum": self.curriculum}
        return {f"data.{key}.success_part": s.success_part for key, s in sections.items() if s}
