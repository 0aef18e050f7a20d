"""Answers that are right however they are written, and wrong ones that only look right."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.tasks.rewards.answers import answer_matches, last_number, literal_number
from groupwise.tasks.rewards.boxes import last_boxed


@pytest.mark.parametrize(("text", "value"), [
    ("3", 3), ("3.0", 3), ("3.", 3), ("007", 7), ("+4", 4), ("-0", 0), ("−7", -7), (".5", "1/2"),
    (r"\boxed{3}", 3), (r"so \boxed{2}, no: \boxed{3}", 3), (r"$\boxed{3.00}$", 3), ("$3$", 3),
    (r"\(3\)", 3), (r"\[ 3 \]", 3), ("(3)", 3), ("{3}", 3), ("x = 3", 3), ("f(x)=3", 3),
    ("The answer is $3$.", 3), ("1,234", 1234), ("1{,}234.5", "2469/2"), (r"\$1,234", 1234),
    ("$5", 5), ("-€5", -5), ("3/4", "3/4"), (r"\frac{3}{4}", "3/4"), (r"\dfrac{ 3 }{ 4 }", "3/4"),
    (r"\frac34", "3/4"), (r"-\tfrac{3}{4}", "-3/4"), (r"\frac{-3}{4}", "-3/4"),
    (r"\frac{3}{-4}", "-3/4"), (r"1\frac{1}{2}", "3/2"), ("1 1/2", "3/2"),
    (r"1.5\times10^{3}", 1500), (r"1.5 \cdot 10^{-1}", "3/20"), ("2e3", 2000), (r"5\text{ cm}", 5),
    (r"5\,\mathrm{cm}^2", 5), (r"90^\circ", 90), ("90°", 90), ("**72**", 72),
    ("**72** apples.", 72), ("72 apples", 72), ("72 miles per hour", 72), ("72 km/h", 72),
    ("72 cm^2", 72), ("72km", 72), ("72km/h", 72), ("7.5cm²", "15/2"), (r"\boxed{72 m²}", 72),
    ("72m³.", 72), ("3×10⁻²", "3/100"), ("$72 million", None), ("1 000", 1000),
    ("-1\u202f234\u202f567.5", "-2469135/2"),
])  # fmt: skip
def test_numbers_in_every_spelling(text, value):
    assert literal_number(text) == (None if value is None else Fraction(value))


@pytest.mark.parametrize("text", [
    "", "x", "three", "1,2", "12,34", "1 2", "1 00", "1000 000", "0/0", "1e9999",
    "3x", "3kmx", "3mg", "3am", "3ab", "3cm or 4cm", "3²", "3√2", "3 x", "3 xy", "3 - abc",
    "3 or 4", "3 or four", "3 not", "3 dozen", "3 halves", "3 squared", "3 apples 4 pears",
    "**3**2", r"3\text{ no, 4}", r"3\text{ or four}",
])  # fmt: skip
def test_texts_that_are_not_numbers_give_none(text):
    assert literal_number(text) is None


SAME = [
    (r"\text{Even}", "even"), ("A", "(a)"), ("B", r"\textbf{(B)}"), (r"x^{2}+1", "x^2 + 1"), (r"\left( 1, 2 \right)", "(1,2)"),
    (r"(-\infty, 2]", "(-∞,2]"), (r"x \leq 2", "x≤2"), (r"2\cdot x", r"2 \times x"), ("2**x", "2^x"), ("n²", "n^{2}"), ("n⁻¹⁰", "n^{-10}"),
    ("2√2", r"2\sqrt{2}"), ("√(x+1)", r"\sqrt{x+1}"), ("sqrt(x+1)", "√(x+1)"), (r"\sqrt{x}", "√x"), ("3km", "3 km"),
    (r"\dfrac{x}{2}", r"\frac{x}2"), ("$y = 2x$", "2x"), (r"3\pi", "3π."), ("50%", r"50\%"), (r"50\%", "50"), ("0.5", "50%"),
    ("1/3", "0.333333"), ("New York", "new  york"), (r"\emptyset", r"\varnothing"), (r"\{\}", "∅"), (r"(-\infty, 2]", "(-infinity,2]"),
    ("2,3", "2 and 3"), ("2, 3", r"$2\text{ and }3$"), ("2,3", "$2$ and $3$"), ("1, 2, 3", "1, 2, and 3"), ("72", "72 percent"),
    ("72 apples", "72"), ("1 hour", "1 Hours"), ("x+1", "1+x"), ("x^2-1", "(x-1)(x+1)"), (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt2}"), (r"\{1,2\}", r"\{2, 1\}"), ("1,2", "2, 1"), ("(1,2)", "( 1, 2 )"), ("x<3", "3>x"),
    ("1+2i", "2i+1"), ("3", r"\sqrt{9}"), ("3", "1+2"), ("2^{10}", "1024"), ("10!", "3628800"), (r"\pi", "3.14159265"),
    (r"x \in [1,2]", "[1,2]"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"), (r"\text{Even}", "EVEN"),
    (r"\frac{x}{y}", "$x/y$"), ("50%", r"\frac{1}{2}"), ("72", "72 hours"), ("72", "$72"), ("72", "**72**"), ("72", "72 km"), ("72", "72."),
    (r"\infty", "infinity"), ("1000", "1 000"), ("2√2", "2*sqrt(2)"), (r"2\sqrt{2}", "√8"), (r"\sqrt{(x+1)^2}", "√((x+1)²)"), ("n²", "n*n"),
    ("2³", "8"), ("x^{10}", "x¹⁰"), ("72", "72km"), ("72", "72m²"), ("3", "√9"), (r"5\text{ cm}^2", "5 cm squared"), ("5", "5 people"),
    ("1", "1 apple"), (r"5\text{ widgetfoo}", "5 widgetfoo"), (r"45\%", r"45\% \text{ of the students}"), ("(B) 12", "B"),
    (r"\text{(A)} 3", "A"), ("7", "3+4=7"), ("1,2", "x_1=1,x_2=2"), ("1,2", "x=1,y=2"), ("10", r"{5 \choose 2}"), ("1/2", r"{1 \over 2}"),
    ("3:4", "3/4"), ("0", r"\sin(\pi)"), ("0", r"e^{i\pi}+1"), (r"\frac{\pi}{4}", r"45^\circ"), ("60 mph", "60 miles per hour"),
    ("5", r"5\text{.}"), ("5", r"\ 5 \ "), ("5", "AB = 5"), ("30", r"\angle ABC = 30^\circ"), ("5", r"\text{Area} = 5"), ("5", "|AB| = 5"),
    ("5", "5 US dollars"), ("5", "5 kWh"), ("PV = nRT", "VP=nTR"),
    ("13", "13 years old"), ("70000", "$70,000 profit"), ("57500", "$57,500/year"), ("540", "540 meters a week"),
    ("230", "The total is $230."), ("5", "5 more"), ("5", '"5"'), ("5", "`5`"), ("5", "*5*"),
    ("0.5", r"50\%"), (r"p\lor q", r"q\lor p"), (r"x=3 \text{ and } y=4", "y=4, x=3"), ("(2,3)", "(x,y)=(2,3)"),
    ("(x,y,z)=(1,2,3)", "(z,y,x)=(3,2,1)"), ("(a,b)=(1,2)", "a=1, b=2"), ("B", "(B) Vitamin C"), ("5", "3 - -2"), ("5", "5_{10}"),
    ("5", r"{\color{blue} 5}"), ("5", r"\textcolor{red}{5}"), ("10", r"\underline{10}"), ("1011_2", "1011_{two}"), ("1011_2", "(1011)_2"),
    ("1011_2", r"1011 \text{ base } 2"), ("3:4", "6:8"), (r"\{1,2,3\}", r"\{1,2,3,3\}"), (r"\gcd(a,b)", r"\gcd(b,a)"),
    ("42", r"42 \quad \text{(final answer)}"), ("10", r"\begin{aligned} x &= 10 \end{aligned}"),
    ("10", r"\text{Area of } \triangle ABC = 10"), ("10", "x=y=10"), ("42", r"\text{The answer is } 42"), (r"\frac13", r"0.\dot{3}"),
    ("1/3", "0.333..."), (r"5:00\text{ p.m.}", "17:00"),
]  # fmt: skip
OTHER = [
    ("3", "4"), ("3", "three"), ("3", "x"), ("3", "-3"), ("3", "3x"), ("3", "3²"), ("32", "3²"), ("3", "3√2"), ("3km", "3 miles"),
    ("x^3", "x²"), ("√2x", r"\sqrt{2x}"), ("3", ""), ("13", "3"), ("0.3", "3"), ("1/3", "0.3333"), ("1000001", "1000000"),
    ("1000000", "3000001/3"), ("1234567.89", "1234567.12"), ("2000000.5", "2000001.5"), ("0.3333333", "0.3333334"),
    ("1000001/1000002", "1000002/1000003"), ("3", r"3\text{ no, 4}"), ("3", r"3\text{ or 4}"), ("3", "3 or 4"), ("3", "3 not"),
    ("3", "3 x"), ("3", "3 dozen"), ("10 am", "10 pm"), ("3456", "3 and 456"), ("23", "2 and 3"), ("9", "**3**2"),
    ("bread and jam", "bread,jam"), ("1 23", "12 3"), ("(1,2)", "(2,1)"), ("[0,1)", "[0,1]"), ("0{,}5", "5"), ("50%", "5000%"), ("x", "y"),
    ("x+1", "x-1"), ("x^2-1", "(x-1)(x+2)"), ("even", "neve"), ("no", "on"), ("abc", "cab"), ("12", "twelve"), ("5", r"6 \boxed{5}"),
    ("2000001/4", "500000.5"), ("A", "A. 5 or B. 6"), ("5", "5 quadrillion"), ("5", "5 dont know"),
    ("5", " and ".join(f"x≠{n}" for n in range(1000))), ("x<3", " and ".join(f"x≠{n}" for n in range(100))), ("5", "5 apples or 6"),
    ("2", "2³"), ("2", "2½"), ("2", "2√2"), ("2", "2√-1"), ("2", "2∛5"), ("2", "2ⁿ"), ("5", "5₈"), ("22", "2²"), ("9", "√9"),
    ("72km", "72 miles"), (r"\pm 2", "2"), ("0", "0.0000001"), ("x+1", ""), ("x_3", "x_4"), ("", ""), (r"\text{}", " "),
    ("3", "3" + " " * 3000), ("5", "5 basis points"), ("5", "5 short"), ("5", "5 gross"), ("5", "5 fold"), ("5", "5 octal"),
    (r"5\text{ mm}", r"5\text{ Mm}"), (r"35^\circ", r"35\%"), (r"\{1,\{2\}\}", r"\{1,2\}"), ("(B) 12", "B. 13"), ("(B) 12", "C"),
    (r"\text{E. coli}", "E"), ("7", "7=5"), ("7", "3+4=8"), ("1,2", "x_1=1,x_2=3"), ("(1,2)", "x=2,y=1"), ("0", r"10^{-300}\pi"),
    (r"\frac{\pi}{4}", r"\frac{\pi}{4}^\circ"), ("3:4", "4/3"), ("AB = 5", "CD = 5"), ("5", r"\text{not} = 5"), ("45%", "45% off"),
    ("5", "5 more than 10"), ("5", "5 in hexadecimal squared"), ("5", "5 more or less"), ("5", "The wrong answer is 5"),
    ("5", "The root of it is 5"),
    ("0.5", r"0.5\%"), (r"\frac14", r"\frac14\%"), (r"p\lor q", r"p\land q"), (r"x=1 \text{ or } y=2", r"x=1 \text{ and } y=2"),
    (r"x>1 \text{ or } y>2", "x>1, y>2"), ("(2,3)", "(y,x)=(2,3)"), ("(1,2,3)", "(x,z,y)=(1,2,3)"), ("D", "D) is incorrect"),
    ("D", "D. is wrong, C is right"), ("D", "D. Neither; it is A"), ("D", "D. 12 C. 13"), ("B", "B. No, C"), ("5", "--5"), ("3:4", "6:9"),
    ("10 am", "22:00"), ("12", r"-\boxed{12}"), ("12", r"2\boxed{12}"), ("12", r"\boxed{12}^2"), ("12", r"\frac{1}{\boxed{12}}"),
    ("12", r"\sqrt{\boxed{12}}"), ("12", r"\boxed{12}x"), ("12", r"not \boxed{12}"), ("12", r"x \neq \boxed{12}"),
    ("12", r"\boxed{12} or thirteen"), ("12", r"\boxed{13}\boxed{12}"), ("12", r"\boxed{1} + \boxed{12}"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_equivalent_answers_match(gold, answer):
    assert answer_matches(gold, answer)
    assert answer_matches(answer, gold)


@pytest.mark.parametrize(("gold", "answer"), OTHER)
def test_different_answers_do_not_match(gold, answer):
    assert not answer_matches(gold, answer)


@pytest.mark.parametrize(("text", "inside"), [
    (r"\boxed{\frac{1}{2}}. No: \fbox{ {3} }", " {3} "), (r"\boxed{3}, \boxed{5}, and \boxed{7}", "3, 5, 7"),
    (r"\boxed 5", "5"), (r"\boxed{5} so \boxed{ }", "5"), (r"\boxed{ }", " "), (r"\boxed{\{1\}}", r"\{1\}"),
    (r"\boxed{1", None), ("3", None), (r"\(\boxed{1}\), \(\boxed{42}\)", "1, 42"), (r"**\boxed{1}**, **\boxed{42}**", "1, 42"),
    ("- \\boxed{1}\n- \\boxed{42}", "1, 42"), (r"x=\boxed{1}, y=\boxed{42}", "x=(1), y=(42)"), (r"So it is \boxed{42}!", "42"),
    (r"$\boxed{13}$; alternatively $\boxed{12}$", "(13)$; alternatively $(12)"), (r"$\angle ABC = \boxed{42}^\circ$.", "42"),
    (r"First \boxed{1}. Then it is \boxed{42}.", "42"), (r"Final answer - \boxed{42}", "42"), ("答案是\\boxed{42}。", "42"),
    (r"So \boxed{42}, that is \boxed{42}", "42"), (r"{\large \boxed{42}}", "42"), (r"$\$\boxed{42}$ and we are done", "42"),
])  # fmt: skip
def test_the_last_box(text, inside):
    assert last_boxed(text) == inside


NUMBERS = st.fractions(min_value=-1000, max_value=1000, max_denominator=50)


@given(NUMBERS, NUMBERS)
def test_numbers_compare_as_numbers(one, other):
    written = [
        str(one),
        rf"\frac{{{one.numerator}}}{{{one.denominator}}}",
        rf"\boxed{{{one}}}",
        f" ${one}$. ",
    ]
    assert all(answer_matches(str(one), each) for each in written)
    assert all(answer_matches(str(other), each) is (one == other) for each in written)


@given(st.integers(-(10**12), 10**12))
def test_grouped_and_with_a_point(whole):
    assert answer_matches(str(whole), f"{whole:,}")
    assert answer_matches(str(whole), f"{whole}.00")
    assert not answer_matches(str(whole), str(whole + 1))


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_text_is_read(one, other):
    assert answer_matches(one, other) is answer_matches(other, one)
    assert answer_matches(one, one) is (answer_matches(one, f" {one}\n"))


@pytest.mark.parametrize(("text", "last"), [
    ("3 + 4 is 7.", "7"), ("it is 1,234.5, I think", "1,234.5"), ("1,2,3", "3"), ("12,345,6", "6"),
    ("20 - 27 = -7", "-7"), ("5-3", "3"), ("(5)-3", "3"), ("it is −5 °C", "−5"),
    ("0.25 or .5", ".5"), ("version 1.2.3", "3"), ("1/2", "1/2"), ("it is 1 1/2", "1 1/2"),
    (r"so $-\frac{1}{2}$", r"-\frac{1}{2}"), ("about 1e6", "1e6"), ("about 1.5E-3!", "1.5E-3"),
    ("3em", "3"), ("about 2 × 10^3", "2 × 10^3"), (r"2\times10^{-3}", r"2\times10^{-3}"),
    ("50 %, roughly", "50 %"), ("$28", "28"), ("28kg", "28"), ("none", None), ("", None),
])  # fmt: skip
def test_the_last_number_of_a_text(text: str, last: str | None) -> None:
    assert last_number(text) == last
    assert last is None or literal_number(last) is not None
