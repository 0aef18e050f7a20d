"""The tables of `run.db`, as a list of migrations that only go forward.

`PRAGMA user_version` counts the migrations applied to a file. A change of the schema is a new entry at the end of
`MIGRATIONS`; an entry that was released is never edited.

The schema follows the usual queries: curves (`metrics` by name and step), the rollouts of a step, the best, the
worst and the failed ones, one reward part over all rollouts (`parts` as rows), everything about one example, and text
(a separate full-text index, see `text_index.py`).

Conventions: a step is an index from 0; a group without a step was finished but belongs to no committed step. Seeds are
unsigned 64-bit numbers stored as SQLite's signed ones (two's complement). Token ids are little-endian int32, the sampler's
log-probabilities little-endian float64, and the learner's, which are computed in float32, little-endian float32: all bit-exact; NULL if
they were not kept. A NaN is the text 'nan' in `rollouts` and `parts`, where NULL means "none", and NULL in `metrics`. Text that UTF-8
cannot encode is a BLOB.
"""

from __future__ import annotations

from collections.abc import Mapping

RECORD = "run.db"
"""The name of a run's record in its folder."""
APPLICATION_ID = 0x47525057
"""Marks the file as a run record (`GRPW`)."""

FILL_TASKS = """
    UPDATE groups SET task = CASE
        WHEN json_type(columns, '$.task') = 'text' AND json_extract(columns, '$.task') <> ''
            THEN substr(json_extract(columns, '$.task'), 1, 200)
        WHEN json_type(columns, '$.dataset_name') = 'text' AND json_extract(columns, '$.dataset_name') <> ''
            THEN substr(json_extract(columns, '$.dataset_name'), 1, 200)
    END WHERE task IS NULL AND json_valid(columns);
    UPDATE rollouts SET task = (SELECT task FROM groups WHERE groups.draw = rollouts.draw)
        WHERE task IS NULL AND EXISTS (SELECT 1 FROM groups WHERE task IS NOT NULL);
    """
"""Fills the column `task` of rows written before it existed. Part of a migration, so it is never edited."""

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE meta (
        key   TEXT PRIMARY KEY,
        value TEXT NOT NULL                        -- JSON
    ) WITHOUT ROWID;

    CREATE TABLE steps (
        step            INTEGER PRIMARY KEY CHECK (step >= 0),
        version_in      INTEGER NOT NULL,          -- the policy that the step began with
        version_out     INTEGER NOT NULL,          -- the policy that it left
        fingerprint_out TEXT NOT NULL,
        draws           TEXT NOT NULL,             -- JSON list, in the order of training
        learning_rate   REAL NOT NULL,
        finished_at     REAL NOT NULL              -- seconds since 1970
    );

    CREATE TABLE metrics (
        name  TEXT NOT NULL,
        step  INTEGER NOT NULL REFERENCES steps (step) ON DELETE CASCADE,
        value REAL,
        PRIMARY KEY (name, step)
    ) WITHOUT ROWID;
    CREATE INDEX metrics_by_step ON metrics (step);

    CREATE TABLE groups (
        draw        INTEGER PRIMARY KEY,
        step        INTEGER REFERENCES steps (step) ON DELETE CASCADE,
        position    INTEGER NOT NULL,              -- in the order of training of its step
        example     INTEGER NOT NULL,
        prompt      TEXT NOT NULL,                 -- JSON: text or messages
        prompt_text TEXT NOT NULL,                 -- for people and the text index
        columns     TEXT NOT NULL,                 -- JSON
        metrics     TEXT NOT NULL,                 -- JSON
        prompt_ids  BLOB                           -- of the members that have none of their own
    );
    CREATE INDEX groups_by_step ON groups (step, position);
    CREATE INDEX groups_by_example ON groups (example);

    CREATE TABLE rollouts (
        id                INTEGER PRIMARY KEY,
        draw              INTEGER NOT NULL REFERENCES groups (draw) ON DELETE CASCADE,
        member            INTEGER NOT NULL,
        attempt           INTEGER NOT NULL,
        step              INTEGER,                 -- of its group, repeated for the indexes
        example           INTEGER NOT NULL,        -- likewise
        outcome           TEXT NOT NULL CHECK (outcome IN ('pending', 'scored', 'failed', 'timed_out')),
        reason            TEXT,
        reward            REAL,
        advantage         REAL,
        truncated         INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        completion        TEXT NOT NULL,
        notes             TEXT NOT NULL,           -- JSON
        prompt_ids        BLOB,
        UNIQUE (draw, member, attempt)
    );
    CREATE INDEX rollouts_by_step ON rollouts (step, id);
    CREATE INDEX rollouts_by_outcome ON rollouts (outcome, id);
    CREATE INDEX rollouts_by_reward ON rollouts (reward, id);
    CREATE INDEX rollouts_by_step_and_reward ON rollouts (step, reward, id);
    CREATE INDEX rollouts_by_example ON rollouts (example, id);

    CREATE TABLE segments (
        rollout        INTEGER NOT NULL REFERENCES rollouts (id) ON DELETE CASCADE,
        position       INTEGER NOT NULL,
        source         TEXT NOT NULL,
        token_ids      BLOB,
        logprobs       BLOB,
        policy_version INTEGER,
        fingerprint    TEXT,
        params         TEXT,                       -- JSON
        seed           INTEGER,
        finish_reason  TEXT,
        PRIMARY KEY (rollout, position)
    );

    CREATE TABLE parts (
        rollout  INTEGER NOT NULL REFERENCES rollouts (id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        name     TEXT NOT NULL,
        turn     INTEGER,
        value    REAL,
        weight   REAL NOT NULL,
        PRIMARY KEY (rollout, position)
    ) WITHOUT ROWID;
    CREATE INDEX parts_by_name ON parts (name, value, rollout);

    CREATE TABLE evaluations (
        id      INTEGER PRIMARY KEY,
        step    INTEGER NOT NULL,                  -- after this many steps
        name    TEXT NOT NULL,
        policy  TEXT NOT NULL,
        metrics TEXT NOT NULL,                     -- JSON
        UNIQUE (step, name, policy)
    );

    CREATE TABLE evaluation_rows (
        evaluation INTEGER NOT NULL REFERENCES evaluations (id) ON DELETE CASCADE,
        position   INTEGER NOT NULL,
        data       TEXT NOT NULL,                  -- JSON
        PRIMARY KEY (evaluation, position)
    ) WITHOUT ROWID;

    CREATE TABLE resumes (
        id               INTEGER PRIMARY KEY,
        step             INTEGER NOT NULL,         -- the first step that was done again
        steps_dropped    INTEGER NOT NULL,
        rollouts_dropped INTEGER NOT NULL,
        resumed_at       REAL NOT NULL,            -- seconds since 1970
        changes          TEXT NOT NULL             -- JSON: config key -> [before, after]
    );
    """,
    """
    ALTER TABLE rollouts ADD COLUMN messages TEXT;  -- JSON: what was said in a chat of several turns
    ALTER TABLE rollouts ADD COLUMN ended_by TEXT;
    ALTER TABLE segments ADD COLUMN prompt_ids BLOB;  -- where a new row begins
    """,
    """
    ALTER TABLE steps ADD COLUMN rejected TEXT NOT NULL DEFAULT '[]';  -- JSON list: drawn and not trained
    """,
    """
    ALTER TABLE evaluations ADD COLUMN asked TEXT NOT NULL DEFAULT '';  -- fingerprint of prompts and way of answering
    """,
    """
    ALTER TABLE groups ADD COLUMN prompt_seen TEXT;  -- of a chat: what the model saw
    """,
    """
    CREATE VIEW prompts AS                          -- as they are shown and searched
        SELECT draw, coalesce(prompt_seen, prompt_text) AS prompt FROM groups;
    DELETE FROM meta WHERE key = 'text_index';      -- which held prompt_text
    """,
    """
    ALTER TABLE groups ADD COLUMN origin TEXT NOT NULL DEFAULT 'fresh';  -- fresh, easy, replay
    ALTER TABLE groups ADD COLUMN again INTEGER;    -- the draw whose completions these are
    """,
    """
    CREATE TABLE warnings (                        -- signals of reward hacking
        step    INTEGER NOT NULL,                  -- after this many steps
        name    TEXT NOT NULL,
        kind    TEXT NOT NULL CHECK (kind IN ('begins', 'ends')),
        message TEXT NOT NULL,
        numbers TEXT NOT NULL,                     -- JSON
        PRIMARY KEY (step, name)
    ) WITHOUT ROWID;
    """,
    """
    ALTER TABLE groups ADD COLUMN task TEXT;       -- of a mixture: the label or data set of its example
    ALTER TABLE rollouts ADD COLUMN task TEXT;     -- of its group, repeated for the indexes
    """
    + FILL_TASKS
    + """
    CREATE INDEX groups_by_task ON groups (task, draw) WHERE task IS NOT NULL;
    CREATE INDEX rollouts_by_task ON rollouts (task, id) WHERE task IS NOT NULL;
    CREATE INDEX rollouts_by_task_and_reward ON rollouts (task, reward, id) WHERE task IS NOT NULL;
    """,
    """
    ALTER TABLE segments ADD COLUMN learner_logprobs BLOB;  -- of tokens that taught: by the first pass of the step over them
    """,
    """
    CREATE INDEX rollouts_by_length ON rollouts (completion_tokens, id);
    CREATE INDEX rollouts_by_truncated ON rollouts (truncated, id);
    CREATE INDEX parts_of_turns ON parts (name) WHERE turn IS NOT NULL;
    UPDATE rollouts SET completion_tokens =    -- only those that the policy wrote; token ids have four bytes
        (SELECT coalesce(sum(length(token_ids)), 0) / 4 FROM segments WHERE rollout = rollouts.id AND source = 'policy')
        WHERE id IN (SELECT rollout FROM segments WHERE source <> 'policy' AND token_ids IS NOT NULL)
            AND EXISTS (SELECT 1 FROM segments WHERE rollout = rollouts.id AND source = 'policy');
    DROP INDEX rollouts_by_task;
    CREATE INDEX rollouts_by_task ON rollouts (task, id, draw) WHERE task IS NOT NULL;
    DELETE FROM meta WHERE key = 'text_index';     -- which held no signs
    """,
    """
    ALTER TABLE rollouts ADD COLUMN teacher_prompt_ids BLOB;  -- what the teacher of a distillation reads instead
    ALTER TABLE segments ADD COLUMN teacher_logprobs BLOB;    -- as the teacher's endpoint gave them
    ALTER TABLE segments ADD COLUMN teacher_top_ids BLOB;     -- its k most probable tokens, of all places one after another
    ALTER TABLE segments ADD COLUMN teacher_top_logprobs BLOB;
    """,
)

_TASK = """CASE WHEN NOT json_valid(columns) THEN NULL
    WHEN json_type(columns, '$.task') = 'text' AND json_extract(columns, '$.task') <> ''
        THEN substr(json_extract(columns, '$.task'), 1, 200)
    WHEN json_type(columns, '$.dataset_name') = 'text' AND json_extract(columns, '$.dataset_name') <> ''
        THEN substr(json_extract(columns, '$.dataset_name'), 1, 200)
    END"""
"""SQL of the task that `FILL_TASKS` fills in for a group."""

TASKS_SINCE = 9

SINCE: tuple[tuple[int, str, Mapping[str, str]], ...] = (
    (2, "rollouts", {"messages": "NULL", "ended_by": "NULL"}),
    (2, "segments", {"prompt_ids": "NULL"}),
    (3, "steps", {"rejected": "'[]'"}),
    (4, "evaluations", {"asked": "''"}),
    (5, "groups", {"prompt_seen": "NULL"}),
    (7, "groups", {"origin": "'fresh'", "again": "NULL"}),
    (TASKS_SINCE, "groups", {"task": _TASK}),
    (TASKS_SINCE, "rollouts", {"task": f"(SELECT {_TASK} FROM main.groups WHERE groups.draw = rollouts.draw)"}),
    (10, "segments", {"learner_logprobs": "NULL"}),
    (12, "rollouts", {"teacher_prompt_ids": "NULL"}),
    (12, "segments", {"teacher_logprobs": "NULL", "teacher_top_ids": "NULL", "teacher_top_logprobs": "NULL"}),
)  # fmt: skip
"""Format version, table, and columns added in it, with the SQL that reads them in an older record: it gives what the migration writes."""

TABLES_SINCE: tuple[tuple[int, str, tuple[str, ...]], ...] = (
    (8, "warnings", ("step", "name", "kind", "message", "numbers")),
)
"""Format version that added a table, the table, and its columns; in an older record it reads as empty."""

LENGTHS_SINCE = 11
"""The format version that added indexes of lengths and truncation."""
