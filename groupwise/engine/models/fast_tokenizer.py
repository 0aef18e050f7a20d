"""A tokenizer that needs `tokenizers` and Jinja, but not transformers, whose import alone costs a second and a half of a processor.

`read_fast_tokenizer` reads the folder of a model whose tokenizer transformers would take from `tokenizer.json` as it is, or rebuild as one
of four classes: those of Qwen2 and Qwen3, of SmolLM2, of Llama 2 and of Gemma. So Llama 3, Mistral's smaller models and Phi 3 and 4 are
read here as well. For any other folder, or if transformers would change anything else while it loads it, the answer is None. Token ids,
texts, rendered chats and saved files equal those of transformers. What `FastTokenizer` cannot do itself, transformers' own tokenizer does:
it is loaded at that moment, and answers everything from then on.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

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

from groupwise.engine.models.template_program import run_template

CLASS = "TokenizersBackend"
"""transformers' class whose `tokenizer.json` is taken as it is."""
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
UNLIMITED = int(1e30)
"""transformers' `model_max_length` of a tokenizer that has no limit."""
_SAVED = {"backend": "tokenizers", "is_local": True, "local_files_only": True}
_KNOWN = {*NAMED, *_SAVED, "tokenizer_class", "model_max_length", "extra_special_tokens"}
_KNOWN |= {"clean_up_tokenization_spaces", "errors", "add_prefix_space", "split_special_tokens"}
_OLDER = {"added_tokens_decoder", "additional_special_tokens", "chat_template"}
"""Keys that only older releases of transformers write."""
_UNUSED = {"add_bos_token", "add_eos_token", "sp_model_kwargs", "spaces_between_special_tokens"}
_UNUSED |= {"use_default_system_prompt", "vocab_size", "model_input_names", "padding_side"}
_UNUSED |= {"legacy"}
"""Keys of published configs that change no ids and no texts where there is a `tokenizer.json`; transformers writes them when it saves."""
QWEN, GPT2, LLAMA, GEMMA = "Qwen2Tokenizer", "GPT2Tokenizer", "LlamaTokenizer", "GemmaTokenizer"
_REBUILT = {
    QWEN: ("qwen2", "qwen3"),
    GPT2: ("llama",),
    LLAMA: ("llama",),
    GEMMA: ("gemma", "gemma2", "gemma3", "gemma3_text"),
}
"""Classes that take vocabulary, merges and added tokens from `tokenizer.json`, and cut texts in their own way; of these model types."""
_MISTRAL = ("mistral", "mixtral")
"""Model types whose tokenizer the package mistral-common reads, if it is installed."""
_TAKEN_AS_IT_IS = (*_MISTRAL, "phi3", "olmo2", "granite")
"""Model types whose `tokenizer.json` is taken as it is, although their configs name another class."""
_DEFAULTS = {
    QWEN: {
        "unk_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    },
    GPT2: dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    LLAMA: {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    GEMMA: {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
}
"""Special tokens of a class where the config names none."""
_QWEN_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REPAIRED = ("mistral", "ministral", "voxtral", "pixtral")
"""Model types whose tokenizer transformers repairs if its vocabulary is large."""


def read_fast_tokenizer(folder: Path) -> FastTokenizer | None:
    """The tokenizer of a local folder, or None if only transformers loads it as it should be."""
    files = {entry.name for entry in folder.iterdir()}
    if not {"tokenizer.json", "tokenizer_config.json"} <= files:
        return None
    written = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens, template = written.get("added_tokens_decoder"), written.get("chat_template")
    if "chat_template.jinja" in files:
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    others = {"special_tokens_map.json", "added_tokens.json"} if tokens is None else set[str]()
    others |= {"additional_chat_templates", "tekken.json"}
    if others & files or not isinstance(template, str | None):
        return None
    try:
        backend: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # noqa: BLE001 - it raises nothing more special for a damaged file, which transformers reports
        return None
    facts = (
        json.loads((folder / "config.json").read_text("utf-8")) if "config.json" in files else {}
    )
    model_type = str(facts.get("model_type", _REPAIRED[0]))
    large = backend.get_vocab_size() > 100_000
    kind = _class_of(str(written.get("tokenizer_class")), model_type, backend)
    if kind is None or (large and model_type.startswith(_REPAIRED)):
        return None
    config = _current_config(written, kind)
    if not _is_known(written, kind, backend) or not _is_complete(backend, tokens, config):
        return None
    if kind != CLASS:
        _rebuild(backend, kind, config)
    if backend.post_processor is None:
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1")
    return FastTokenizer(str(folder), config, backend, template)


def _class_of(declared: str, model_type: str, backend: Any) -> str | None:
    """The class as which transformers loads a tokenizer whose config declares this one; None where that is not known here."""
    name = declared.removesuffix("Fast")
    if declared == CLASS:
        return CLASS
    if model_type in _MISTRAL and importlib.util.find_spec("mistral_common") is not None:
        return None
    if declared == "PreTrainedTokenizerFast" and model_type in ("llama", *_TAKEN_AS_IT_IS):
        return CLASS
    if name in (LLAMA, GPT2) and model_type in _TAKEN_AS_IT_IS:
        return CLASS
    if name == LLAMA and isinstance(backend.decoder, decoders.ByteLevel):
        return None  # releases of transformers differ
    return name if model_type in _REBUILT.get(name, ()) else None


def _is_known(written: Mapping[str, Any], kind: str, backend: Any) -> bool:
    """True if the config holds nothing that changes what the class does, apart from what is read here."""
    plain = written.get("add_prefix_space") in (None, False)
    return (
        written.keys() <= _KNOWN | _OLDER | _UNUSED
        and not written.get("split_special_tokens")
        and (plain or kind in (CLASS, LLAMA))
        and (
            not written.get("clean_up_tokenization_spaces") or isinstance(backend.model, models.BPE)
        )
        and written.get("model_input_names") in (None, ["input_ids", "attention_mask"])
        and not {"additional_special_tokens", "extra_special_tokens"} <= written.keys()
        and isinstance(written.get("extra_special_tokens", []), list | None)
        and (
            "added_tokens_decoder" in written  # it says what those are that stand as objects
            or all(isinstance(written.get(name), str | None) for name in NAMED)
        )
    )


def _current_config(written: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The config as transformers reads it: with its class, its special tokens as texts, and under today's names."""
    dropped = _OLDER | {"add_bos_token", "add_eos_token"}
    config = _DEFAULTS.get(kind, {}) | {key: written[key] for key in written.keys() - dropped}
    if "additional_special_tokens" in written:
        config["extra_special_tokens"] = written["additional_special_tokens"]
    texts = {
        name: config[name].get("content") for name in NAMED if isinstance(config.get(name), dict)
    }
    return {**config, **texts, "tokenizer_class": kind}


def _is_complete(backend: Any, tokens: Any, config: Mapping[str, Any]) -> bool:
    """True if transformers would add no tokens that the config names, and texts keep their lengths. `tokens`: those that it describes."""
    named = [config[name] for name in NAMED if config.get(name) is not None]
    special = [*named, *(config.get("extra_special_tokens") or ())]
    added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
    marked = {token.content for token in added.values() if token.special}
    return (
        not (backend.truncation or backend.padding)
        and all(isinstance(token, str) for token in special)
        and marked.issuperset(special)
        and tokens in (None, _described_tokens(backend))
        and (config["tokenizer_class"] == CLASS or _keeps_its_tokens(backend))
    )


_FLAGS = ("lstrip", "normalized", "rstrip", "single_word")


def _described_tokens(backend: Any) -> dict[str, dict[str, Any]]:
    """The added tokens as a config describes them in `added_tokens_decoder`."""
    added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
    return {
        str(number): {name: getattr(token, name) for name in ("content", "special", *_FLAGS)}
        for number, token in added.items()
    }


def _keeps_its_tokens(backend: Any) -> bool:
    """True if the tokenizer that transformers builds from these parts has the same tokens, and joins them by the same rules."""
    added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
    model, following = backend.model, backend.get_vocab_size(with_added_tokens=False)
    if not isinstance(model, models.BPE) or model.dropout or model.ignore_merges:
        return False
    for number, token in sorted(added.items()):
        known = model.token_to_id(token.content)
        if (following if known is None else known) != number:
            return False
        if any(getattr(token, flag) for flag in _FLAGS):
            return False
        following += known is None
    return not (model.continuing_subword_prefix or model.end_of_word_suffix)


def _rebuild(backend: Any, kind: str, config: Mapping[str, Any]) -> None:
    """Normalise, cut and decode texts as transformers' class does, whatever `tokenizer.json` says."""
    pieces = kind in (LLAMA, GEMMA)
    model = backend.model
    model.fuse_unk = model.byte_fallback = pieces
    model.unk_token = config["unk_token"] if kind == GEMMA else None
    backend.normalizer = None
    if not pieces:
        model.continuing_subword_prefix = model.end_of_word_suffix = ""
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == GPT2)
        if kind == QWEN:
            backend.normalizer = normalizers.NFC()
            words = pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated", invert=False)
            letters = pre_tokenizers.Sequence([words, letters])
        backend.pre_tokenizer, backend.decoder = letters, decoders.ByteLevel()
        return
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == GEMMA:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    else:
        prefixed = config.get("add_prefix_space") is not False
        first = "always" if config.get("legacy") else "first"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement="▁", prepend_scheme=first if prefixed else "never", split=False
        )
        steps += [decoders.Strip(content=" ", left=1)] * prefixed
    backend.decoder = decoders.Sequence(steps)


class _Encoded(dict[str, list[int]]):
    """Tokens of one text; it has what transformers' `BatchEncoding` has, which is made if it is asked for."""

    def __init__(self, tokenizer: FastTokenizer, text: str, special: bool) -> None:
        ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=special).ids
        super().__init__(input_ids=ids, attention_mask=[1] * len(ids))
        self._again = lambda: tokenizer._load()(text, add_special_tokens=special)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name] if name in self else getattr(self._again(), name)


class FastTokenizer:
    """Acts as the tokenizer of transformers that the folder holds: methods and attributes have its names and meaning."""

    def __init__(
        self, folder: str, config: dict[str, Any], backend: Any, chat_template: str | None
    ) -> None:
        vars(self).update(
            _folder=folder,
            _config=config,
            _backend=backend,
            _whole=None,
            chat_template=chat_template,
        )

    def __call__(self, text: Any, *, add_special_tokens: bool = True, **options: Any) -> Any:
        if self._whole is None and isinstance(text, str) and not options:
            return _Encoded(self, text, add_special_tokens)
        return self._load()(text, add_special_tokens=add_special_tokens, **options)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        plain = not options or (
            options.keys() == {"clean_up_tokenization_spaces"} and not any(options.values())
        )
        if self._whole is None and plain and isinstance(token_ids, list | tuple):
            ids = cast("Sequence[Any]", token_ids)
            if all(type(token) is int for token in ids):
                return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self._load().decode(token_ids, skip_special_tokens=skip_special_tokens, **options)

    def get_chat_template(self, chat_template: Any = None, tools: Any = None) -> str:
        if self._whole is None and isinstance(chat_template or self.chat_template, str):
            return chat_template or self.chat_template
        return self._load().get_chat_template(chat_template, tools)

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **options: Any,
    ) -> Any:
        template = chat_template or self.chat_template
        plain = self._whole is None and not tokenize and isinstance(template, str)
        if plain and conversation and not _OPTIONS & options.keys():
            rows = (*conversation, *(tools or ()))
            if isinstance(conversation, list) and all(isinstance(row, Mapping) for row in rows):
                named = {name: self._config[name] for name in NAMED if self._config.get(name)}
                asks = {"add_generation_prompt": add_generation_prompt}
                return run_template(template, conversation, tools, {**named, **options, **asks})
        return self._load().apply_chat_template(
            conversation,
            tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=tokenize,
            **options,
        )

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if self._whole is not None:
            return self._whole.convert_tokens_to_ids(tokens)
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self._backend.token_to_id(tokens)
        return self.unk_token_id if found is None else found

    def get_vocab(self) -> dict[str, int]:
        if self._whole is not None:
            return self._whole.get_vocab()
        return self._backend.get_vocab(with_added_tokens=True)

    def save_pretrained(self, save_directory: Any, **options: Any) -> Any:
        saved_as_read = not _UNUSED & self._config.keys()
        if (
            self._whole is not None
            or options
            or isinstance(self.chat_template, dict)
            or not saved_as_read
        ):
            return self._load().save_pretrained(save_directory, **options)
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        config = {"model_max_length": UNLIMITED, **self._config, **_SAVED}
        text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        names = ["tokenizer_config.json"]
        (folder / names[0]).write_text(text, encoding="utf-8")
        if self.chat_template is not None:
            names.append("chat_template.jinja")
            (folder / names[-1]).write_text(self.chat_template, encoding="utf-8")
        names.append("tokenizer.json")
        self._backend.save(str(folder / names[-1]))
        return tuple(str(folder / name) for name in names)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return (self._whole or self).backend_tokenizer.get_added_tokens_decoder()

    @property
    def backend_tokenizer(self) -> Any:
        return self._backend if self._whole is None else self._whole.backend_tokenizer

    @property
    def all_special_tokens(self) -> list[str]:
        if self._whole is not None:
            return self._whole.all_special_tokens
        named = [self._config[name] for name in NAMED if self._config.get(name) is not None]
        return [*dict.fromkeys([*named, *(self._config.get("extra_special_tokens") or ())])]

    @property
    def all_special_ids(self) -> list[int]:
        return self.convert_tokens_to_ids(self.all_special_tokens)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """transformers' class, for `isinstance`."""
        return type(self._load())

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_groupwise")):
            raise AttributeError(name)
        if self._whole is None and name.removesuffix("_id") in NAMED:
            text = self._config.get(name.removesuffix("_id"))
            return text if text is None or name in NAMED else self.convert_tokens_to_ids(text)
        return getattr(self._load(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in NAMED or hasattr(type(self), name):
            setattr(self._load(), name, value)
            return
        vars(self)[name] = value
        if self._whole is not None:
            setattr(self._whole, name, value)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> Any:
        return _unpickled, (vars(self),)

    def _load(self) -> Any:
        """transformers' own tokenizer, which answers everything once it is there."""
        if self._whole is None:
            import transformers

            kind = getattr(transformers, self._config["tokenizer_class"])
            whole = kind.from_pretrained(self._folder, local_files_only=True)
            for name, value in vars(self).items():
                if not name.startswith("_") or name.startswith("_groupwise"):
                    setattr(whole, name, value)
            vars(self)["_whole"] = whole
        return self._whole


_OPTIONS = {
    *("documents", "continue_final_message", "sanitize_control_tokens", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    "tokenizer_kwargs",
}
"""Arguments of `apply_chat_template` that are none of the template's."""


def _unpickled(attributes: dict[str, Any]) -> FastTokenizer:
    made = FastTokenizer.__new__(FastTokenizer)
    vars(made).update(attributes)
    return made
