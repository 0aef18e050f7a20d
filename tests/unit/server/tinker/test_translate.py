"""The client's data and ours: rows and losses of requests, answers, and every refusal by name."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from groupwise.algorithms.registry import from_spec
from groupwise.core.errors import UsageError
from groupwise.core.types import Completion, LossSpec, Row
from groupwise.server.engine.verb_protocol import Computed, VerbSampled
from groupwise.server.tinker import translate
from groupwise.server.tinker.messages import messages


def _request(loss: str = "cross_entropy", **fields: Any) -> Any:
    return messages().ForwardBackwardRequest(model_id="m", seq_id=3, loss_fn=loss, **fields)


def _add(
    request: Any, inputs: Sequence[int], targets: Sequence[int], **floats: Sequence[float]
) -> Any:
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = struct.pack(f"<{len(inputs)}i", *inputs)
    target = datum.loss_fn_inputs["target_tokens"]
    target.dtype = messages().DTYPE_INT64
    target.dense = struct.pack(f"<{len(targets)}q", *targets)
    target.shape.append(len(targets))
    for name, values in floats.items():
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype = messages().DTYPE_FLOAT32
        tensor.dense = struct.pack(f"<{len(values)}f", *values)
    return datum


def _row(**changes: Any) -> Row:
    fields = {
        "prompt_ids": (5,), "completion_ids": (6, 7, 8), "mask": (0, 1, 1),
        "sampling_logprobs": (0.0, 0.0, 0.0), "advantage": 0.0, "scale": 1.0,
        "credits": (0.0, 0.5, -2.0),
    }  # fmt: skip
    return Row(**{**fields, **changes})


LOSSES = [
    ("cross_entropy", "log_probability", {"weights": [0.0, 0.5, -2.0]}),
    *(
        (loss, surrogate, {"logprobs": [0.0, -0.5, -1.0], "advantages": [0.0, 0.5, -2.0]})
        for loss, surrogate in (
            ("importance_sampling", "ratio"),
            ("ppo", "clipped_ratio"),
            ("cispo", "clipped_weight"),
        )
    ),
]


@pytest.mark.parametrize(("loss", "surrogate", "floats"), LOSSES)
def test_losses(loss: str, surrogate: str, floats: dict[str, list[float]]) -> None:
    request = _request(loss, forward_only=True)
    _add(request, [5, 6, 7], [6, 7, 8], **floats)
    read = translate.read(request.SerializeToString())
    row = _row(sampling_logprobs=tuple(floats.get("logprobs", (0.0, 0.0, 0.0))))
    spec = LossSpec("given", {"surrogate": surrogate})
    assert (read.model, read.sequence) == ("m", 3)
    assert read.forward == translate.Forward((row,), spec, True)
    from_spec(spec)


def test_the_clip_settings_in_either_field() -> None:
    expected = {"surrogate": "clipped_ratio", "clip_low": 0.5, "clip_high": 2.0}
    older = _request("ppo", loss_fn_config={"clip_low_threshold": 0.5, "clip_high_threshold": 2.0})
    newer = _request("ppo", loss_fn_config={"clip_low_threshold": 0.75})
    newer.loss_fn_config_v2["clip_low_threshold"].number = 0.5
    newer.loss_fn_config_v2["clip_high_threshold"].number = 2.0
    for request in (older, newer):
        _add(request, [5], [6], logprobs=[-1.0], advantages=[1.0])
        assert translate.forward_of(request).loss.knobs == expected


def _weights(request: Any) -> Any:
    return request.data[0].loss_fn_inputs["weights"]


def _targets(request: Any) -> Any:
    return request.data[0].loss_fn_inputs["target_tokens"]


def _emptied(request: Any) -> None:
    del request.data[0].model_input[:]
    _targets(request).dense = b""
    _weights(request).dense = b""


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda request: setattr(_weights(request), name, value)


def _dtype(name: str) -> int:
    return getattr(messages(), f"DTYPE_{name}")


PPO = "clip_low_threshold"
NAN, MINUS = struct.pack("<f", math.nan), struct.pack("<q", -100)
WRONG: list[tuple[str, Callable[[Any], Any]]] = [
    ("'dro' is not supported by this server. There are: ", lambda r: setattr(r, "loss_fn", "dro")),
    ("no setting 'beta'", lambda r: r.loss_fn_config.update({"beta": 0.1})),
    (r"\[1.1, 1.2\]", lambda r: r.loss_fn_config.update({PPO: 1.1})),
    (f"'{PPO}'] is a text", lambda r: setattr(r.loss_fn_config_v2[PPO], "text", "low")),
    ("has no data", lambda r: r.ClearField("data")),
    ("a chunk 'image'", lambda r: setattr(r.data[0].model_input.add().image, "format", "png")),
    ("has 'mask'", lambda r: r.data[0].loss_fn_inputs["mask"].CopyFrom(_weights(r))),
    (r"\['weights'\] is missing", lambda r: r.data[0].loss_fn_inputs.pop("weights")),
    ("has 0 numbers, but the model input has 1 tokens", _set("dense", b"")),
    ("has 3 bytes, which is no multiple of 4", _set("dense", b"123")),
    (r"\['weights'\]\[0\] is nan", _set("dense", NAN)),
    (r"has the shape \[1, 2\]", lambda r: _targets(r).shape.append(2)),
    ("one number for each token", lambda r: setattr(_weights(r).sparse_csr, "values", b"")),
    ("must be int64", lambda r: setattr(_targets(r), "dtype", _dtype("FLOAT32"))),
    ("must be float32", lambda r: setattr(_weights(r), "dtype", _dtype("BFLOAT16"))),
    ("is -100; a token is 0 or more", lambda r: setattr(_targets(r), "dense", MINUS)),
    ("model_input is empty", _emptied),
    ("than 200,000 fields", lambda r: r.MergeFrom(_request(data=[{}] * 200_001))),
    ("200,000 fields", lambda r: r.MergeFrom(_request(data=[{"model_input": [{}] * 200_001}]))),
]
"""One mistake each, and what is said of it."""


@pytest.mark.parametrize(("message", "change"), WRONG)
def test_what_cannot_be_is_refused_by_name(message: str, change: Callable[[Any], Any]) -> None:
    clips = PPO in message or "1.1" in message
    request = _request("ppo" if clips else "cross_entropy")
    floats = {"logprobs": [-1.0], "advantages": [1.0]} if clips else {"weights": [1.0]}
    _add(request, [5], [6], **floats)
    translate.forward_of(request)
    change(request)
    with pytest.raises(UsageError, match=message):
        translate.forward_of(translate.parse_forward_backward(request.SerializeToString()))


def test_targets_are_the_tokens_that_follow() -> None:
    request = _request()
    _add(request, [5, 6, 7], [6, 9, 8], weights=[0.0, 0.0, 1.0])
    with pytest.raises(UsageError, match=r"'target_tokens'\]\[1\] is 9"):
        translate.forward_of(request)
    with pytest.raises(UsageError, match="no protobuf message"):
        translate.parse_forward_backward(b"\xff\xff\xff")


def test_outputs() -> None:
    computed = Computed(
        ((-1.0, -0.5), (-0.25,)),
        {"loss/policy": 1.5, "loss/kl": 0.25, "tokens": 3.0, "clip_high": 1.0},
    )
    message = messages().ForwardBackwardOutput()
    message.ParseFromString(translate.outputs(computed))
    assert dict(message.metrics) == {"loss:sum": 1.75, "tokens:sum": 3.0, "clip_high:sum": 1.0}
    (record,) = message.loss_fn_outputs
    assert record.num_datums == 2
    tensor = record.fields["logprobs"]
    assert struct.unpack("<3f", tensor.data) == (-1.0, -0.5, -0.25)
    assert struct.unpack("<3q", tensor.offsets) == (0, 8, 12)


@pytest.mark.parametrize(
    ("last", "expected"), [(None, [None, -0.5, -0.25]), (1, [None, None, -0.25])]
)
def test_samples(last: int | None, expected: list[float | None]) -> None:
    drawn = VerbSampled(
        (
            Completion((3, 0), (-1.0, -2.0), "stop", 1, 0, "f"),
            Completion((3,), (-1.0,), "length", 2, 0, "f"),
        ),
        (-0.5, -0.25),
    )
    message = messages().SampleResponse()
    message.ParseFromString(translate.sample_response(drawn, 3, last))
    assert [struct.unpack(f"<{len(s.tokens) // 4}i", s.tokens) for s in message.sequences] == [
        (3, 0),
        (3,),
    ]
    assert [s.stop_reason for s in message.sequences] == [0, 1]
    assert struct.unpack("<2f", message.sequences[0].logprobs) == (-1.0, -2.0)
    prompt = struct.unpack("<3f", message.prompt_logprobs)
    assert [None if math.isnan(value) else value for value in prompt] == expected
