"""Writes in steps: each step of all comes before the next of any."""

from sqlalchemy.orm import Session

from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.steps import Steps, in_steps, side_by_side
from groupwise.jobs.fleet.store.tables import Project


@in_steps
def two_steps(session: Session, name: str, told: list[str]) -> Steps:
    told.append(f"{name} 1")
    session.add(Project(name=name))
    yield None
    told.append(f"{name} 2")


@in_steps
def one_step(_: Session, name: str, told: list[str]) -> Steps:
    told.append(f"{name} 1")
    yield from ()


def test_a_step_of_all_comes_before_the_next_of_any(database: Database) -> None:
    told: list[str] = []

    def write(session: Session) -> None:
        with side_by_side(session):
            two_steps(session, "a", told)
            one_step(session, "b", told)
            two_steps(session, "c", told)
        two_steps(session, "d", told)

    database.run(write)
    assert told == ["a 1", "b 1", "c 1", "a 2", "c 2", "d 1", "d 2"]
