"""The tokenizer without transformers gives what transformers gives: ids, texts, chats, errors, files; and hands over what it has not."""

import filecmp
import json
import pickle
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from groupwise.engine.models.fast_tokenizer import FastTokenizer, read_fast_tokenizer
from groupwise.engine.models.template_program import run_template
from tests.chat import (
    SPECIAL,
    TEMPLATES,
    byte_level_tokenizer,
    chat_tokenizer,
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
    return folder


def qwen_folder(folder: Path) -> Path:
    folder.mkdir()
    write_qwen_tokenizer(folder, OWN_TEMPLATE)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


def resaved_qwen_folder(folder: Path) -> Path:
    qwen = qwen_folder(folder.with_name("hub"))
    Qwen2Tokenizer.from_pretrained(qwen, local_files_only=True).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return folder


@pytest.fixture(
    scope="module",
    params=[plain_folder, qwen_folder, resaved_qwen_folder],
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


def test_what_it_knows_of_its_tokens(pair):
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


@NEWER
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("family", [None, *SPECIAL])
def test_chats(pair, family, tools, messages):
    fast, whole = pair
    given = {"tools": tools, "add_generation_prompt": family == "qwen3", "extra": (1, "x")}
    if family is not None:
        given["chat_template"] = (TEMPLATES / f"{family}.jinja").read_text()

    def rendered(tokenizer):
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, **given)
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            return type(error), str(error)

    assert rendered(fast) == rendered(whole)
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


def test_what_it_has_not_comes_from_transformers(pair):
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
        ("tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"}),
        ("tokenizer_config.json", {"add_bos_token": True}),
        ("tokenizer_config.json", {"split_special_tokens": True}),
        ("tokenizer_config.json", {"pad_token": "<not there>"}),
        ("tokenizer_config.json", {"clean_up_tokenization_spaces": True}),
        ("tokenizer.json", {"post_processor": None}),
        ("special_tokens_map.json", {}),
    ],
)
def test_what_transformers_would_change_is_left_to_it(pair, tmp_path, file, change):
    pair[0].save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert read_fast_tokenizer(tmp_path) is not None
    path = tmp_path / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | change))
    assert read_fast_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("config.json", "model_type"),
        ("tokenizer_config.json", "unk_token"),
        ("tokenizer_config.json", "added_tokens_decoder.260"),
        ("tokenizer.json", "model.end_of_word_suffix"),
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
    pair[0].save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    code = f"""
import sys
from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.tokenizer import load_tokenizer
from groupwise.engine.models.tokens import prompt_ids
assert prompt_ids(load_tokenizer(ModelConfig(name={str(tmp_path)!r})), [{{"role": "user", "content": "a"}}])
print("transformers" in sys.modules)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"
