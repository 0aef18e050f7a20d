"""Names of rewards elsewhere (TRL, open-r1, ms-swift, verifiers, well-known notebooks), and ours that do the same.

`meant_by` answers for a name that is none of ours; how a function is usually named (`get_…_reward`, `…_reward_func`) makes no difference.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Meant:
    """A guess at the meaning of a name that is none of ours."""

    rewards: tuple[str, ...]
    """Names of our rewards, the likeliest first; empty if there is nothing of the kind."""
    remark: str
    """An explanation of these, or advice if there is none."""
    parameters: tuple[tuple[str, str | float], ...] = ()
    """Parameters by which the first of ours does the same."""

    @property
    def hint(self) -> str:
        """The hint for the message that refuses the name."""
        remark = f"{self.remark[0].upper()}{self.remark[1:]}."
        ours = " or ".join(f"`{reward}`" for reward in self.rewards)
        return f"Did you mean {ours}? {remark}" if ours else remark


_RIGHT = Meant(
    ("math_answer",),
    "it compares the last answer tag or box with the gold answer, as mathematics where both can be read whole",
)
_EXACT = Meant(
    ("correctness", "correctness_xml"),
    "the first compares the whole completion with the gold answer, the second what stands in its answer tag",
)
_IN_TAG = Meant(
    ("correctness_xml",), "it compares what stands in the last answer tag with the gold answer"
)
_LAYOUT = Meant(
    ("strict_format", "soft_format"),
    "the first wants reasoning and answer in their tags and nothing else, the second both tags anywhere",
)
_TAGS = Meant(
    ("xml_count",), "it counts the four tags of reasoning and answer that occur exactly once"
)
_THINK = ("reasoning_tag", "think")
_THINK_LAYOUT = Meant(_LAYOUT.rewards, _LAYOUT.remark, (_THINK, ("right", 1.0)))
_THINK_TAGS = Meant(_TAGS.rewards, _TAGS.remark, (_THINK, ("each", 0.25)))
_COSINE = Meant(
    ("length",),
    "a right answer earns more the shorter it is, a wrong one loses less the longer it is, along a cosine over max_length tokens",
)
_REPEATED = Meant(
    ("repetition",), "its parameters are n, the words of an n-gram, and max_penalty, 0 or less"
)
_TOO_LONG = Meant(
    ("overlong",),
    "its parameters are max_length and cache, in tokens; algorithm.type dapo has it built in",
)
_CODE = Meant(
    ("python_tests",),
    "it runs a completion's Python against the tests of its row, and gives the share that passes",
)
_OTHER_CODE = Meant(
    ("python_tests",),
    "it runs Python alone, against the tests of its row; for other languages write a function of your own",
)
_CODE_BLOCK = Meant(
    ("python_tests",),
    "it finds the code itself, in a fenced block or in the answer tag, and gives 0 where that does not run",
)
_KEYWORDS = Meant(
    ("keyword_match",), "it gives the share of a row's keywords that the completion contains"
)
_JUDGE = Meant(
    ("judge",),
    "it asks a model behind an OpenAI-compatible service; endpoint and model are its parameters",
)
_RUBRIC = Meant(
    ("judge", "rubric_overlap"),
    "the first lets a model score by the row's rubric, the second compares words without a model",
)
_DIGITS = Meant(("int_reward",), "it asks for digits and nothing else in the answer tag")
_STEPS = Meant(
    (),
    "none here counts steps, which are words that any text may have; write a function of your own, path/to/file.py:function",
)

OTHER_NAMES: dict[str, Meant] = {
    **dict.fromkeys(
        (
            *("accuracy", "math", "math_accuracy", "math_verify", "math_equal", "boxed", "gsm8k"),
            *("reasoning_accuracy", "external_r1v_acc", "equation", "deepscaler", "prime_math"),
        ),
        _RIGHT,
    ),
    **dict.fromkeys(("exact_match", "em", "equals", "correct", "match"), _EXACT),
    **dict.fromkeys(("correctness_reward_func", "correctness_reward", "check_answer"), _IN_TAG),
    **dict.fromkeys(("format", "r1_format", "external_r1v_format"), _THINK_LAYOUT),
    **dict.fromkeys(("format_xml", "xml_format"), _LAYOUT),
    "tag_count": _THINK_TAGS,
    **dict.fromkeys(("tags", "xmlcount", "count_xml"), _TAGS),
    **dict.fromkeys(("cosine", "cosine_scaled", "len", "length_penalty", "kimi_length"), _COSINE),
    **dict.fromkeys(
        ("repetition_penalty", "ngram_repetition", "ngram_penalty", "repetitiveness"), _REPEATED
    ),
    **dict.fromkeys(
        (
            *("soft_overlong_punishment", "soft_overlong", "overlong_punishment"),
            *("overlong_penalty", "soft_punish", "dapo_overlong"),
        ),
        _TOO_LONG,
    ),
    **dict.fromkeys(
        (
            *("code", "binary_code", "weighted_binary_code", "code_execution", "code_tests"),
            *("unit_tests", "python", "python_code", "humaneval", "mbpp"),
        ),
        _CODE,
    ),
    "code_format": _CODE_BLOCK,
    **dict.fromkeys(("ioi_code", "cf_code", "codeforces"), _OTHER_CODE),
    **dict.fromkeys(("keyword", "keywords", "contains"), _KEYWORDS),
    **dict.fromkeys(("llm_judge", "llm_as_judge", "llm_as_a_judge", "ruler", "genrm"), _JUDGE),
    **dict.fromkeys(("rubric", "rubrics"), _RUBRIC),
    **dict.fromkeys(("int", "integer", "digits", "is_int"), _DIGITS),
    **dict.fromkeys(("reasoning_steps", "steps", "num_steps"), _STEPS),
}
"""Meanings by name, without the parts that `meant_by` takes off."""

_ENDS = re.compile(r"(_rewards?)?(_(func|fn|function)s?)?$|_score$")


def meant_by(name: str, known: Collection[str]) -> Meant | None:
    """The likely meaning of a name, of a function in a module also by its last part; None for a name that says nothing.

    `known` are our own names, which `get_…_reward` and the like may stand for.
    """
    last = re.split(r"[.:/]", name)[-1]
    # `cosine_scaled` of `get_cosine_scaled_reward`.
    for tried in (last, _ENDS.sub("", last.lower().removeprefix("get_"), count=1)):
        if tried in OTHER_NAMES:
            return OTHER_NAMES[tried]
        if tried in known and tried != name:
            return Meant((tried,), "here it has that name")
    return None
