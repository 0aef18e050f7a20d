"""Requests and answers of a training loop that uses a server's sampler and learner.

`groupwise rl` with `run.server` drives the parts of a server as it drives those of its own process: it opens them under an id of its own
(`PartsRequest`), has things done by them (`CallRequest`, numbered by the client, so that a call that is sent again is done once), and ends
them. Folders (states, publications, weights to begin with) go to and fro as files, by paths within what the server keeps for the id.

Every float keeps its bits. Those that are not finite are the texts "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from groupwise.api.schemas.fail_fast import FailFast
from groupwise.core.types import GroupRequest, LossSpec, OptimiserParams, Policy, PolicyRole, Row

PartsKind = Literal["training", "supervised", "serving"]
"""Sampler and learner; the learner alone; the sampler alone."""
SECTIONS: Mapping[PartsKind, tuple[str, ...]] = {
    "training": ("model", "lora", "algorithm", "sampler", "training", "rollout", "eval"),
    "supervised": ("model", "lora", "training"),
    "serving": ("model", "lora", "sampler", "training", "rollout", "eval"),
}
"""The sections of a run's config from which its parts are made; the rest stays with the loop."""
OF_RUN = ("threads", "processes")
"""Keys of the section `run` that go with them."""
LOST = frozenset({"parts_gone", "unknown_parts"})
"""Codes of problems that mean that the server has lost the parts: its engine ended, it restarted, or it heard nothing for too long."""
MAX_CALLS = 2**53
ID_PATTERN = r"^[A-Za-z0-9-]{8,64}$"
PATH_PATTERN = r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*){0,3}$"
"""Relative paths of files and folders; no part of a path begins with a dot."""
MAX_PATH = 200
DEFAULT_CALL_WAIT, MAX_CALL_WAIT = 20.0, 60.0
"""Seconds for which an answer is awaited before the client has to ask again."""
PIECE = 8 << 20
"""Bytes of a file that are sent or requested at once, if the server takes that many."""
HEARTBEAT = 10.0
"""Seconds between two words of a client that has nothing to ask; see `parts_silence` of the server."""

FilePath = Annotated[str, Field(pattern=PATH_PATTERN, max_length=MAX_PATH)]


class _Body(FailFast, BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class PartsRequest(_Body):
    """The request to use the server's model."""

    owner: str = Field(
        description=(
            "The client's own name for itself: parts that were opened before under the same name belong to a loop that is gone, "
            "and are ended."
        ),
        min_length=1,
        max_length=128,
    )


class PartsAnswer(BaseModel):
    """The parts of an id."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str
    ready: bool = Field(description="True if the model is loaded (`open` was done).")
    silence: float = Field(
        description="Seconds without a request after which they are ended; any request for them counts."
    )
    piece: int = Field(default=PIECE, description="Bytes of a file that are sent at once, at most.")


class PlanRequest(_Body):
    """How would the work be laid out on the server's machine? Nothing is loaded."""

    kind: PartsKind
    config: dict[str, Any] = Field(description="The sections that `SECTIONS` names.")
    longest_prompt: int | None = Field(
        default=None, description="Tokens; null where nothing is sampled.", ge=0
    )
    described: str | None = Field(
        default=None,
        description="The text of config.json of a model that will be sent, in place of `model.name`.",
        max_length=1 << 20,
    )


class PlanAnswer(BaseModel):
    """The layout."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    layout: dict[str, Any] = Field(
        description="Device, number format, processes, threads, slots, key length and what else a run records of it."
    )


class Open(_Body):
    """Load the model. Once."""

    verb: Literal["open"] = "open"
    kind: PartsKind
    config: dict[str, Any] = Field(description="The sections that `SECTIONS` names.")
    run: str = Field(
        description="Name of the run, which policies carry.", min_length=1, max_length=128
    )
    longest_prompt: int | None = Field(
        default=None, description="Tokens; null where nothing is sampled.", ge=0
    )
    model: FilePath | None = Field(
        default=None, description="A folder that was sent, in place of `model.name`."
    )
    adapter: FilePath | None = Field(
        default=None, description="A folder that was sent, in place of `model.adapter`."
    )
    weights: FilePath | None = Field(
        default=None,
        description="For `serving`: a folder that was sent, with the weights to serve.",
    )
    base: str | None = Field(
        default=None,
        description="The client's fingerprint of the model it means; other weights are refused.",
        max_length=64,
    )


class Generate(_Body):
    """`Sampler.generate`; gives the completions."""

    verb: Literal["generate"] = "generate"
    request: GroupRequest


class Load(_Body):
    """`Sampler.load`; gives the fingerprint of what it serves then. `policy.path` is a folder that was published or sent."""

    verb: Literal["load"] = "load"
    policy: Policy


class ForwardBackward(_Body):
    """`Learner.forward_backward`; gives the sums."""

    verb: Literal["forward_backward"] = "forward_backward"
    rows: list[Row]
    loss: LossSpec
    denominators: dict[str, float]


class TrainedLogprobs(_Body):
    """`Learner.trained_logprobs`, of the rows of the last `forward_backward`."""

    verb: Literal["trained_logprobs"] = "trained_logprobs"


class Update(_Body):
    """`Learner.update`; gives its result."""

    verb: Literal["update"] = "update"
    params: OptimiserParams


class Discard(_Body):
    """`Learner.discard`."""

    verb: Literal["discard"] = "discard"


class Publish(_Body):
    """`Learner.publish`; gives the policy, whose path is a folder to be fetched."""

    verb: Literal["publish"] = "publish"
    version: int = Field(ge=0, lt=10**9)


class Logprobs(_Body):
    """`Learner.logprobs`."""

    verb: Literal["logprobs"] = "logprobs"
    rows: list[Row]
    role: PolicyRole = "policy"


class Predictions(_Body):
    """`Learner.predictions`."""

    verb: Literal["predictions"] = "predictions"
    rows: list[Row]


class SaveState(_Body):
    """`Learner.save` into a folder to be fetched, which must be new; gives nothing."""

    verb: Literal["save_state"] = "save_state"
    folder: FilePath


class LoadState(_Body):
    """`Learner.load` of a folder that was sent."""

    verb: Literal["load_state"] = "load_state"
    folder: FilePath


class Fingerprint(_Body):
    """`Sampler.fingerprint`."""

    verb: Literal["fingerprint"] = "fingerprint"


AnyVerb = Annotated[
    Open
    | Generate
    | Load
    | ForwardBackward
    | TrainedLogprobs
    | Update
    | Discard
    | Publish
    | Logprobs
    | Predictions
    | SaveState
    | LoadState
    | Fingerprint,
    Field(discriminator="verb"),
]


class PartsOpenedAnswer(BaseModel):
    """The answer of `open`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    stop_token_ids: tuple[int, ...]
    layout: dict[str, Any]
    fingerprint: str = Field(
        description="Fingerprint of the weights that are served; empty without a sampler."
    )
    tells_trained_logprobs: bool = Field(
        default=False, description="True if there is the verb `trained_logprobs`."
    )


class CallRequest(_Body):
    """Something to be done. Its number, chosen by the client, stands in the address; the same one with other content is refused."""

    after: int | None = Field(
        default=None,
        description="The number of a call that must be over first, however it ends; it may come later than this one.",
        ge=0,
        lt=MAX_CALLS,
    )
    do: AnyVerb


class CallError(BaseModel):
    """The error that a call raised."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    code: str = Field(
        description="Code of the error, as in exit messages: `policy_mismatch`, `usage` …"
    )
    message: str


class CallAnswer(BaseModel):
    """How far a call is."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    number: int
    state: Literal["working", "done", "failed", "given_up"] = Field(
        description="`working`: ask for it again (GET)."
    )
    result: Any = Field(
        default=None, description="Result of a call that is done; its form depends on the verb."
    )
    error: CallError | None = Field(default=None, description="Error of a call that failed.")


class EndedAnswer(BaseModel):
    """These parts, or something of them, no longer exist."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str


class FileFacts(BaseModel):
    """A file of a folder."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    path: str = Field(description="Within the folder.")
    size: int = Field(description="Bytes.", ge=0)


class FolderAnswer(BaseModel):
    """The content of a folder, or the size of a file so far."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    files: list[FileFacts]
