"""All uses of Unsloth: loading a model, adding an adapter, and switching between learning and sampling.

Unsloth replaces parts of transformers when it is imported, so it must be imported first: `ready` does that, and raises with advice if it is
not installed. No other module of this package imports it, and without `model.backend: unsloth` it is never imported.

Its output is sent to stderr, because stdout may be a command's JSON. It reports usage statistics to its makers by default; this module
switches that off.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from groupwise.core.cache import cache_folder
from groupwise.core.errors import ModelError, UsageError
from groupwise.core.extras import install_command, not_installed
from groupwise.engine.models.config import ModelConfig

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from groupwise.engine.models.lora_config import AdapterConfig

logger = logging.getLogger(__name__)

EXTRAS = "train,unsloth"
FIRST_ADAPTER = "default"
"""The name that peft gives an adapter by default."""


def installed_version() -> str:
    """The installed version of Unsloth. Raises UsageError with advice if it is not installed."""
    try:
        unsloth_version = version("unsloth")
    except PackageNotFoundError:
        unsloth_version = None
    if unsloth_version is None or find_spec("unsloth") is None:
        raise UsageError(
            not_installed("model.backend: unsloth", EXTRAS, "unsloth")
            + " Or leave model.backend out: transformers and torch then train the model."
        )
    return unsloth_version


def ready() -> None:
    """Import Unsloth, before transformers if that is still possible. Raises UsageError if it cannot be used."""
    installed_version()
    if "unsloth" not in sys.modules and "transformers" in sys.modules:
        logger.warning(
            "transformers was imported before Unsloth, which then cannot replace all that it would: slower, and more memory is needed. "
            "Begin a new process, and this command first"
        )
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    # The default is the folder in which the command is run.
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(cache_folder("unsloth")))
    _fast()


def import_first(model: ModelConfig) -> None:
    """Call `ready` when a command starts; do nothing if another backend loads the model."""
    if model.backend == "unsloth":
        ready()


def load(config: ModelConfig, dtype: str, longest: int | None) -> PreTrainedModel:
    """Load the model for texts of at most `longest` tokens, or as many as it supports; no parameter is trainable.

    Raises ModelError if it cannot be loaded, or not in the requested format; UsageError if Unsloth cannot be used.
    """
    ready()
    import torch
    from transformers import GenerationConfig

    from groupwise.engine.models.plan import prompt_room
    from groupwise.engine.models.tokenizer import explaining_errors, resolve
    from groupwise.engine.models.transformers_log import quiet

    resolved = resolve(config)
    room = prompt_room(config, 0)
    with quiet(), explaining_errors(config, resolved, "model"), _contain_output():
        model, _ = _fast().from_pretrained(
            model_name=resolved.location,
            revision=config.revision,
            max_seq_length=room if longest is None else min(longest, room),
            dtype=getattr(torch, dtype),
            load_in_4bit=config.load_in_4bit,
            load_in_8bit=config.load_in_8bit,
            full_finetuning=False,
            trust_remote_code=config.trust_remote_code,
            use_exact_model_name=True,  # otherwise it may load another repository, with rounded weights
        )
    for key in ("load_in_4bit", "load_in_8bit"):
        if getattr(config, key) != bool(
            getattr(model, f"is_{key.replace('load', 'loaded')}", False)
        ):
            raise ModelError(
                f"model.{key} is {str(getattr(config, key)).lower()}, but Unsloth loaded {config.name!r} otherwise on this machine, as its "
                "messages say. Change the key, or take another model or machine."
            )
    model.requires_grad_(False)
    model.generation_config = GenerationConfig()  # a penalty in it would change the draws
    return model


def adapt(
    model: PreTrainedModel, config: AdapterConfig, *, gradient_checkpointing: bool
) -> PeftModel:
    """Add an adapter called `FIRST_ADAPTER` to the model; Unsloth's own kernels compute it if they support it."""
    targets = config.target_modules
    with _contain_output():
        return _fast().get_peft_model(
            model,
            r=config.r,
            target_modules=targets
            if targets is None or isinstance(targets, str)
            else sorted(targets),
            lora_alpha=config.lora_alpha,
            use_rslora=config.use_rslora,
            lora_dropout=0.0,
            bias="none",
            use_gradient_checkpointing="unsloth" if gradient_checkpointing else False,
        )


def learning(model: PreTrainedModel) -> None:
    """Switch the model to computing rows with a gradient."""
    _fast().for_training(model)


def sampling(model: PreTrainedModel) -> None:
    """Switch the model to generating."""
    _fast().for_inference(model)


def _fast() -> Any:
    if "unsloth" in sys.modules:
        return sys.modules["unsloth"].FastLanguageModel
    with _contain_output():
        try:
            from unsloth import FastLanguageModel  # pyright: ignore[reportAttributeAccessIssue]  # it is not here
        except (ImportError, NotImplementedError, RuntimeError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise UsageError(
                f"model.backend is unsloth, but Unsloth cannot be used on this machine: {lines[0]}\nFix that, install it "
                f"again ({install_command(EXTRAS)}), or leave model.backend out."
            ) from error
    return FastLanguageModel


@contextmanager
def _contain_output() -> Iterator[None]:
    """Send Unsloth's output to stderr, and undo its changes to the root logger, which would make every logger write there."""
    root = logging.getLogger()
    level, handlers = root.level, [*root.handlers]
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft's, for maintainers
            yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
