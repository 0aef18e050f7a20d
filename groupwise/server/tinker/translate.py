"""Translates between the client's data and ours: datums to rows, losses to loss specs, results to answers.

A datum is a sequence of N input tokens and N targets: target i is the token after input i. As a row, the first input is the prompt and the
targets are the completion, so every target has a log-probability, which is returned to the client. All of the client's losses are sums with
a credit for each token: `weights` for cross_entropy, `advantages` for the others. They map to the loss `given`.

Anything that cannot be expressed is refused by name (`UsageError`): targets that are not the next tokens of the input (including soft
targets with several per position), images and audio, other losses, and unknown inputs or settings.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from groupwise.api.http.strict_json import LARGE
from groupwise.core.errors import UsageError
from groupwise.core.types import LossSpec, Row
from groupwise.server.engine.verb_protocol import Computed, VerbSampled
from groupwise.server.tinker.messages import messages

POLICY_INPUTS = ("target_tokens", "logprobs", "advantages")
MOST_FIELDS = 200_000
"""Limit on the number of protobuf fields in one body; several thousand datums stay below it."""
CLIP_SETTINGS = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"}


@dataclass(frozen=True, slots=True)
class ClientLoss:
    """A loss known to the client: our surrogate for it, and the inputs of its datums."""

    surrogate: str
    inputs: tuple[str, ...]
    settings: Mapping[str, str]
    """Our setting names by the client's."""


LOSSES: dict[str, ClientLoss] = {
    "cross_entropy": ClientLoss("log_probability", ("target_tokens", "weights"), {}),
    "importance_sampling": ClientLoss("ratio", POLICY_INPUTS, {}),
    "ppo": ClientLoss("clipped_ratio", POLICY_INPUTS, CLIP_SETTINGS),
    "cispo": ClientLoss("clipped_weight", POLICY_INPUTS, CLIP_SETTINGS),
}
"""Every supported loss. The clip is 0.8 to 1.2 unless `loss_fn_config` sets another."""


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward pass, with or without gradient."""

    rows: tuple[Row, ...]
    loss: LossSpec
    forward_only: bool


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """A body of `forward_backward`, ready for a model's queue."""

    model: str
    sequence: int
    content: bytes
    """Canonical encoding: equal requests have equal content."""
    forward: Forward | UsageError
    """The pass, or the error in it; the request has used its sequence number in either case."""


def read(body: bytes) -> ForwardRequest:
    """Parse a body. UsageError if it is no such message, and therefore has no number."""
    message = parse_forward_backward(body)
    try:
        forward = forward_of(message)
    except UsageError as error:
        forward = error
    content = message.SerializeToString(deterministic=True)
    return ForwardRequest(message.model_id, message.seq_id, content, forward)


async def parse_in_thread(body: bytes) -> ForwardRequest:
    """See `read`; in a thread if the body is large."""
    return await asyncio.to_thread(read, body) if len(body) > LARGE else read(body)


def parse_forward_backward(body: bytes) -> Any:
    """The message `ForwardBackwardRequest`; UsageError if the body is not one, or has more than MOST_FIELDS."""
    from google.protobuf.message import DecodeError

    message = messages().ForwardBackwardRequest()
    try:
        _check_field_count(body, message.DESCRIPTOR)
        message.ParseFromString(body)
    except (DecodeError, IndexError) as error:
        raise UsageError(
            f"The body of forward_backward is no protobuf message ForwardBackwardRequest: {error}."
        ) from error
    return message


def _check_field_count(body: bytes, descriptor: Any) -> None:
    """UsageError for more than MOST_FIELDS, before any of them is created; IndexError if the body ends too early."""
    pending = [(0, len(body), descriptor)]
    number = 0
    while pending:
        at, end, kind = pending.pop()
        while at < end:
            number += 1
            if number > MOST_FIELDS:
                raise UsageError(
                    f"The body of forward_backward has more than {MOST_FIELDS:,} fields; send fewer datums at once."
                )
            tag, at = _varint(body, at)
            match tag & 7:
                case 0:
                    _, at = _varint(body, at)
                case 1:
                    at += 8
                case 5:
                    at += 4
                case 2:
                    size, at = _varint(body, at)
                    field = kind.fields_by_number.get(tag >> 3)
                    if field is not None and field.message_type is not None:
                        pending.append((at, min(at + size, end), field.message_type))
                    at += size
                case _:  # the start or end of a group
                    pass


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """A varint, and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError("a number has no end")


def forward_of(message: Any) -> Forward:
    """Rows and loss of a request. UsageError names the invalid datum and field."""
    loss = loss_of(message.loss_fn, _loss_settings(message))
    if not message.data:
        raise UsageError("forward_backward has no data; it needs at least one datum.")
    kind = LOSSES[message.loss_fn]
    rows = tuple(_datum_row(datum, kind, index) for index, datum in enumerate(message.data))
    return Forward(rows, loss, message.forward_only)


def loss_of(name: str, settings: Mapping[str, float]) -> LossSpec:
    """Translate the client's loss. UsageError for an unsupported loss, or a setting that it does not have."""
    if name not in LOSSES:
        raise UsageError(
            f"The loss {name!r} is not supported by this server. There are: {', '.join(LOSSES)}. Any other can be computed by the "
            "client itself with forward_backward_custom."
        )
    kind = LOSSES[name]
    for setting in settings:
        if setting not in kind.settings:
            setting_names = ", ".join(kind.settings) or "none"
            raise UsageError(
                f"The loss {name!r} has no setting {setting!r} in loss_fn_config here. There are: {setting_names}."
            )
    low = settings.get("clip_low_threshold", 0.8)
    high = settings.get("clip_high_threshold", 1.2)
    if not (0 <= low <= 1 <= high < math.inf):
        raise UsageError(
            f"The loss {name!r} is to clip the ratio to [{low:g}, {high:g}]. Both are bounds of the ratio itself: clip_low_threshold "
            "lies between 0 and 1, clip_high_threshold at 1 or above, for example 0.8 and 1.2."
        )
    knobs = {kind.settings[setting]: value for setting, value in settings.items()}
    return LossSpec("given", {"surrogate": kind.surrogate, **knobs})


def outputs(computed: Computed) -> bytes:
    """The message `ForwardBackwardOutput`: the log-probabilities of each datum, and the metrics."""
    classes = messages()
    message = classes.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add()
    record.type_tag = "ArrayRecord"
    record.num_datums = len(computed.logprobs)
    tensor = record.fields["logprobs"]
    tensor.dtype = classes.DTYPE_FLOAT32
    tensor.data = b"".join(_float32(row) for row in computed.logprobs)
    offsets = [0]
    for row in computed.logprobs:
        offsets.append(offsets[-1] + 4 * len(row))
    tensor.offsets = struct.pack(f"<{len(offsets)}q", *offsets)
    for name, value in metrics(computed.sums).items():
        message.metrics[name] = value
    return cast(bytes, message.SerializeToString())


def metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Rename the sums for the client: the suffix after the colon tells it how to combine the values of several requests."""
    loss = math.fsum(value for name, value in sums.items() if name.startswith("loss/"))
    sums_by_name = {
        f"{name}:sum": value for name, value in sums.items() if not name.startswith("loss/")
    }
    return {"loss:sum": loss, **sums_by_name}


def sample_response(result: VerbSampled, prompt_length: int, last: int | None) -> bytes:
    """The message `SampleResponse`; only the last `last` log-probabilities of the prompt are included, if `last` is given."""
    classes = messages()
    message = classes.SampleResponse()
    for completion in result.completions:
        sequence = message.sequences.add()
        stopped = completion.finish_reason == "stop"
        sequence.stop_reason = classes.STOP_REASON_STOP if stopped else classes.STOP_REASON_LENGTH
        sequence.tokens = struct.pack(f"<{len(completion.token_ids)}i", *completion.token_ids)
        sequence.logprobs = _float32(completion.logprobs)
    if result.prompt_logprobs is not None:
        logprobs = [math.nan, *result.prompt_logprobs]
        left_out = 0 if last is None else prompt_length - last
        message.prompt_logprobs = _float32([math.nan] * left_out + logprobs[left_out:])
    return cast(bytes, message.SerializeToString())


def text_tokens(chunks: Iterable[Any], where: str) -> tuple[int, ...]:
    """The tokens of a protobuf model input. UsageError if it contains anything but text."""
    tokens: list[int] = []
    for chunk in chunks:
        kind = chunk.WhichOneof(chunk.DESCRIPTOR.oneofs[0].name)
        if kind != "encoded_text":
            raise UsageError(f"{where} holds a chunk {kind!r}; this server takes text alone.")
        tokens.extend(_unpack(chunk.encoded_text.tokens, "i", where))
    for index, token in enumerate(tokens):
        if token < 0:
            raise UsageError(f"{where} has the token {token} at {index}; a token is 0 or more.")
    return tuple(tokens)


def _datum_row(datum: Any, kind: ClientLoss, index: int) -> Row:
    where = f"data[{index}]"
    inputs = text_tokens(datum.model_input, f"{where}.model_input")
    for name in datum.loss_fn_inputs:
        if name not in kind.inputs:
            raise UsageError(
                f"{where}.loss_fn_inputs has {name!r}, which this loss does not take. It takes: {', '.join(kind.inputs)}."
            )
    values = {
        name: _input_values(datum.loss_fn_inputs, name, len(inputs), where) for name in kind.inputs
    }
    targets = tuple(int(value) for value in values["target_tokens"])
    _check_targets(inputs, targets, where)
    credits = tuple(values[kind.inputs[-1]])
    sampling = values.get("logprobs") or [0.0] * len(targets)
    return Row(
        prompt_ids=inputs[:1],
        completion_ids=targets,
        mask=tuple(int(credit != 0) for credit in credits),
        sampling_logprobs=tuple(sampling),
        advantage=0.0,
        scale=1.0,
        credits=credits,
    )


def _check_targets(inputs: Sequence[int], targets: Sequence[int], where: str) -> None:
    if not inputs:
        raise UsageError(f"{where}.model_input is empty; it needs at least one token.")
    for index, (target, following) in enumerate(zip(targets, inputs[1:], strict=False)):
        if target != following:
            raise UsageError(
                f"{where}.loss_fn_inputs['target_tokens'][{index}] is {target}, but the input goes on with {following}. This server "
                "computes the log-probability of the tokens that follow: give tokens[:-1] as the input and tokens[1:] as the targets, "
                "and the weight or advantage 0 where a token should not teach."
            )
    if targets[-1] < 0:
        raise UsageError(
            f"{where}.loss_fn_inputs['target_tokens'][{len(targets) - 1}] is {targets[-1]}; a token is 0 or more."
        )


def _input_values(tensors: Mapping[str, Any], name: str, length: int, where: str) -> list[float]:
    """The values of an input, which must be dense, finite and as long as the model input."""
    name_of_input = f"{where}.loss_fn_inputs[{name!r}]"
    if name not in tensors:
        raise UsageError(f"{name_of_input} is missing; this loss needs it.")
    tensor = tensors[name]
    shape = list(tensor.shape)
    if tensor.WhichOneof("encoding") == "sparse_csr" or len(shape) > 1:
        raise UsageError(
            f"{name_of_input} has the shape {shape}; this server takes one number for each token, so {[length]}."
        )
    classes = messages()
    formats = {
        classes.DTYPE_FLOAT32: "f",
        classes.DTYPE_INT64: "q",
        classes.DTYPE_INT32: "i",
    }
    if tensor.dtype not in formats or (name == "target_tokens" and formats[tensor.dtype] == "f"):
        dtype = "int64" if name == "target_tokens" else "float32"
        raise UsageError(f"{name_of_input} has a dtype that does not fit; it must be {dtype}.")
    values = _unpack(tensor.dense, formats[tensor.dtype], name_of_input)
    if len(values) != length:
        raise UsageError(
            f"{name_of_input} has {len(values)} numbers, but the model input has {length} tokens; they must be as many."
        )
    for at, value in enumerate(values):
        if not math.isfinite(value):
            raise UsageError(f"{name_of_input}[{at}] is {value}; it must be a finite number.")
    return values


def _loss_settings(message: Any) -> dict[str, float]:
    """`loss_fn_config_v2` if it is set, else the older field."""
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    settings: dict[str, float] = {}
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof(value.DESCRIPTOR.oneofs[0].name) != "number":
            raise UsageError(f"loss_fn_config[{name!r}] is a text; the losses here take numbers.")
        settings[name] = value.number
    return settings


def _unpack(data: bytes, kind: str, where: str) -> list[Any]:
    size = struct.calcsize(f"<{kind}")
    if len(data) % size:
        raise UsageError(f"{where} has {len(data)} bytes, which is no multiple of {size}.")
    return list(struct.unpack(f"<{len(data) // size}{kind}", data))


def _float32(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)
