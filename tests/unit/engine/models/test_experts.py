"""Models with experts: adapters of experts are what peft computes, and a decoded row does not depend on its neighbours."""

from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from groupwise.core.errors import ModelError
from groupwise.engine.models import experts
from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.decoder import Decoder, PromptCache, SlotCache
from groupwise.engine.models.experts import ALL_ROWS, compute_experts, experts_of
from groupwise.engine.models.export import write_merged
from groupwise.engine.models.files import read_model_tensors, write_tensors
from groupwise.engine.models.lora import AdaptedModel, read_adapter
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.models.plan import count_parameters
from groupwise.engine.models.text_mask import TextMask
from tests.unit.engine.models.native.families import SMALL, made, randomised

FOUR: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 4}
HEADS: dict[str, Any] = {"head_dim": 8}
QWEN: dict[str, Any] = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 24}
CONFIGS = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**SMALL, **QWEN, **HEADS),
    "qwen2_moe": lambda: Qwen2MoeConfig(**SMALL, **QWEN, shared_expert_intermediate_size=24),
    "mixtral": lambda: MixtralConfig(**SMALL, **FOUR),
    "granitemoe": lambda: GraniteMoeConfig(**SMALL, **FOUR),
    "gpt_oss": lambda: GptOssConfig(**SMALL, **FOUR, head_dim=8),  # transposed, with biases
}
BOTH = ("experts.gate_up_proj", "experts.down_proj")
IDS = torch.randint(3, 96, (3, 12), generator=torch.Generator().manual_seed(0))
PEFT_ASKS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def adapted(model: Any, matrices: tuple[str, ...] = BOTH) -> AdaptedModel:
    settings = LoraConfig(r=3, alpha=6, target_parameters=matrices)
    found = AdaptedModel(model, new_lora_config(settings))
    found.add("policy", trainable=True, seed=0)
    randomised(found, "policy", size=0.3)
    return found


def loss(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1)[:, :-1].gather(-1, IDS[:, 1:, None]).sum()


@PEFT_ASKS
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("matrices", [BOTH, BOTH[1:]], ids=["both", "one"])
def test_logits_and_gradients_are_those_of_peft(tmp_path, family, matrices):
    model = adapted(made(CONFIGS[family]()), matrices)
    model.save("policy", tmp_path)
    decoder = Decoder(model.base)
    with model.using("policy"):
        hidden = decoder.hidden(IDS, torch.arange(12)[None], TextMask(12), None)
        ours = decoder.logits(hidden.flatten(0, 1)).view(3, 12, -1)
    names = [*model.parameters("policy")]
    gradients = torch.autograd.grad(loss(ours), [*model.parameters("policy").values()])
    plain = PeftModel.from_pretrained(made(CONFIGS[family]()), str(tmp_path), is_trainable=True)
    theirs: Any = plain(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    loss(theirs).backward()
    found = {
        name.replace(".default.", "."): parameter.grad
        for name, parameter in plain.named_parameters()
        if parameter.requires_grad
    }
    assert sorted(found) == names
    assert sum(".experts." in name for name in names) == 4 * len(matrices)
    for name, gradient in zip(names, gradients, strict=True):
        assert float(gradient.abs().max()) > 0
        torch.testing.assert_close(gradient, found[name], atol=1e-3, rtol=1e-3, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("with_adapter", [False, True])
def test_a_decoded_row_has_the_same_bits_among_other_rows(with_adapter):
    """And those of the experts' usual way, but for rounding."""
    model = made(CONFIGS["qwen3_moe"]())
    policy = adapted(model)
    decoder = Decoder(model)

    def decode(neighbours: torch.Tensor) -> torch.Tensor:
        cache, prompt = SlotCache(slots=8, key_length=16), PromptCache()
        decoder.hidden(IDS[:1, :5], torch.arange(5)[None], TextMask(5), prompt)
        for slot in range(8):
            cache.place(slot, prompt)
        cache.positions = torch.full((8,), 5)
        tokens = neighbours.clone()
        tokens[2] = IDS[0, 5]
        mask = (torch.arange(16) <= 5).expand(8, 1, 16)
        hidden = decoder.hidden(tokens[:, None], cache.positions[:, None], mask, cache)
        return decoder.logits(hidden[:, 0])[2]

    with policy.using("policy" if with_adapter else None):
        alone = decode(torch.full((8,), 7))
        assert torch.equal(decode(torch.arange(10, 18)), alone)
        whole = model(input_ids=IDS[:1, :6], use_cache=False).logits[0, -1]
    torch.testing.assert_close(alone, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_those_of_one_expert_after_the_other(family, dtype):
    """And an expert that nobody chose has a gradient of 0."""
    policy = adapted(made(CONFIGS[family]()).to(dtype))
    path, module = next(iter(experts_of(policy.base).items()))
    layer: Any = module
    weights = {}
    outermost: Any = policy.base.get_submodule(path)
    for outer in (outermost, outermost.base_layer):
        weights[outer.parameter_name] = outer.by_expert("policy")
    parameters = [each for name, each in policy.parameters("policy").items() if path in name]
    x_NH = torch.randn(9, SMALL["hidden_size"], generator=torch.Generator().manual_seed(3))
    x_NH = x_NH.to(dtype).requires_grad_()
    chosen_NK = torch.tensor([[0, 3], [3, 1], [0, 1]] * 3)
    shares_NK = torch.full((9, 2), 0.5, dtype=dtype)
    found = []
    for kind in ("grouped", ALL_ROWS):
        layer.config._experts_implementation = kind
        y_NH = compute_experts(layer, x_NH, chosen_NK, shares_NK, weights)
        slopes = torch.autograd.grad(
            (y_NH.float() * torch.linspace(-1, 1, 9)[:, None]).sum(), [x_NH, *parameters]
        )
        found.append([y_NH, *slopes])
    close = 1e-5 if dtype == torch.float32 else 0.03
    for one, other in zip(*found, strict=True):
        largest = float(other.detach().abs().max())
        assert largest > 0
        torch.testing.assert_close(one, other, atol=close * largest, rtol=0)


def test_small_adapters_of_experts_act_in_bfloat16():
    """What is less than half of the last bit is added before the output is rounded."""
    generator, ends = torch.Generator().manual_seed(0), torch.tensor([4000, 4000]).int()
    x, weight = (torch.randn(n, 8, generator=generator).bfloat16() for n in (4000, 2))
    low, up = torch.ones(4000, 8).bfloat16(), torch.full((2, 1, 8), 2**-14).bfloat16()
    changed, plain = (
        experts._AtOnce.apply(x, weight[:, None], low, each, ends).float() for each in (up, 0 * up)
    )
    assert float((changed - plain).mean()) == pytest.approx(8 * 2**-14, rel=0.3)


def test_an_adapter_that_is_removed_leaves_the_experts_as_they_were():
    model = made(CONFIGS["mixtral"]())
    before = model(input_ids=IDS).logits
    structure = [*model.named_modules()]
    policy = adapted(model)
    policy.add("other", trainable=False, seed=1)
    policy.remove("policy")
    assert len(policy.layers) == 2 * 4 + 2 * 2
    policy.remove("other")
    assert [*model.named_modules()] == structure
    assert torch.equal(model(input_ids=IDS).logits, before)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_merged_model_is_the_adapted_one(tmp_path, family):
    base = made(CONFIGS[family]())
    base.save_pretrained(tmp_path / "base")
    policy = adapted(base)
    policy.save("policy", tmp_path)
    with torch.no_grad(), policy.using("policy"):
        wanted = base(input_ids=IDS).logits
    model = ModelConfig(name=str(tmp_path / "base"))
    write_merged(model, tmp_path, tmp_path / "merged", "float32")
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=IDS).logits, wanted, atol=1e-4, rtol=1e-4)


def test_all_linear_leaves_out_experts_and_what_chooses_them():
    model = AdaptedModel(made(CONFIGS["qwen2_moe"]()), new_lora_config(LoraConfig()))
    model.add("policy", trainable=True, seed=0)
    assert {path.rpartition(".")[2] for path in model.layers} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"target_parameters": ("experts.w1",)}, r"experts\.w1.*experts\.gate_up_proj"),
        ({"target_modules": ("q_proj", "up_proj", "gate_proj")}, r"lora\.target_parameters"),
    ],
)
def test_targets_that_cannot_be_are_refused(settings, named):
    model = AdaptedModel(made(CONFIGS["qwen3_moe"]()), new_lora_config(LoraConfig(**settings)))
    with pytest.raises(ModelError, match=named):
        model.add("policy", trainable=True, seed=0)
    assert not model.layers


def test_adapters_over_one_base_change_the_same_matrices():
    model = adapted(made(CONFIGS["qwen3_moe"]()))
    other = new_lora_config(LoraConfig(target_parameters=BOTH[:1]))
    with pytest.raises(ModelError, match="target_parameters"):
        model.add("other", trainable=True, seed=0, config=other)
    assert [*model.configs] == ["policy"]


def test_files_are_read_back(tmp_path):
    first, second = (adapted(made(CONFIGS["qwen3_moe"]())) for _ in range(2))
    with torch.no_grad():
        for parameter in second.parameters("policy").values():
            parameter.zero_()
    first.save("policy", tmp_path)
    second.write("policy", read_adapter(tmp_path), "the file")
    with torch.no_grad(), first.using("policy"), second.using("policy"):
        assert torch.equal(first.base(input_ids=IDS).logits, second.base(input_ids=IDS).logits)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_all_experts_are_held_and_the_chosen_ones_are_active(tmp_path, family):
    model = made(CONFIGS[family]())
    model.save_pretrained(tmp_path)
    counts = count_parameters(
        ModelConfig(name=str(tmp_path)), LoraConfig(r=3, target_parameters=BOTH)
    )
    of_experts = sum(p.numel() for path, p in model.named_parameters() if ".experts." in path)
    assert counts.parameters == model.num_parameters()
    assert counts.active == counts.parameters - of_experts // 2
    assert counts.sizes.experts == 2
    expected = adapted(model).parameters("policy").values()
    assert counts.trained == sum(parameter.numel() for parameter in expected)


@torch.no_grad()
@pytest.mark.parametrize("matrices", [BOTH, BOTH[1:]], ids=["both", "one"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_an_adapter_is_written_for_each_expert_as_vllm_takes_it(tmp_path, family, matrices):
    """The base model plus the exported matrices gives the same logits as the model with its adapter."""
    model = made(CONFIGS[family]())
    plain = tmp_path / "plain"
    model.save_pretrained(plain)
    policy = adapted(model, matrices)
    policy.save_by_expert("policy", tmp_path)
    written, files = read_adapter(tmp_path), read_model_tensors(plain)
    for name in [name for name in written if name.endswith("lora_A.weight")]:
        product = written[name.replace("lora_A", "lora_B")] @ written[name]
        files[name.removeprefix("base_model.model.").replace("lora_A.", "")] += 2.0 * product
    of_experts = [name for name in written if ".experts." in name]
    assert len(of_experts) == 2 * 3 * 4 * model.config.num_hidden_layers
    write_tensors(files, plain / "model.safetensors")
    merged: Any = AutoModelForCausalLM.from_pretrained(plain)
    with policy.using("policy"):
        expected = model(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(merged(input_ids=IDS).logits, expected, atol=1e-4, rtol=1e-4)


def test_experts_whose_files_vllm_names_otherwise_are_refused(tmp_path):
    with pytest.raises(ModelError, match="this model is a gpt_oss"):
        adapted(made(CONFIGS["gpt_oss"]())).save_by_expert("policy", tmp_path)
