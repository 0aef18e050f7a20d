"""Rush Hour: slide cars out of the way until car A is at the right edge, in as few moves as possible.

Boards are generated. A layout is a set of cars and walls, each car with its axis and its line. From one placement of the cars the
solver finds every reachable placement and its distance in moves from the nearest solved one, in a single search: moves can be
undone, so the search starts at all solved boards. A slide of any length is one move. Boards with the requested number of moves
are drawn from these, a few of each layout.

`answer` holds every solution of the fewest moves; boards with more than `MAX_SOLUTIONS` are not used, so that no best answer is ever
called wrong. Each has been played on its own board. No two examples share a board, and no two splits share a layout.

The reward is `rush_solution_shaped`, or `rush_solution_exact` with `task.reward: exact`; the other one is recorded as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, model_validator

from groupwise.core.errors import TaskError
from groupwise.core.reward_call.call import RewardCallable
from groupwise.core.reward_call.text import CompletionText
from groupwise.core.settings.schema import setting
from groupwise.core.settings.view import TaskSection
from groupwise.tasks.data.order import Stream
from groupwise.tasks.rewards.registry import get_reward_funcs as rewards_named
from groupwise.tasks.rewards.rush_hour import (
    EMPTY,
    LEAVING,
    WALL,
    Board,
    Move,
    Moves,
    board_of,
    merge_steps,
    moves_in,
    play,
    read_moves,
    solvable,
)

MAX_SOLUTIONS = 24
"""Most best solutions that a board may have, because all of them are stored in its row."""
MAX_STATES = 500
"""Most reachable states (placements of the cars) of a layout; one with more is skipped, because dense boards are the harder ones anyway."""
BOARDS_OF_A_LAYOUT = 4
FREE_CELLS = range(4, 11)
"""Number of free cells on a board: with fewer there is no move, with more boards are easy and have many states."""
MAX_MISSES_IN_A_ROW = 5000
"""Number of consecutive layouts without a board of the wanted number of moves after which the search ends."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

INSTRUCTION = (
    "Solve a Rush Hour board. Letters are cars, o is a free cell, x is a wall. A car slides along its own line: one that lies "
    "left to right with < and >, one that stands upright with ^ and v. It cannot pass walls or other cars. Bring car A to the "
    "right edge in as few moves as possible. A move is car, direction and number of cells. Answer with nothing but the moves "
    "between answer tags, for example <answer>A>1,Dv2,B<1</answer>."
)
"""The last car of the example is not A, so it solves no board."""

State = int
"""Position of every car on its line, three bits each; car A has the lowest bits."""
Graph = dict[State, list[State]]


class TaskConfig(TaskSection):
    """The `task:` section of a config for this task."""

    size: int = setting(5, "Rows and columns of a board.", ge=4, le=8)
    min_moves: int = setting(2, "Smallest number of moves that a board may need.", ge=1)
    max_moves: int = setting(5, "Largest number of moves that a board may need.", ge=1)
    max_walls: int = setting(
        1, "Maximum number of walls on a board; none is in A's row.", ge=0, le=8
    )
    show_optimum: bool = setting(False, "Say in the prompt how many moves are enough.")
    show_moves: bool = setting(
        False,
        "List the possible first moves in the prompt, for models that cannot find them.",
    )
    reward: Literal["shaped", "exact"] = setting(
        "shaped", "rush_solution_shaped, which also pays for progress, or rush_solution_exact."
    )
    train_size: int = setting(2000, "Training examples.", ge=1)
    validation_size: int = setting(128, "Held-out examples of a supervised run.", ge=1)
    eval_size: int = setting(128, "Held-out examples of evaluations.", ge=1)
    seed: int = setting(0, "Seed of the boards; the run has a seed of its own.", ge=0)

    @model_validator(mode="after")
    def _check_move_range(self) -> TaskConfig:
        if self.min_moves > self.max_moves:
            raise ValueError("min_moves is greater than max_moves")
        return self


@dataclass(frozen=True, slots=True)
class Car:
    """A car without its position. Its line is a row if it is horizontal, else a column."""

    horizontal: bool
    line: int
    length: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Cars (A first) and walls. Cells are bits; the first cell of the first row is the lowest bit."""

    size: int
    cars: tuple[Car, ...]
    walls: int
    masks: tuple[tuple[int, ...], ...]
    """The mask of each car's cells at each position on its line."""


@dataclass(frozen=True, slots=True)
class SolvedStates:
    """The solver's results for a layout."""

    graph: Graph
    """Each state's neighbours, one move away."""
    distance: dict[State, int]
    """Fewest moves to a solved state; states that cannot be solved are missing."""
    path_counts: dict[State, int]
    """Number of shortest solutions of each state."""


def get_config_schema() -> type[BaseModel]:
    """The config's `task:` section."""
    return TaskConfig


def get_rl_dataset(config: Any) -> list[dict[str, Any]]:
    """The training examples: `board`, `size`, `moves` (the fewest) and `answer` (every solution with that many moves)."""
    return _rows_of_split(TaskConfig.of(config), "train")


def get_eval_dataset(config: Any) -> list[dict[str, Any]]:
    """The held-out examples. They are drawn first, so they do not depend on the sizes of the other splits."""
    return _rows_of_split(TaskConfig.of(config), "eval")


def get_sft_dataset(config: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """The training examples with a best solution as completion."""
    return [_with_completion(row) for row in get_rl_dataset(config)]


def get_sft_eval_dataset(config: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """The validation examples with a best solution as completion."""
    return [_with_completion(row) for row in _rows_of_split(TaskConfig.of(config), "validation")]


def get_reward_funcs(config: Any, tokenizer: Any) -> list[tuple[RewardCallable, float]]:
    """The reward that the config selects; the other one has weight 0 and is only recorded."""
    trained = TaskConfig.of(config).reward
    functions = [
        {"name": f"rush_solution_{kind}", "weight": float(kind == trained)}
        for kind in ("shaped", "exact")
    ]
    return rewards_named(functions, config)


def compute_metrics(
    prompts: Sequence[Any],
    completions: Sequence[CompletionText],
    dataset_rows: Sequence[Mapping[str, Any]],
    config: Any,
    tokenizer: Any,
) -> dict[str, Any]:
    """Shares of boards solved, of best solutions, and of well-formed lists of moves; mean superfluous moves, if any board was solved."""
    answers = [moves_in(completion) for completion in completions]
    pairs = list(zip(answers, dataset_rows, strict=True))
    plays = [play(board_of(row["board"], row["size"]), moves or ()) for moves, row in pairs]
    exact = [
        moves is not None and merge_steps(moves) in map(read_moves, row["answer"])
        for moves, row in pairs
    ]
    excess = [
        attempt.length(moves or ()) - row["moves"]
        for attempt, (moves, row) in zip(plays, pairs, strict=True)
        if attempt.solved
    ]
    return {
        "metrics": {
            "solved": fmean(attempt.solved for attempt in plays),
            "exact": fmean(exact),
            "readable": fmean(moves is not None for moves in answers),
            **({"excess_moves": fmean(excess)} if excess else {}),
        },
        "correct": exact,
    }


# --- examples ------------------------------------------------------------------------------------


def _rows_of_split(task_config: TaskConfig, split_name: str) -> list[dict[str, Any]]:
    """The rows of one split. Unused boards of a layout are not given to another split."""
    sizes = {
        "eval": task_config.eval_size,
        "validation": task_config.validation_size,
        "train": task_config.train_size,
    }
    layouts = _boards_of_layouts(task_config)
    for split, size in sizes.items():
        boards = islice((solved_board for layout in layouts for solved_board in layout), size)
        if split == split_name:
            return [_board_row(task_config, *solved_board) for solved_board in boards]
        for _ in boards:
            pass
    raise AssertionError(split_name)


def _board_row(
    task_config: TaskConfig, board: Board, solutions: tuple[Moves, ...]
) -> dict[str, Any]:
    moves = len(solutions[0])
    lines = [
        f"Board ({task_config.size} rows of {task_config.size} cells):",
        *map(" ".join, board.rows),
    ]
    if task_config.show_optimum:
        lines.append(f"{moves} move{'s are' if moves > 1 else ' is'} enough.")
    if task_config.show_moves:
        lines.append(f"Possible first moves: {', '.join(map(str, possible_moves(board)))}")
    return {
        "prompt": [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": "\n".join(lines)},
        ],
        "board": board.cells,
        "size": board.size,
        "moves": moves,
        "answer": [",".join(map(str, solution)) for solution in solutions],
    }


def possible_moves(board: Board) -> list[Move]:
    """Every legal slide on a board, car by car, shorter ones first."""
    cars = sorted(set(board.cells) - {EMPTY, WALL})
    candidates = (
        Move(car, direction, cells)
        for car in cars
        for direction in "<>^v"
        for cells in range(1, board.size)
    )
    return [move for move in candidates if play(board, (move,)).legal]


def _with_completion(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "completion": f"<answer>{row['answer'][0]}</answer>"}


# --- boards --------------------------------------------------------------------------------------


def _boards_of_layouts(task_config: TaskConfig) -> Iterator[list[tuple[Board, tuple[Moves, ...]]]]:
    """Boards with their solutions, grouped by layout, without end. Raises TaskError once no more are found."""
    stream = Stream(
        "rush_hour",
        task_config.seed,
        task_config.size,
        task_config.max_walls,
        task_config.min_moves,
        task_config.max_moves,
    )
    seen: set[tuple[int, tuple[Car, ...]]] = set()
    count, misses = 0, 0
    while misses < MAX_MISSES_IN_A_ROW:
        layout, start = draw_layout(stream, task_config.size, task_config.max_walls)
        key = layout.walls, tuple(sorted(layout.cars, key=_line_key))
        boards = [] if key in seen else _pick_boards(task_config, stream, layout, start)
        seen.add(key)
        count, misses = count + len(boards), 0 if boards else misses + 1
        if boards:
            yield boards
    raise TaskError(
        f"task: only {count} boards of {task_config.size}×{task_config.size} cells that need {task_config.min_moves} to "
        f"{task_config.max_moves} moves were found; then {MAX_MISSES_IN_A_ROW} layouts in a row had none. "
        "Lower min_moves, raise max_moves, or make train_size, validation_size and eval_size smaller."
    )


def _line_key(car: Car) -> tuple[bool, int]:
    """Sort key: cars of one line keep their order, as `draw_layout` returns it."""
    return car.horizontal, car.line


def _pick_boards(
    task_config: TaskConfig, stream: Stream, layout: Layout, start: State
) -> list[tuple[Board, tuple[Moves, ...]]]:
    """A few boards of a layout with the wanted number of moves; each number of moves is equally likely."""
    solved = solve(layout, start)
    if solved is None:
        return []
    by_moves: dict[int, list[State]] = {}
    for state, moves in solved.distance.items():
        if (
            task_config.min_moves <= moves <= task_config.max_moves
            and solved.path_counts[state] <= MAX_SOLUTIONS
        ):
            by_moves.setdefault(moves, []).append(state)
    selection: list[State] = []
    while by_moves and len(selection) < BOARDS_OF_A_LAYOUT:
        moves = sorted(by_moves)[stream.below(len(by_moves))]
        states = by_moves[moves]
        selection.append(states.pop(stream.below(len(states))))
        if not states:
            del by_moves[moves]
    return [_with_solutions(layout, solved, state) for state in selection]


def _with_solutions(
    layout: Layout, solved: SolvedStates, state: State
) -> tuple[Board, tuple[Moves, ...]]:
    """The board as drawn, with its best solutions, each verified by playing it."""
    # The letters of the cars: A, then in order of appearance, row by row.
    firsts = [layout.masks[car][_position_of(state, car)] for car in range(len(layout.cars))]
    order = sorted(range(1, len(firsts)), key=lambda car: firsts[car] & -firsts[car])
    letters = {0: LEAVING} | dict(zip(order, LETTERS[1:], strict=False))
    names = [letters[car] for car in range(len(firsts))]
    cells = [WALL if layout.walls >> cell & 1 else EMPTY for cell in range(layout.size**2)]
    for number, name in enumerate(names):
        mask = layout.masks[number][_position_of(state, number)]
        cells = [name if mask >> cell & 1 else sign for cell, sign in enumerate(cells)]
    board = board_of("".join(cells), layout.size)
    solutions = tuple(
        tuple(_move_between(layout, names, *step) for step in path)
        for path in _shortest_paths(solved, state)
    )
    return solvable(board, solutions), solutions


def draw_layout(stream: Stream, size: int, max_walls: int) -> tuple[Layout, State]:
    """Random cars and walls, and the positions of the cars: A in its row, the others anywhere with room.

    A's row has no other horizontal car and no wall, because most such boards could not be solved.
    """
    row = stream.below(size)
    cars, positions = [Car(True, row, 2)], [stream.below(size - 1)]
    occupied = _cells_mask(size, cars[0], positions[0])
    walls = 0
    for _ in range(stream.below(max_walls + 1)):
        cell = stream.below(size * size)
        if cell // size != row:
            walls |= 1 << cell
    occupied |= walls
    free_cells = FREE_CELLS[stream.below(len(FREE_CELLS))]
    for _ in range(4 * size * size):
        if size * size - occupied.bit_count() <= free_cells or len(cars) == len(LETTERS):
            break
        length = 3 if size > 4 and stream.below(3) == 0 else 2
        car = Car(stream.below(2) == 0, stream.below(size), length)
        position = stream.below(size - length + 1)
        mask = _cells_mask(size, car, position)
        if not mask & occupied and not (car.horizontal and car.line == row):
            occupied |= mask
            cars.append(car)
            positions.append(position)
    return _make_layout(size, cars, positions, walls)


def _make_layout(
    size: int, cars: Sequence[Car], positions: Sequence[int], walls: int
) -> tuple[Layout, State]:
    """Layout and state; the cars after A are sorted by position."""
    order = [0, *sorted(range(1, len(cars)), key=lambda car: positions[car])]
    masks = tuple(
        tuple(
            _cells_mask(size, cars[car], position)
            for position in range(size - cars[car].length + 1)
        )
        for car in order
    )
    state = sum(positions[car] << 3 * index for index, car in enumerate(order))
    return Layout(size, tuple(cars[car] for car in order), walls, masks), state


def _cells_mask(size: int, car: Car, position: int) -> int:
    """The cells of a car at a position on its line."""
    span = range(position, position + car.length)
    if car.horizontal:
        return sum(1 << car.line * size + column for column in span)
    return sum(1 << row * size + car.line for row in span)


def _position_of(state: State, car: int) -> int:
    return state >> 3 * car & 7


# --- solver --------------------------------------------------------------------------------------


def solve(layout: Layout, start: State) -> SolvedStates | None:
    """All states reachable from `start`, with their distances; None if there are too many."""
    graph = _state_graph(layout, start)
    if graph is None:
        return None
    at_the_edge = layout.size - layout.cars[0].length
    distance = {state: 0 for state in graph if _position_of(state, 0) == at_the_edge}
    path_counts = dict.fromkeys(distance, 1)
    queue = list(distance)
    for state in queue:  # grows while it is read: nearest states first
        next_distance = distance[state] + 1
        for predecessor in graph[state]:
            if predecessor not in distance:
                distance[predecessor], path_counts[predecessor] = next_distance, 0
                queue.append(predecessor)
            if distance[predecessor] == next_distance:
                path_counts[predecessor] += path_counts[state]
    return SolvedStates(graph, distance, path_counts)


def _state_graph(layout: Layout, start: State) -> Graph | None:
    """Each reachable state with its neighbours, one move away; None if there are more than `MAX_STATES`."""
    cars = [(3 * car, masks, len(masks)) for car, masks in enumerate(layout.masks)]
    cells = layout.walls
    for car, masks in enumerate(layout.masks):
        cells |= masks[_position_of(start, car)]
    graph: Graph = {start: []}
    queue = [(start, cells)]
    for state, occupied in queue:  # grows while it is read
        neighbours = graph[state]
        for shift, masks, room in cars:
            position = state >> shift & 7
            obstacles = occupied ^ masks[position]
            for step in (-1, 1):
                target = position + step
                while 0 <= target < room and not masks[target] & obstacles:
                    next_state = state + (target - position << shift)
                    neighbours.append(next_state)
                    if next_state not in graph:
                        graph[next_state] = []
                        queue.append((next_state, obstacles | masks[target]))
                    target += step
        if len(queue) > MAX_STATES:
            return None
    return graph


def _shortest_paths(solved: SolvedStates, state: State) -> Iterator[list[tuple[State, State]]]:
    """Every shortest path to a solved state, as steps from state to state."""
    nearer = solved.distance[state] - 1
    if nearer < 0:
        yield []
        return
    for next_state in solved.graph[state]:
        if solved.distance[next_state] == nearer:
            for rest in _shortest_paths(solved, next_state):
                yield [(state, next_state), *rest]


def _move_between(layout: Layout, names: Sequence[str], before: State, after: State) -> Move:
    """The move that leads from one state to the next."""
    car = next(i for i in range(len(names)) if _position_of(before, i) != _position_of(after, i))
    cells = _position_of(after, car) - _position_of(before, car)
    backward, forward = "<>" if layout.cars[car].horizontal else "^v"
    return Move(names[car], forward if cells > 0 else backward, abs(cells))
