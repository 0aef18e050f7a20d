"""Which of a job's mirrored checkpoints is the newest: the one order by which attempts go on, rows are kept and people are told.

It is of the newest attempt that has left any, and of that one's the one with the most steps. Attempts go on from the newest, so that steps
grow from each to the next, also where `retry` began a new generation: an epoch counts on over all of them. Where they do not grow, the job
has decided to begin anew. Then what it has done since is what it goes on from, and what is kept: of two courses the one that it is on,
though the other one was further.
"""

from __future__ import annotations

from groupwise.jobs.fleet.store.tables import Checkpoint

NEWEST_FIRST = (Checkpoint.epoch.desc(), Checkpoint.step.desc(), Checkpoint.path.desc())
"""To order rows of one job by."""
