"""Rush Hour's boards, moves and rewards: each row is scored by its own board, and only moves that really lead out are rewarded."""

import asyncio
import time
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.errors import TaskError
from groupwise.core.reward_call.request import ScoreRequest
from groupwise.tasks.rewards.registry import get_reward_funcs
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.tasks.rewards.rush_hour import (
    Move,
    RushSolutionExact,
    RushSolutionShaped,
    board_of,
    looks_like_a_move,
    moves_in,
    play,
    read_moves,
)

# B blocks A, C blocks B from going up:
#   o o C o
#   A A B o
#   o o B o
#   o o o o
BOARD = "ooCoAABoooBooooo"
GOLD = "Bv1,C>1,A>2"
# Only A is there, two cells from the edge.
FREE = "AAoo" + "oooo" * 3


def read(text):
    moves = read_moves(text)
    assert moves is not None
    return moves


def exact(*texts, answer: object = GOLD, **columns: Any):
    return RushSolutionExact()(list(texts), answer=[answer] * len(texts), **columns)


def shaped(text, board=BOARD, answer=GOLD, **columns: Any):
    each: dict[str, Any] = {name: [value] for name, value in columns.items()}
    return RushSolutionShaped()([text], [board], answer=[answer], **each)[0]


def played(board, moves):
    done = play(board_of(board), read(moves))
    return done.board.cells, done.legal, done.solved


# Reading


@pytest.mark.parametrize(("text", "moves"), [
    ("A>2", "A>2"), ("A>2,B^1", "A>2,B^1"), ("A>2, B^1", "A>2,B^1"), ("A>2; B^1;", "A>2,B^1"),
    ("A>2\nB^1", "A>2,B^1"), ("A > 2 , B ^ 1.", "A>2,B^1"), ("AR2,BL1,CU3,DD4", "A>2,B<1,C^3,Dv4"),
    ("ar2,bV1,vv1", "A>2,Bv1,Vv1"), ("A>1,A>1", "A>1,A>1"), ("A>02", "A>2"),
])  # fmt: skip
def test_moves_are_read(text, moves):
    assert ",".join(map(str, read(text))) == moves


@pytest.mark.parametrize("text", [
    "", "A>0", "A>-1", "A>", "A2", "A>2 and B^1", "AB>2", "A>2B^1", "A>99999", "1>2", "A*2", ",A>2",
])  # fmt: skip
def test_other_texts_are_no_list_of_moves(text):
    assert read_moves(text) is None


@pytest.mark.parametrize(("text", "moves"), [
    ("<answer>A>2</answer>", "A>2"), ("B^1 <answer>C>1</answer> or <ANSWER> A>2 </ANSWER>", "A>2"),
    ("<think>B^1</think>\nA>2", "A>2"),
    ("<think>B^1</think><answer>\nB^1\nA>2\n</answer>", "B^1,A>2"),
    ("These are the moves:\nB^1,A>2", "B^1,A>2"), ("A>2\nThat is all.", "A>2"),
    ("C>1\nNo, wait.\nA>2", "A>2"), ([{"role": "assistant", "content": "A>2"}], "A>2"),
    ("The moves are B^1,A>2", None), ("<answer>move A right</answer> A>2", None),
    ("<answer></answer>", None), ("A>2</think>", None), ("", None),
])  # fmt: skip
def test_the_answer_of_a_completion(text, moves):
    found = moves_in(text)
    assert (found and ",".join(map(str, found))) == moves


def test_reading_ends_soon_whatever_is_written():
    begun = time.thread_time()
    for text in ("A>1   " * 3000 + "!", "A>1 , " * 3000 + "!", "A>" + "0" * 20_000, "<" * 20_000):
        assert read_moves(text) is None
        looks_like_a_move(text)
        moves_in(text)
    assert time.thread_time() - begun < 2


# Boards


@pytest.mark.parametrize("value", [
    BOARD, "ooCo\nAABo\nooBo\noooo\n", "o o C o\nA A B o\no o B o\no o o o",
    ["ooCo", "AABo", "ooBo", "oooo"], list(BOARD),
])  # fmt: skip
def test_a_board_is_text_or_a_list(value):
    board = board_of(value, 4)
    assert (board.size, board.cells) == (4, BOARD)
    assert board.rows == ["ooCo", "AABo", "ooBo", "oooo"]
    assert board_of(value) == board_of(value, "4") == board_of(value, float("nan")) == board


@pytest.mark.parametrize(("value", "size", "says"), [
    ("ooo", None, "3 cells; expected a square"), (BOARD, 5, "16 cells; expected 5×5"),
    (BOARD, "5x5", "`size` holds '5x5'"), ("", None, "expected a square"),
    (None, None, "expected text"), ([1, 2, 3, 4], None, "expected text"),
    ("AAo.ooooo", None, "the signs ."), ("AAobooooo", None, "the signs b"),
    ("BBooooooo", None, "no car A"),
    ("AoooAoooo", None, "car A on the board 'AoooAoooo' are not in one line"),
    ("AAoBoBooo", None, "car B"),
    ("AAoooBBoo", None, "car B"),  # around the corner of a row
    ("AooAooooo", None, "upright"), ("oAAoooooo", None, "already"),
])  # fmt: skip
def test_boards_that_cannot_be_played_are_refused(value, size, says):
    with pytest.raises(ValueError, match=r"board|size") as caught:
        board_of(value, size)
    assert says in str(caught.value)


def test_blockers_and_distance():
    assert board_of(BOARD).to_go == 1 + 2
    assert board_of(FREE).to_go == 0 + 2
    assert board_of("AxBBo" + "o" * 20).to_go == 2 + 4  # a wall, a car of two cells, four cells
    assert board_of("BAoo" + "o" * 12).to_go == 2  # what is behind does not count


# Playing


def test_moves_change_the_board():
    assert played(BOARD, "Bv1") == ("ooCoAAooooBoooBo", 1, False)
    assert played(BOARD, GOLD) == ("oooCooAAooBoooBo", 3, True)


@pytest.mark.parametrize(("moves", "cells", "legal"), [
    ("A>1", BOARD, 0),  # B stands there
    ("A<1", BOARD, 0),  # off the board
    ("B>1", BOARD, 0),  # not its axis
    ("Av1", BOARD, 0), ("Z>1", BOARD, 0),  # no such car
    ("Bv9", "ooCoAAooooBoooBo", 0),  # one cell goes, the second does not
    ("C>9,Bv1", "oooCAABoooBooooo", 0),  # and what follows is not played
    ("Bv1,B^2", BOARD, 1), ("Bv1,A>1,Bv1", "ooCooAAoooBoooBo", 2), ("C^1", BOARD, 0),  # a car of one cell is horizontal
])  # fmt: skip
def test_the_first_cell_that_is_not_free_stops_the_play(moves, cells, legal):
    assert played(BOARD, moves) == (cells, legal, False)


def test_a_car_cannot_wrap_around_the_end_of_a_row():
    for board, moves in (("AooooBooo", "B>1"), ("AooBooooo", "B<1"), ("AooBooBoo", "Bv1")):
        assert played(board, moves) == (board, 0, False)


@pytest.mark.parametrize(("moves", "solved"), [
    ("A>2", True), ("A>1,A<1,A>2", True), ("A>1", False),
    ("A>3", True),  # not a legal move, but A stands at the edge
    ("A>2,A<1", True),  # the board is solved, the rest is not played
    ("A>2,Z>1", True), ("A>2,A>1", True),
])  # fmt: skip
def test_a_board_is_solved_as_soon_as_a_stands_at_the_edge(moves, solved):
    assert played(FREE, moves)[2] is solved


@given(st.lists(st.tuples(st.sampled_from("ABC"), st.sampled_from("<>^v"), st.integers(1, 4))))
def test_playing_keeps_every_car_and_wall(steps):
    board = board_of("ooCoAABoxoBooooo")
    done = play(board, [Move(*step) for step in steps])
    assert sorted(done.board.cells) == sorted(board.cells)
    assert done.board.cells.index("x") == board.cells.index("x")
    assert 0 <= done.legal <= len(steps)


# Rewards


@pytest.mark.parametrize(("text", "value"), [
    (GOLD, 1.0), ("<think>Hm.</think><answer>BD1, CR1, AR2</answer>", 1.0),
    ("Bv1,C>1,A>1,A>1", 1.0),  # steps of one car in one direction are one move
    ("C>1,Bv1,A>2", 0.0), ("A>2", 0.0), ("Z>1", 0.0), ("Move B down: Bv1, then A.", 0.01),
    ("first B v 1", 0.01), ("Move B down.", 0.0), ("A>0", 0.0), ("<answer>1</answer>", 0.0),
    ("</think>2", 0.0), ("", 0.0),
])  # fmt: skip
def test_exact(text, value):
    assert exact(text) == [value]


def test_exact_takes_any_of_several_solutions():
    answers = ["Bv1,A>2", "B^1,A>2"]
    assert exact("B^1,A>2", "Bv1,A>2", "Bv2,A>2", answer=answers) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # 0.65 exact + 0.20 solve + 0.10 prefix + 0.05 potential
        (GOLD, 0.65 + 0.20 + 0.10 + 0.05),
        ("C>1,Bv1,A>2", 0.20 + 0.10 + 0.05),
        ("C>1,C<1,Bv1,A>2", 0.20 / 2 + 0.10 + 0.05),
        ("C>1,C<1,Bv1,Bv1,A>2", 0.10 * 3 / 5 + 0.05 / 3),  # B cannot go so far
        ("Bv1,A>2,C>1", 0.20 + 0.10 * 2 / 3 + 0.05),  # solved after two of three
        ("Bv1,C>1", 0.10 + 0.05 / 3),
        ("Bv1,A>9", 0.20 + 0.10 * 1 / 2 + 0.05),  # A stands at the edge; its move was not legal
        ("Bv1,A>2,A>1", 0.20 + 0.10 * 2 / 3 + 0.05),  # one too many, and still within three
        ("Bv1,A>2,A>1,A>1", 0.20 / 2 + 0.10 * 2 / 4 + 0.05),
        ("Bv1,C>1,A>9,A>9,Z>1,Z<1", 0.20 / 4 + 0.10 * 2 / 3 + 0.05),  # of gold; 2 of 5 are legal
        ("Bv1", 0.10 + 0.05 / 3),
        ("Bv1,Z>1,Y>2", 0.10 * 1 / 3 + 0.05 / 3),
        ("Z>1", 0.0),
        ("A>2", 0.0),
        ("do Bv1 then", 0.65 * 0.01),
        ("", 0.0),
    ],
)
def test_shaped(text, value):
    assert shaped(text) == pytest.approx(value)


@pytest.mark.parametrize(("text", "value"), [
    ("Bv2,A>2", 1.0), ("Bv1,Bv1,A>1,A>1", 1.0), ("Bv2,A>2,C^1", 0.20 / 2 + 0.10 + 0.05),
    ("Bv2,A>2,A>1", 0.20 / 2 + 0.10 * 2 / 3 + 0.05), ("Bv2,A>3", 0.20 + 0.10 / 2 + 0.05),
    ("Bv2,A>1", 0.10 + 0.05 * 2 / 3),
])  # fmt: skip
def test_moves_beyond_the_solution_cost_reward(text, value):
    assert shaped(text, "ooBoAABooooooooo", "Bv2,A>2") == pytest.approx(value)


def test_excess_is_counted_from_the_target():
    text = "C>1,C<1,Bv1,A>2"
    parts = 0.10 + 0.05
    assert shaped(text, moves=4) == pytest.approx(0.20 + parts)
    assert shaped(text, moves=2) == pytest.approx(0.20 / 3 + parts)
    assert shaped(text, moves=None) == shaped(text) == pytest.approx(0.20 / 2 + parts)
    assert shaped("A<1", "oAAoo" + "o" * 20, "A>2") == pytest.approx(0.10), "away, not below 0"


# Rows


# The same picture with other names: here C blocks A.
RENAMED = BOARD.translate(str.maketrans("BC", "CB"))
GOLD_RENAMED = GOLD.translate(str.maketrans("BC", "CB"))


def test_each_row_has_its_own_board_gold_and_target():
    texts, boards = [GOLD, GOLD, "A>2", "A>2"], [BOARD, RENAMED, FREE, BOARD]
    answers, targets = [GOLD, GOLD_RENAMED, ["A>2"], GOLD], [3, 3, 1, 3]
    rows = list(zip(texts, boards, answers, targets, strict=True))
    alone = [
        RushSolutionShaped()([text], [board], answer=[answer], moves=[target])[0]
        for text, board, answer, target in rows
    ]
    for order in (rows, rows[::-1]):
        texts, boards, answers, targets = (list(column) for column in zip(*order, strict=True))
        together = RushSolutionShaped()(texts, boards, answer=answers, moves=targets)
        assert together == [alone[rows.index(row)] for row in order]
    assert alone == [1.0, 0.0, 1.0, 0.0]


def test_each_row_has_its_own_target():
    texts, boards, golds = ["C>1,C<1,Bv1,A>2"] * 2, [BOARD] * 2, [GOLD] * 2
    for targets in ([4, 2], [2, 4]):
        values = RushSolutionShaped()(texts, boards, answer=golds, moves=targets)
        alone = {4: 0.20 + 0.15, 2: 0.20 / 3 + 0.15}
        assert values == pytest.approx([alone[target] for target in targets])


@pytest.mark.parametrize(("answer", "says"), [
    (GOLD_RENAMED, "Cv1 is not legal"),  # names of another board
    ("Bv1,Z>2", "Z>2 is not legal"), ("Bv1,C>1", "A does not reach the right edge"),
    ("Bv1,A>1", "A does not reach the right edge"),
    ("Bv1,A>3", "A>3 is not legal"),  # a gold solution has no move like that
    ([GOLD, GOLD_RENAMED], "Cv1 is not legal"), ("slide B down", "not a list of moves"),
])  # fmt: skip
def test_a_gold_solution_that_does_not_solve_its_own_board_is_refused(answer, says):
    with pytest.raises(ValueError, match=says):
        shaped("A>1", answer=answer)
    rubric = Rubric(get_reward_funcs(["rush_solution_shaped"]), where="here")
    with pytest.raises(TaskError, match=says):
        rubric.check_rows({7: {"board": BOARD, "answer": answer}})


def test_another_car_at_the_exit_does_not_solve_the_board():
    board = "AoooBBoooooooooo"
    assert played(board, "B>2") == ("AoooooBBoooooooo", 1, False)
    with pytest.raises(ValueError, match="A does not reach"):
        shaped("B>2", board, "B>2")


def test_rows_are_checked_before_anything_is_trained_and_fail_their_rollouts():
    functions = get_reward_funcs(["rush_solution_shaped", "rush_solution_exact"])
    rubric = Rubric(functions, where="here")
    rubric.check_rows({0: {"board": BOARD, "size": 4, "moves": 3, "answer": [GOLD]}})
    rubric.check_rows({0: {"board": list(BOARD), "answer": GOLD}})
    for row, says in (
        ({"answer": GOLD}, "board"),
        ({"board": BOARD, "answer": ""}, "gold"),
        ({"board": BOARD, "answer": GOLD, "size": 6}, "expected 6×6"),
        ({"board": BOARD, "answer": GOLD, "moves": "few"}, "`moves` holds 'few'"),
    ):
        with pytest.raises(TaskError, match=says):
            rubric.check_rows({0: row})
    columns = {"board": [BOARD], "answer": [GOLD_RENAMED]}
    asked = ScoreRequest(0, ["p"], [GOLD], [[1]], columns, 0, 1)
    (member,) = asyncio.run(Rubric(functions[:1]).score(asked)).members
    assert member.outcome == "failed"
    assert "not solve its board" in str(member.reason)


@given(st.text("ABCZ<>^v1239,; \n", max_size=40))
def test_values_are_between_0_and_1_and_only_gold_earns_1(text):
    value = shaped(text)
    assert 0 <= value <= 1
    assert (value == 1) == (exact(text) == [1.0])


def test_every_short_list_of_moves_is_worth_less_than_gold():
    steps = [f"{car}{way}{n}" for car, way, n in product("ABC", "<>^v", (1, 2))]
    values = {",".join(pair): shaped(",".join(pair)) for pair in product(steps, repeat=2)}
    assert max(values.values()) < 1 == shaped(GOLD)
    assert values["Bv1,A>2"] == pytest.approx(0.20 + 0.10 + 0.05)


def test_a_move_of_many_zeros_is_no_move():
    assert moves_in("A>" + "0" * 4300 + "1") is None
    assert moves_in("A>0001") == moves_in("A>1")
