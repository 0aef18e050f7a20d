"""Renders a conversation with the model's chat template; no other module does.

`prompt_text` is the prompt for the model. It ends where the assistant's answer starts. If the last message is the start of an
assistant's answer (a prefill such as `<think>`), the prompt ends with the words of that message, and the model continues them. `render`
renders messages without this special case.

A template also receives the schemas of tools, and its own arguments such as `enable_thinking`: those of `model.chat_template_kwargs`,
which `load_tokenizer` stores on the tokenizer, and those of the row, which take precedence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from groupwise.core.errors import TaskError
from groupwise.core.types import Message, Prompt
from groupwise.engine.models.control_tokens import OF_TOOLS, break_control_tokens
from groupwise.engine.models.tool_calls import written_calls

PROBE = "⟦words⟧"
"""Placeholder for the assistant's words, used to find the text that a template writes before them."""

OF_THE_MODEL = "chat_template_kwargs"
"""Attribute of a tokenizer with the template arguments for all conversations."""

RESERVED_ARGUMENTS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "conversation",
        "chat_template",
        "tokenize",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
    }
)
"""Names that are not allowed as arguments of a row."""

_THOUGHTS = re.compile(
    r"(?P<opens>[<[◁](?P<name>[^<>[\]◁▷/\s|]+)[>\]▷]|<\|begin_of_thought\|>|<\|channel\|>analysis(?:<\|message\|>)?)"
    r"\s*(?:[<[◁]/(?P=name)[>\]▷]\s*)?$"
)
"""Matches reasoning that a template opens, or opens and closes, before the assistant's words: `<think>`, `[THINK]`, `◁think▷`, channels."""


class TemplateRefused(TaskError):
    """The template, or the code that uses its render, does not accept this conversation; it may accept others."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, and the other inputs of its template."""

    messages: Sequence[Message]
    tools: Sequence[Any] = ()
    """JSON schemas of the tools."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


def prompt_text(tokenizer: Any, chat: Chat) -> str:
    """A conversation up to the point where the model continues it. Raises TaskError if the template refuses it."""
    if not chat.messages or chat.messages[-1].get("role") != "assistant":
        return render(tokenizer, chat, ask=True)
    *history, unfinished = chat.messages
    if not history:
        raise TemplateRefused(
            "The prompt is one message of the assistant: nothing is asked before the assistant speaks. Put a message of the user before it."
        )
    words = unfinished.get("content")
    if not isinstance(words, str) or not words or unfinished.get("tool_calls"):
        raise TaskError(
            "The prompt ends with a message of the assistant that has no text or calls tools, so it cannot be continued. Let it "
            "end with the text that the answer begins with, or leave that message out."
        )
    earlier = Chat(history, chat.tools, chat.template_kwargs)
    opening = render(tokenizer, earlier, ask=True)
    if opening == render(tokenizer, earlier, ask=False):
        header = assistant_header(tokenizer, earlier)
        if header is None:
            raise TaskError(
                "The prompt ends with a message of the assistant, but the model's chat template does not show where the assistant's words "
                "begin: it renders the conversation differently once they are there. Leave that message out, or set model.chat_template to "
                "one that knows add_generation_prompt."
            )
        opening += header
    thoughts = _THOUGHTS.search(opening)
    if thoughts is not None and thoughts["opens"] in words:
        opening = opening[: thoughts.start()]  # the prefill opens the reasoning itself
    return opening + break_control_tokens(tokenizer, words)


def render(tokenizer: Any, chat: Chat, *, ask: bool) -> str:
    """Render all messages; `ask` adds the assistant header, after which the model answers. Raises Refused if the template refuses them."""
    return apply(tokenizer, chat, add_generation_prompt=ask, tokenize=False)


def apply(tokenizer: Any, chat: Chat, **options: Any) -> Any:
    """Call `apply_chat_template` on all messages. Raises Refused if the template refuses them."""
    arguments = {"tools": list(chat.tools) or None, **template_arguments(tokenizer, chat)}
    template, messages = template_of(tokenizer, chat), list(chat.messages)
    if "developer" not in template:  # a newer name of the role "system"
        messages = [
            {**message, "role": "system"} if message.get("role") == "developer" else message
            for message in messages
        ]
    try:
        if not options.get("tokenize"):
            messages = [
                break_control_tokens(tokenizer, message, of_tool=message.get("role") in OF_TOOLS)
                for message in messages
            ]
            arguments = break_control_tokens(tokenizer, arguments)
        if any(message.get("tool_calls") for message in messages):
            messages, arguments["chat_template"] = written_calls(
                tokenizer, messages, template, arguments
            )
        return tokenizer.apply_chat_template(messages, **arguments, **options)
    except (
        Exception
    ) as error:  # a template is a program by the model's authors and may raise anything
        text = refusal(error, messages)
        raise TemplateRefused(text[0].upper() + text[1:]) from error


def template_of(tokenizer: Any, chat: Chat) -> str:
    """The text of the template. Raises TaskError for a tokenizer that has none."""
    if not tokenizer.chat_template:
        raise TaskError(
            "A row is a list of chat messages, but the model's tokenizer has no chat template. Give text (`prompt`, and for sft also "
            "`completion` or `text`), or a template file as model.chat_template."
        )
    return tokenizer.get_chat_template(tools=list(chat.tools) or None)


def template_arguments(tokenizer: Any, chat: Chat) -> dict[str, Any]:
    """Template arguments other than messages and tools. Raises TaskError for one that would have no effect."""
    template = template_of(tokenizer, chat)
    arguments = {**getattr(tokenizer, OF_THE_MODEL, {}), **chat.template_kwargs}
    if reserved := sorted(RESERVED_ARGUMENTS & arguments.keys()):
        raise TaskError(
            f"chat_template_kwargs has {', '.join(reserved)}, which are for `apply_chat_template` itself. Leave it out."
        )
    for name in arguments:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise TaskError(
                f"chat_template_kwargs has {name!r}, which the model's chat template does not mention, so that it would have no effect. "
                "Leave it out, or give a template that knows it as model.chat_template."
            )
    return arguments


def assistant_header(tokenizer: Any, chat: Chat) -> str | None:
    """The text that the template writes between a conversation and the assistant's next words; None if it cannot be determined."""
    with suppress(TaskError):
        messages = [*chat.messages, {"role": "assistant", "content": PROBE}]
        bare = render(tokenizer, chat, ask=False)
        answered = render(tokenizer, Chat(messages, chat.tools, chat.template_kwargs), ask=False)
        header, marker, _ = answered.removeprefix(bare).partition(PROBE)
        return header if marker and answered.startswith(bare) else None
    return None


def missing_turn_warning(tokenizer: Any, prompt: Prompt) -> str | None:
    """A warning if prompts do not end with the template's assistant header; None if they do."""
    if isinstance(prompt, str) or prompt[-1].get("role") == "assistant":
        return None
    header, chat = None, Chat(prompt)
    with suppress(TaskError):
        if render(tokenizer, chat, ask=True) == render(tokenizer, chat, ask=False):
            header = assistant_header(tokenizer, chat)
    if header is None or not header.strip():
        return None
    return (
        f"the chat template writes {header!r} before an answer, but not at the end of a prompt, so the model is not told "
        "that it is its turn. Let the template honour add_generation_prompt, or give another one as model.chat_template"
    )


def refusal(error: Exception, messages: Sequence[Message]) -> str:
    """Explains why a chat template could not render messages: invalid Unicode, a broken template, or messages that it refuses."""
    texts = (str(value) for message in messages for value in message.values())
    surrogate = next(
        (char for text in texts for char in text if "\ud800" <= char <= "\udfff"), None
    )
    if surrogate is not None:
        return (
            f"a message has the character {surrogate!a}, half of a surrogate pair, which is not valid Unicode. Leave it out, or decode the "
            "text correctly at its source."
        )
    reason, line = str(error).rstrip(". \n"), getattr(error, "lineno", None)
    if line is not None:  # only jinja's syntax errors carry a line number
        return (
            f"the chat template of the model does not parse: {reason} (line {line} of the template). Fix it, or give "
            "another one as model.chat_template."
        )
    if not messages:
        return (
            "the conversation has no message, so nothing is asked. Give it a message of the user."
        )
    roles = ", ".join(str(message.get("role")) for message in messages)
    return (
        f"the chat template of the model refuses messages with the roles {roles}: {reason}. Give messages that it takes "
        "(many know no system role, or want user and assistant in turns), or another template as model.chat_template."
    )
