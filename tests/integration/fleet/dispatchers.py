"""A dispatcher that claims and ends jobs as fast as it can, to be run as a process of its own and killed at any moment."""

import random
import sys
import time

from sqlalchemy import select, update

from groupwise.jobs.fleet.queue import claim, requeue_pending
from groupwise.jobs.fleet.store.database import Database, Session, connect, database_time
from groupwise.jobs.fleet.store.tables import Attempt, Job, Reservation


def main(url: str, owner: str, seed: int) -> None:
    """Until nothing waits or runs any more."""
    rng = random.Random(seed)
    database = connect(url)
    while not database.run(all_is_done):
        found = database.run(
            lambda s: claim.claim(s, owner=owner, lease_seconds=60.0, limit=rng.randint(1, 4))
        )
        if (unplaced := found.unplaced) is not None:
            reasons = database.read(lambda s, unplaced=unplaced: claim.explain(s, unplaced))
            time.sleep(rng.choice((0.0, 0.01)))  # others may release something meanwhile
            database.run(
                lambda s, unplaced=unplaced, reasons=reasons: claim.mark(
                    s, unplaced, reasons, owner
                )
            )
        for each in found.claimed:
            time.sleep(rng.uniform(0, 0.01))  # it "runs"
            database.run(lambda s, epoch=each.epoch: end(s, epoch, "completed"))
        if not found.claimed:
            time.sleep(0.01)
    database.close()


def all_is_done(session: Session) -> bool:
    waiting = select(Job.job_id).where(Job.status.in_(("queued", "pending", "running")))
    return session.scalar(waiting.limit(1)) is None


def end(session: Session, epoch: int, status: str) -> None:
    """The end of an attempt as the fleet writes it: with its release, and with those woken that may begin now."""
    now = database_time(session)
    outcome = "succeeded" if status == "completed" else "void"
    session.execute(
        update(Attempt)
        .where(Attempt.epoch == epoch, Attempt.state != "ended")
        .values(state="ended", outcome=outcome, ended_at=now)
    )
    session.execute(update(Attempt).where(Attempt.epoch == epoch).values(cleanup="clean"))
    owner = select(Attempt.job_id).where(Attempt.epoch == epoch).scalar_subquery()
    session.execute(
        update(Job).where(Job.job_id == owner, Job.status == "running").values(status=status)
    )
    vm_ids = session.scalars(
        update(Reservation)
        .where(Reservation.epoch == epoch, Reservation.released_at.is_(None))
        .values(released_at=now)
        .returning(Reservation.vm_id)
    ).all()
    requeue_pending.wake(session, vm_ids=set(vm_ids))


def give_back(database: Database, owner: str) -> int:
    """What the fleet does for a dispatcher that was killed: nothing of its attempts ever ran, so their jobs are queued again."""

    def of_owner(session: Session) -> int:
        epochs = session.scalars(
            select(Attempt.epoch).where(Attempt.owner == owner, Attempt.state != "ended")
        ).all()
        for epoch in epochs:
            end(session, epoch, "queued")
        return len(epochs)

    return database.run(of_owner)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
