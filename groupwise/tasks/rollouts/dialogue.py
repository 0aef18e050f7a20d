"""The conversation of a rollout of several turns, as the tokens that the sampler sees.

Sampled tokens are never changed. The environment's answer is appended to them: unchanged for text; in a chat, as the difference
between the chat template's output before and after the answer. That difference starts where the policy's words end, so it includes
everything that the template puts between two turns.

Some templates rewrite earlier turns, for example without their reasoning. Then there is no such difference: the conversation is
tokenised again, and a new row starts, whose prompt is everything that the policy sees. A template that only trims white space at
the ends of the policy's words does not cause that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from groupwise.api.schemas.template_columns import ForTemplate, for_template
from groupwise.core.errors import TaskError
from groupwise.core.types import Completion, Message, Prompt, SamplingParams, Segment
from groupwise.engine.models.chat_template import Chat, prompt_text
from groupwise.engine.models.control_tokens import break_control_tokens, pieces
from groupwise.engine.models.tokens import completion_text, rendered_ids, rendered_prompt, text_ids
from groupwise.tasks.data.messages import join_conversation
from groupwise.tasks.environment import Observation
from groupwise.tasks.rollouts.single import policy_segment
from groupwise.tasks.tools import Schema, instructions


class Unrenderable(Exception):
    """An observation that cannot follow the conversation; the message says why."""


class Dialogue(Protocol):
    """One rollout's conversation after its first prompt."""

    segments: list[Segment]

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens that the sampler gets next."""
        ...

    def say(self, completion: Completion, params: SamplingParams) -> str:
        """Add the policy's completion; returns it as text."""
        ...

    def hear(self, observation: Observation, longest: int) -> bool:
        """Add the environment's answer, unless the context would have more than `longest` tokens. Returns True if it was added.

        Raises Unrenderable.
        """
        ...

    def record(self, observation: Observation) -> None:
        """Record an answer that the policy no longer sees."""
        ...

    @property
    def text(self) -> str:
        """The conversation after the prompt, for rewards and readers."""
        ...

    @property
    def messages(self) -> tuple[Message, ...] | None:
        """The same as messages of a chat; None for text."""
        ...


def begin_dialogue(
    tokenizer: Any,
    prompt: Prompt,
    tools: Sequence[Schema],
    columns: Mapping[str, Any],
    ids: tuple[int, ...] | None,
) -> Dialogue:
    """A dialogue that starts with this prompt; `ids` are its tokens if they are known. The other arguments are those of `first_ids`."""
    ids = ids or first_ids(tokenizer, prompt, tools, columns)
    if isinstance(prompt, str):
        return TextDialogue(tokenizer, ids)
    template_inputs = _template_inputs(tools, columns)
    return ChatDialogue(tokenizer, prompt, template_inputs.tools, ids, template_inputs.arguments)


def first_ids(
    tokenizer: Any,
    prompt: Prompt,
    tools: Sequence[Schema],
    columns: Mapping[str, Any],
    check_rendered: Callable[[str], object] | None = None,
) -> tuple[int, ...]:
    """Tokens of a first prompt; see `first_text`. `check_rendered` gets a chat's text before it is tokenised, and may raise any error."""
    text = first_text(tokenizer, prompt, tools, columns)
    if check_rendered is not None and not isinstance(prompt, str):
        check_rendered("".join(pieces(text)))
    return rendered_ids(tokenizer, prompt, text)


def first_text(
    tokenizer: Any, prompt: Prompt, tools: Sequence[Schema], columns: Mapping[str, Any]
) -> str:
    """The text of a first prompt. A chat prompt includes the tools, and its template gets the row's other columns that are meant for it.

    Raises TaskError.
    """
    if isinstance(prompt, str):
        row_inputs = for_template(columns, "a row")  # the task's own text describes its `tools`
        return rendered_prompt(tokenizer, prompt, row_inputs.tools, row_inputs.arguments)
    template_inputs = _template_inputs(tools, columns)
    if not knows_tools(tokenizer):
        messages = without_tools(tokenizer, prompt, template_inputs.tools)
        return rendered_prompt(tokenizer, messages, (), template_inputs.arguments)
    try:
        arguments = template_inputs.arguments
        return rendered_prompt(tokenizer, prompt, template_inputs.tools, arguments)
    except TaskError as problem:
        hint = (
            "\nOr give the tools in TextCalls, which the template need not know." if tools else ""
        )
        raise TaskError(f"{problem}{hint}") from problem


def _template_inputs(tools: Sequence[Schema], columns: Mapping[str, Any]) -> ForTemplate:
    """Inputs of a chat's template: the tools of the task, or else those of the row. Raises TaskError if both have tools."""
    row_inputs = for_template(columns, "a row")
    if not tools:
        return row_inputs
    if row_inputs.tools:
        raise TaskError(
            "The row has a column `tools`, and the task's environment has tools of its own, which are those that can be called. Leave the "
            "column out, or call it otherwise."
        )
    return replace(row_inputs, tools=tuple(tools))


def knows_tools(tokenizer: Any) -> bool:
    """True if the chat template has a place for tools."""
    return "tools" in str(tokenizer.chat_template or "")


def with_tool_descriptions(messages: Sequence[Message], tools: Sequence[Schema]) -> list[Message]:
    """The chat with the tools described in its system message."""
    tool_text = instructions(tools)
    if messages and messages[0].get("role") in ("system", "developer"):
        system = "\n\n".join(filter(str.strip, (messages[0].get("content") or "", tool_text)))
        return [{**messages[0], "content": system}, *messages[1:]]
    return [{"role": "system", "content": tool_text}, *messages]


def without_tools(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Schema]
) -> list[Message]:
    """The chat for a template that has no place for tools: they are described in the system message, and their results are messages of the
    user. A template that mentions the role `tool` gets results as they are, unless tools are given.
    """
    described = with_tool_descriptions(messages, tools) if tools else list(messages)
    if not tools and "tool" in str(tokenizer.chat_template or ""):
        return described
    return [_result_of_user(tokenizer, message) for message in described]


def _result_of_user(tokenizer: Any, message: Message) -> Message:
    """A tool's result as a message of the user; any other message as it is."""
    if message.get("role") != "tool":
        return message
    content = break_control_tokens(tokenizer, message.get("content") or "", of_tool=True)
    return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}


class TextDialogue:
    """Plain text with nothing between completions and answers; a `Dialogue`."""

    def __init__(self, tokenizer: Any, ids: tuple[int, ...]) -> None:
        self.segments: list[Segment] = []
        self._tokenizer = tokenizer
        self._context = ids
        self._said: list[str] = []

    @property
    def context(self) -> tuple[int, ...]:
        """See `Dialogue.context`."""
        return self._context

    def say(self, completion: Completion, params: SamplingParams) -> str:
        """See `Dialogue.say`."""
        self.segments.append(policy_segment(completion, params))
        self._context += completion.token_ids
        text = completion_text(self._tokenizer, completion.token_ids)
        self._said.append(text)
        return text

    def hear(self, observation: Observation, longest: int) -> bool:
        """See `Dialogue.hear`."""
        self.record(observation)
        ids = text_ids(self._tokenizer, _observation_text(observation))
        if len(self._context) + len(ids) > longest:
            return False
        self._context += ids
        if ids:
            self.segments.append(Segment("environment", ids))
        return True

    def record(self, observation: Observation) -> None:
        """See `Dialogue.record`."""
        self._said.append(_observation_text(observation))

    @property
    def text(self) -> str:
        """See `Dialogue.text`."""
        return "".join(self._said)

    @property
    def messages(self) -> None:
        """Text has none."""
        return None


class ChatDialogue:
    """Messages through the model's chat template; a `Dialogue`."""

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[Message],
        tools: Sequence[Schema],
        ids: tuple[int, ...],
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self.segments: list[Segment] = []
        self._tokenizer = tokenizer
        self._describes_tools = bool(tools) and not knows_tools(tokenizer)
        self._tools = () if self._describes_tools else tools
        self._template_kwargs = template_kwargs
        self._prompt = (
            list(prompt) if knows_tools(tokenizer) else without_tools(tokenizer, prompt, tools)
        )
        self._messages: list[Message] = []
        self._rendered = self._render(self._prompt)
        """The template's last output for the conversation, up to the point where the policy continues."""
        self._context = ids
        self._last: Sequence[int] = ()
        self._row: tuple[int, ...] | None = None
        """Prompt of the row that the next segment starts, if it starts one."""

    @property
    def context(self) -> tuple[int, ...]:
        """See `Dialogue.context`."""
        return self._context

    def say(self, completion: Completion, params: SamplingParams) -> str:
        """See `Dialogue.say`."""
        self.segments.append(policy_segment(completion, params, self._row))
        self._row = None
        self._last = completion.token_ids
        self._context += completion.token_ids
        text = completion_text(self._tokenizer, completion.token_ids)
        self._messages.append({"role": "assistant", "content": text})
        return text

    def hear(self, observation: Observation, longest: int) -> bool:
        """See `Dialogue.hear`."""
        self.record(observation)
        if not observation:
            raise Unrenderable("the environment is not done, but gave no observation")
        messages = [*self._messages]
        # The chat template does not support tools: their results are user messages.
        if self._describes_tools:
            messages = [_result_of_user(self._tokenizer, message) for message in messages]
        rendered = self._render(join_conversation(self._prompt, messages))
        added = self._template_suffix(rendered)
        ids = text_ids(self._tokenizer, rendered if added is None else added)
        context = ids if added is None else self._context + ids
        if len(context) > longest:
            return False
        self._rendered, self._context = rendered, context
        if added is None:
            self._row = ids
        else:
            self.segments.append(Segment("environment", ids))
        return True

    def record(self, observation: Observation) -> None:
        """See `Dialogue.record`."""
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}]
        self._messages += observation or []

    @property
    def text(self) -> str:
        """See `Dialogue.text`."""
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self._messages)

    @property
    def messages(self) -> tuple[Message, ...]:
        """See `Dialogue.messages`."""
        return tuple(self._messages)

    def _template_suffix(self, rendered: str) -> str | None:
        """The text that the template put after the policy's words; None if it rewrote the text before them."""
        if not rendered.startswith(self._rendered):
            return None
        rest = rendered[len(self._rendered) :]
        verbatim = self._tokenizer.decode(list(self._last), skip_special_tokens=False)
        if rest.startswith(verbatim):
            return rest[len(verbatim) :]
        text = completion_text(self._tokenizer, self._last).strip()
        rest, words = rest.lstrip(), break_control_tokens(self._tokenizer, text)
        if not rest.startswith(words):
            return None
        return rest[len(words) :].removeprefix(self._end_of_turn())

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return prompt_text(self._tokenizer, Chat(messages, self._tools, self._template_kwargs))
        except TaskError as error:
            raise Unrenderable(str(error)) from error

    def _end_of_turn(self) -> str:
        """The stop token that the policy wrote, as text; empty if it wrote none."""
        if completion_text(self._tokenizer, self._last[-1:]):
            return ""
        return self._tokenizer.decode(list(self._last[-1:]), skip_special_tokens=False)


def _observation_text(observation: Observation) -> str:
    if observation is None or isinstance(observation, str):
        return observation or ""
    raise Unrenderable("the environment answered text with chat messages; expected text")
