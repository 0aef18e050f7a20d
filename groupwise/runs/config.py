"""The `run` section: where a run is written, how often, and what of it is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, cast, get_args

from pydantic import field_validator

from groupwise.core.settings.schema import Conflict, Strict, setting

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Pattern of run names: each is a folder name, and part of an address `run@step`."""


RESERVED = frozenset({"base"})
"""Names with another meaning wherever a run may be named."""


SinkName = Literal["tensorboard", "wandb", "trackio", "mlflow", "jsonl", "parquet"]
"""Services that show metrics in addition to the run's own record."""
SINKS: tuple[SinkName, ...] = get_args(SinkName)
WITH_TABLES = frozenset({"wandb", "trackio", "mlflow", "jsonl"})
"""The sinks that show rollouts."""
WITH_KEYS = ("wandb", "trackio", "mlflow")
"""The sinks that have config keys of their own, which start with their names."""
_NO_SERVICE = (
    "there is no sink for {0}; name another one, or write a callback that sends the metrics there"
)
NO_SINKS = {
    "all": "all would also name what is not installed here; name each one",
    "tb": "TensorBoard is called tensorboard here",
    "console": "progress is shown without being asked for; leave console out",
    **dict.fromkeys(("json", "file"), "the file of metrics is called jsonl here"),
    "csv": "a table of that kind is written by the callback loss_logging; jsonl and parquet have all metrics",
    **{
        name: _NO_SERVICE.format(name)
        for name in (
            *("azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte"),
            *("neptune", "swanlab"),
        )
    },
}
"""Services that users of other frameworks may expect in `report_to`, and the message for each."""


class HubSection(Strict):
    """The upload of what a finished run has made."""

    repo_id: str | None = setting(
        None,
        "OWNER/NAME on the hub, to which the final weights, the tokenizer and the model card are uploaded; it is created if it does "
        "not exist. The files stay in the run's folder as well. null: no upload.",
        on_resume="free",
        min_length=1,
    )
    revision: str = setting(
        "main",
        "Branch that receives them; it is created if it does not exist.",
        on_resume="free",
        min_length=1,
    )
    private: bool = setting(
        True,
        "Whether a new repository is private. true: an existing public one is refused.",
        on_resume="free",
    )
    overwrite: bool = setting(
        False,
        "true: replace what the branch holds; its history keeps the old files. false: a branch with other files is refused.",
        on_resume="free",
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Settings of the upload without a repository."""
        if self.repo_id is not None:
            return
        for key, default in (("revision", "main"), ("private", True), ("overwrite", False)):
            if (value := getattr(self, key)) != default:
                yield Conflict(
                    f"{key} is {value}, which has no effect without repo_id. Set repo_id to OWNER/NAME, or leave {key} out.",
                    (key, "repo_id"),
                )


class RunSection(Strict):
    """The run directory is `dir/name`."""

    name: str | None = setting(
        None, "Name of the run; null takes the config file's name.", on_resume="free"
    )
    dir: str = setting(
        "runs", "Folder that holds the runs, on a local disk.", on_resume="free", min_length=1
    )
    save_steps: int = setting(
        10, "Steps between checkpoints; a crash costs at most this many.", on_resume="free", ge=1
    )
    save_total_limit: int | None = setting(
        2,
        "Number of checkpoints that are kept, the newest ones; null: all.",
        on_resume="free",
        ge=1,
    )
    logging_steps: int = setting(
        1, "Steps between lines of progress; every step is recorded.", on_resume="free", ge=1
    )
    keep_tokens: bool = setting(
        True,
        "Store token ids and log-probabilities of every rollout beside its text, which takes disk space.",
        on_resume="free",
    )
    threads: int | None = setting(
        None,
        "CPU threads for torch, of all processes together; null uses one for each core. Other numbers change the last bits.",
        on_resume="warn",
        ge=1,
    )
    processes: int | None = setting(
        None,
        "Processes that sample and learn side by side; they share the threads and one copy of the model's weights. 1: the process of "
        "the loop does both. null chooses for the machine: one for each thread on a CPU, but 1 on a GPU, for small models and for "
        "full fine-tuning. Other numbers change the last bits.",
        on_resume="warn",
        ge=1,
    )
    server: str | None = setting(
        None,
        "URL of a training server (groupwise serve) whose machine samples and learns; the loop, the rewards, the record and the "
        "checkpoints stay here. Its key comes from GROUPWISE_API_KEY. null: this machine computes.",
        on_resume="free",
        min_length=1,
    )
    profile: int | tuple[int, ...] | None = setting(
        None,
        "Steps whose work is traced: one or a list. profile/step-N.json is for Perfetto, profile/step-N.txt lists what took longest. "
        "A traced step is slower.",
        on_resume="free",
    )
    report_to: Literal["none"] | SinkName | tuple[SinkName, ...] = setting(
        (),
        "Where metrics, evaluations and rollouts are shown besides the run's own record, which always has them: one or several of "
        "tensorboard, wandb, trackio, mlflow, jsonl, parquet.",
        on_resume="free",
    )
    wandb_project: str | None = setting(
        None,
        "Project in Weights & Biases; null: the environment variable WANDB_PROJECT, else groupwise.",
        on_resume="free",
        min_length=1,
    )
    wandb_entity: str | None = setting(
        None,
        "User or team in Weights & Biases; null takes WANDB_ENTITY, else your own.",
        on_resume="free",
        min_length=1,
    )
    wandb_group: str | None = setting(
        None, "Group of runs in Weights & Biases.", on_resume="free", min_length=1
    )
    trackio_project: str | None = setting(
        None, "Project in trackio; null: groupwise.", on_resume="free", min_length=1
    )
    mlflow_experiment: str | None = setting(
        None,
        "Experiment in MLflow; null: the environment variable MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID, else groupwise.",
        on_resume="free",
        min_length=1,
    )
    num_completions_to_print: int = setting(
        8,
        "Number of rollouts that wandb, trackio, mlflow and jsonl show, every logging_steps steps; 0: none.",
        on_resume="free",
        ge=0,
    )
    log_unique_prompts: bool = setting(
        False, "Show one rollout of each prompt in these tables.", on_resume="free"
    )
    license: str | None = setting(
        None,
        "Licence that the model card names, as the hub calls it (apache-2.0); null leaves it open.",
        on_resume="free",
        min_length=1,
    )
    hub: HubSection = HubSection()

    def conflicts(self) -> Iterator[Conflict]:
        """Too few threads for the processes, a profile of work on another machine, and keys of sinks that `report_to` does not name."""
        if self.threads is not None and (self.processes or 1) > self.threads:
            yield Conflict(
                f"processes is {self.processes}, but threads is {self.threads}: the threads are those of all processes together, and "
                f"each process needs one. Set threads to {self.processes} or more, or leave one of the two out.",
                ("threads", "processes"),
            )
        if self.server is not None and self.profile is not None:
            yield Conflict(
                "profile traces what this machine computes, but server has another one compute. Leave one of the two out.",
                ("profile", "server"),
            )
        for sink in WITH_KEYS:
            for key in [key for key in type(self).model_fields if key.startswith(f"{sink}_")]:
                if getattr(self, key) is not None and sink not in self.sinks:
                    yield _without_sink(key, getattr(self, key), sink)
        if not WITH_TABLES & set(self.sinks):
            for key in ("num_completions_to_print", "log_unique_prompts"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    yield _without_sink(key, getattr(self, key), "wandb, trackio, mlflow or jsonl")

    @property
    def sinks(self) -> tuple[SinkName, ...]:
        """The services that `report_to` names, each once."""
        names = (self.report_to,) if isinstance(self.report_to, str) else self.report_to
        return tuple(dict.fromkeys(name for name in names if name != "none"))

    @field_validator("report_to", mode="before")
    @classmethod
    def _is_no_sink(cls, value: Any) -> Any:
        """Runs before the type check, so it turns a list into the tuple that the field expects."""
        is_list = isinstance(value, list | tuple)
        names = tuple(cast("list[Any]", value)) if is_list else (value,)
        for name in names:
            if isinstance(name, str) and name in NO_SINKS:
                raise ValueError(f"{NO_SINKS[name]}. There are: {', '.join(SINKS)}.")
        return names if is_list else value

    @property
    def profiled_steps(self) -> frozenset[int]:
        """The steps that `profile` names."""
        return frozenset((self.profile,) if isinstance(self.profile, int) else self.profile or ())

    @field_validator("profile")
    @classmethod
    def _names_steps(cls, value: int | tuple[int, ...] | None) -> int | tuple[int, ...] | None:
        steps = (value,) if isinstance(value, int) else value or ()
        if any(step < 1 for step in steps):
            raise ValueError(f"profile has {min(steps)}; the first step is 1.")
        return value

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, name: str | None) -> str | None:
        if name is not None and not RUN_NAME.fullmatch(name):
            raise ValueError(
                f'"{name}" cannot name a run; use letters, digits, `.`, `_` and `-`, '
                "beginning with a letter or digit."
            )
        if name in RESERVED:
            raise ValueError(
                f'"{name}" cannot name a run; it names the model itself, as in `--policy {name}`.'
            )
        return name


def _without_sink(key: str, value: object, sink: str) -> Conflict:
    return Conflict(
        f"{key} is {value}, which has no effect while report_to does not name {sink}. Add it, or leave {key} out.",
        (key, "report_to"),
    )
