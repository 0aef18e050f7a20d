"""The tokenizer without transformers gives what transformers gives: ids, texts, chats, errors, files; and hands over what it has not."""

import filecmp
import json
import pickle
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from shutil import copytree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from groupwise.engine.models.fast_tokenizer import FastTokenizer, read_fast_tokenizer
from groupwise.engine.models.template_program import run_template
from tests.chat import (
    SPECIAL,
    TEMPLATES,
    byte_level_tokenizer,
    chat_tokenizer,
    piece_tokenizer,
    starting_with,
    write_published_tokenizer,
    write_qwen_tokenizer,
)

NEWER = pytest.mark.skipif(
    version("transformers") < "5.23",
    reason="older releases render thoughts and namespaces otherwise; templates are run as by newer ones",
)
TEXTS = (
    "",
    "I'LL 1234 ab a e\u0301",
    "Two and two?",
    "<|im_start|>user\n",
    "größer 日本語 🙂\u200b",
    " a  b\n\n\tc ",
    " ",
    "ab<s>ab <bos> ab</s> [INST]ab",
    "\x00\x07\x1b[0m\r\n\u2028\ufeff\ud7ff",
    "▁a▁ 123456 12",
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [None, "ü"]}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "<Adds> & 'more'"}}
CHATS = (
    [{"role": "user", "content": "Two and two?"}],
    [
        {"role": "system", "content": "Be brief.", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "Sum?"}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "thinking": "hm"},
        {"role": "tool", "content": '{"sum": 3}'},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nx\n</think>\n\nb", "reasoning_content": "y"},
        {"role": "user", "content": "c"},
    ],
)
LIMIT = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
OWN_TEMPLATE = """{%- set ns = namespace(seen=0) -%}
{%- for m in messages -%}
{%- if m.role == 'system' %}{% continue %}{% endif -%}
{%- set ns.seen = ns.seen + 1 %}{{ dict(a=1)['a'] }}{{ m | tojson(indent=2) }}{{ bos_token }}{{ strftime_now('%Y') }}
{%- generation %}{{ m.get('thinking', '-') }}{% endgeneration %}
{% endfor %}{{ ns.seen }}{{ tools | tojson if tools else documents }}{{ extra }}"""


def plain_folder(folder: Path) -> Path:
    plain = byte_level_tokenizer()
    start = ("<|im_start|>", plain.token_to_id("<|im_start|>"))
    plain.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[start]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<unk>",
        extra_special_tokens=["<extra>"], chat_template=OWN_TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def qwen_folder(folder: Path) -> Path:
    folder.mkdir()
    write_qwen_tokenizer(folder, OWN_TEMPLATE)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


def smollm2_folder(folder: Path) -> Path:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*special, *letters, "ab", "Ġa", "12"]
    merges = [("a", "b"), ("Ġ", "a"), ("1", "2")]
    plain = Tokenizer(models.BPE({text: n for n, text in enumerate(words)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    plain.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False)])
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    config = {
        "add_prefix_space": False, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "bos_token": "<|im_start|>",
        "chat_template": OWN_TEMPLATE, "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "model_max_length": 8192,
        "pad_token": "<|im_end|>", "tokenizer_class": "GPT2Tokenizer", "unk_token": "<|endoftext|>", "vocab_size": 49152,
    }  # fmt: skip
    write_published_tokenizer(folder, plain, config, "llama")
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("")
    return folder


def llama3_folder(folder: Path) -> Path:
    plain = byte_level_tokenizer([("a", "b"), ("Ġ", "a"), ("1", "2")])
    plain.model.ignore_merges = True
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(words), behavior="isolated", invert=False)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    steps = [processors.ByteLevel(trim_offsets=False), starting_with(plain, "<|im_start|>")]
    plain.post_processor = processors.Sequence(steps)
    config = {
        "bos_token": "<|im_start|>", "chat_template": OWN_TEMPLATE, "clean_up_tokenization_spaces": True, "eos_token": "<|im_end|>",
        "model_input_names": ["input_ids", "attention_mask"], "model_max_length": 131072, "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    write_published_tokenizer(folder, plain, config, "llama")
    return folder


def phi4_folder(folder: Path) -> Path:
    llama3_folder(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "phi3"}')
    return folder


def mistral_folder(folder: Path, model_type: str = "mistral") -> Path:
    plain = piece_tokenizer(["<unk>", "<s>", "</s>", "[INST]"])
    plain.post_processor = starting_with(plain, "<s>")
    config = {
        "add_bos_token": True, "add_eos_token": False, "additional_special_tokens": [], "bos_token": "<s>", "chat_template": OWN_TEMPLATE,
        "clean_up_tokenization_spaces": False, "eos_token": "</s>", "legacy": False, "model_max_length": 10**30, "pad_token": None,
        "sp_model_kwargs": {}, "spaces_between_special_tokens": False, "tokenizer_class": "LlamaTokenizerFast", "unk_token": "<unk>",
        "use_default_system_prompt": False, "padding_side": "left",
    }  # fmt: skip
    write_published_tokenizer(folder, plain, config, model_type)
    return folder


def llama2_folder(folder: Path) -> Path:
    return mistral_folder(folder, "llama")


def legacy_llama2_folder(folder: Path) -> Path:
    llama2_folder(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    token = {"__type": "AddedToken", "content": "<s>", **flags}
    config |= {"legacy": True, "bos_token": token, "add_prefix_space": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def gemma_folder(folder: Path) -> Path:
    plain = piece_tokenizer(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>"])
    plain.normalizer = normalizers.Replace(" ", "▁")
    plain.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    plain.decoder = decoders.Sequence(steps)
    plain.post_processor = starting_with(plain, "<bos>")
    config = {
        "add_bos_token": True, "add_eos_token": False, "additional_special_tokens": ["<start_of_turn>"], "bos_token": "<bos>",
        "chat_template": OWN_TEMPLATE, "clean_up_tokenization_spaces": False, "eos_token": "<eos>", "pad_token": "<pad>",
        "sp_model_kwargs": {}, "spaces_between_special_tokens": False, "tokenizer_class": "GemmaTokenizer", "unk_token": "<unk>",
        "use_default_system_prompt": False,
    }  # fmt: skip
    write_published_tokenizer(folder, plain, config, "gemma2")
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + OWN_TEMPLATE)
    return folder


def resaved_qwen_folder(folder: Path) -> Path:
    qwen = qwen_folder(folder.with_name("hub"))
    Qwen2Tokenizer.from_pretrained(qwen, local_files_only=True).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return folder


@pytest.fixture(
    scope="module",
    params=[
        *(plain_folder, qwen_folder, resaved_qwen_folder, smollm2_folder, llama3_folder),
        *(phi4_folder, mistral_folder, llama2_folder, legacy_llama2_folder, gemma_folder),
    ],
    ids=lambda f: f.__name__,
)
def pair(request, tmp_path_factory):
    """Both tokenizers of one folder, which has a byte-level vocabulary and tokens of several kinds."""
    folder = request.param(tmp_path_factory.mktemp("tokenizer") / "made")
    fast = read_fast_tokenizer(folder)
    assert type(fast) is FastTokenizer
    return fast, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def untouched(tokenizer):
    """True if transformers' tokenizer has not been loaded for it."""
    return vars(tokenizer)["_whole"] is None


@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=40)), special=st.booleans())
def test_ids_and_texts(pair, text, special):
    fast, whole = pair
    ids = whole(text, add_special_tokens=special)
    assert dict(fast(text, add_special_tokens=special)) == dict(ids)
    for skip in (False, True):
        shown = fast.decode(ids["input_ids"], skip_special_tokens=skip)
        assert shown == whole.decode(ids["input_ids"], skip_special_tokens=skip)
    assert untouched(fast)


def test_tokens_and_special_tokens_are_those_of_transformers(pair):
    fast, whole = pair
    assert (len(fast), fast.get_vocab()) == (len(whole), whole.get_vocab())
    for name in (
        *("bos_token", "bos_token_id", "eos_token_id", "unk_token_id", "pad_token", "pad_token_id"),
        *("all_special_tokens", "all_special_ids", "added_tokens_decoder", "chat_template"),
    ):
        assert getattr(fast, name) == getattr(whole, name), name
    tokens = ["<think>", "a", "no such token"]
    assert fast.convert_tokens_to_ids(tokens) == whole.convert_tokens_to_ids(tokens)
    assert fast.get_chat_template() == whole.get_chat_template()
    again = pickle.loads(pickle.dumps(fast))
    assert again("a<think>")["input_ids"] == whole("a<think>")["input_ids"]
    assert untouched(fast)
    assert untouched(again)


def rendered(tokenizer, messages, **given):
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, extra=(1, "x"), **given)
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        return type(error), str(error)


@NEWER
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_chats(pair, tools, messages):
    fast, whole = pair
    assert rendered(fast, messages, tools=tools) == rendered(whole, messages, tools=tools)
    assert untouched(fast)


@pytest.fixture(scope="module")
def plain_pair(tmp_path_factory):
    folder = plain_folder(tmp_path_factory.mktemp("plain") / "made")
    return read_fast_tokenizer(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True)


@NEWER
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("family", [*SPECIAL])
def test_chats_by_templates_of_families(plain_pair, family, tools, messages):
    given = {
        "tools": tools,
        "add_generation_prompt": family == "qwen3",
        "chat_template": (TEMPLATES / f"{family}.jinja").read_text(),
    }
    fast, whole = plain_pair
    assert rendered(fast, messages, **given) == rendered(whole, messages, **given)
    assert untouched(fast)


@NEWER
@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = namespace() %}{% set ns._a = 1 %}",
        "{{ namespace(_a=1) }}",
        "{{ dict.__init__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{% broken",
    ],
)
def test_templates_that_fail_do_so_in_the_same_way(template):
    whole = chat_tokenizer("chatml")
    kinds = set()
    for render in (
        lambda: run_template(template, CHATS[0], None, {}),
        lambda: whole.apply_chat_template(CHATS[0], chat_template=template, tokenize=False),
    ):
        try:
            kinds.add(render())
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            kinds.add(type(error))
    assert len(kinds) == 1


def test_files(pair, tmp_path):
    fast, whole = pair
    whole.save_pretrained(tmp_path / "whole")
    files = [path.rpartition("/")[2] for path in fast.save_pretrained(tmp_path / "fast")]
    assert sorted(files) == sorted(path.name for path in (tmp_path / "whole").iterdir())
    same = filecmp.cmpfiles(tmp_path / "fast", tmp_path / "whole", files, shallow=False)
    assert sorted(same[0]) == sorted(files)


def test_missing_features_come_from_the_tokenizer_of_transformers(pair):
    fast, whole = pickle.loads(pickle.dumps(pair))
    fast.chat_template = whole.chat_template = "{% generation %}{{ messages[0].content }}{% endgeneration %}"  # fmt: skip
    wanted = {"return_assistant_tokens_mask": True, "return_dict": True}
    assert dict(fast.apply_chat_template(CHATS[0], **wanted)) == dict(
        whole.apply_chat_template(CHATS[0], **wanted)
    )
    assert isinstance(fast, PreTrainedTokenizerFast)
    fast.add_special_tokens({"pad_token": "<new>"})
    assert fast("<new>", add_special_tokens=False)["input_ids"] == [len(whole)]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "BertTokenizer"}),
        ("tokenizer_config.json", {"model_input_names": ["input_ids", "token_type_ids"]}),
        ("tokenizer_config.json", {"split_special_tokens": True}),
        ("tokenizer_config.json", {"pad_token": "<not there>"}),
        ("tokenizer_config.json", {"additional_special_tokens": [], "extra_special_tokens": []}),
        ("tokenizer_config.json", {"added_tokens_decoder": {}}),
        ("tokenizer.json", {"truncation": LIMIT}),
        ("tokenizer.json", {"model": None}),
        ("tekken.json", {}),
    ],
)
def test_files_that_transformers_would_convert_are_left_to_it(pair, tmp_path, file, change):
    folder = copytree(vars(pair[0])["_folder"], tmp_path / "changed")
    assert read_fast_tokenizer(folder) is not None
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | change))
    assert read_fast_tokenizer(folder) is None


def test_older_files_of_special_tokens_are_left_to_transformers(pair, tmp_path):
    folder = copytree(vars(pair[0])["_folder"], tmp_path / "changed")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("added_tokens_decoder", None)
    path.write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text("{}")
    assert read_fast_tokenizer(folder) is None


@pytest.mark.parametrize(
    ("declared", "model_type"),
    [
        ("GPT2Tokenizer", "phi"),
        ("LlamaTokenizer", "qwen2"),
        ("GemmaTokenizer", "llama"),
        ("PreTrainedTokenizerFast", "bert"),
        ("LlamaTokenizer", "llama"),  # of bytes: releases of transformers differ
    ],
)
def test_a_class_of_another_model_is_left_to_transformers(tmp_path, declared, model_type):
    folder = llama3_folder(tmp_path / "made")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": declared}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert read_fast_tokenizer(folder) is None


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("config.json", "model_type"),
        ("tokenizer_config.json", "unk_token"),
        ("tokenizer_config.json", "added_tokens_decoder.260"),
        ("tokenizer.json", "added_tokens"),
    ],
)
def test_another_qwen_is_left_to_transformers(tmp_path, file, part):
    path = qwen_folder(tmp_path / "qwen") / file
    content = json.loads(path.read_text())
    *outer, last = part.split(".")
    owner = content
    for name in outer:
        owner = owner[name]
    del owner[last]
    path.write_text(json.dumps(content))
    assert read_fast_tokenizer(path.parent) is None


def test_it_imports_no_transformers(pair, tmp_path):
    folder = copytree(vars(pair[0])["_folder"], tmp_path / "moved")
    code = f"""
import sys
from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.tokenizer import load_tokenizer
from groupwise.engine.models.tokens import prompt_ids
assert prompt_ids(load_tokenizer(ModelConfig(name={str(folder)!r})), [{{"role": "user", "content": "a"}}])
print("transformers" in sys.modules)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"
