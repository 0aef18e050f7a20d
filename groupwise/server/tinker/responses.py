"""The JSON that the client is answered with. What a call comes to is kept as bytes (`futures.py`); the last classes say its form."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Response(BaseModel):
    """The base of all answers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class ClientConfigResponse(Response):
    """Settings for the client."""

    pjwt_auth_enabled: bool = False
    use_pyqwest_transport: bool = False
    proto_compress_fwdbwd: bool = False
    parallel_fwdbwd_chunks: bool = True
    sample_use_retrieve_futures: bool = False
    sample_join_sampling_session: bool = False
    custom_loss_server_side: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000


class ClientDynamicConfigResponse(Response):
    """Settings that may change while the client runs; here they never do."""

    sample_cancel_enabled: bool = False


class SupportedModel(Response):
    """A base."""

    model_name: str
    max_context_length: int | None = Field(
        default=None,
        description="Tokens of prompt and completion together; absent if it is known only when the base is loaded.",
    )
    trainable: bool
    sampleable: bool


class GetServerCapabilitiesResponse(Response):
    """The available base models."""

    supported_models: list[SupportedModel]


class CreateSessionResponse(Response):
    """A session."""

    type: Literal["create_session"] = "create_session"
    session_id: str


class SessionHeartbeatResponse(Response):
    """The session goes on."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class CloseSessionResponse(Response):
    """The session has ended, or there was none."""


class TelemetryResponse(Response):
    """Telemetry that the client sends; it is not stored."""

    status: Literal["accepted"] = "accepted"


class HealthResponse(Response):
    """The server is there."""

    status: Literal["ok"] = "ok"


class UntypedAPIFuture(Response):
    """The call was written down. Its answer is fetched by `request_id`."""

    request_id: str
    model_id: str


class SampleFuture(Response):
    """Likewise; each sequence that will be drawn has an id."""

    request_id: str
    sample_sequence_ids: list[str]


class ModelData(Response):
    """The base of a model."""

    arch: str
    model_name: str
    tokenizer_id: str


class GetInfoResponse(Response):
    """A model that has been made."""

    type: Literal["get_info"] = "get_info"
    model_id: str
    model_name: str
    model_data: ModelData
    is_lora: bool
    lora_rank: int


class CreateSamplingSessionResponse(Response):
    """A sampler."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class GetSamplerResponse(Response):
    """The model of a sampler; `model_path` if it has saved weights."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


class WeightsInfoResponse(Response):
    """The kind of model that saved the weights."""

    base_model: str
    is_lora: bool
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool


class Checkpoint(Response):
    """Weights that a model has saved under a name."""

    checkpoint_id: str = Field(examples=["weights/step-100"])
    checkpoint_type: Literal["training", "sampler"]
    time: datetime
    tinker_path: str
    size_bytes: int
    public: Literal[False] = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = Field(default=None, description="None: never.")


class Cursor(Response):
    """The part of a list that was asked for, and the length of the whole."""

    offset: int
    limit: int
    total_count: int


class CheckpointsListResponse(Response):
    """Checkpoints; those of one model are listed whole, without a cursor."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(Response):
    """A model that a client has trained; it is listed when its session has ended, too."""

    training_run_id: str = Field(description="The id of the model.")
    base_model: str
    model_owner: str = Field(description="Id of the API key that opened its session.")
    is_lora: Literal[True] = True
    corrupted: Literal[False] = False
    lora_rank: int
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None


class TrainingRunsResponse(Response):
    """Training runs, the newest first."""

    training_runs: list[TrainingRun]
    cursor: Cursor


class GetSessionResponse(Response):
    """A session, open or ended; its samplers are known while it is open."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class ListSessionsResponse(Response):
    """Ids of sessions, open and ended, the newest first."""

    sessions: list[str]


class EmptyResponse(Response):
    """It was done."""


class StorageUsageOfAccount(Response):
    """All checkpoints of the server, because it has a single account."""

    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float


class CheckpointStorageUsageResponse(Response):
    """Disk space of the checkpoints; nothing is billed."""

    data: list[StorageUsageOfAccount]


class TryAgainResponse(Response):
    """There is no answer yet; ask again at once."""

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: Literal["active"] = "active"


class CreateModelResponse(Response):
    """A model was made."""

    model_id: str
    type: Literal["create_model"]


class OptimStepResponse(Response):
    """An update was made."""

    metrics: dict[str, float]


class SaveWeightsResponse(Response):
    """Weights were saved, or loaded: where they are."""

    path: str
    type: Literal["save_weights", "load_weights", "save_weights_for_sampler"]


class SaveWeightsForSamplerResponse(Response):
    """Weights were saved for one sampler, which is there now."""

    sampling_session_id: str
    type: Literal["save_weights_for_sampler"]


class RequestFailedResponse(Response):
    """The call came to nothing."""

    error: str
    category: Literal["user", "server"] = Field(description="Whose fault it was.")


Result = (
    CreateModelResponse
    | OptimStepResponse
    | SaveWeightsResponse
    | SaveWeightsForSamplerResponse
    | RequestFailedResponse
)
"""Results of calls that are answered in JSON."""


class RefusedResponse(Response):
    """Why a request was not done."""

    code: str = Field(description="The name of the problem; never changes its meaning.")
    message: str = Field(description="What was wrong with this request, and what to do.")
