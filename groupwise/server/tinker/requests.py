"""The JSON bodies that the client sends, strictly: an unknown field, or a value that cannot take effect here, is refused by name.

Names of projects and tags are taken and not kept: they describe a request, and change nothing of what it does.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from groupwise.api.schemas.fail_fast import IN_SLICES, FailFast

MAX_CALLS = 2**53
"""Call numbers are smaller than this: all JSON readers represent integers up to here exactly."""
WHOLE = Annotated[int, Field(ge=0, lt=MAX_CALLS)]
MANY_WHOLE = Annotated[list[WHOLE], IN_SLICES]
FINITE = Annotated[float, Field(allow_inf_nan=False)]
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
NAME = Annotated[str, Field(pattern=NAME_PATTERN)]
"""Name of something saved, which becomes a folder name."""
LONGEST_ID = 400
ID = Annotated[str, Field(min_length=1, max_length=LONGEST_ID)]
STOP_TEXT = Annotated[str, Field(min_length=1)]
"""An empty one would stand in every text, and end each completion after a token."""
METADATA = (
    Annotated[
        dict[Annotated[str, Field(max_length=200)], Annotated[str, Field(max_length=2000)]],
        Field(max_length=64),
    ]
    | None
)
TTL = Annotated[int, Field(ge=1, le=10 * 366 * 24 * 3600)] | None
"""Seconds after which saved weights expire, up to ten years; None: never."""


class Body(FailFast, BaseModel):
    """The base of all bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class CreateSession(Body):
    """`ServiceClient(...)`."""

    tags: list[str]
    user_metadata: METADATA = None
    sdk_version: str
    project_id: str | None = None
    display_name: Annotated[str, Field(max_length=1000)] | None = None
    type: Literal["create_session"] = "create_session"


class Heartbeat(Body):
    """Sent by a client every few seconds."""

    session_id: ID
    type: Literal["session_heartbeat"] = "session_heartbeat"


class Lora(Body):
    """The adapter of a new model."""

    rank: Annotated[int, Field(ge=1, le=1024)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Body):
    """The family of optimisers, chosen with the model."""

    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    """`create_lora_training_client`."""

    session_id: ID
    model_seq_id: WHOLE
    base_model: str
    user_metadata: METADATA = None
    lora_config: Lora
    optimizer_config: Optimizer = Optimizer()
    type: Literal["create_model"] = "create_model"


class GetInfo(Body):
    """Asked when a training client is made."""

    model_id: ID
    type: Literal["get_info"] = "get_info"


class Adam(Body):
    """AdamW's parameters for one step; the defaults are the client's."""

    learning_rate: Annotated[FINITE, Field(ge=0)] = 1e-4
    beta1: Annotated[FINITE, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[FINITE, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[FINITE, Field(ge=0)] = 1e-12
    weight_decay: Annotated[FINITE, Field(ge=0)] = 0.0
    grad_clip_norm: FINITE = 0.0
    """0 or less: not clipped."""


class OptimStep(Body):
    """`optim_step`."""

    model_id: ID
    seq_id: WHOLE
    adam_params: Adam
    type: Literal["optim_step"] = "optim_step"


class SaveWeights(Body):
    """`save_state`."""

    model_id: ID
    seq_id: WHOLE
    path: NAME
    ttl_seconds: TTL = None
    overwrite: bool = False
    user_metadata: METADATA = None
    type: Literal["save_weights"] = "save_weights"


class LoadWeights(Body):
    """`load_state` with `model_id` and `seq_id`; a new training client from a state with `session_id` and `model_seq_id`."""

    model_id: ID | None = None
    seq_id: WHOLE | None = None
    session_id: ID | None = None
    model_seq_id: WHOLE | None = None
    base_model: str | None = None
    user_metadata: METADATA = None
    path: ID
    optimizer: bool
    optimizer_config: Optimizer | None = None
    weights_access_token: None = None
    """There is one account."""
    type: Literal["load_weights"] = "load_weights"


class SaveForSampler(Body):
    """`save_weights_for_sampler` with a path, `save_weights_and_get_sampling_client` without."""

    model_id: ID
    seq_id: WHOLE
    path: NAME | None = None
    sampling_session_seq_id: WHOLE | None = None
    """The client takes the next number when it sends the request again."""
    kind: Literal["snapshot"] = "snapshot"
    """Not `inflight`: a sampling client always serves the weights that it was made with."""
    ttl_seconds: TTL = None
    """Only with `path`: weights without a name last as long as their session."""
    user_metadata: METADATA = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class CreateSampler(Body):
    """`create_sampling_client`."""

    session_id: ID
    sampling_session_seq_id: WHOLE
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class TextChunk(Body):
    """The one kind of input that is taken."""

    tokens: MANY_WHOLE
    type: Literal["encoded_text"]


class ModelInput(Body):
    """A prompt."""

    chunks: list[TextChunk]


class SamplingSettings(Body):
    """`SamplingParams` of the client."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: STOP_TEXT | list[STOP_TEXT] | list[WHOLE] | None = None
    """None: the model's own stop tokens. An empty list: none at all. Others stop beside the model's own."""
    temperature: Annotated[FINITE, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[FINITE, Field(gt=0, le=1)] = 1.0


class TargetTokens(Body):
    """Ids whose log-probabilities are wanted in place of the prompt's tokens: [tokens of the prompt - 1, K], dense or sparse (CSR)."""

    data: Annotated[list[Annotated[int, Field(ge=-1, lt=MAX_CALLS)]], IN_SLICES]
    """-1: none is wanted there; nor in cells that a sparse tensor does not list."""
    dtype: Literal["int64"]
    shape: Annotated[list[WHOLE], Field(min_length=2, max_length=2)]
    sparse_crow_indices: MANY_WHOLE | None = None
    sparse_col_indices: MANY_WHOLE | None = None


MAX_TOP = 1024
"""Largest number of most likely tokens at one place."""
TOP = Annotated[int, Field(ge=0, le=MAX_TOP)]


class Sample(Body):
    """`sample` and `compute_logprobs`."""

    num_samples: Annotated[int, Field(ge=1, le=4096)] = 1
    prompt: ModelInput
    sampling_params: SamplingSettings
    base_model: None = None
    """A sampling session says what is sampled."""
    model_path: None = None
    sampling_session_id: ID
    seq_id: Annotated[int, Field(ge=0, lt=2**63)]
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: TOP = 0
    topk_sample_logprobs: TOP = 0
    target_prompt_logprobs: TargetTokens | None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    record_stability_info: Literal[False] | None = None
    type: Literal["sample"] = "sample"


class SetTtl(Body):
    """`set_checkpoint_ttl_from_tinker_path`."""

    ttl_seconds: TTL


class Page(Body):
    """The query of a list: the part of it that is asked for."""

    model_config = ConfigDict(extra="forbid", strict=False, frozen=True)

    limit: Annotated[int, Field(ge=1, le=1000)] = 20
    offset: Annotated[int, Field(ge=0, lt=MAX_CALLS)] = 0


class Scope(Body):
    """The query of one entry. There is one account, so that both scopes are the same."""

    access_scope: Literal["owned", "accessible"] = "owned"


class ScopedPage(Scope, Page):
    """The query of a list with a scope."""


class TokenizerOf(Body):
    """The query of `GET /tokenizer`."""

    base_model: ID


class NoQuery(Body):
    """The query of a list of one account without projects: it takes no parameter."""


class WeightsInfo(Body):
    """`get_weights_info_by_tinker_path`."""

    tinker_path: ID


class Retrieve(Body):
    """Polled until the answer is there. Answers are always sent whole."""

    request_id: ID
    allow_metadata_only: bool = False


def content_of(body: Body) -> bytes:
    """Serialise a request; equal requests give equal bytes."""
    return body.model_dump_json().encode()


def identity_of(body: Body) -> bytes:
    """The part of a request that is equal when the client sends it again: all of it, but for the number of a new sampler."""
    if isinstance(body, SaveForSampler):
        body = body.model_copy(update={"sampling_session_seq_id": None})
    return content_of(body)


def kind_of(body: Body) -> str:
    """The name for this kind of call in the ledger."""
    return type(body).__name__
