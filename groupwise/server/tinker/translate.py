"""Translates between the client's data and ours: datums to rows, losses to loss specs, results to answers.

A datum is a sequence of N input tokens and N targets: target i is what is to follow input i. As a row, the first input is the prompt, the
others are the completion, and targets that differ from it are given beside it (`Row.targets`). cross_entropy also takes K targets for each
token (soft targets). Every target has a log-probability, which is returned to the client, wherever its credit is 0 as well. All of the
client's losses are sums with a credit for each target: `weights` for cross_entropy, `advantages` for the others. They map to the loss
`given`.

Anything that cannot be expressed is refused by name (`UsageError`): images and audio, other losses, and unknown inputs or settings.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

from groupwise.core.errors import UsageError
from groupwise.core.types import LossSpec, Row, TopTokens
from groupwise.server.engine.tinker_protocol import Computed, SampleResult
from groupwise.server.tinker import requests
from groupwise.server.tinker.tensors import Cells, Sparse, cells_of, messages, places_of, unpacked

POLICY_INPUTS = ("target_tokens", "logprobs", "advantages")
MAX_FIELDS = 200_000
"""Limit on the number of protobuf fields in one body; several thousand datums stay below it."""
RATIO_MASK = "sequence_ratio_mask"
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
    "dro": ClientLoss("quadratic_penalty", POLICY_INPUTS, {"beta": "beta"}),
    "gspo": ClientLoss("clipped_sequence_ratio", (*POLICY_INPUTS, RATIO_MASK), CLIP_SETTINGS),
}
"""Every supported loss."""
CLIPS: Mapping[str, tuple[float, float]] = {
    "ppo": (0.8, 1.2),
    "cispo": (0.8, 1.2),
    "gspo": (1 - 3e-4, 1 + 4e-4),
}
"""The bounds of the ratio unless `loss_fn_config` sets others; those of gspo are its paper's."""


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward pass, with or without gradient."""

    rows: tuple[Row, ...]
    loss: LossSpec
    forward_only: bool
    widths: tuple[int | None, ...]
    """One entry for each row: K if its targets have the shape [N, K], None for [N]."""


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
    """Parse a body. UsageError if it is not such a message, and so has no number."""
    message = parse_forward_backward(body)
    try:
        forward = forward_of(message)
    except UsageError as error:
        forward = error
    content = message.SerializeToString(deterministic=True)
    return ForwardRequest(message.model_id, message.seq_id, content, forward)


def parse_forward_backward(body: bytes) -> Any:
    """The message `ForwardBackwardRequest`; UsageError if the body is not one, or has more than MAX_FIELDS."""
    from google.protobuf.message import DecodeError

    message = messages().ForwardBackwardRequest()
    try:
        _check_field_count(body, message.DESCRIPTOR)
        message.ParseFromString(body)
    except (DecodeError, IndexError) as error:
        raise UsageError(
            f"The body of forward_backward is not a protobuf message ForwardBackwardRequest: {error}."
        ) from error
    if len(message.model_id) > requests.LONGEST_ID:
        raise UsageError(
            f"model_id has {len(message.model_id):,} characters; an id has {requests.LONGEST_ID} at most."
        )
    return message


def _check_field_count(body: bytes, descriptor: Any) -> None:
    """UsageError for more than MAX_FIELDS, before any of them is created; IndexError if the body ends too early."""
    pending = [(0, len(body), descriptor)]
    number = 0
    while pending:
        at, end, kind = pending.pop()
        while at < end:
            number += 1
            if number > MAX_FIELDS:
                raise UsageError(
                    f"The body of forward_backward has more than {MAX_FIELDS:,} fields; send fewer datums at once."
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
    read = [_datum_row(datum, message.loss_fn, index) for index, datum in enumerate(message.data)]
    rows, widths = zip(*read, strict=True)
    return Forward(rows, loss, message.forward_only, widths)


def loss_of(name: str, settings: Mapping[str, float]) -> LossSpec:
    """Translate the client's loss. UsageError for an unsupported loss, or a setting that it does not have."""
    if name not in LOSSES:
        raise UsageError(
            f"The loss {name!r:.80} is not supported by this server. There are: {', '.join(LOSSES)}. Any other can be computed by the "
            "client itself with forward_backward_custom."
        )
    kind = LOSSES[name]
    for setting in settings:
        if setting not in kind.settings:
            setting_names = ", ".join(kind.settings) or "none"
            raise UsageError(
                f"The loss {name!r} has no setting {setting!r:.80} in loss_fn_config here. There are: {setting_names}."
            )
    knobs = {kind.settings[setting]: value for setting, value in settings.items()}
    if name == "dro":
        beta = settings.get("beta", math.nan)
        if not 0 <= beta < math.inf:
            has = f"{{'beta': {beta:g}}}" if "beta" in settings else "no beta"
            raise UsageError(
                f"The loss 'dro' has {has} in loss_fn_config; it needs one of 0 or more, for example 0.05: the weight of the squared "
                "distance between the model's log-probabilities and those in logprobs."
            )
    if name not in CLIPS:
        return LossSpec("given", {"surrogate": kind.surrogate, **knobs})
    low = settings.get("clip_low_threshold", CLIPS[name][0])
    high = settings.get("clip_high_threshold", CLIPS[name][1])
    if not (0 <= low <= 1 <= high < math.inf):
        raise UsageError(
            f"The loss {name!r} is to clip the ratio to [{low:g}, {high:g}]. Both are bounds of the ratio itself: clip_low_threshold "
            "lies between 0 and 1, clip_high_threshold at 1 or above, for example 0.8 and 1.2."
        )
    return LossSpec("given", {"surrogate": kind.surrogate, "clip_low": low, "clip_high": high})


def outputs(computed: Computed, widths: Sequence[int | None]) -> bytes:
    """The message `ForwardBackwardOutput`: the log-probabilities of each datum in the shape of its targets, and the metrics.

    A record holds datums of one shape [N, K], so a new one begins with each datum of another K (`widths`).
    """
    classes = messages()
    message = classes.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    pairs = zip(widths, computed.logprobs, strict=True)
    for width, group in groupby(pairs, key=lambda pair: pair[0]):
        rows = [logprobs for _, logprobs in group]
        record = message.loss_fn_outputs.add()
        record.type_tag = "ArrayRecord"
        record.num_datums = len(rows)
        tensor = record.fields["logprobs"]
        tensor.dtype = classes.DTYPE_FLOAT32
        tensor.data = b"".join(_float32(row) for row in rows)
        offsets = [0]
        for row in rows:
            offsets.append(offsets[-1] + 4 * len(row))
        tensor.offsets = struct.pack(f"<{len(offsets)}q", *offsets)
        tensor.trailing_shape.extend([] if width is None else [width])
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


def sample_response(result: SampleResult, request: requests.Sample) -> bytes:
    """The message `SampleResponse`. Of the prompt's log-probabilities only the last are included if `request` limits them."""
    classes = messages()
    message = classes.SampleResponse()
    for index, completion in enumerate(result.completions):
        sequence = message.sequences.add()
        stopped = completion.finish_reason == "stop"
        sequence.stop_reason = classes.STOP_REASON_STOP if stopped else classes.STOP_REASON_LENGTH
        sequence.tokens = struct.pack(f"<{len(completion.token_ids)}i", *completion.token_ids)
        sequence.logprobs = _float32(completion.logprobs)
        if result.completion_tops is not None:
            _write_top(sequence.topk_sampled_logprobs, result.completion_tops[index], 0)
    prompt_length = sum(len(chunk.tokens) for chunk in request.prompt.chunks)
    last = request.prompt_logprobs_last_n
    left_out = 0 if last is None else prompt_length - last
    if result.prompt_logprobs is not None:
        logprobs = [math.nan, *result.prompt_logprobs]
        message.prompt_logprobs = _float32([math.nan] * left_out + logprobs[left_out:])
    if result.prompt_top is not None:
        _write_top(message.topk_prompt_logprobs, result.prompt_top, max(1, left_out))
    if request.target_prompt_logprobs is not None:
        logprobs = result.target_logprobs or ()  # none: the prompt is one token
        _write_target_logprobs(
            message.target_prompt_logprobs, logprobs, request.target_prompt_logprobs
        )
    return cast(bytes, message.SerializeToString())


NO_TOKEN = (0, -99999.0)
"""The token and the log-probability of an empty cell in the client's tables of most likely tokens."""


def _write_top(table: Any, top: TopTokens, empty: int) -> None:
    """Fill a table of most likely tokens whose first `empty` places have none; a prompt's first token is not among those of `top`."""
    skipped = top.count * max(0, empty - 1)
    token_ids = [NO_TOKEN[0]] * (top.count * empty) + [*top.token_ids[skipped:]]
    logprobs = [NO_TOKEN[1]] * (top.count * empty) + [*top.logprobs[skipped:]]
    table.k, table.length = top.count, len(token_ids) // top.count
    table.token_ids = struct.pack(f"<{len(token_ids)}i", *token_ids)
    table.logprobs = _float32(logprobs)


def _write_target_logprobs(
    tensor: Any, logprobs: Sequence[float], target_tokens: requests.TargetTokens
) -> None:
    """Fill a tensor of the shape and layout of the ids that were asked for."""
    tensor.dtype = messages().DTYPE_FLOAT32
    tensor.shape.extend(target_tokens.shape)
    starts, columns = target_tokens.sparse_crow_indices, target_tokens.sparse_col_indices
    if starts is None or columns is None:
        tensor.dense = _float32(logprobs)
        return
    length, width = target_tokens.shape
    listed = Sparse(target_tokens.data, starts, columns)
    places = places_of(listed, length, width, "target_prompt_logprobs")
    tensor.sparse_csr.values = _float32([logprobs[place] for place in places])
    tensor.sparse_csr.crow_indices = struct.pack(f"<{len(starts)}q", *starts)
    tensor.sparse_csr.col_indices = struct.pack(f"<{len(columns)}q", *columns)


def text_tokens(chunks: Iterable[Any], where: str) -> tuple[int, ...]:
    """The tokens of a protobuf model input. UsageError if it contains anything but text."""
    tokens: list[int] = []
    for chunk in chunks:
        kind = chunk.WhichOneof(chunk.DESCRIPTOR.oneofs[0].name)
        if kind != "encoded_text":
            raise UsageError(f"{where} holds a chunk {kind!r}; this server takes text alone.")
        tokens.extend(unpacked(chunk.encoded_text.tokens, "i", where))
    for index, token in enumerate(tokens):
        if token < 0:
            raise UsageError(f"{where} has the token {token} at {index}; a token is 0 or more.")
    return tuple(tokens)


def _datum_row(datum: Any, loss: str, index: int) -> tuple[Row, int | None]:
    """The row of a datum, and K if its targets have the shape [N, K]."""
    kind, where = LOSSES[loss], f"data[{index}]"
    inputs = text_tokens(datum.model_input, f"{where}.model_input")
    if not inputs:
        raise UsageError(f"{where}.model_input is empty; it needs at least one token.")
    for name in datum.loss_fn_inputs:
        if name not in kind.inputs:
            raise UsageError(
                f"{where}.loss_fn_inputs has {name!r:.80}, which this loss does not take. It takes: {', '.join(kind.inputs)}."
            )
    values = {name: _input_cells(datum, loss, name, len(inputs), where) for name in kind.inputs}
    widths = {name: cells.width for name, cells in values.items()}
    width = widths["target_tokens"]
    if len({*widths.values()}) > 1:
        raise UsageError(
            f"{where}.loss_fn_inputs has weights and target_tokens of different shapes: for each token "
            f"{widths['weights'] or 'one'} and {width or 'one'}. Both must have the same shape."
        )
    credits = values["weights" if "weights" in values else "advantages"].values
    sampling = values["logprobs"].values if "logprobs" in values else (0.0,) * len(credits)
    targets = values["target_tokens"].values
    completion_ids, target_ids = _completion_and_targets(inputs, targets, credits, width, where)
    row = Row(
        prompt_ids=inputs[:1],
        completion_ids=completion_ids,
        mask=_trained_targets(loss, values, where),
        sampling_logprobs=sampling,
        advantage=0.0,
        scale=1.0,
        credits=credits,
        targets=None if target_ids == completion_ids else target_ids,
    )
    return row, width


def _completion_and_targets(
    inputs: Sequence[int],
    targets: Sequence[int],
    credits: Sequence[float],
    width: int | None,
    where: str,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens after the first, and the ids whose log-probabilities are computed.

    The completion is as long as the input; its last id is not read. Below 0, a target is the mark of one that does not count: with a
    credit it is refused, without one the completion's own id stands in its place.
    """
    last = targets[-1] if width is None and targets[-1] >= 0 else inputs[-1]
    completion_ids = (*inputs[1:], last)
    target_ids = list(targets)
    for at, target in enumerate(targets):
        if target >= 0:
            continue
        if credits[at]:
            raise UsageError(
                f"{where}.loss_fn_inputs['target_tokens'][{at}] is {target}; a token is 0 or more, unless its weight or advantage is 0."
            )
        target_ids[at] = completion_ids[at // (width or 1)]
    return completion_ids, tuple(target_ids)


def _trained_targets(loss: str, values: Mapping[str, Cells], where: str) -> tuple[int, ...]:
    """1 for each target that the loss looks at: those with a credit, except where the loss is more than a sum of credits.

    The squared distance of `dro` also counts where the advantage is 0, but not where the log-probability is 0 as well: so is a prompt
    padded. The ratio of `gspo` is over the tokens that its mask marks, and those with an advantage must be among them.
    """
    if loss == "cross_entropy":
        return tuple(int(weight != 0) for weight in values["weights"].values)
    advantages = values["advantages"].values
    if loss == "dro":
        pairs = zip(advantages, values["logprobs"].values, strict=True)
        return tuple(int(advantage != 0 or logprob != 0) for advantage, logprob in pairs)
    if loss != "gspo":
        return tuple(int(advantage != 0) for advantage in advantages)
    marks = values[RATIO_MASK].values
    for at, (mark, advantage) in enumerate(zip(marks, advantages, strict=True)):
        if advantage and not mark:
            raise UsageError(
                f"{where}.loss_fn_inputs['advantages'][{at}] is {advantage:g} where {RATIO_MASK} is 0; this server computes gspo where "
                "every token with an advantage is part of the sequence's ratio. Mark it in the mask, or set its advantage to 0."
            )
    return tuple(int(mark != 0) for mark in marks)


def _input_cells(datum: Any, loss: str, name: str, length: int, where: str) -> Cells:
    """An input, as long as the model input. UsageError for a missing one, and for several numbers for a token where the loss takes one."""
    name_of_input = f"{where}.loss_fn_inputs[{name!r}]"
    if name not in datum.loss_fn_inputs:
        raise UsageError(f"{name_of_input} is missing; this loss needs it.")
    tensor = datum.loss_fn_inputs[name]
    if len(tensor.shape) > 2:
        raise UsageError(
            f"{name_of_input} has {len(tensor.shape):,} dimensions; it has one number for each token, or K."
        )
    if len(tensor.shape) > 1 and loss != "cross_entropy":
        raise UsageError(
            f"{name_of_input} has the shape {list(tensor.shape)}; the loss {loss!r} takes one number for each token, so {[length]}. "
            "Several targets for a token are taken by cross_entropy."
        )
    return cells_of(tensor, name_of_input, length, integers=name == "target_tokens")


def _loss_settings(message: Any) -> dict[str, float]:
    """`loss_fn_config_v2` if it is set, else the older field."""
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    settings: dict[str, float] = {}
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof(value.DESCRIPTOR.oneofs[0].name) != "number":
            raise UsageError(
                f"loss_fn_config[{name!r:.80}] is a text; the losses here take numbers."
            )
        settings[name] = value.number
    return settings


def _float32(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)
