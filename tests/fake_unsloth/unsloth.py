# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false
"""A stand-in of the library Unsloth, for tests of the port to it: models and adapters of transformers and peft, with Unsloth's manners.

It prints, has every logger write, wants to be imported before transformers, takes the arguments that Unsloth takes and no others, puts an
adapter called `default` over a model, and computes hidden states of causal rows alone: for other masks and for caches, its decoder has
none. It has no kernels, and its 4 bits are a mark on the model.
"""

import logging
import os
import sys
import types

if notes := os.environ.get("FAKE_UNSLOTH_NOTES"):
    with open(notes, "a") as file:
        print("late" if "transformers" in sys.modules else "first", file=file)
if os.environ.get("FAKE_UNSLOTH_ENDS"):  # whoever imports it wants to know no more
    os._exit(0)

REFUSES_4BIT = "FAKE_UNSLOTH_REFUSES_4BIT"
"""In the environment: it loads other weights than it is asked for, and only says so."""

print("Unsloth: will patch your computer.")
logging.basicConfig(level=logging.INFO)


class FastLanguageModel:
    """What Unsloth calls so."""

    @staticmethod
    def from_pretrained(
        model_name,
        max_seq_length=2048,
        dtype=None,
        load_in_4bit=True,
        load_in_8bit=False,
        full_finetuning=False,
        trust_remote_code=False,
        revision=None,
        use_exact_model_name=False,
    ):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        print(f"Unsloth: Fast model patching of {model_name}.")
        assert use_exact_model_name, "it would load the weights of another repository"
        assert not full_finetuning
        model = AutoModelForCausalLM.from_pretrained(
            model_name, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code
        )
        model.is_loaded_in_4bit = load_in_4bit and not os.environ.get(REFUSES_4BIT)
        model.is_loaded_in_8bit = load_in_8bit
        model.generation_config.repetition_penalty = 1.3
        model.max_seq_length = max_seq_length
        _have_causal_rows_alone(model)
        return model, AutoTokenizer.from_pretrained(model_name)

    @staticmethod
    def get_peft_model(
        model,
        r=16,
        target_modules=None,
        lora_alpha=16,
        lora_dropout=0.0,
        bias="none",
        use_gradient_checkpointing="unsloth",
        use_rslora=False,
        random_state=3407,
    ):
        from peft import LoraConfig, get_peft_model

        assert use_gradient_checkpointing in ("unsloth", False)
        if use_gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        config = LoraConfig(
            r=r, target_modules=target_modules, lora_alpha=lora_alpha, lora_dropout=lora_dropout, bias=bias
        )  # fmt: skip
        return get_peft_model(model, config)

    @staticmethod
    def for_training(model):
        return model.train()

    @staticmethod
    def for_inference(model):
        return model.eval()


def _have_causal_rows_alone(model):
    """Its decoder by itself takes no mask and no cache; `generate`, which goes by the whole model, has both."""
    body = model.get_decoder()
    plain, whole = body.forward, model.forward
    inside = []

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **more):
        if not inside:
            assert attention_mask is None, "Unsloth's decoder computes causal rows alone"
            assert more.get("past_key_values") is None, "Unsloth's decoder has a cache of its own"
            assert more.get("cache") is None, "Unsloth's decoder has a cache of its own"
            assert input_ids.shape[1] <= model.max_seq_length, "Unsloth would cut these rows off"
        return plain(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **more,
        )

    def through(self, *args, **more):
        inside.append(True)
        try:
            return whole(*args, **more)
        finally:
            inside.pop()

    body.forward = types.MethodType(forward, body)
    model.forward = types.MethodType(through, model)
