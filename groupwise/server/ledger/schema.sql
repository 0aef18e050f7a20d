-- migration 1
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL                        -- JSON
) WITHOUT ROWID;

CREATE TABLE runs (
    position    INTEGER PRIMARY KEY,           -- in the order of their beginning
    run         TEXT NOT NULL UNIQUE,
    folder      TEXT NOT NULL,
    settings    TEXT NOT NULL,                 -- JSON, as posted
    config      TEXT NOT NULL,                 -- JSON, as the engine was given it
    state       TEXT NOT NULL CHECK (state IN ('active', 'stopped', 'finished', 'failed', 'replaced')),
    reason      TEXT,
    incarnation INTEGER NOT NULL DEFAULT 0,
    started_at  REAL NOT NULL,
    ended_at    REAL
);
CREATE UNIQUE INDEX one_active_run ON runs (state) WHERE state = 'active';

CREATE TABLE plans (
    id              INTEGER PRIMARY KEY,
    run             TEXT NOT NULL REFERENCES runs (run),
    step            INTEGER NOT NULL CHECK (step >= 0),
    state           TEXT NOT NULL DEFAULT 'planned' CHECK (state IN ('planned', 'trained', 'quarantined')),
    parameters      TEXT NOT NULL,             -- JSON
    losses          INTEGER NOT NULL DEFAULT 0,  -- engines that were lost over it
    made_at         REAL NOT NULL,
    reason          TEXT,                      -- why it was quarantined
    fingerprint_out TEXT,                      -- these five where it was trained
    version_out     INTEGER,
    policy_path     TEXT,
    metrics         TEXT,                      -- JSON
    trained_at      REAL,
    CHECK ((state = 'trained') <= (fingerprint_out IS NOT NULL AND version_out IS NOT NULL))
);
CREATE UNIQUE INDEX one_living_plan ON plans (run, step) WHERE state <> 'quarantined';

CREATE TABLE groups (
    id           TEXT PRIMARY KEY,
    run          TEXT NOT NULL REFERENCES runs (run),
    draw         INTEGER NOT NULL CHECK (draw >= 0),
    state        TEXT NOT NULL CHECK (state IN ({states})),
    sampled_step INTEGER NOT NULL,             -- steps that were done when it was sampled
    version      INTEGER NOT NULL,
    fingerprint  TEXT NOT NULL,
    members      INTEGER NOT NULL CHECK (members > 0),
    prompt       TEXT NOT NULL,                -- JSON: text or messages
    content      TEXT NOT NULL,                -- hash of what a client echoes
    key_id       TEXT NOT NULL,                -- of the API key that asked for it
    opened_at    REAL NOT NULL,
    lease_end    REAL NOT NULL,                -- uptime at which its lease is over
    rewards      TEXT,                         -- JSON list: a number or null for each member
    answer       TEXT,                         -- JSON: how the rewards were acknowledged
    accepted     INTEGER UNIQUE,               -- place in the order in which rewards were accepted
    reason       TEXT,                         -- why it is stale or quarantined
    plan         INTEGER REFERENCES plans (id),
    position     INTEGER,                      -- in its plan
    CHECK ((state IN ({without_rewards})) <= (rewards IS NULL)),
    CHECK ((state NOT IN ({perhaps_without_rewards})) <= (rewards IS NOT NULL)),
    CHECK ((rewards IS NULL) = (answer IS NULL) AND (rewards IS NULL) = (accepted IS NULL)),
    CHECK ((state IN ({in_a_plan})) = (plan IS NOT NULL)),
    CHECK ((plan IS NULL) = (position IS NULL)),
    UNIQUE (plan, position)
);
CREATE UNIQUE INDEX one_group_a_draw ON groups (run, draw) WHERE state NOT IN ({free});
CREATE INDEX groups_by_state ON groups (run, state, accepted);
CREATE INDEX groups_by_content ON groups (content);
CREATE INDEX leases ON groups (lease_end) WHERE state = 'open';

CREATE TRIGGER groups_begin_open BEFORE INSERT ON groups WHEN NEW.state <> 'open'
BEGIN SELECT RAISE(ABORT, 'a group begins open'); END;

CREATE TRIGGER group_moves BEFORE UPDATE OF state ON groups
WHEN (OLD.state, NEW.state) NOT IN (VALUES {moves})
BEGIN SELECT RAISE(ABORT, 'a group does not move so: see groupwise.server.ledger.group_states'); END;

CREATE TRIGGER rewards_stand BEFORE UPDATE OF rewards ON groups
WHEN OLD.rewards IS NOT NULL AND NEW.rewards IS NOT OLD.rewards
BEGIN SELECT RAISE(ABORT, 'accepted rewards stand'); END;

CREATE TABLE records (
    id     TEXT PRIMARY KEY REFERENCES groups (id),
    record BLOB NOT NULL                       -- to_json(Group), as it was sampled
);

CREATE TABLE answers (
    key_id    TEXT NOT NULL,
    route     TEXT NOT NULL,
    key       TEXT NOT NULL,                   -- the Idempotency-Key
    body_hash TEXT NOT NULL,
    status    INTEGER NOT NULL,
    body      BLOB NOT NULL,
    made_at   REAL NOT NULL,                   -- uptime of the server
    PRIMARY KEY (key_id, route, key)
);
CREATE INDEX answers_by_age ON answers (made_at);

CREATE TABLE events (
    id   INTEGER PRIMARY KEY AUTOINCREMENT,
    run  TEXT,
    kind TEXT NOT NULL,
    data TEXT NOT NULL,                        -- JSON
    at   REAL NOT NULL
);

CREATE TABLE counters (
    run   TEXT NOT NULL,
    name  TEXT NOT NULL,
    value INTEGER NOT NULL,
    PRIMARY KEY (run, name)
) WITHOUT ROWID;

-- migration 2
CREATE TABLE handed_out (                      -- groups whose members are given to one call each
    id     TEXT PRIMARY KEY REFERENCES groups (id),
    run    TEXT NOT NULL,
    key_id TEXT NOT NULL,
    name   TEXT NOT NULL,                      -- under which the calls gather
    asked  TEXT NOT NULL,                      -- hash of what all of them ask
    given  INTEGER NOT NULL CHECK (given > 0)  -- members that calls have had
);
CREATE INDEX handed_out_by_name ON handed_out (run, key_id, name);

CREATE TABLE member_rewards (
    id      TEXT NOT NULL REFERENCES handed_out (id),
    member  INTEGER NOT NULL CHECK (member >= 0),
    reward  REAL,                              -- null: failed
    include TEXT NOT NULL CHECK (include IN ('next', 'hold')),
    answer  TEXT NOT NULL,                     -- JSON: how it was acknowledged
    PRIMARY KEY (id, member)
) WITHOUT ROWID;
CREATE TRIGGER member_rewards_stand BEFORE UPDATE ON member_rewards
BEGIN SELECT RAISE(ABORT, 'accepted rewards stand'); END;

-- migration 3
CREATE TABLE verb_sessions (                   -- of clients that train through the Tinker API
    position INTEGER PRIMARY KEY,
    id       TEXT NOT NULL UNIQUE,
    name     TEXT                              -- the Idempotency-Key that it was asked for with
);

CREATE TABLE verb_models (
    position INTEGER PRIMARY KEY,
    id       TEXT NOT NULL UNIQUE,
    session  TEXT NOT NULL REFERENCES verb_sessions (id) ON DELETE CASCADE,
    spec     TEXT NOT NULL,                    -- JSON: base, rank, seed …
    kept     INTEGER                           -- the call after which its state is kept; null: none yet
);

CREATE TABLE verb_samplers (
    position INTEGER PRIMARY KEY,
    id       TEXT NOT NULL UNIQUE,
    session  TEXT NOT NULL REFERENCES verb_sessions (id) ON DELETE CASCADE,
    base     TEXT NOT NULL,
    weights  TEXT                              -- JSON: model, kind, name; null: the base as it is
);

CREATE TABLE verb_calls (
    position   INTEGER PRIMARY KEY,            -- in the order in which they were accepted
    id         TEXT NOT NULL UNIQUE,
    session    TEXT NOT NULL REFERENCES verb_sessions (id) ON DELETE CASCADE,
    line       TEXT NOT NULL,                  -- model or sampler
    sequence   INTEGER NOT NULL,
    kind       TEXT NOT NULL,
    digest     BLOB NOT NULL,
    content    BLOB,                           -- null: it need not be repeated
    state      TEXT NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'answered', 'failed')),
    changed    INTEGER NOT NULL DEFAULT 0,     -- whether the model is another one since
    media_type TEXT,                           -- of the answer; of a failure its category
    body       BLOB,
    UNIQUE (line, sequence),
    CHECK ((state = 'waiting') = (body IS NULL)),
    CHECK ((state = 'waiting') <= (content IS NOT NULL))
);
CREATE TRIGGER delivered_answers_stand BEFORE UPDATE OF state, body ON verb_calls WHEN OLD.state <> 'waiting'
BEGIN SELECT RAISE(ABORT, 'what a call came to stands'); END;

CREATE TABLE verb_steps (                      -- the record of each model: one row for each update
    model         TEXT NOT NULL,
    step          INTEGER NOT NULL CHECK (step >= 0),
    learning_rate REAL NOT NULL,
    grad_norm     REAL,                        -- null: it was not finite
    metrics       TEXT NOT NULL,               -- JSON: sums over the forward passes since the step before
    at            REAL NOT NULL,
    PRIMARY KEY (model, step)
) WITHOUT ROWID;

-- migration 4
ALTER TABLE runs ADD COLUMN tokenizer TEXT;    -- JSON: its hash, and the tokens that end a completion

-- migration 5
CREATE TABLE session_history (                 -- every session of `verb_sessions`; it stays when the session ends
    position      INTEGER PRIMARY KEY,
    id            TEXT NOT NULL UNIQUE,
    owner         TEXT NOT NULL,               -- of the API key that opened it; empty if it is not known
    display_name  TEXT,
    user_metadata TEXT,                        -- JSON, as the client gave it
    created_at    REAL NOT NULL
);
CREATE TABLE training_runs (                   -- every model of `verb_models`; it stays when the session ends
    position        INTEGER PRIMARY KEY,
    id              TEXT NOT NULL UNIQUE,
    session         TEXT NOT NULL REFERENCES session_history (id),
    spec            TEXT NOT NULL,             -- JSON: base, rank, seed …
    user_metadata   TEXT,                      -- JSON, as the client gave it
    created_at      REAL NOT NULL,
    last_request_at REAL NOT NULL
);
CREATE INDEX training_runs_by_session ON training_runs (session);
INSERT INTO session_history (id, owner, created_at)
SELECT id, '', CAST(strftime('%s', 'now') AS REAL) FROM verb_sessions ORDER BY position;
INSERT INTO training_runs (id, session, spec, created_at, last_request_at)
SELECT id, session, spec, CAST(strftime('%s', 'now') AS REAL), CAST(strftime('%s', 'now') AS REAL)
FROM verb_models ORDER BY position;

-- migration 6
CREATE TABLE trajectories (                    -- members that consist of several calls, of groups in handed_out
    id     TEXT NOT NULL REFERENCES handed_out (id),
    member INTEGER NOT NULL CHECK (member >= 0),
    run    TEXT NOT NULL,
    key_id TEXT NOT NULL,
    name   TEXT,                               -- as its client calls it; null: by the ids of its calls
    turns  INTEGER NOT NULL DEFAULT 0 CHECK (turns >= 0),  -- numbers that were given to its calls
    PRIMARY KEY (id, member)
) WITHOUT ROWID;
CREATE UNIQUE INDEX trajectories_by_name ON trajectories (run, key_id, name) WHERE name IS NOT NULL;

CREATE TABLE turns (
    call     TEXT PRIMARY KEY,                 -- id of the completion, without chatcmpl-
    id       TEXT NOT NULL,                    -- of the group
    member   INTEGER NOT NULL,
    position INTEGER NOT NULL CHECK (position >= 0),  -- in its trajectory
    asked    TEXT NOT NULL,                    -- hash of the request, by which a retry is recognised
    step     INTEGER NOT NULL,                 -- steps that were done when it was sampled
    record   BLOB,                             -- to_json(Group) of one rollout; null: its group has closed
    FOREIGN KEY (id, member) REFERENCES trajectories (id, member)
) WITHOUT ROWID;
CREATE INDEX turns_by_trajectory ON turns (id, member, position);
CREATE INDEX turns_with_record ON turns (id) WHERE record IS NOT NULL;

-- migration 7
ALTER TABLE groups ADD COLUMN named INTEGER NOT NULL DEFAULT 0;  -- whether its client named the draw

-- migration 8
CREATE TABLE responses (                       -- of /v1/responses, so that another can go on from one
    id       TEXT PRIMARY KEY,
    key_id   TEXT NOT NULL,
    response TEXT NOT NULL,                    -- JSON, as it was sent
    messages TEXT NOT NULL,                    -- JSON: the conversation up to it, without instructions
    made_at  REAL NOT NULL                     -- seconds of uptime
) WITHOUT ROWID;

-- migration 9
ALTER TABLE turns DROP COLUMN asked;
ALTER TABLE answers ADD COLUMN retries INTEGER;  -- of the last request that got it; null: no other is taken for a retry of it
ALTER TABLE answers ADD COLUMN completion TEXT;  -- the stored completion that it has, without chatcmpl-
CREATE INDEX answers_by_body ON answers (key_id, route, body_hash) WHERE retries IS NOT NULL;

-- migration 10
DELETE FROM answers WHERE made_at > 1e9;       -- of earlier servers, which stored the time of day

-- migration 11
ALTER TABLE verb_models ADD COLUMN sums TEXT;  -- JSON: sums of its gradient passes since the last update; null: none
