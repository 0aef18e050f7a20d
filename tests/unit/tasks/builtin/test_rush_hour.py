"""Generated boards: every solution is right, none is missing, no two splits share a layout, and prompts give nothing away."""

import pytest
from pydantic import ValidationError

from groupwise.core.settings.view import View
from groupwise.tasks.builtin import rush_hour
from groupwise.tasks.builtin.rush_hour import Car, TaskConfig, solve
from groupwise.tasks.rewards.rush_hour import Move, board_of, play, read_moves
from tests.task_kit import scored, splits

SMALL = {"train_size": 30, "validation_size": 8, "eval_size": 8}
KINDS = [
    {},
    {"size": 4, "min_moves": 1, "max_moves": 2},
    {"size": 5, "min_moves": 4, "max_moves": 6, "max_walls": 3},
    {"size": 6, "min_moves": 3, "max_moves": 8, "seed": 5, "train_size": 8, "eval_size": 4},
]


def config(**task):
    return View({"task": {**SMALL, **task}})


def rows_of(**task):
    return splits(rush_hour, config(**task))


def read(text):
    moves = read_moves(text)
    assert moves is not None
    return moves


def successors(board):
    """Every board that is one move away: found by trying, not by the solver."""
    for car in sorted(set(board.cells) - {"o", "x"}):
        for direction in "<>^v":
            for cells in range(1, board.size):
                done = play(board, [Move(car, direction, cells)])
                if done.legal == 0:
                    break
                yield (f"{car}{direction}{cells}", done)


def best_solutions(board):
    """All shortest solutions, by playing everything."""
    level, seen = {board: [()]}, {board}
    while level:
        found, further = [], {}
        for here, ways in level.items():
            for move, done in successors(here):
                longer = [(*way, move) for way in ways]
                if done.solved:
                    found += longer
                elif done.board not in seen:
                    further.setdefault(done.board, []).extend(longer)
        if found:
            return {",".join(way) for way in found}
        seen |= further.keys()
        level = further
    return set()


@pytest.mark.parametrize("kind", KINDS)
def test_every_stored_solution_solves_its_own_board_in_the_stored_number_of_moves(kind):
    own = TaskConfig(**{**SMALL, **kind})
    for row in [row for rows in rows_of(**kind) for row in rows]:
        board = board_of(row["board"], own.size)
        assert own.min_moves <= row["moves"] <= own.max_moves
        for solution in row["answer"]:
            moves = read(solution)
            assert len(moves) == row["moves"]
            assert play(board, moves).solved


@pytest.mark.parametrize("kind", KINDS[:2])
def test_the_answer_holds_every_best_solution(kind):
    for row in rows_of(**kind)[0][:25]:
        assert set(row["answer"]) == best_solutions(board_of(row["board"]))
        assert len(set(row["answer"])) == len(row["answer"]) <= rush_hour.MAX_SOLUTIONS


def layout_of(row):
    """What stays the same however cars are moved: walls, and the cars of each line in their order."""
    board, size = row["board"], row["size"]
    lines = {f"row {n}": board[n * size : (n + 1) * size] for n in range(size)}
    lines |= {f"column {n}": board[n::size] for n in range(size)}
    walls = tuple(place for place, sign in enumerate(board) if sign == "x")
    cars = {
        name: [
            line.count(car) for car in dict.fromkeys(line) if line.count(car) > 1 and car.isupper()
        ]
        for name, line in lines.items()
    }
    return walls, tuple((name, tuple(found)) for name, found in cars.items() if found)


@pytest.mark.parametrize("kind", [{}, {"size": 4, "min_moves": 1, "max_moves": 1, "max_walls": 0}])
def test_no_board_occurs_twice_and_no_two_splits_share_a_layout(kind):
    splits = rows_of(train_size=200, validation_size=100, eval_size=100, **kind)
    assert [len(rows) for rows in splits] == [200, 100, 100]
    boards = [row["board"] for rows in splits for row in rows]
    assert len(set(boards)) == len(boards)
    train, validation, test = ({layout_of(row) for row in rows} for rows in splits)
    assert train.isdisjoint(validation | test)
    assert validation.isdisjoint(test)


def test_the_solver_counts_slides_and_ways():
    #   A A o B      B leaves the way by one slide down, of one or two cells
    #   o o o B
    #   o o o o
    #   o o o o
    cars = (Car(True, 0, 2), Car(False, 3, 2))
    layout, start = rush_hour._make_layout(4, cars, (0, 0), walls=0)
    solved = solve(layout, start)
    assert solved.distance[start] == 2
    assert solved.path_counts[start] == 2  # Bv1 or Bv2
    assert len(solved.graph) == 3 * 3 - 1  # all places but A at the edge with B in row 0
    # with a wall in the third row, B can neither leave the way upwards nor downwards
    layout, start = rush_hour._make_layout(4, (cars[0], Car(False, 3, 2)), (0, 0), walls=1 << 11)
    assert start not in solve(layout, start).distance
    many = [Car(True, 0, 2), *(Car(True, n, 2) for n in range(1, 4))]
    layout, start = rush_hour._make_layout(8, many, (0, 0, 0, 0), 0)
    assert solve(layout, start) is None  # 7 places each: 2401 states, too many


# Prompts


def test_the_prompt_shows_the_board_and_nothing_of_the_answer():
    shown = rows_of(show_optimum=True)[0]
    for row, open_ in zip(rows_of()[0], shown, strict=True):
        system, user = row["prompt"]
        assert open_["prompt"][1]["content"].startswith(user["content"])
        assert f"\n{row['moves']} moves are enough" in open_["prompt"][1]["content"]
        lines = user["content"].splitlines()
        assert lines[0] == "Board (5 rows of 5 cells):"
        assert "".join(lines[1:]).replace(" ", "") == row["board"]
        assert "enough" not in user["content"]
        assert not any(answer in system["content"] for answer in row["answer"])


# Rewards


def parts(text, row, **task):
    member = scored("rush_hour", text, row, config(**task))
    return member.reward, {part.name: part.value for part in member.parts}


@pytest.mark.parametrize("reward", ["shaped", "exact"])
def test_gold_completions_earn_one_and_the_other_reward_is_recorded(reward):
    taught = rush_hour.get_sft_dataset(config(), None)
    for row in taught[:20]:
        assert row["completion"] == f"<answer>{row['answer'][0]}</answer>"
        found, by_name = parts(row["completion"], row, reward=reward)
        assert found == 1.0
        assert by_name == {"rush_solution_shaped": 1.0, "rush_solution_exact": 1.0}
        for solution in row["answer"]:
            assert parts(solution, row, reward=reward)[0] == 1.0
    found, by_name = parts(taught[0]["answer"][0].partition(",")[0], taught[0], reward=reward)
    assert found == by_name[f"rush_solution_{reward}"]
    assert by_name["rush_solution_shaped"] != by_name["rush_solution_exact"] == 0


def test_metrics():
    board = "ooCoAABoooBooooo"
    row = {"board": board, "size": 4, "moves": 2, "answer": ["Bv1,A>2"]}
    texts = ["Bv1,A>2", "C>1,C<1,Bv1,A>2", "Bv1", "no idea"]
    found = rush_hour.compute_metrics(["p"] * 4, texts, [row] * 4, config(), None)
    assert found["correct"] == [True, False, False, False]
    assert found["metrics"] == {"solved": 0.5, "exact": 0.25, "readable": 0.75, "excess_moves": 1.0}
    nothing = rush_hour.compute_metrics(["p"], ["no idea"], [row], config(), None)
    assert nothing["metrics"] == {"solved": 0.0, "exact": 0.0, "readable": 0.0}
    with pytest.raises(ValidationError, match="min_moves is greater"):
        TaskConfig(min_moves=4, max_moves=3)


def test_the_possible_first_moves_are_those_that_can_be_played():
    for row in rows_of(size=4, show_moves=True, train_size=20)[0]:
        told = row["prompt"][1]["content"].partition("Possible first moves: ")[2].split(", ")
        board = board_of(row["board"], 4)
        assert told == [move for move, _ in successors(board)]
        assert all(gold.split(",")[0] in told for gold in row["answer"])
