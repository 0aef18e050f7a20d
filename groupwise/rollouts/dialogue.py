"""What was said in a rollout of several turns, as the tokens that the sampler sees.

The tokens that were sampled stay as they were sampled. What the environment says is appended to them: text as it stands, or, in a chat,
the difference between what the chat template made of the conversation before and what it makes of it now. That difference
begins where the policy's words end, so it holds whatever the template puts between two turns.

Some templates write earlier turns anew, for example without their reasoning. Then there is no such difference: the conversation is
tokenised afresh, and a new row begins, whose prompt is all that the policy sees. White space that a template trims at the ends
of the policy's words is no reason for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from groupwise.errors import TaskError
from groupwise.models.tokens import completion_text, prompt_ids, refusal
from groupwise.rollouts.single import policy_segment
from groupwise.rollouts.two_stage import text_ids
from groupwise.tasks.environment import Observation
from groupwise.tasks.tools import Schema, instructions
from groupwise.types import Completion, Message, Prompt, SamplingParams, Segment


class Unrenderable(Exception):
    """An observation that cannot follow what was said before; its text says why."""


class Dialogue(Protocol):
    """One rollout's conversation after its first prompt."""

    segments: list[Segment]

    @property
    def context(self) -> tuple[int, ...]:
        """All that the sampler sees next."""
        ...

    def say(self, completion: Completion, params: SamplingParams) -> str:
        """Take what the policy wrote; returns it as text."""
        ...

    def hear(self, observation: Observation, longest: int) -> bool:
        """Take the environment's answer, unless the context would have more than `longest` tokens; whether it was taken.

        Raises Unrenderable.
        """
        ...

    def record(self, observation: Observation) -> None:
        """Note an answer that the policy does not see any more."""
        ...

    @property
    def text(self) -> str:
        """All that was said after the prompt, for rewards and people."""
        ...

    @property
    def messages(self) -> tuple[Message, ...] | None:
        """The same as messages of a chat; None for text."""
        ...


def begin(
    tokenizer: Any, prompt: Prompt, tools: Sequence[Schema], ids: tuple[int, ...] | None
) -> Dialogue:
    """A dialogue that begins with this prompt; `ids` are its tokens where they are known."""
    ids = ids or first_ids(tokenizer, prompt, tools)
    if isinstance(prompt, str):
        return TextDialogue(tokenizer, ids)
    return ChatDialogue(tokenizer, prompt, tools, ids)


def first_ids(tokenizer: Any, prompt: Prompt, tools: Sequence[Schema]) -> tuple[int, ...]:
    """Tokens of a first prompt, with the tools in it where it is a chat. Raises TaskError."""
    if not tools or isinstance(prompt, str):
        return prompt_ids(tokenizer, prompt)
    if not knows_tools(tokenizer):
        return prompt_ids(tokenizer, told_of_tools(prompt, tools))
    try:
        return text_ids(tokenizer, _render(tokenizer, prompt, tools))
    except Unrenderable as problem:
        raise TaskError(
            f"{problem}\nOr give the tools in TextCalls, which the template need not know."
        ) from problem


def knows_tools(tokenizer: Any) -> bool:
    """Whether the chat template has a place for tools."""
    return "tools" in str(tokenizer.chat_template or "")


def told_of_tools(messages: Sequence[Message], tools: Sequence[Schema]) -> list[Message]:
    """The chat with the tools described in its system message."""
    told = instructions(tools)
    if messages and messages[0].get("role") == "system":
        system = {**messages[0], "content": f"{messages[0]['content']}\n\n{told}"}
        return [system, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]


class TextDialogue:
    """Text after text, with nothing in between; a `Dialogue`."""

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
        ids = text_ids(self._tokenizer, _as_text(observation))
        if len(self._context) + len(ids) > longest:
            return False
        self._context += ids
        if ids:
            self.segments.append(Segment("environment", ids))
        return True

    def record(self, observation: Observation) -> None:
        """See `Dialogue.record`."""
        self._said.append(_as_text(observation))

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
    ) -> None:
        self.segments: list[Segment] = []
        self._tokenizer = tokenizer
        self._told = bool(tools) and not knows_tools(tokenizer)
        self._tools = () if self._told else tools
        self._prompt = told_of_tools(prompt, tools) if self._told else list(prompt)
        self._messages: list[Message] = []
        self._rendered = _render(tokenizer, self._prompt, self._tools)
        """The conversation up to where the policy speaks, as the template wrote it last."""
        self._context = ids
        self._last: Sequence[int] = ()
        self._row: tuple[int, ...] | None = None
        """Prompt of the row that the next segment begins, if it begins one."""

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
        conversation = [*self._prompt, *map(self._as_template_knows, self._messages)]
        rendered = _render(self._tokenizer, conversation, self._tools)
        added = self._added(rendered)
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
        return "\n\n".join(f"{each['role']}: {each['content']}" for each in self._messages)

    @property
    def messages(self) -> tuple[Message, ...]:
        """See `Dialogue.messages`."""
        return tuple(self._messages)

    def _added(self, rendered: str) -> str | None:
        """What the template put after the policy's words; None if it wrote anew what stands before."""
        if not rendered.startswith(self._rendered):
            return None
        rest = rendered[len(self._rendered) :]
        verbatim = self._tokenizer.decode(list(self._last), skip_special_tokens=False)
        if rest.startswith(verbatim):
            return rest[len(verbatim) :]
        rest, words = rest.lstrip(), completion_text(self._tokenizer, self._last).strip()
        if not rest.startswith(words):
            return None
        return rest[len(words) :].removeprefix(self._end_of_turn())

    def _end_of_turn(self) -> str:
        """The stop token that the policy wrote, as text; empty where it wrote none."""
        if completion_text(self._tokenizer, self._last[-1:]):
            return ""
        return self._tokenizer.decode(list(self._last[-1:]), skip_special_tokens=False)

    def _as_template_knows(self, message: Message) -> Message:
        """A tool's result in a chat whose template knows no tools is told by the user."""
        if not self._told or message["role"] != "tool":
            return message
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": result}


def _as_text(observation: Observation) -> str:
    if observation is None or isinstance(observation, str):
        return observation or ""
    raise Unrenderable("the environment answered text with chat messages; expected text")


def _render(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Schema]) -> str:
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            add_generation_prompt=True,
            tokenize=False,
        )
    except (
        Exception
    ) as error:  # a template is a program of the model's makers and raises what it likes
        raise Unrenderable(refusal(error, messages)) from error
