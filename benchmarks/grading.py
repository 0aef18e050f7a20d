r"""How often graders of mathematics are wrong, ours beside math-verify alone: `python -m benchmarks.grading`.

Three sets, each with the right verdict known: pairs from a file, if one is given (`--pairs`, JSONL with `gold`, `completion` and `right`);
golds of the kinds that MATH and GSM8K have, each written in other ways (right) and with one mistake (a near miss: wrong); and arithmetic
as the built-in task `math` makes it. The near misses change a sign, a digit, an operator, a base, a bracket or a letter.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from groupwise.tasks.rewards.mathematics import MathAnswer

Grader = Callable[[str, str], bool]


@dataclass(frozen=True, slots=True)
class Case:
    """An answer with the verdict that it deserves."""

    kind: str
    gold: str
    completion: str
    right: bool


GOLDS: dict[str, list[str]] = {
    r"42": ["42.0", r"\boxed{42}", "$42$", "x = 42", r"42\text{ apples}", "+42", r"\frac{84}{2}", "**42**", "The answer is 42.", "42 km"],
    r"-17": ["−17", "-17.0", r"\left(-17\right)", "x=-17", "- 17"],
    r"1234": ["1,234", "1{,}234", "1 234", r"\$1234", r"1,\!234", "1234.00", r"1.234 \times 10^3"],
    r"0.25": [".25", r"\frac14", "1/4", r"25\%", r"\tfrac{1}{4}", r"2.5\cdot 10^{-1}", "0.250"],
    r"\frac{3}{7}": ["3/7", r"\dfrac{3}{7}", r"\frac37", r"\frac{6}{14}", "$3/7$", r"{3}/{7}"],
    r"-\frac{5}{3}": [r"\frac{-5}{3}", r"\frac{5}{-3}", "-5/3", r"-1\frac{2}{3}", r"-\dfrac53"],
    r"2\frac{3}{4}": ["2 3/4", r"\frac{11}{4}", "2.75", "11/4"],
    r"3\sqrt{2}": [r"\sqrt{18}", r"\sqrt{2}\cdot 3", "3√2", "3*sqrt(2)", r"\frac{6}{\sqrt{2}}", r"3\sqrt2"],
    r"\frac{2+\sqrt{5}}{3}": [r"\frac{\sqrt{5}+2}{3}", r"\frac23+\frac{\sqrt5}{3}", r"(2+\sqrt{5})/3"],
    r"12\pi": [r"\pi \cdot 12", "12π", "12*pi", r"12\pi\text{ cm}^2", r"\frac{24\pi}{2}"],
    r"\frac{\pi}{6}": ["pi/6", "π/6", r"\dfrac{\pi}{6}", r"\frac{1}{6}\pi"],
    r"x^2-3x+2": ["(x-1)(x-2)", "2-3x+x^2", "x²-3x+2", "x*x-3*x+2", r"x^{2}-3x+2"],
    r"\frac{x+3}{x-2}": ["(x+3)/(x-2)", r"\frac{3+x}{x-2}", r"\frac{-x-3}{2-x}", r"1+\frac{5}{x-2}"],
    r"(2a+3b)^5": ["(3b+2a)^5", "(2a+3b)^{5}", r"(2a+3b)^2(2a+3b)^3"],
    r"x^{13}+7": ["7+x^{13}", r"x^{6}x^{7}+7", "x^13+7"],
    r"3e^{2x}": [r"3\mathrm{e}^{2x}", r"3\cdot e^{x}\cdot e^{x}", r"3\exp(2x)"],
    r"\ln 3+2": [r"2+\ln(3)", r"\ln(3e^2)", r"2 + \ln 3"],
    r"\log_2 7": [r"\frac{\ln 7}{\ln 2}", r"\log_{2}(7)"],
    r"3+4i": ["4i+3", r"3+4\mathrm{i}", "3 + 4 i"],
    r"2^{75}": [r"2^{70}\cdot 32", "2^75", r"4\cdot 2^{73}"],
    r"\binom{9}{4}": ["126", r"\frac{9!}{4!5!}", r"\dbinom{9}{4}"],
    r"(3,-4)": ["( 3, -4 )", r"\left(3,-4\right)", "$(3,-4)$", "(3.0,-4)"],
    r"(\frac{1}{2},3,5)": ["(0.5,3,5)", "(1/2, 3, 5)"],
    r"[2,7)": [r"2\le x<7", "[ 2, 7 )", r"x\in[2,7)", r"\left[2,7\right)"],
    r"(-\infty,3]": [r"x\le 3", "(-∞, 3]", r"\left(-\infty,3\right]", r"3 \geq x"],
    r"(-\infty,-2)\cup(5,\infty)": [r"x<-2 \text{ or } x>5", r"(5,\infty)\cup(-\infty,-2)"],
    r"\{2,5,9\}": [r"\{9,2,5\}", r"\{ 2, 5, 9 \}"],
    r"3,8": ["8, 3", "3 and 8", r"x=3 \text{ or } x=8", r"3\text{ and }8"],
    r"y=2x+5": ["2x+5", "y=5+2x", "2x-y+5=0", "y = 2x + 5"],
    r"x^2+y^2=9": ["9=x^2+y^2", "x^2+y^2-9=0", "2x^2+2y^2=18"],
    r"\begin{pmatrix}2&3\\4&7\end{pmatrix}": [r"\begin{bmatrix}2&3\\4&7\end{bmatrix}", r"\begin{pmatrix} 2 & 3 \\ 4 & 7 \end{pmatrix}"],
    r"35^\circ": ["35", "35°", r"35\text{ degrees}"],
    r"45\%": ["45", "0.45", "45 percent", "45%"],
    r"18\text{ cm}": ["18", "18 cm", r"18\,\mathrm{cm}", "18 centimeters"],
    r"1201_3": ["1201_{3}", r"1201_3"],
    r"\text{(C)}": ["C", "(C)", r"\textbf{(C)}", r"\text{C}"],
    r"\text{even}": ["even", "Even", r"\text{Even}"],
    r"|x-3|": [r"\left|x-3\right|", "|3-x|", r"\lvert x-3\rvert"],
    r"\sin 2x": [r"\sin(2x)", r"2\sin x\cos x"],
    r"\frac{1}{2^{60}}": ["2^{-60}", r"\left(\frac12\right)^{60}", "1/2^{60}"],
    r"2R+3r": ["3r+2R", "2R + 3r"],
    r"x_1+2x_2": ["2x_2+x_1", "x_{1}+2x_{2}"],
    r"60\text{ mph}": ["60", r"60\text{ miles per hour}"],
    r"AB=12": ["12", r"|AB|=12", "AB = 12"],
    r"\text{(B)} 37": ["B", "37", r"\text{(B)}", "(B) 37"],
    r"5:8": ["5 : 8", r"\frac{5}{8}", "5/8"],
    r"7x^2-4x+9": ["9+7x^2-4x", r"7x^{2}-4x+9"],
    r"\frac{14\sqrt{3}}{9}": [r"\frac{14}{9}\sqrt{3}", r"\frac{14}{3\sqrt{3}}", r"{14\sqrt{3} \over 9}"],
}  # fmt: skip
"""Answers as MATH, GSM8K and their like have them, and other ways to write each."""

# What must change the meaning of any gold above where it applies.
_SWAPS = (
    (r"\+", "-"), (r"(?<=[\w)}])-", "+"), (r"^-(?=[\d\\])", ""), (r"^(?=[\d\\x(])(?!\\text|\\begin|\\\{|.*[<>=,])", "-"), (r"\(", "["),
    (r"\)", "]"), (r"\[", "("), (r"\)$", "]"), (r"\\cup", r"\\cap"), (r"\\pi", "e"), (r"\\ln", r"\\sin"), (r"\\sin", r"\\cos"),
    (r"\\sqrt\{", r"\\sqrt[3]{"), (r"\\frac\{", r"\\frac{1+"), (r"\\binom", r"\\frac"), (r"\\infty", "0"), (r"\^", "_"), (r"_", "^"),
    (r"\bx\b", "z"), (r"\ba", "c"), (r"R", "r"), ("C", "D"), ("even", "odd"), ("<", ">"), (r"=", r"\\ne "), (r"\bi\b", "j"), ("cm", "km"),
    (r"\\%", r"\\text{ thousand}"), (r"$", r"+1"), (r"$", r"\\sqrt{2}"), (r"$", r"\\cdot 2"), (r"$", "_8"), (r"$", "^2"),
    (r"(?<=[3-9x}])$", "!"), (r"$", r" \\text{ or } 1"), (r"$", ", 6"), (r"$", r" \\to \\infty"), (r"$", r" \\mathbb{Z}"),
    (r"$", r"\\mathrm{k}"), (r"$", "("), (r"$", "|6"), (r"$", r" \\notin A"), (r"^", "7="), (r"^", r"\\neg "), (r"$", "‰"),
    (r"^", r"\\frac{1}{2}"), (r"^(?=\d)", "1"), (r"^", r"\\text{not }"),
)  # fmt: skip


def near_misses(gold: str, chance: random.Random, count: int) -> Iterator[str]:
    """The gold answer with one mistake."""
    found: set[str] = set()
    for pattern, new in _SWAPS:
        for place in re.finditer(pattern, gold):
            found.add(gold[: place.start()] + place.expand(new) + gold[place.end() :])
    for place in re.finditer(r"\d", gold):
        for digit in "0123456789":
            found.add(gold[: place.start()] + digit + gold[place.end() :])
        if place.group() != "0":
            found.add(gold[: place.end()] + place.group() + gold[place.end() :])
    found -= {gold}
    kept = sorted(each for each in found if not _equal_by_chance(gold, each))
    yield from chance.sample(kept, min(count, len(kept)))


def _equal_by_chance(gold: str, missed: str) -> bool:
    """A change that changes nothing."""
    in_words = gold in (r"\text{(C)}", r"\text{even}") and not re.search(
        r"D|odd|not|neg|or", missed
    )
    return (
        in_words
        or missed in (r"\binom{9}{5}", r"18\text{ cm}^2")
        or missed.count("begin") > missed.count("end")
    )


def cases(pairs: Path | None, count: int, seed: int) -> list[Case]:
    """All three sets, in a fixed order for a seed."""
    chance = random.Random(seed)
    found: list[Case] = []
    if pairs is not None:
        for line in pairs.read_text().splitlines():
            row = json.loads(line)
            found.append(Case("pairs", row["gold"], row["completion"], bool(row["right"])))
    for gold, others in GOLDS.items():
        for other in (gold, *others):
            boxed = rf"So the answer is $\boxed{{{other}}}$."
            found.append(Case("written otherwise", gold, boxed, True))
            found.append(Case("written otherwise", gold, f"<answer>{other}</answer>", True))
    each = count // len(GOLDS) + 1
    missed = [(gold, miss) for gold in GOLDS for miss in near_misses(gold, chance, 4 * each)]
    for gold, miss in chance.sample(missed, min(count, len(missed))):
        found.append(Case("near misses", gold, rf"So it is $\boxed{{{miss}}}$.", False))
    for _ in range(200):
        a, b = chance.randint(2, 999), chance.randint(2, 999)
        answer = a * b
        found.append(Case("arithmetic", str(answer), f"<answer>{answer:,}</answer>", True))
        found.append(
            Case(
                "arithmetic",
                str(answer),
                f"<answer>{answer + chance.choice((-10, -1, 1, 10))}</answer>",
                False,
            )
        )
    return found


def ours() -> Grader:
    """`math_answer`."""
    reward = MathAnswer()
    return lambda gold, completion: reward([completion], answer=[gold]) == [1.0]


def alone() -> Grader:
    """math-verify, as its page says to use it."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def grade(gold: str, completion: str) -> bool:
        return bool(verify(parse(f"${gold}$"), parse(re.sub(r"</?answer>", "$", completion))))

    return grade


def main() -> None:
    """Print one row for each set and grader."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--near-misses", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="so many of our wrong verdicts")
    options = parser.parse_args()
    table = cases(options.pairs, options.near_misses, options.seed)
    verdicts: dict[str, list[bool]] = {}
    slowest: dict[str, float] = {}
    for name, grader in (("groupwise", ours()), ("math-verify", alone())):
        verdicts[name], slowest[name] = [], 0.0
        for case in table:
            began = time.process_time()
            verdicts[name].append(grader(case.gold, case.completion))
            slowest[name] = max(slowest[name], time.process_time() - began)
    print("| set | grader | answers | false positives | false negatives |")
    print("|---|---|---|---|---|")
    for kind in dict.fromkeys(case.kind for case in table):
        for name, given in verdicts.items():
            rows = [
                (case, verdict)
                for case, verdict in zip(table, given, strict=True)
                if case.kind == kind
            ]
            positives = sum(verdict and not case.right for case, verdict in rows)
            negatives = sum(case.right and not verdict for case, verdict in rows)
            print(f"| {kind} | {name} | {len(rows)} | {positives} | {negatives} |")
    lost = [
        case
        for case, own, other in zip(table, *verdicts.values(), strict=True)
        if other == case.right and own != case.right
    ]
    print(f"\nWhere math-verify alone is right and groupwise is not: {len(lost)}")
    print(
        "Slowest answer:", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in slowest.items())
    )
    wrong = [
        case for case, own in zip(table, verdicts["groupwise"], strict=True) if own != case.right
    ]
    for case in wrong[: options.show]:
        print(
            f"{'false negative' if case.right else 'false positive'}: {case.gold}   {case.completion}"
        )


if __name__ == "__main__":
    main()
