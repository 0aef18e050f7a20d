"""Rush Hour: boards, moves, playing them, and the two rewards for a list of moves.

A board is written row by row, as text or as a list: `o` is empty, `x` a wall, a letter from A to Z a car. Cars of one cell are
horizontal. A is the car that must reach the right edge.

A move is a car, a direction and a number of cells, `A>2`; directions are `< > ^ v` or L R U D. Cars move along their own axis, cell
by cell. The first cell that is not free stops the play: the steps before it remain, but that move is illegal. The play also ends as
soon as A is at the right edge, even in the middle of a move: then the board is solved. Later moves are not played, but each counts
as superfluous. Consecutive steps of one car in one direction are played as written, but count as one move when moves are compared
with a gold solution, or their number with the target.

The moves of a completion are the content of its last pair of answer tags. Without such tags they are the text after the closing
think tag, or its last line that is a list of moves. A list holds only moves, separated by commas, semicolons or spaces.

    exact    1 if the moves are those of a gold solution;
             0.01 if there is no list of moves, but something looks like a move
    shaped   0.65 exact + 0.20 solve + 0.10 prefix + 0.05 potential

`solve` is 1 for a solved board within the target length and 1/(1 + excess) beyond it. `prefix` is the larger of two shares: the
part of a gold solution that the moves start with, and the legal share of the written moves. `potential` is the share of blockers +
distance that the moves removed: cars and walls in A's way, and cells between A and the right edge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise, takewhile
from math import isqrt
from typing import Any, cast

from groupwise.core.reward_call.call import score_each_row
from groupwise.core.reward_call.tags import THINK, after_reasoning
from groupwise.core.reward_call.text import CompletionText, completion_text
from groupwise.tasks.rewards.extracted import LogExtra, record_answers
from groupwise.tasks.rewards.gold import gold_answers, gold_of_row
from groupwise.tasks.rewards.registry import reward

EMPTY, WALL, LEAVING = "o", "x", "A"

LOOKS_LIKE_A_MOVE = 0.01
"""Reward of a completion with something like a move, but no list of moves."""

_DIRECTIONS = {"<": "<", ">": ">", "^": "^", "V": "v", "L": "<", "R": ">", "U": "^", "D": "v"}
_MOVE = r"[A-Za-z] ?[<>^VvLlRrUuDd] ?0{0,9}[1-9]\d{0,3}(?!\d)"
_SEPARATOR = r"(?:\s*[,;]\s*|\s+)"  # unambiguous, or backtracking would be exponential
_LIST = re.compile(rf"{_MOVE}(?:{_SEPARATOR}{_MOVE})*\s*[.,;]?")
_LIKE = re.compile(rf"(?<![A-Za-z]){_MOVE}")


@dataclass(frozen=True, slots=True)
class Move:
    """A car, one of `< > ^ v`, and the number of cells, at least 1."""

    car: str
    direction: str
    cells: int

    def __str__(self) -> str:
        return f"{self.car}{self.direction}{self.cells}"


Moves = tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """A square board that can be played; created by `board_of`, which checks it."""

    size: int
    cells: str
    """Row by row, without separators: `oBoAAoooo` for three rows of three."""

    @property
    def rows(self) -> list[str]:
        """Its rows from the top."""
        return [
            self.cells[start : start + self.size] for start in range(0, len(self.cells), self.size)
        ]

    @property
    def to_go(self) -> int:
        """Cars and walls between A and the right edge, plus the cells in between; 0 if A is at the edge."""
        front = self.cells.rindex(LEAVING)
        cells_ahead = self.cells[front + 1 : (front // self.size + 1) * self.size]
        cars = set(cells_ahead) - {EMPTY, WALL}
        return len(cars) + cells_ahead.count(WALL) + len(cells_ahead)


@dataclass(frozen=True, slots=True)
class Play:
    """The outcome of playing moves on a board."""

    board: Board
    """The board at the end of the play."""
    begun: int
    """Moves that were started: the legal ones, and the one that stopped the play."""
    legal: int
    """Moves that were played completely."""
    solved: bool

    def length(self, moves: Moves) -> int:
        """Length of these moves after this play: consecutive started steps of one car in one direction count as one, each later
        move as one.
        """
        return len(merge_steps(moves[: self.begun])) + len(moves[self.begun :])


# --- reading -------------------------------------------------------------------------------------


def moves_in(completion: CompletionText) -> Moves | None:
    """The moves that a completion answers with, as written; None if it has no list."""
    text = completion_text(completion)
    tagged = THINK.last_answer(text)
    if tagged is not None:
        return read_moves(tagged)
    answer_text = after_reasoning(text)
    lines = reversed(answer_text.splitlines())
    return next(
        (moves for candidate in (answer_text, *lines) if (moves := read_moves(candidate))), None
    )


def _one_spelling(completion: CompletionText) -> str:
    """The merged moves as text; empty if there are none."""
    return ",".join(map(str, merge_steps(moves_in(completion) or ())))


def looks_like_a_move(completion: CompletionText) -> bool:
    """True if the text contains something like `A>2`."""
    return _LIKE.search(completion_text(completion)) is not None


@lru_cache(maxsize=256)
def read_moves(text: str) -> Moves | None:
    """The moves of a text that holds nothing else; None for any other text."""
    if not _LIST.fullmatch(text.strip()):
        return None
    moves = [re.sub(r"\s", "", move) for move in re.findall(_MOVE, text)]
    return tuple(
        Move(move[0].upper(), _DIRECTIONS[move[1].upper()], int(move[2:])) for move in moves
    )


def merge_steps(moves: Moves) -> Moves:
    """Joins consecutive steps of one car in one direction into one move: the form in which solutions are compared."""
    return tuple(
        Move(car, direction, sum(step.cells for step in steps))
        for (car, direction), steps in groupby(moves, key=lambda move: (move.car, move.direction))
    )


def board_of(value: Any, size: Any = None) -> Board:
    """A board from a column's value. Raises ValueError for anything that cannot be played."""
    rows = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(row, str) for row in rows):
        raise ValueError(f"the board is {value!r:.60}; expected text, or a list of rows or cells")
    cells = re.sub(r"\s", "", "".join(rows))
    side = isqrt(len(cells))
    expected_side = _optional_integer(size, "size")
    if side < 2 or side**2 != len(cells) or expected_side not in (None, side):
        size_text = "a square" if expected_side is None else f"{expected_side}×{expected_side}"
        raise ValueError(f"the board {cells!r:.60} has {len(cells)} cells; expected {size_text}")
    return _checked_board(side, cells)


def _optional_integer(value: Any, name: str) -> int | None:
    """An integer in a column; None if the row has none."""
    if value is None or value != value:  # the NaN of tables
        return None
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(f"the column `{name}` holds {value!r:.40}; expected a number") from None


@lru_cache(maxsize=256)
def _checked_board(size: int, cells: str) -> Board:
    unknown = sorted(set(re.sub("[A-Zox]", "", cells)))
    if unknown:
        raise ValueError(
            f"the board {cells!r} has the signs {', '.join(unknown)}; `o` is empty, `x` a wall, A to Z are cars"
        )
    board = Board(size, cells)
    for car, positions in _cells_by_car(board).items():
        gaps = {after - before for before, after in pairwise(positions)}
        in_a_row = gaps == {1} and positions[0] // size == positions[-1] // size
        if len(positions) > 1 and gaps != {size} and not in_a_row:
            raise ValueError(f"the cells of car {car} on the board {cells!r} are not in one line")
    leaving = _cells_by_car(board).get(LEAVING)
    if leaving is None:
        raise ValueError(f"the board {cells!r} has no car A, which is the one that leaves")
    if not _is_horizontal(leaving):
        raise ValueError(
            f"car A stands upright on the board {cells!r}, so it never reaches the right edge"
        )
    if board.to_go == 0:
        raise ValueError(f"car A is at the right edge of the board {cells!r} already")
    return board


# --- playing -------------------------------------------------------------------------------------


def play(board: Board, moves: Sequence[Move]) -> Play:
    """Play moves until A is at the right edge, a move is illegal, or there are no more."""
    grid, cars = list(board.cells), _cells_by_car(board)
    moves_begun, legal, solved = 0, 0, False
    for move in moves:
        moves_begun += 1
        completed = all(_move_one_cell(grid, cars, board.size, move) for _ in range(move.cells))
        legal += completed
        solved = cars[LEAVING][-1] % board.size == board.size - 1
        if solved or not completed:
            break
    return Play(Board(board.size, "".join(grid)), moves_begun, legal, solved)


def _move_one_cell(grid: list[str], cars: dict[str, list[int]], size: int, move: Move) -> bool:
    """Move a car by one cell, if the car exists, the direction is along its axis, and the cell is free. Returns True if it moved."""
    positions = cars.get(move.car)
    if positions is None or _is_horizontal(positions) != (move.direction in "<>"):
        return False
    step = {"<": -1, ">": 1, "^": -size, "v": size}[move.direction]
    front = (positions[-1] if step > 0 else positions[0]) + step
    off_the_row = abs(step) == 1 and front // size != positions[0] // size
    if off_the_row or not 0 <= front < len(grid) or grid[front] != EMPTY:
        return False
    for position in positions:
        grid[position] = EMPTY
    cars[move.car] = [position + step for position in positions]
    for position in cars[move.car]:
        grid[position] = move.car
    return True


def _cells_by_car(board: Board) -> dict[str, list[int]]:
    """The cells of each car, in order."""
    positions: dict[str, list[int]] = {}
    for position, sign in enumerate(board.cells):
        if sign not in (EMPTY, WALL):
            positions.setdefault(sign, []).append(position)
    return positions


def _is_horizontal(positions: Sequence[int]) -> bool:
    """True for neighbours in a row; a car of one cell counts as horizontal."""
    return len(positions) == 1 or positions[1] - positions[0] == 1


# --- rewards -------------------------------------------------------------------------------------


@reward("rush_solution_exact")
@dataclass(frozen=True, slots=True)
class RushSolutionExact:
    """1 for the moves of a gold solution, 0 for others, 0.01 for a completion that only contains something like a move."""

    answer_column: str | None = None
    """The column with the gold solutions; None looks for it."""

    def __call__(
        self,
        completions: Sequence[CompletionText],
        log_extra: LogExtra | None = None,
        **columns: Any,
    ) -> list[float]:
        """One reward for each completion."""
        record_answers(log_extra, map(_one_spelling, completions))
        solutions = gold_solutions(columns, len(completions), self.answer_column)
        return score_each_row(_exact_score, completions, solutions)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row without gold solutions."""
        _read_golds(gold_of_row(row, self.answer_column))


@reward("rush_solution_shaped")
@dataclass(frozen=True, slots=True)
class RushSolutionShaped:
    """`exact`, `solve`, `prefix` and `potential`, each from 0 to 1 and with its weight.

    Every row has its own `board`, gold solutions and, if it likes, `size` and target length `moves` (else that of its shortest gold
    solution). A row with a gold solution that does not solve its board is refused.
    """

    exact: float = 0.65
    solve: float = 0.20
    prefix: float = 0.10
    potential: float = 0.05
    answer_column: str | None = None
    """The column with the gold solutions; None looks for it."""

    def __call__(
        self,
        completions: Sequence[CompletionText],
        board: Sequence[Any],
        log_extra: LogExtra | None = None,
        **columns: Any,
    ) -> list[float]:
        """One reward for each completion."""
        record_answers(log_extra, map(_one_spelling, completions))
        count = len(completions)
        nothing = [None] * count
        sizes = columns.get("size") or nothing
        golds = gold_solutions(columns, count, self.answer_column)
        boards = [
            solvable(board_of(cells, size), solutions)
            for cells, size, solutions in zip(board, sizes, golds, strict=True)
        ]
        return score_each_row(
            self._shaped_reward, completions, boards, golds, columns.get("moves") or nothing
        )

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row whose board cannot be played, or whose gold solutions do not all solve it."""
        golds = _read_golds(gold_of_row(row, self.answer_column))
        solvable(board_of(row["board"], row.get("size")), golds)
        _optional_integer(row.get("moves"), "moves")

    def _shaped_reward(
        self, completion: CompletionText, board: Board, golds: tuple[Moves, ...], target: Any
    ) -> float:
        exact = self.exact * _exact_score(completion, golds)
        moves = moves_in(completion)
        if moves is None:
            return exact
        attempt = play(board, moves)
        column_optimum = _optional_integer(target, "moves")
        optimum = min(map(len, golds)) if column_optimum is None else column_optimum
        return (
            exact
            + self.solve * attempt.solved / (1 + max(0, attempt.length(moves) - optimum))
            + self.prefix
            * max(
                attempt.legal / len(moves), *(_matching_prefix_share(moves, gold) for gold in golds)
            )
            + self.potential * max(0, board.to_go - attempt.board.to_go) / board.to_go
        )


def gold_solutions(
    columns: dict[str, Any], count: int, answer_column: str | None = None
) -> list[tuple[Moves, ...]]:
    """The gold solutions of each row. Raises ValueError for a row without any, and for text that is not a list of moves."""
    return [_read_golds(forms) for forms in gold_answers(columns, count, answer_column)]


@lru_cache(maxsize=256)
def _read_golds(forms: tuple[str, ...]) -> tuple[Moves, ...]:
    read = {form: read_moves(form) for form in forms}
    for form, moves in read.items():
        if moves is None:
            raise ValueError(
                f"the gold solution {form!r:.60} is not a list of moves such as `B^1,A>2`"
            )
    return tuple(merge_steps(moves) for moves in read.values() if moves is not None)


@lru_cache(maxsize=256)
def solvable(board: Board, solutions: tuple[Moves, ...]) -> Board:
    """The board, after checking that each of these solutions solves it. Raises ValueError that names the first one that does not."""
    for moves in solutions:
        attempt = play(board, moves)
        if not attempt.solved or attempt.legal < attempt.begun:
            text = ",".join(map(str, moves))
            why = (
                f"its move {moves[attempt.legal]} is not legal there"
                if attempt.legal < len(moves)
                else "A does not reach the right edge"
            )
            raise ValueError(
                f"the gold solution {text} does not solve its board {board.cells!r}: {why}"
            )
    return board


def _exact_score(completion: CompletionText, golds: Sequence[Moves]) -> float:
    moves = moves_in(completion)
    if moves is None:
        return LOOKS_LIKE_A_MOVE if looks_like_a_move(completion) else 0.0
    return float(merge_steps(moves) in golds)


def _matching_prefix_share(moves: Moves, gold: Moves) -> float:
    """The share of a gold solution that the moves start with."""
    pairs = zip(merge_steps(moves), gold, strict=False)
    common_prefix = takewhile(lambda pair: pair[0] == pair[1], pairs)
    return len(list(common_prefix)) / len(gold)
