"""The options of `groupwise generate`, which are also the arguments of `groupwise.generate`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from groupwise.core.errors import UsageError
from groupwise.core.settings.credentials import secrets_in
from groupwise.core.settings.schema import Conflict, Strict, setting
from groupwise.core.settings.tree import tree_of
from groupwise.core.settings.validation import validate
from groupwise.tasks.data.chat import Prefill

BASE_URL = "http://127.0.0.1:8000/v1"
"""The default address of vLLM and `groupwise serve`."""
CONCURRENCY = 16
"""Default number of concurrent requests; only `--client-replicas` multiplies it."""

_SHARD = re.compile(r"([1-9]\d*)/([1-9]\d*)")
INSTRUCTION = re.compile(r"\{\{\s*instruction\s*\}\}")
"""The prompt column in templates of distilabel. A template of nothing else is the column itself, which may then hold a chat."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class GenerateConfig(Strict):
    """Each key is the option of that name, with `-` for `_`."""

    refused: ClassVar[Mapping[str, str]] = {
        "api_key": "keys are read only from the environment: name the variable with api_key_env",
        "shards": "launching shards as jobs is not in this version. Run one command for each, with --shard 1/N to --shard N/N and the "
        "same --output, and at last the same without --shard, which puts them together",
    }

    dataset: str | None = setting(None, "The prompts: a file, a folder, or a dataset on the hub.")
    dataset_config: str | None = setting(None, "Which configuration of a dataset on the hub.")
    split: str = setting("train", "Which split, also a slice: train[:100].", min_length=1)
    prompt_column: str | None = setting(
        None, "The column with the prompt, text or chat messages; null: prompt.", min_length=1
    )
    prompt_template: str | None = setting(
        None,
        "A text with columns in braces, {question}, in place of one column; or with {{ instruction }} for that column.",
        min_length=1,
    )
    system_prompt: str | None = setting(
        None, "A system message for each conversation that has none.", min_length=1
    )
    task_module: str | None = setting(None, "A task whose training prompts are answered.")
    config: str | None = setting(None, "The YAML file that the task's hooks are given.")

    model: str | None = setting(None, "The model's name there; null: the one that is served.")
    base_url: str = setting(BASE_URL, "The service; what comes before /chat/completions.")
    api_key_env: str = setting("OPENAI_API_KEY", "The environment variable with the key.")
    api: Literal["chat", "completions"] | None = setting(
        None,
        "chat sends text as a user's message, completions lets it be continued as it stands; null: chat, and for the text "
        "prompts of a task completions.",
    )
    prefill: Prefill = setting(
        "continue",
        "Of a chat that ends with the assistant: the answer goes on with its words, or (drop) they are left out as an earlier answer.",
    )
    temperature: float | None = setting(None, "null: the service's own.", ge=0)
    top_p: float | None = setting(None, "null: the service's own.", gt=0, le=1)
    max_new_tokens: int = setting(8192, "Longest generation in tokens.", ge=1)
    stop: tuple[str, ...] = setting((), "Texts that end a generation.")
    seed: int | None = setting(None, "Makes a service that knows seeds repeat itself.", ge=0)
    extra: dict[str, Any] = setting(
        {}, "Further fields of each request; null takes out a field, such as max_tokens."
    )
    num_generations: int = setting(1, "Generations for each row.", ge=1)

    concurrency: int = setting(CONCURRENCY, "Requests under way at once.", ge=1)
    timeout: float = setting(900.0, "Seconds for one request.", gt=0)
    retries: int = setting(8, "How often a request that may still succeed is repeated.", ge=0)
    shard: str | None = setting(None, "i/N: only the i-th of every N rows.")

    output: str | None = setting(None, "The folder that holds everything.", min_length=1)
    hub: str | None = setting(None, "OWNER/NAME: a dataset on the hub to upload to, too.")
    private: bool = setting(True, "Whether a dataset that is made on the hub is private.")

    rewards: tuple[str, ...] = setting(
        (), "Rewards by name, or module:function, that score each generation."
    )
    answer_column: str | None = setting(None, "The column with the answer that rewards look for.")
    min_reward: float | None = setting(
        None, "Train only on rows whose best generation earns so much."
    )
    keep: Literal["best", "all"] = setting(
        "best", "Of a row that earns enough: its best generation, or all that earn enough."
    )
    keep_truncated: bool = setting(
        False,
        "Train on generations that the limit cut off, too; they teach to end in mid-sentence.",
    )
    price_in: float | None = setting(None, "Price of a million prompt tokens.", ge=0)
    price_out: float | None = setting(None, "Price of a million generated tokens.", ge=0)

    def conflicts(self) -> Iterator[Conflict]:
        """Report options that conflict or have no effect."""
        yield from self._conflicts_of_source()
        yield from self._conflicts_of_rewards()
        if self.api == "completions" and self.system_prompt is not None:
            yield Conflict(
                "completions has no system message; leave system_prompt out, or put it into the template.",
                ("api", "system_prompt"),
            )
        if self.output is None and self.hub is None:
            yield Conflict("say where to: output (a folder, or hub:OWNER/NAME).", ("output", "hub"))
        if self.hub is not None and not _HUB_NAME.fullmatch(self.hub):
            yield Conflict(f"{self.hub!r} is not a dataset on the hub; write OWNER/NAME.", ("hub",))
        if self.hub is None and not self.private:
            yield Conflict("private has no effect without the hub.", ("private", "hub"))
        if self.hub is not None and self.shard is not None:
            yield Conflict(
                "a shard is not uploaded; leave hub to the command that puts them together.",
                ("hub", "shard"),
            )
        if self.shard is not None and not _is_shard(self.shard):
            yield Conflict(
                f"shard is {self.shard!r}; write 1/8 for the first of eight, 8/8 for the last.",
                ("shard",),
            )

    def _conflicts_of_source(self) -> Iterator[Conflict]:
        if (self.dataset is None) == (self.task_module is None):
            yield Conflict(
                "give the prompts as one of dataset and task_module.", ("dataset", "task_module")
            )
        template = self.prompt_template
        takes_column = template is None or INSTRUCTION.search(template)
        if self.prompt_column is not None and not takes_column:
            yield Conflict(
                "a template takes the place of prompt_column; write {column} into it, or {{ instruction }} for the prompt column.",
                ("prompt_column", "prompt_template"),
            )
        dataset_options = ("dataset_config", "prompt_column", "prompt_template", "system_prompt")
        for name in dataset_options if self.task_module is not None else ():
            if getattr(self, name) is not None:
                yield Conflict(
                    f"{name} has no effect on the prompts of a task.", (name, "task_module")
                )
        if self.task_module is not None and self.split != "train":
            yield Conflict("a task's prompts have no splits.", ("split", "task_module"))
        if self.task_module is None and self.config is not None:
            yield Conflict("config is the task's; there is no task_module.", ("config",))

    def _conflicts_of_rewards(self) -> Iterator[Conflict]:
        if self.rewards and self.task_module is not None:
            yield Conflict(
                "a task brings its own rewards; leave the others out.", ("rewards", "task_module")
            )
        if self.min_reward is not None and not self.rewards and self.task_module is None:
            yield Conflict("min_reward needs rewards.", ("min_reward", "rewards"))
        if self.answer_column is not None and not self.rewards:
            yield Conflict("answer_column has no effect without rewards.", ("answer_column",))
        if self.keep == "all" and self.min_reward is None:
            yield Conflict("keep has no effect without min_reward.", ("keep", "min_reward"))

    @property
    def scores(self) -> bool:
        """True if generations are scored: by the named rewards, or by a task's rewards if `min_reward` needs them."""
        return bool(self.rewards) or self.min_reward is not None

    @property
    def part(self) -> tuple[int, int]:
        """Index of the shard, counted from 0, and the number of shards."""
        match = _SHARD.fullmatch(self.shard or "1/1")
        assert match, "checked in conflicts"
        return int(match[1]) - 1, int(match[2])

    @property
    def root(self) -> Path:
        """The folder of the whole generation, even if this command handles one shard."""
        if self.output is not None:
            return Path(self.output).expanduser()
        assert self.hub is not None, "checked in conflicts"
        return Path("generated", self.hub.replace("/", "--"))

    @property
    def folder(self) -> Path:
        """The folder of this command: the shard's, or the whole generation's."""
        index, count = self.part
        return self.root / f"shard-{index + 1}-of-{count}" if self.shard else self.root


def _is_shard(text: str) -> bool:
    match = _SHARD.fullmatch(text)
    return match is not None and int(match[1]) <= int(match[2])


def read_options(options: Mapping[str, Any]) -> GenerateConfig:
    """Validate the options. Raises UsageError that lists every problem.

    `output="hub:OWNER/NAME"` sets `hub`; `prompt_template="{{ instruction }}"` alone means the prompt column itself.
    """
    values = dict(options)
    output = values.get("output")
    if isinstance(output, str) and output.startswith("hub:"):
        if values.get("hub") is not None:
            raise UsageError("Two datasets on the hub are given; name one.")
        del values["output"]
        values["hub"] = output.removeprefix("hub:")
    template = values.get("prompt_template")
    # A task's prompts have no template that could be translated.
    from_dataset = values.get("task_module") is None
    if from_dataset and isinstance(template, str) and INSTRUCTION.fullmatch(template.strip()):
        del values["prompt_template"]
    tree = tree_of(values, "generate")
    return validate(GenerateConfig, tree, check=lambda tree: secrets_in(tree, "extra"))
