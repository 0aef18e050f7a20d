"""Messages between a run and the worker in Tunix's environment: one line of JSON for a call, and one for its answer.

run → worker    {"number": 3, "do": {"verb": "publish", "version": 1}}     or {"cancel": 3}
worker → run    {"number": 3, "result": …}     or {"number": 3, "error": {"kind": "ModelError", "message": …}}

Every float keeps its bits; NaN and infinities are strings, as in requests to a training server, whose verbs are used here for the same
work.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from groupwise.api.schemas.parts import (
    Discard,
    ForwardBackward,
    Generate,
    Load,
    Logprobs,
    Predictions,
    Publish,
    TrainedLogprobs,
    Update,
)

TPU_IN_USE_ADVICE = (
    "A TPU belongs to one process at a time: end other runs that have it, and restart kernels that have used jax. "
    "With JAX_PLATFORMS=cpu in the environment it computes on the CPU."
)
"""Advice for devices that cannot be opened."""


class Message(BaseModel):
    """Strict, because both ends are of one version."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Look(Message):
    """Asks for versions and devices; the answer is `WorkerInfo`. Nothing is loaded."""

    verb: Literal["look"] = "look"


class WorkerInfo(Message):
    """Versions and devices."""

    tunix: str
    jax: str
    platform: str
    """cpu, gpu or tpu."""
    devices: int
    device: str
    """Name of the first of them."""


class Open(Message):
    """Loads the model, once; the answer is `Opened`."""

    verb: Literal["open"] = "open"
    model: str
    """A folder in the format of transformers."""
    text: dict[str, Any]
    """The config of the model's text part: `config.json` with transformers' defaults for its kind."""
    dtype: str
    mesh: tuple[int, int]
    """Devices for (fsdp, tp)."""
    remat: bool
    """Compute the activations of a layer again in its backward pass, in place of keeping them."""
    layers: tuple[str, ...]
    """Layers of transformers' model that get an adapter, by their names."""
    rank: int
    alpha: float
    seed: int
    start: str | None
    """A folder with the adapter to start from, or to serve."""
    described: dict[str, Any]
    """Peft's description of the adapter."""
    run: str
    publish_folder: str
    slots: int
    key_length: int
    max_tokens: int
    """Most tokens of a batch that is learnt from."""


class Opened(Message):
    """The model is loaded."""

    fingerprint: str
    """Fingerprint of the weights that are served."""


class Save(Message):
    """`Learner.save`."""

    verb: Literal["save"] = "save"
    folder: str


class Restore(Message):
    """`Learner.load`."""

    verb: Literal["restore"] = "restore"
    folder: str


Verb = Annotated[
    Look
    | Open
    | Generate
    | Load
    | ForwardBackward
    | TrainedLogprobs
    | Update
    | Discard
    | Publish
    | Logprobs
    | Predictions
    | Save
    | Restore,
    Field(discriminator="verb"),
]


class Order(Message):
    """A line to the worker."""

    number: int | None = None
    do: Verb | None = None
    cancel: int | None = None


class WorkerError(Message):
    """The error that a call raised."""

    kind: str
    """Name of a class in `groupwise.core.errors`."""
    message: str


class Answer(Message):
    """A line from the worker."""

    number: int
    result: Any = None
    error: WorkerError | None = None


ANY: TypeAdapter[Any] = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="strings"))
