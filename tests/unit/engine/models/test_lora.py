"""Adapters: exact arithmetic on a rounded base, strict files, and the format of peft."""

import json
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear as PeftLinear
from safetensors.torch import load_file, save_file

from groupwise.core.errors import ModelError
from groupwise.engine.learner.weights import TrainedAdapter
from groupwise.engine.models.config import LoraConfig
from groupwise.engine.models.lora import AdaptedModel, fingerprint, layer_kinds, read_adapter
from groupwise.engine.models.lora_config import CONFIG, WEIGHTS, new_lora_config, read_lora_config
from groupwise.engine.models.native import linear
from groupwise.engine.models.tiny import tiny_model

IDS = torch.tensor([[7, 8, 9, 30, 31, 4, 50, 66]])


def adapted(dtype=torch.float32, **settings) -> AdaptedModel:
    config = new_lora_config(LoraConfig(**{"r": 4, "alpha": 8, **settings}))
    base: Any = tiny_model()
    return AdaptedModel(base.to(dtype), config)


def randomise(model: AdaptedModel, name: str, size=0.3, seed=1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters(name).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)


def trained(**settings) -> AdaptedModel:
    model = adapted(**settings)
    model.add("policy", trainable=True, seed=0)
    randomise(model, "policy")
    return model


def logits(model: AdaptedModel, name: str | None):
    with torch.no_grad(), model.using(name) as acting:
        return acting(IDS).logits


def saved(model: AdaptedModel, folder, name="policy"):
    folder.mkdir(exist_ok=True)
    model.save(name, folder)
    return folder


# Small changes on a base in bfloat16


@pytest.mark.parametrize(("learning_rate", "of_peft"), [(1e-4, 0.6), (1e-5, 0.1)])
def test_a_small_change_acts_in_full_on_a_rounded_base(learning_rate, of_peft):
    """After one AdamW step every entry of B is ± the learning rate. How much of that reaches the layer's output?"""
    config = new_lora_config(LoraConfig(r=16, alpha=32, target_modules=("q_proj",)))
    model = AdaptedModel(tiny_model(hidden_size=256, layers=1, heads=4).bfloat16(), config)
    model.add("policy", trainable=True, seed=0)
    layer: Any = next(iter(model.layers.values()))
    generator = torch.Generator().manual_seed(1)
    down, up = layer.factors("policy")
    base = layer.get_base_layer().weight
    of_peft_layer: Any = PeftLinear(
        layer.get_base_layer(), "policy", config.as_peft(), r=16, lora_alpha=32
    )
    with torch.no_grad():
        up.copy_(learning_rate * torch.sign(torch.randn(up.shape, generator=generator)))
        of_peft_layer.lora_A["policy"].weight.copy_(down)
        of_peft_layer.lora_B["policy"].weight.copy_(up)
        base.copy_(torch.randn(base.shape, generator=generator) / 16)
        inputs = torch.randn(1 << 13, 256, generator=generator).bfloat16()
        exact = 2.0 * (inputs.double() @ down.double().t()) @ up.double().t()

    def slope(changed, unchanged) -> float:
        realised = changed.double() - unchanged.double()
        return float((realised * exact).sum() / (exact * exact).sum())

    with torch.no_grad():
        with model.using(None):
            before = layer(inputs)
        with model.using("policy"):
            ours = slope(layer(inputs), before)
            theirs = slope(of_peft_layer(inputs), before)
    assert before.dtype == torch.bfloat16
    assert 0.95 < ours < 1.05
    assert theirs < of_peft, "the comparison has lost its point: peft adds before rounding now"


# Adapters of several shapes on one base

SHAPES: dict[str, dict[str, Any]] = {
    "narrow": {"r": 2, "alpha": 6, "target_modules": ("q_proj", "v_proj")},
    "mlp": {"r": 8, "alpha": 8, "dropout": 0.5, "target_modules": ("up_proj", "down_proj")},
    "head": {"r": 3, "alpha": 3, "target_modules": ("lm_head",)},
    "all": {"r": 5, "alpha": 10},
}
PEFT_ASKS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
NO_CONFIG = pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")
"""peft 0.20 looks for the base's config, and a model of a test has none."""
TIED = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")


def add_shape(model: AdaptedModel, name: str) -> None:
    config = new_lora_config(LoraConfig(**SHAPES[name]))
    model.add(name, trainable=name != "mlp", seed=len(name), config=config)
    randomise(model, name, seed=len(name))


def of_shapes(*names: str, dtype=torch.float32) -> AdaptedModel:
    model = adapted(dtype)
    for name in names:
        add_shape(model, name)
    return model


@TIED
@pytest.mark.parametrize("name", SHAPES)
def test_an_adapter_is_what_it_would_be_alone(name, tmp_path):
    """Whichever shapes came before and after it, and went."""
    dtype = torch.bfloat16
    alone = of_shapes(name, dtype=dtype)
    others = [each for each in SHAPES if each != name]
    model = of_shapes(others[0], others[1], name, others[2], dtype=dtype)
    model.remove(others[1])
    assert torch.equal(logits(model, name), logits(alone, name))
    assert fingerprint(model.parameters(name)) == fingerprint(alone.parameters(name))
    assert [*model.low_rank(name)] == [*alone.low_rank(name)]
    assert {p.requires_grad for p in model.parameters(name).values()} == {name != "mlp"}
    assert {p.dtype for p in model.parameters(name).values()} == {torch.float32}
    model.add("fresh", trainable=True, seed=3)
    torch.testing.assert_close(logits(model, "fresh"), logits(model, None), rtol=0, atol=1e-6)
    files = [saved(each, tmp_path / str(n), name) / CONFIG for n, each in enumerate((model, alone))]
    assert files[0].read_text() == files[1].read_text()
    assert json.loads(files[0].read_text())["r"] == SHAPES[name]["r"]
    assert torch.equal(logits(model, None), logits(adapted(dtype), None))


@TIED
def test_an_adapter_that_is_removed_leaves_the_base_as_it_was():
    fresh = adapted()
    model = of_shapes(*SHAPES)
    for name in SHAPES:
        model.remove(name)
    assert not model.layers
    assert [*map(type, model.base.modules())] == [*map(type, fresh.base.modules())]
    wanted = fresh.base.state_dict()
    assert all(torch.equal(value, wanted[key]) for key, value in model.base.state_dict().items())
    add_shape(model, "narrow")
    assert torch.equal(logits(model, "narrow"), logits(of_shapes("narrow"), "narrow"))


@TIED
def test_kinds_of_layers():
    bare = layer_kinds(tiny_model())
    assert bare["unembed"] == ("lm_head",)
    kinds = {path.rpartition(".")[2] for path in bare["mlp"]}
    assert kinds == {"gate_proj", "up_proj", "down_proj"}
    assert layer_kinds(of_shapes(*SHAPES).base) == bare
    shape = LoraConfig(r=2, target_modules=bare["attention"])
    model = AdaptedModel(tiny_model(), new_lora_config(shape))
    model.add("policy", trainable=True, seed=0)
    assert [*model.layers] == [*bare["attention"]]


def test_the_base_holds_nothing_of_its_adapters():
    """Its own tensors stay, so that what is written of the base is the base, and its embeddings stay tied."""
    model = trained()
    model.add("served", trainable=False, seed=9)
    randomise(model, "served", seed=5)
    fresh = tiny_model().state_dict()
    own = {
        key.replace(".base_layer", ""): value
        for key, value in model.base.state_dict().items()
        if ".lora_" not in key
    }
    assert own.keys() == fresh.keys()
    assert all(torch.equal(value, fresh[key]) for key, value in own.items())
    assert torch.equal(logits(model, None), tiny_model()(IDS).logits)
    embeddings: Any = model.base.get_input_embeddings()
    head: Any = model.base.get_output_embeddings()
    assert model.base.config.tie_word_embeddings
    assert head.weight is embeddings.weight


def test_the_starting_adapter_is_the_reference(tmp_path):
    folder = saved(trained(), tmp_path / "start")
    model = AdaptedModel(tiny_model(), read_lora_config(folder))
    weights = TrainedAdapter(model, seed=0, start=read_adapter(folder))
    wanted = logits(trained(), "policy")
    assert torch.equal(logits(model, "policy"), wanted)
    randomise(model, "policy", seed=8)
    with torch.no_grad(), weights.acting_reference():
        assert torch.equal(weights.reference_model(IDS).logits, wanted)
    assert set(weights.parameters()) == set(model.parameters("policy"))


# Dropout


def test_dropout_acts_only_when_asked_and_in_evaluation_mode_too():
    model = trained(dropout=0.5)
    plain = logits(model, "policy")
    model.base.eval()
    for _ in range(2):
        with torch.no_grad(), model.using("policy", dropout=True):
            torch.manual_seed(0)
            dropped = model.base(IDS).logits
        assert not torch.allclose(dropped, plain)
        assert torch.equal(logits(model, "policy"), plain)


# Files


@PEFT_ASKS
@TIED
@pytest.mark.parametrize("shape", [{}, SHAPES["head"], SHAPES["narrow"]], ids=str)
def test_peft_reloads_what_was_saved(tmp_path, shape):
    model = trained(**shape)
    theirs = PeftModel.from_pretrained(tiny_model(), str(saved(model, tmp_path / "a")))
    with torch.no_grad():
        found = [theirs(IDS).logits]
        if shape is not SHAPES["head"]:  # merged, it would change the embeddings that it is tied to
            found.append(theirs.merge_and_unload()(IDS).logits)
    wanted = logits(model, "policy")
    for each in found:
        torch.testing.assert_close(each, wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(wanted, logits(model, None), atol=1e-2)
    tensors = load_file(tmp_path / "a" / WEIGHTS)
    assert all(".lora_A." in key or ".lora_B." in key for key in tensors)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert json.loads((tmp_path / "a" / CONFIG).read_text())["task_type"] == "CAUSAL_LM"


@NO_CONFIG
@PEFT_ASKS
def test_an_adapter_saved_by_peft_is_loaded(tmp_path):
    from peft import get_peft_model

    theirs = get_peft_model(tiny_model(), new_lora_config(LoraConfig(r=4, alpha=12)).as_peft())
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    theirs.save_pretrained(tmp_path)
    model = AdaptedModel(tiny_model(), read_lora_config(tmp_path))
    model.add("served", trainable=False, seed=0)
    model.write("served", read_adapter(tmp_path), str(tmp_path))
    with torch.no_grad():
        wanted = theirs.eval()(IDS).logits
    torch.testing.assert_close(logits(model, "served"), wanted, atol=1e-5, rtol=1e-5)


def test_loading_is_strict_and_lists_everything():
    model = trained()
    before = fingerprint(model.parameters("policy"))
    given = {key: tensor.detach().clone() for key, tensor in model.parameters("policy").items()}
    lacking, bent, *_ = given
    given["stranger.lora_A.weight"] = given.pop(lacking)
    given[bent] = torch.zeros(3, 3)
    with pytest.raises(ModelError) as caught:
        model.write("policy", given, "/the/folder")
    said = str(caught.value)
    assert all(name in said for name in ("/the/folder", lacking, "stranger.lora_A", f"{bent}: (3"))
    assert fingerprint(model.parameters("policy")) == before, "none was loaded"


@pytest.mark.parametrize(("change", "named"), [
    ({"use_dora": True}, "use_dora"), ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"), ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"bias": "all"}, "bias"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"), ({"peft_type": "IA3"}, "'IA3'"),
])  # fmt: skip
def test_other_kinds_of_adapter_are_refused(tmp_path, change, named):
    folder = saved(trained(), tmp_path / "a")
    described = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**described, **change}))
    with pytest.raises(ModelError) as caught:
        read_lora_config(folder)
    assert named in str(caught.value)


def test_the_fingerprint_is_of_names_shapes_types_and_bytes():
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(4)}
    found = {
        fingerprint(tensors),
        fingerprint({"a": torch.ones(3, 2), "b": torch.zeros(4)}),
        fingerprint({"a": torch.ones(2, 3), "c": torch.zeros(4)}),
        fingerprint({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.int32)}),
        fingerprint({"a": torch.ones(2, 3), "b": torch.tensor([0.0, 0, 0, -0.0])}),
        fingerprint({"a": torch.ones(2, 3).bfloat16(), "b": torch.zeros(4)}),
    }
    assert len(found) == 6
    assert fingerprint(dict(reversed(tensors.items()))) == fingerprint(tensors)
    transposed = {"a": torch.ones(3, 2).t(), "b": torch.zeros(4)}
    assert fingerprint(transposed) == fingerprint(tensors)


def test_the_fingerprint_survives_the_file(tmp_path):
    model = trained()
    folder = saved(model, tmp_path / "a")
    assert fingerprint(read_adapter(folder)) == fingerprint(model.parameters("policy"))
    tensors = load_file(folder / WEIGHTS)
    next(iter(tensors.values()))[0, 0] += 1e-7
    save_file(tensors, folder / WEIGHTS)
    assert fingerprint(read_adapter(folder)) != fingerprint(model.parameters("policy"))


@pytest.mark.parametrize("at_once", [False, True])
def test_the_layer_computes_the_low_rank_sum(monkeypatch, at_once):
    """And its gradient, also where the sum is one product, as on a GPU."""
    monkeypatch.setattr(linear, "rounds_before_adding", lambda x: at_once)
    model = trained()
    for layer in model.layers.values():
        base: Any = layer.get_base_layer()
        generator = torch.Generator().manual_seed(2)
        inputs = torch.randn(2, 3, base.in_features, generator=generator, requires_grad=True)
        leaves = (inputs, *layer.factors("policy"))
        wanted = inputs @ (base.weight + 2.0 * leaves[2] @ leaves[1]).t()
        with model.using("policy"):
            found = layer(inputs)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        gradients = (torch.autograd.grad(each.square().sum(), leaves) for each in (found, wanted))
        torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("targets", [("nope",), ("k_proj", "v_prj"), ("embed_tokens", "k_proj")])
def test_an_adapter_that_is_refused_leaves_the_others_as_they_are(targets):
    """Such as one whose targets would have no effect."""
    model = of_shapes("narrow", "mlp")
    before = {name: logits(model, name) for name in ("narrow", "mlp")}
    layers = [*model.layers]
    config = new_lora_config(LoraConfig(r=7, target_modules=targets))
    with pytest.raises(ModelError, match=r"lora\.target_modules") as caught:
        model.add("bad", trainable=True, seed=0, config=config)
    assert (set(targets) - {"k_proj"}).pop() in str(caught.value)
    assert "q_proj, up_proj, v_proj" in str(caught.value)
    assert [*model.layers] == layers
    assert [*model.configs] == ["narrow", "mlp"]
    assert all(torch.equal(logits(model, name), before[name]) for name in before)
    assert all(p.requires_grad for p in model.parameters("narrow").values())
    assert not any(p.requires_grad for p in model.parameters("mlp").values())


def test_the_file_of_a_new_adapter_has_no_key_that_the_oldest_peft_warns_of():
    keys = {*new_lora_config(LoraConfig(r=4)).to_json()}
    assert "peft_version" in keys
    assert "kasa_config" not in keys  # of peft 0.21


NARROW = {"layers_to_transform": [1], "use_rslora": True}
PART = {"exclude_modules": ["layers.0.self_attn.v_proj"]}


@PEFT_ASKS
@pytest.mark.parametrize(
    "told",
    [
        {},
        NARROW,
        {**NARROW, "layers_pattern": "layers"},
        PART,
        {"target_modules": r".*1\.mlp.*proj"},
    ],
    ids=str,
)
def test_the_config_is_that_of_peft(told, tmp_path):
    """Every key of its file is the same, and so are the layers that it names."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    theirs = PeftConfig(
        r=3, task_type="CAUSAL_LM", **{"target_modules": ["q_proj", "v_proj"], **told}
    )
    theirs.save_pretrained(tmp_path)
    ours = read_lora_config(tmp_path)
    stored = json.loads((tmp_path / CONFIG).read_text())
    found = ours.to_json()
    assert {**found, "target_modules": set(found.pop("target_modules"))} == {
        **stored,
        "inference_mode": True,
        "target_modules": set(stored["target_modules"]),
    }
    model = AdaptedModel(tiny_model(), ours)
    model.add("policy", trainable=True, seed=0)
    wanted = [
        name
        for name, _ in get_peft_model(tiny_model(), theirs).named_parameters()
        if ".lora_" in name
    ]
    assert sorted(name.replace(".default", "") for name in wanted) == [*model.parameters("policy")]
