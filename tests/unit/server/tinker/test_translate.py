"""Translation between the client's data and ours: rows and losses of requests, answers, and every refusal by name."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from groupwise.algorithms.registry import from_spec
from groupwise.core.errors import UsageError
from groupwise.core.types import Completion, LossSpec, Row, TopTokens
from groupwise.server.engine.tinker_protocol import Computed, SampleResult
from groupwise.server.tinker import requests, translate
from groupwise.server.tinker.sampling import prompt_targets
from groupwise.server.tinker.tensors import messages


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


POLICY = {"logprobs": [0.0, -0.5, -1.0], "advantages": [0.0, 0.5, -2.0]}
LOSSES = [
    ("cross_entropy", "log_probability", {"weights": [0.0, 0.5, -2.0]}),
    ("importance_sampling", "ratio", POLICY),
    ("ppo", "clipped_ratio", POLICY),
    ("cispo", "clipped_weight", POLICY),
    ("dro", "quadratic_penalty", POLICY),
    ("gspo", "clipped_sequence_ratio", {**POLICY, "sequence_ratio_mask": [0.0, 1.0, 1.0]}),
]
KNOBS = {
    "ppo": {"clip_low": 0.8, "clip_high": 1.2},
    "cispo": {"clip_low": 0.8, "clip_high": 1.2},
    "dro": {"beta": 0.5},
    "gspo": {"clip_low": 0.9997, "clip_high": 1.0004},
}


@pytest.mark.parametrize(("loss", "surrogate", "floats"), LOSSES)
def test_losses(loss: str, surrogate: str, floats: dict[str, list[float]]) -> None:
    request = _request(loss, forward_only=True)
    if loss == "dro":
        request.loss_fn_config["beta"] = 0.5
    _add(request, [5, 6, 7], [6, 7, 8], **floats)
    read = translate.read(request.SerializeToString())
    row = _row(sampling_logprobs=tuple(floats.get("logprobs", (0.0, 0.0, 0.0))))
    spec = LossSpec("given", {"surrogate": surrogate, **KNOBS.get(loss, {})})
    assert (read.model, read.sequence) == ("m", 3)
    assert read.forward == translate.Forward((row,), spec, True, (None,))
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


def _sparse(
    tensor: Any,
    shape: Sequence[int],
    values: Sequence[float],
    starts: Sequence[int],
    columns: Sequence[int],
) -> None:
    tensor.ClearField("shape")
    tensor.shape.extend(shape)
    kind = "f" if tensor.dtype == _dtype("FLOAT32") else "q"
    tensor.sparse_csr.values = struct.pack(f"<{len(values)}{kind}", *values)
    tensor.sparse_csr.crow_indices = struct.pack(f"<{len(starts)}q", *starts)
    tensor.sparse_csr.col_indices = struct.pack(f"<{len(columns)}q", *columns)


PPO, LONG = "clip_low_threshold", "a" * 5_000
NAN, MINUS = struct.pack("<f", math.nan), struct.pack("<q", -100)
WRONG: list[tuple[str, Callable[[Any], Any]]] = [
    ("'custom' is not supported by", lambda r: setattr(r, "loss_fn", "custom")),
    ("'stable_reinforce' is not", lambda r: setattr(r, "loss_fn", "stable_reinforce")),
    ("no setting 'beta'", lambda r: r.loss_fn_config.update({"beta": 0.1})),
    (r"\[1.1, 1.2\]", lambda r: r.loss_fn_config.update({PPO: 1.1})),
    (f"'{PPO}'] is a text", lambda r: setattr(r.loss_fn_config_v2[PPO], "text", "low")),
    ("has no data", lambda r: r.ClearField("data")),
    ("a chunk 'image'", lambda r: setattr(r.data[0].model_input.add().image, "format", "png")),
    ("has 'mask'", lambda r: r.data[0].loss_fn_inputs["mask"].CopyFrom(_weights(r))),
    (r"\['weights'\] is missing", lambda r: r.data[0].loss_fn_inputs.pop("weights")),
    ("has 0 numbers, but there are 1 tokens", _set("dense", b"")),
    ("has 3 bytes, which is not a multiple of 4", _set("dense", b"123")),
    (r"\['weights'\]\[0\] is nan", _set("dense", NAN)),
    (r"has 1 numbers; its shape \[1, 2\] has 2", lambda r: _targets(r).shape.append(2)),
    (r"has the shape \[2\]; there are 1 tokens", lambda r: _weights(r).shape.append(2)),
    (r"has the shape \[\]; there are 1", lambda r: setattr(_weights(r).sparse_csr, "values", b"")),
    ("at most 4,000,000 in all", lambda r: _sparse(_weights(r), [1, 4_000_001], [], [0, 0], [])),
    (
        r"not a sparse tensor of the shape \[1, 2\]",
        lambda r: _sparse(_weights(r), [1, 2], [1], [0, 1], [2]),
    ),
    ("has 5,001 dimensions", lambda r: _targets(r).shape.extend([1] * 5_000)),
    ("model_id has 5,000", lambda r: setattr(r, "model_id", LONG)),
    (f"'{'a' * 79} is not supported", lambda r: setattr(r, "loss_fn", LONG)),
    (f"'{'a' * 79} in loss_fn_config", lambda r: r.loss_fn_config.update({LONG: 1.0})),
    (f"'{'a' * 79}, which", lambda r: r.data[0].loss_fn_inputs[LONG].CopyFrom(_weights(r))),
    ("none twice in a row", lambda r: _sparse(_weights(r), [1, 2], [1, 1], [0, 2], [0, 0])),
    ("2 row starts that rise", lambda r: _sparse(_weights(r), [1, 2], [1], [1, 1], [0])),
    ("for each token 2 and one", lambda r: _sparse(_weights(r), [1, 2], [1], [0, 1], [0])),
    ("must be int64", lambda r: setattr(_targets(r), "dtype", _dtype("FLOAT32"))),
    ("must be float32", lambda r: setattr(_weights(r), "dtype", _dtype("BFLOAT16"))),
    ("is -100; a token is 0 or more", lambda r: setattr(_targets(r), "dense", MINUS)),
    ("model_input is empty", _emptied),
    ("than 200,000 fields", lambda r: r.MergeFrom(_request(data=[{}] * 200_001))),
    ("200,000 fields", lambda r: r.MergeFrom(_request(data=[{"model_input": [{}] * 200_001}]))),
]
"""One mistake each, and what is said of it."""


@pytest.mark.parametrize(("message", "change"), WRONG)
def test_invalid_forward_requests_are_refused_by_field(
    message: str, change: Callable[[Any], Any]
) -> None:
    clips = PPO in message or "1.1" in message
    request = _request("ppo" if clips else "cross_entropy")
    floats = {"logprobs": [-1.0], "advantages": [1.0]} if clips else {"weights": [1.0]}
    _add(request, [5], [6], **floats)
    translate.forward_of(request)
    change(request)
    with pytest.raises(UsageError, match=message) as refused:
        translate.forward_of(translate.parse_forward_backward(request.SerializeToString()))
    assert len(str(refused.value)) < 1_000  # it is stored, and sent


def test_targets_other_than_the_tokens_that_follow() -> None:
    """A target may differ from the next input token, but what precedes it is always the input. A negative target means the next token."""
    request = _request()
    _add(request, [5, 6, 7], [0, 9, 8], weights=[0.0, 0.5, -2.0])
    _add(request, [5, 6, 7], [-100, -100, 8], weights=[0.0, 0.0, 1.0])
    _add(request, [5, 6, 7], [6, -1, -1], weights=[1.0, 0.0, 0.0])
    rows = translate.forward_of(request).rows
    assert rows[0] == _row(targets=(0, 9, 8))
    assert (rows[1].completion_ids, rows[1].targets) == ((6, 7, 8), None)
    assert (rows[2].completion_ids, rows[2].targets) == ((6, 7, 7), None)


def test_several_targets_for_a_token() -> None:
    """Dense, and sparse: cells that are not listed are 0."""
    request = _request()
    dense, sparse = (_add(request, [5, 6], [0] * 6, weights=[0.0] * 6) for _ in range(2))
    for datum in (dense, sparse):
        for tensor in datum.loss_fn_inputs.values():
            tensor.ClearField("shape")
            tensor.shape.extend([2, 3])
    dense.loss_fn_inputs["target_tokens"].dense = struct.pack("<6q", 7, 8, 9, 0, 11, 0)
    dense.loss_fn_inputs["weights"].dense = struct.pack("<6f", 0.5, 0.25, 0.25, 0, 1, 0)
    inputs = sparse.loss_fn_inputs
    _sparse(inputs["target_tokens"], [2, 3], [7, 8, 9, 11], [0, 3, 4], [0, 1, 2, 1])
    _sparse(inputs["weights"], [2, 3], [0.5, 0.25, 0.25, 1], [0, 3, 4], [0, 1, 2, 1])
    _add(request, [5, 6], [6, 7], weights=[0.0, 1.0])
    forward = translate.forward_of(request)
    assert forward.widths == (3, 3, None)
    assert forward.rows[0] == forward.rows[1]
    assert forward.rows[0] == _row(
        completion_ids=(6, 6),
        mask=(1, 1, 1, 0, 1, 0),
        sampling_logprobs=(0.0,) * 6,
        credits=(0.5, 0.25, 0.25, 0.0, 1.0, 0.0),
        targets=(7, 8, 9, 0, 11, 0),
    )


def test_one_target_for_a_token_alone_in_the_losses_of_policies() -> None:
    request = _request("ppo")
    _add(request, [5], [6], logprobs=[-1.0], advantages=[1.0])
    _targets(request).shape.append(1)
    with pytest.raises(UsageError, match=r"shape \[1, 1\]; the loss 'ppo' takes one number"):
        translate.forward_of(request)


@pytest.mark.parametrize("beta", [None, -0.5, math.nan])
def test_the_beta_of_dro(beta: float | None) -> None:
    with pytest.raises(UsageError, match=r"'dro' has .*it needs one of 0 or more"):
        translate.loss_of("dro", {} if beta is None else {"beta": beta})


def test_masks_of_dro_and_gspo_are_derived_from_their_inputs() -> None:
    """dro: all but a padded prompt, whose advantages and log-probabilities are both 0. gspo: what the mask marks, and no less."""
    dro = _request("dro", loss_fn_config={"beta": 0.1})
    _add(dro, [5, 6, 7], [6, 7, 8], logprobs=[0.0, -0.5, -1.0], advantages=[0.0, 0.0, 1.0])
    assert translate.forward_of(dro).rows[0].mask == (0, 1, 1)
    for advantages in ([0.0, 0.0, 1.0], [2.0, 0.0, 1.0]):
        gspo = _request("gspo")
        marks = {"logprobs": [-1.0] * 3, "sequence_ratio_mask": [0.0, 1.0, 1.0]}
        _add(gspo, [5, 6, 7], [6, 7, 8], advantages=advantages, **marks)
        if not advantages[0]:
            assert translate.forward_of(gspo).rows[0].mask == (0, 1, 1)
            continue
        with pytest.raises(UsageError, match=r"'advantages'\]\[0\] is 2 where sequence_ratio_mask"):
            translate.forward_of(gspo)


def test_bytes_that_are_no_protobuf_are_refused() -> None:
    with pytest.raises(UsageError, match="not a protobuf message"):
        translate.parse_forward_backward(b"\xff\xff\xff")


def test_outputs() -> None:
    computed = Computed(
        ((-1.0, -0.5), (-0.25,)),
        {"loss/policy": 1.5, "loss/kl": 0.25, "tokens": 3.0, "clip_high": 1.0},
    )
    message = messages().ForwardBackwardOutput()
    message.ParseFromString(translate.outputs(computed, (None, None)))
    assert dict(message.metrics) == {"loss:sum": 1.75, "tokens:sum": 3.0, "clip_high:sum": 1.0}
    (record,) = message.loss_fn_outputs
    assert record.num_datums == 2
    tensor = record.fields["logprobs"]
    assert struct.unpack("<3f", tensor.data) == (-1.0, -0.5, -0.25)
    assert struct.unpack("<3q", tensor.offsets) == (0, 8, 12)


def test_outputs_of_several_targets_have_the_shape_of_the_targets() -> None:
    """As the client reads them."""
    from tinker.proto.response_conv import deserialize_forward_backward_output

    logprobs = ((-1.0,), (-1.0, -2.0, -3.0, -4.0), (-5.0, -6.0), (-7.0,), (-8.0, -9.0))
    widths = (None, 2, 2, 1, None)
    message = deserialize_forward_backward_output(translate.outputs(Computed(logprobs, {}), widths))
    tensors = [output["logprobs"] for output in message.loss_fn_outputs]
    assert [tensor.shape for tensor in tensors] == [[1], [2, 2], [1, 2], [1, 1], [2]]
    assert [tuple(tensor.data) for tensor in tensors] == [*logprobs]


@pytest.mark.parametrize(
    ("last", "expected"), [(None, [None, -0.5, -0.25]), (1, [None, None, -0.25])]
)
def test_samples(last: int | None, expected: list[float | None]) -> None:
    sample_request = _asked(prompt_logprobs=True, prompt_logprobs_last_n=last)
    sampled = SampleResult(
        (
            Completion((3, 0), (-1.0, -2.0), "stop", 1, 0, "f"),
            Completion((3,), (-1.0,), "length", 2, 0, "f"),
        ),
        (-0.5, -0.25),
    )
    message = messages().SampleResponse()
    message.ParseFromString(translate.sample_response(sampled, sample_request))
    assert [struct.unpack(f"<{len(s.tokens) // 4}i", s.tokens) for s in message.sequences] == [
        (3, 0),
        (3,),
    ]
    assert [s.stop_reason for s in message.sequences] == [0, 1]
    assert struct.unpack("<2f", message.sequences[0].logprobs) == (-1.0, -2.0)
    prompt = struct.unpack("<3f", message.prompt_logprobs)
    assert [None if math.isnan(value) else value for value in prompt] == expected


def _asked(**changes: Any) -> requests.Sample:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    body = {"prompt": prompt, "sampling_params": {}, "sampling_session_id": "s", "seq_id": 0}
    return requests.Sample.model_validate({**body, **changes})


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (None, [None, [(4, -0.5), (3, -1.0)], [(9, -0.25), (8, -2.0)]]),
        (1, [None, None, [(9, -0.25), (8, -2.0)]]),
    ],
)
def test_the_likeliest_tokens_as_the_client_reads_them(last: int | None, expected: Any) -> None:
    """Of the prompt, whose first token has none, and of what was drawn."""
    from tinker.proto.response_conv import deserialize_sample_response

    sampled = SampleResult(
        (
            Completion((3, 0), (-1.0, -2.0), "stop", 1, 0, "f"),
            Completion((3,), (-1.0,), "length", 2, 0, "f"),
        ),
        (-0.5, -0.25),
        TopTokens(2, (4, 3, 9, 8), (-0.5, -1.0, -0.25, -2.0)),
        (TopTokens(1, (3, 1), (-1.0, -0.5)), TopTokens(1, (3,), (-1.0,))),
    )
    sample_request = _asked(prompt_logprobs=True, prompt_logprobs_last_n=last)
    message = deserialize_sample_response(translate.sample_response(sampled, sample_request))
    assert message.topk_prompt_logprobs == expected
    assert [sequence.topk_logprobs for sequence in message.sequences] == [
        [[(3, -1.0)], [(1, -0.5)]],
        [[(3, -1.0)]],
    ]


@pytest.mark.parametrize(
    "layout",
    [
        {"data": [9, -1, -1, 8]},
        {"data": [9, 8], "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [0, 1]},
    ],
)
def test_given_tokens_of_a_prompt_in_the_layout_that_they_came_in(layout: Any) -> None:
    from tinker.proto.response_conv import deserialize_sample_response

    sample_request = _asked(target_prompt_logprobs={"dtype": "int64", "shape": [2, 2], **layout})
    assert prompt_targets(sample_request, 3) == (9, -1, -1, 8)
    sampled = SampleResult((), target_logprobs=(-0.5, 0.0, 0.0, -0.25))
    message = deserialize_sample_response(translate.sample_response(sampled, sample_request))
    tensor = message.target_prompt_logprobs
    assert tensor is not None
    assert tensor.to_torch().tolist() == [[-0.5, 0.0], [0.0, -0.25]]
    assert tensor.sparse_crow_indices == layout.get("sparse_crow_indices")
    assert tensor.sparse_col_indices == layout.get("sparse_col_indices")
