"""Makes the parts of a run if Unsloth loads the model: the model, its adapters, and what learns and samples them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from groupwise.engine.backends.unsloth import library
from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.plan import prompt_room
from groupwise.engine.models.tokenizer import explained, quiet, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(config: ModelConfig, dtype: str, longest: int | None) -> PreTrainedModel:
    """The model, for texts of at most `longest` tokens, or of as many as it takes; with no generation settings of its own.

    Raises ModelError for a model that cannot be loaded, UsageError if Unsloth cannot be used.
    """
    from transformers import GenerationConfig

    library.ready()
    resolved = resolve(config)
    room = prompt_room(config, 0)
    with quiet(), explained(config, resolved, "model"):
        model = library.load(
            config, resolved.location, dtype, room if longest is None else min(longest, room)
        )
    model.generation_config = GenerationConfig()  # a penalty there would change what is drawn
    return model
