"""The config of a notebook: one flat, typed config with the names that GRPO notebooks use, and its conversion for the core.

    config = TrainingConfig(dataset="arithmetic", num_batches=60, learning_rate=1e-4)
    config.num_generations = 8

It is checked at once, and each value again when it is changed. It can be changed until it is passed to `prepare_session`.
`overrides` takes any key of the core (docs/configuration.md) under its dotted name. A subclass may add fields of its own, for
datasets and rewards that receive the config.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NoReturn,
    Self,
    Union,
    cast,
    get_args,
    get_origin,
)

from pydantic import (
    ConfigDict,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from groupwise.core.accelerators import accelerator
from groupwise.core.errors import ConfigError
from groupwise.core.reward_call.tags import Tag, Tags
from groupwise.core.settings.credentials import holds_secret, is_secret, names_secret
from groupwise.core.settings.schema import SKIP_CONFLICT_CHECKS, Conflict, setting
from groupwise.core.terminal.notebook import Table
from groupwise.notebook.core import CHECKPOINTS, by_own_names, core_config
from groupwise.notebook.friendly_errors import UserModel, plain_number, to_config_error
from groupwise.runs.config import RESERVED, RUN_NAME

Backend = Literal["auto", "torch", "tunix"]
Devices = Literal["auto"] | int | tuple[int, int]
Sink = Literal["tensorboard", "wandb", "trackio", "mlflow", "jsonl", "parquet"]
PresetName = Literal["quick", "standard", "production"]

if TYPE_CHECKING:  # accepted values; credentials are stored as SecretStr, and None is replaced by the computed text
    Secret = SecretStr | str
    Computed = str
else:
    Secret = SecretStr
    Computed = str | None

PRESETS: Mapping[PresetName, Mapping[str, Any]] = {
    "quick": {
        "num_batches": 60,
        "openrubrics_max": 200,
        "dataset_max": 500,
        "lora_rank": 16,
        "lora_alpha": 32,
        "num_generations": 4,
        "total_generation_steps": 128,
    },
    "standard": {},
    "production": {
        "num_batches": 3000,
        "openrubrics_max": 20_000,
        "num_generations": 8,
        "batch_size": 4,
        "max_prompt_length": 512,
        "total_generation_steps": 1024,
    },
}
"""Values of each preset that differ from the defaults: `quick` is a short trial, `standard` the defaults, `production` a long run."""

DRIVE = Path("/content/drive/MyDrive")
"""Folder of Google Drive in Colab, once it is mounted."""
OWN_ROWS = (
    "For a table or a list of your own, register_dataset('mine', lambda config: rows), and name it: dataset='mine'. Or assign it to "
    "session.train_dataset and session.test_dataset."
)
SECRETS = ("wandb_api_key", "kaggle_username", "kaggle_key", "hf_token")
"""The fields that are credentials; their environment variables have the same names in upper case."""
MASK = "*" * 10
"""Pydantic's placeholder for a credential."""


class TrainingConfig(UserModel):
    """A training in a notebook. Raises ConfigError for what cannot work, with all that is wrong at once."""

    model_config = ConfigDict(frozen=False, validate_assignment=True, protected_namespaces=())

    num_batches: int = setting(
        500, "Batches of prompts; train_fraction of them are trained on, each in one step.", ge=1
    )
    learning_rate: float = setting(
        3e-6,
        "Peak of the learning rate: it rises over the first tenth of the steps, then falls to 0 along a cosine.",
        gt=0,
    )
    lora_rank: int = setting(64, "Rank of the adapter.", ge=1)
    lora_alpha: int = setting(64, "The adapter's output is scaled by alpha / rank.", ge=1)
    model: str | None = setting(
        None,
        "Hub id, folder or alias. None: Gemma 3 1B IT on a TPU or a GPU, the bundled small model on a CPU.",
        min_length=1,
    )
    dataset: str | None = setting(
        None,
        "openrubrics, gsm8k, arithmetic, a registered name, a hub id or a file. None: openrubrics, if use_openrubrics.",
        min_length=1,
    )
    use_openrubrics: bool = setting(True, "Use openrubrics if no dataset is named.")
    openrubrics_max: int = setting(
        2000,
        "Maximum number of rows of openrubrics; if it has more, the seed chooses a sample.",
        ge=2,
    )
    dataset_max: int | None = setting(
        None,
        "Maximum number of rows of any other dataset; if it has more, the seed chooses a sample. None: all.",
        ge=2,
    )
    save_to_drive: bool = setting(
        False,
        "Keep checkpoints and exports on Google Drive (Colab), so that they outlive the machine.",
    )
    experiment_name: str = setting("gemma3_grpo_reasoning", "Name of the run, and of its folder.")
    checkpoint_dir: Computed = setting(
        None,
        "The run's folder. Not given: that of the experiment on Drive if save_to_drive, else ./checkpoints/<experiment_name>.",
    )
    num_generations: int = setting(
        2, "Completions of each prompt, which are compared with each other.", ge=2
    )
    num_iterations: int = setting(1, "Passes over the completions of a step.", ge=1)
    beta: float = setting(
        0.08, "Weight of the KL penalty, which keeps the policy near the model at the start.", ge=0
    )
    epsilon: float = setting(0.2, "The ratio of probabilities is clipped at 1 ± epsilon.", gt=0)
    batch_size: int = setting(2, "Prompts in a batch.", ge=1)
    max_prompt_length: int = setting(
        256, "Maximum number of tokens of a prompt; longer prompts are left out.", ge=1
    )
    total_generation_steps: int = setting(512, "Maximum number of tokens of a completion.", ge=1)
    train_fraction: float = setting(
        0.9,
        "Share of the rows, and of num_batches, that is trained on; the other rows are the test part.",
        gt=0,
        lt=1,
    )
    reasoning_start: str = setting("<reasoning>", "What the reasoning begins with.")
    reasoning_end: str = setting("</reasoning>", "What it ends with.")
    solution_start: str = setting("<answer>", "What the answer begins with.")
    solution_end: str = setting("</answer>", "What it ends with.")
    system_prompt: Computed = setting(
        None,
        "Text before each question. Not given: asks for reasoning and answer between the four marks; an empty text: none.",
    )
    wandb_api_key: Secret | None = setting(None, "Key of Weights & Biases, for report_to.")
    kaggle_username: Secret | None = setting(
        None, "User name for what your own cells load from Kaggle; kagglehub finds it."
    )
    kaggle_key: Secret | None = setting(None, "Likewise.")
    hf_token: Secret | None = setting(
        None, "For models and data of the hub that need one, such as Gemma."
    )
    devices: Devices = setting(
        "auto",
        "auto; backend torch on a CPU: the number of processes; backend tunix: the number of devices, or a mesh (fsdp, tp).",
    )
    overrides: dict[str, Any] = setting(
        {},
        'Any key of the core by its dotted name, {"training.weight_decay": 0.0}; it wins over what is set here.',
    )
    seed: int = setting(
        42, "Decides the split, the order, every sampled token and the adapter's start.", ge=0
    )
    backend: Backend = setting(
        "auto", "What trains: torch, or tunix (JAX); auto takes tunix on a TPU, else torch."
    )
    report_to: tuple[Sink, ...] = setting(
        (), "Where metrics are shown besides the run's own record."
    )

    _prepared: bool = PrivateAttr(default=False)

    @classmethod
    def preset(cls, name: PresetName, **changes: Any) -> Self:
        """The config of a preset (quick, standard, production) with changes."""
        if name not in PRESETS:
            raise ConfigError(f"There is no preset {name!r}. There are: {', '.join(PRESETS)}.")
        return cls(**{**PRESETS[name], **changes})

    @classmethod
    def fields(cls) -> Table:
        """A table of all settings with default and meaning, a subclass's own too: `help` would show all of pydantic and no meanings."""
        rows = [
            (
                name,
                "" if field.is_required() else repr(field.get_default(call_default_factory=True)),
                field.description or "",
            )
            for name, field in cls.model_fields.items()
        ]
        return Table("", rows, ("field", "default", "meaning"))

    def prepared(self) -> None:
        """Makes the config read-only."""
        vars(self)["overrides"] = _Fixed(copy.deepcopy(self.overrides))
        self._prepared = True

    @classmethod
    def values_for_messages(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """See `UserModel`; for credentials only whether they are text."""
        hidden = {
            name: (MASK if _is_mask(value) else "…") if isinstance(value, str | SecretStr) else 0
            for name, value in values.items()
            if (name in SECRETS or is_secret(name)) and not isinstance(value, bool | None)
        }
        return {**without_secrets(super().values_for_messages(values)), **hidden}

    @property
    def tags(self) -> Tags:
        """The four marks, in the form that rewards accept."""
        return Tags(
            reasoning=_tag(self.reasoning_start, self.reasoning_end),
            answer=_tag(self.solution_start, self.solution_end),
        )

    @property
    def max_steps(self) -> int:
        """Steps of the training: floor(num_batches × train_fraction)."""
        return math.floor(self.num_batches * self.train_fraction + 1e-9)

    @property
    def chosen_backend(self) -> Literal["torch", "tunix"]:
        """The backend that is named, or the one that suits the machine."""
        if self.backend != "auto":
            return self.backend
        return "tunix" if accelerator() == "tpu" else "torch"

    def conflicts(self) -> Iterator[Conflict]:
        """Yields conflicts between fields."""
        if self.max_steps < 1:
            yield Conflict(
                f"num_batches {self.num_batches} × train_fraction {self.train_fraction} is less than one step. Raise num_batches.",
                ("num_batches", "train_fraction"),
            )
        if isinstance(self.devices, tuple) and self.chosen_backend == "torch":
            yield Conflict(
                f"devices is {self.devices}, a mesh, which the backend torch does not have. Give a number, or backend='tunix'.",
                ("devices", "backend"),
            )
        marks = ("reasoning_start", "reasoning_end", "solution_start", "solution_end")
        try:
            _ = self.tags
        except ValueError as error:
            yield Conflict(str(error), marks)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, without_secrets(value, name or "")

    def __getstate__(self) -> dict[Any, Any]:
        """State for pickle, whose files are shared: without credentials, which a session finds in its other sources. Copies keep them."""
        state = super().__getstate__()
        items = state["__dict__"].items()
        hidden = {name for name, value in items if isinstance(value, SecretStr) or name in SECRETS}
        return {
            **state,
            "__dict__": {**state["__dict__"], **dict.fromkeys(hidden)},
            "__pydantic_fields_set__": state["__pydantic_fields_set__"] - hidden,
        }

    if not TYPE_CHECKING:  # type checkers read the fields instead

        def __delattr__(self, name: str) -> None:
            raise ConfigError(f"{name} cannot be removed; give it another value.")

        def __setattr__(self, name: str, value: Any) -> None:
            if self._prepared and name in type(self).model_fields:
                raise _closed_error(name)
            previous = dict(self.__dict__), set(self.__pydantic_fields_set__)
            try:
                super().__setattr__(name, value)
            except ValidationError as error:
                self.__dict__.clear()
                self.__dict__.update(previous[0])
                object.__setattr__(self, "__pydantic_fields_set__", previous[1])
                values = {key: previous[0][key] for key in previous[1]}
                raise to_config_error(type(self), {**values, name: value}, error) from None

    @field_validator("*", mode="before")
    @classmethod
    def _convert_number(cls, original: Any, info: ValidationInfo) -> Any:
        """Converts numpy numbers to Python's, and 10.0 to 10 if the field takes integers."""
        value = plain_number(original)
        is_whole = isinstance(value, float) and value.is_integer()
        field = cls.model_fields[str(info.field_name)]
        return int(value) if is_whole and takes_whole_alone(field) else value

    @field_validator(*SECRETS, mode="before")
    @classmethod
    def _refuse_mask(cls, value: Any) -> Any:
        if _is_mask(value):
            raise ValueError(
                "asterisks are not a credential: they stand in its place where a config is shown or dumped. Give the credential itself, or "
                "leave it out; config.changed(…) makes a config that keeps it"
            )
        return value

    @field_validator("model", "dataset", "checkpoint_dir", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name == "dataset" and not isinstance(value, str | Path | None):
            raise ValueError(f"is {type(value).__name__}; it must be a name. {OWN_ROWS}")
        text = str(value) if isinstance(value, Path) else value
        return str(Path(str(text)).expanduser()) if str(text).startswith("~") else text

    @field_validator("experiment_name")
    @classmethod
    def _check_folder_name(cls, name: str) -> str:
        if not RUN_NAME.fullmatch(name) or name in RESERVED:
            quoted = json.dumps("…" if holds_secret(name) else name, ensure_ascii=False)
            raise ValueError(
                f"{quoted} cannot name an experiment, which is a folder as well. Use letters (a to z), digits, `.`, `_` and `-`, "
                "beginning with a letter or digit, but not `base`, which names the model itself. Where that folder is to be, "
                "checkpoint_dir says."
            )
        return name

    @field_validator("report_to", "devices", mode="before")
    @classmethod
    def _list_as_tuple(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name == "report_to" and isinstance(value, str):
            return (value,)
        return tuple(cast("list[Any]", value)) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _compute_fields(self) -> Self:
        """Computes the fields that are None, and those computed before, from the other fields."""
        values = vars(self)
        for name in ("system_prompt", "checkpoint_dir"):
            if values[name] is None or (name == "checkpoint_dir" and not values[name]):
                self.__pydantic_fields_set__.discard(name)
        parent = DRIVE if self.save_to_drive else CHECKPOINTS
        computed = {
            "system_prompt": (
                f"Solve the problem. First think it through between {self.reasoning_start} and {self.reasoning_end}, then give the answer "
                f"alone between {self.solution_start} and {self.solution_end}."
            ),
            "checkpoint_dir": str(parent / self.experiment_name),
        }
        values.update(
            (name, value) for name, value in computed.items() if name not in self.model_fields_set
        )
        return self

    @model_validator(mode="after")
    def _check_core_config(self, info: ValidationInfo) -> Self:
        """Checks the core's config; errors use the names of this class unless a key of the core was given."""
        if info.context is SKIP_CONFLICT_CHECKS:
            return self
        try:
            with by_own_names(self):
                core_config(self)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


ColabTrainingConfig = TrainingConfig


def _refused(*_: Any, **__: Any) -> NoReturn:
    raise _closed_error("overrides")


_refuse: Any = _refused


class _Fixed(dict[str, Any]):
    """The overrides of a config that cannot be changed."""

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(
            (key, _Fixed(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else value)
            for key, value in values.items()
        )

    def __copy__(self) -> dict[str, Any]:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return {
            key: value.__deepcopy__(memo)
            if isinstance(value, _Fixed)
            else copy.deepcopy(value, memo)
            for key, value in self.items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return _Fixed, (self.__deepcopy__({}),)


def without_secrets(value: Any, key: str = "") -> Any:
    """The value with "…" in place of credentials, recognised by their key or form, also within lists and mappings."""
    if isinstance(value, Mapping):
        parts = cast("Mapping[str, Any]", value)
        return {name: without_secrets(part, str(name)) for name, part in parts.items()}
    if isinstance(value, list):
        return [without_secrets(item, key) for item in cast("list[Any]", value)]
    if isinstance(value, bool | SecretStr | None) or not str(value):
        return value
    by_form = holds_secret(value) if isinstance(value, str) else names_secret(str(value))
    return "…" if by_form or is_secret(key.rpartition(".")[2]) else value


def _is_mask(value: object) -> bool:
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    return isinstance(text, str) and set(text.strip()) == {"*"}


def _closed_error(name: str) -> ConfigError:
    return ConfigError(
        f"{name} cannot be changed: a session was prepared with this config. Make another one, "
        f"config.changed({name}=…), and prepare a session with that."
    )


def takes_whole_alone(*fields: FieldInfo) -> bool:
    """True if the fields accept integers but no other numbers."""
    kinds = {kind for field in fields for kind in _kinds(field.annotation)}
    return int in kinds and float not in kinds


def _kinds(annotation: Any) -> set[Any]:
    """Types that an annotation accepts: int and None for `int | None`."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {kind for member in get_args(annotation) for kind in _kinds(member)}
    return {annotation}


def _tag(opening: str, closing: str) -> Tag:
    """The tag's name if the marks are `<name>` and `</name>`, else the pair of marks."""
    name = opening[1:-1]
    is_name = (
        name and (opening, closing) == (f"<{name}>", f"</{name}>") and not set(name) & set("<>/")
    )
    return name if is_name else (opening, closing)
