CREATE TABLE api_keys (
    key_id TEXT NOT NULL,
    role TEXT NOT NULL,
    digest BYTEA NOT NULL,
    projects JSONB,
    note TEXT,
    created_at FLOAT NOT NULL,
    expires_at FLOAT,
    revoked_at FLOAT,
    CONSTRAINT pk_api_keys PRIMARY KEY (key_id)
);

CREATE TABLE blob_rights (
    sha256 TEXT NOT NULL,
    project TEXT NOT NULL,
    at FLOAT NOT NULL,
    CONSTRAINT pk_blob_rights PRIMARY KEY (sha256, project)
);

CREATE TABLE control_processes (
    owner TEXT NOT NULL,
    role TEXT NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    started_at FLOAT NOT NULL,
    seen_at FLOAT NOT NULL,
    facts JSONB DEFAULT '{}' NOT NULL,
    CONSTRAINT pk_control_processes PRIMARY KEY (owner)
);

CREATE TABLE cursors (
    name TEXT NOT NULL,
    position BIGINT DEFAULT '0' NOT NULL,
    CONSTRAINT pk_cursors PRIMARY KEY (name)
);

CREATE TABLE events (
    event_id BIGSERIAL NOT NULL,
    at FLOAT NOT NULL,
    actor TEXT NOT NULL,
    kind TEXT NOT NULL,
    job_id TEXT,
    epoch BIGINT,
    vm_id TEXT,
    before JSONB,
    after JSONB,
    detail JSONB,
    CONSTRAINT pk_events PRIMARY KEY (event_id)
);
CREATE INDEX ix_events_job_id ON events (job_id);
CREATE INDEX ix_events_vm_id ON events (vm_id);

CREATE TABLE jobs (
    job_id TEXT NOT NULL,
    job_type TEXT DEFAULT 'GRPO' NOT NULL,
    model TEXT,
    dataset TEXT,
    reward_function TEXT,
    preprocessing_pipeline TEXT DEFAULT 'generic' NOT NULL,
    hyperparams JSONB DEFAULT '{}' NOT NULL,
    use_unsloth BOOLEAN DEFAULT false NOT NULL,
    output_dir TEXT DEFAULT 'outputs' NOT NULL,
    max_steps INTEGER DEFAULT '500' NOT NULL,
    learning_rate FLOAT DEFAULT '5e-6' NOT NULL,
    batch_size INTEGER DEFAULT '1' NOT NULL,
    num_generations INTEGER DEFAULT '4' NOT NULL,
    priority INTEGER DEFAULT '0' NOT NULL,
    status TEXT DEFAULT 'queued' NOT NULL,
    retry_count INTEGER DEFAULT '0' NOT NULL,
    failure_reason TEXT,
    assigned_vm TEXT,
    gpu_index INTEGER,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    start_time TIMESTAMP WITH TIME ZONE,
    end_time TIMESTAMP WITH TIME ZONE,
    log_path TEXT,
    project TEXT DEFAULT 'default' NOT NULL,
    name TEXT,
    submitted_by TEXT,
    request JSONB DEFAULT '{}' NOT NULL,
    spec JSONB,
    spec_hash TEXT,
    resources JSONB,
    shape TEXT,
    due FLOAT,
    rank FLOAT,
    admitted_at FLOAT,
    not_before FLOAT DEFAULT '0' NOT NULL,
    waiting_since FLOAT,
    generation INTEGER DEFAULT '0' NOT NULL,
    spent JSONB DEFAULT '{}' NOT NULL,
    blocked_reasons JSONB,
    blocked_on TEXT,
    cancel_requested_at FLOAT,
    exit_code INTEGER,
    idempotency_key TEXT,
    request_hash TEXT,
    CONSTRAINT pk_jobs PRIMARY KEY (job_id),
    CONSTRAINT uq_jobs_project_idempotency_key UNIQUE (project, idempotency_key)
);
CREATE INDEX ix_jobs_blocked_on ON jobs (blocked_on) WHERE status = 'pending' AND blocked_on IS NOT NULL;
CREATE INDEX ix_jobs_created ON jobs (created_at, job_id, status);
CREATE INDEX ix_jobs_new ON jobs (created_at) WHERE admitted_at IS NULL;
CREATE INDEX ix_jobs_of_project ON jobs (project, due, rank) WHERE status IN ('queued', 'pending', 'held');
CREATE INDEX ix_jobs_patient ON jobs (waiting_since) WHERE status = 'queued';
CREATE INDEX ix_jobs_queue ON jobs (rank, job_id) WHERE status = 'queued';
CREATE INDEX ix_jobs_shapes ON jobs (shape, rank, job_id) WHERE status = 'queued';
CREATE INDEX ix_jobs_waiting ON jobs (shape, rank, job_id) WHERE status = 'pending' AND blocked_on IS NULL;

CREATE TABLE projects (
    name TEXT NOT NULL,
    weight FLOAT DEFAULT '1' NOT NULL,
    max_gpus INTEGER,
    max_waiting INTEGER,
    CONSTRAINT pk_projects PRIMARY KEY (name)
);

CREATE TABLE vms (
    vm_id TEXT NOT NULL,
    ip_address TEXT DEFAULT '127.0.0.1' NOT NULL,
    port INTEGER DEFAULT '22' NOT NULL,
    "user" TEXT,
    ssh_key_path TEXT,
    transport TEXT DEFAULT 'ssh' NOT NULL,
    jump JSONB,
    host_key TEXT,
    seen_host_key TEXT,
    workdir TEXT DEFAULT 'groupwise-fleet' NOT NULL,
    python TEXT DEFAULT 'python3' NOT NULL,
    labels JSONB DEFAULT '{}' NOT NULL,
    cpu_slots INTEGER,
    projects JSONB,
    deadman FLOAT,
    probe JSONB,
    idle_memory_mb INTEGER DEFAULT '500' NOT NULL,
    active BOOLEAN DEFAULT true NOT NULL,
    draining BOOLEAN DEFAULT false NOT NULL,
    cordoned TEXT,
    lost_at FLOAT,
    contact TEXT DEFAULT 'new' NOT NULL,
    unreachable_since FLOAT,
    misses INTEGER DEFAULT '0' NOT NULL,
    problem TEXT,
    degraded BOOLEAN DEFAULT false NOT NULL,
    boot_id TEXT,
    facts JSONB DEFAULT '{}' NOT NULL,
    observed_round FLOAT DEFAULT '0' NOT NULL,
    launch_failures INTEGER DEFAULT '0' NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    last_polled TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_vms PRIMARY KEY (vm_id)
);

CREATE TABLE attempts (
    epoch BIGSERIAL NOT NULL,
    job_id TEXT NOT NULL,
    generation INTEGER NOT NULL,
    number INTEGER NOT NULL,
    state TEXT DEFAULT 'reserved' NOT NULL,
    outcome TEXT,
    failure_class TEXT,
    charged BOOLEAN,
    evidence JSONB DEFAULT '{}' NOT NULL,
    owner TEXT,
    lease_until FLOAT DEFAULT '0' NOT NULL,
    contact TEXT DEFAULT 'ok' NOT NULL,
    unreachable_since FLOAT,
    cleanup TEXT DEFAULT 'pending' NOT NULL,
    resume_from JSONB,
    previous_failure TEXT,
    spec JSONB,
    created_at FLOAT NOT NULL,
    running_at FLOAT,
    ended_at FLOAT,
    CONSTRAINT pk_attempts PRIMARY KEY (epoch),
    CONSTRAINT fk_attempts_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id)
);
CREATE INDEX ix_attempts_job_id ON attempts (job_id);
CREATE INDEX ix_attempts_open ON attempts (lease_until) WHERE state <> 'ended' OR cleanup <> 'clean';
CREATE UNIQUE INDEX uq_attempts_live ON attempts (job_id) WHERE state <> 'ended';

CREATE TABLE checkpoints (
    job_id TEXT NOT NULL,
    generation INTEGER NOT NULL,
    epoch BIGINT NOT NULL,
    path TEXT NOT NULL,
    step BIGINT NOT NULL,
    manifest JSONB NOT NULL,
    mirrored_at FLOAT NOT NULL,
    damaged_at FLOAT,
    CONSTRAINT pk_checkpoints PRIMARY KEY (job_id, generation, epoch, path),
    CONSTRAINT fk_checkpoints_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id)
);
CREATE INDEX ix_checkpoints_damaged ON checkpoints (damaged_at) WHERE damaged_at IS NOT NULL;

CREATE TABLE gpus (
    gpu_id BIGSERIAL NOT NULL,
    vm_id TEXT NOT NULL,
    index INTEGER NOT NULL,
    uuid TEXT NOT NULL,
    model TEXT,
    memory_mb INTEGER,
    observed TEXT DEFAULT 'ok' NOT NULL,
    detail TEXT,
    memory_used_mb INTEGER,
    utilisation INTEGER,
    temperature INTEGER,
    quarantined TEXT,
    accused JSONB,
    observed_at FLOAT,
    CONSTRAINT pk_gpus PRIMARY KEY (gpu_id),
    CONSTRAINT fk_gpus_vm_id FOREIGN KEY(vm_id) REFERENCES vms (vm_id),
    CONSTRAINT uq_gpus_vm_id_uuid UNIQUE (vm_id, uuid)
);
CREATE INDEX ix_gpus_uuid ON gpus (uuid);
CREATE INDEX ix_gpus_vm_id ON gpus (vm_id);

CREATE TABLE attempt_members (
    epoch BIGINT NOT NULL,
    rank INTEGER NOT NULL,
    vm_id TEXT NOT NULL,
    state TEXT,
    handle JSONB DEFAULT '{}' NOT NULL,
    log_offset BIGINT DEFAULT '0' NOT NULL,
    log_shipped BIGINT DEFAULT '0' NOT NULL,
    released BOOLEAN DEFAULT false NOT NULL,
    CONSTRAINT pk_attempt_members PRIMARY KEY (epoch, rank),
    CONSTRAINT fk_attempt_members_epoch FOREIGN KEY(epoch) REFERENCES attempts (epoch),
    CONSTRAINT fk_attempt_members_vm_id FOREIGN KEY(vm_id) REFERENCES vms (vm_id)
);
CREATE INDEX ix_attempt_members_vm_id ON attempt_members (vm_id);
CREATE INDEX ix_members_unshipped ON attempt_members (epoch) WHERE log_shipped < log_offset;

CREATE TABLE gpu_history (
    gpu_id BIGINT NOT NULL,
    minute BIGINT NOT NULL,
    memory_used_mb INTEGER,
    utilisation INTEGER,
    temperature INTEGER,
    CONSTRAINT pk_gpu_history PRIMARY KEY (gpu_id, minute),
    CONSTRAINT fk_gpu_history_gpu_id FOREIGN KEY(gpu_id) REFERENCES gpus (gpu_id)
);

CREATE TABLE reservations (
    reservation_id BIGSERIAL NOT NULL,
    vm_id TEXT NOT NULL,
    gpu_id BIGINT,
    slot INTEGER,
    share_mb INTEGER,
    epoch BIGINT NOT NULL,
    rank INTEGER NOT NULL,
    reserved_at FLOAT NOT NULL,
    released_at FLOAT,
    CONSTRAINT pk_reservations PRIMARY KEY (reservation_id),
    CONSTRAINT fk_reservations_epoch FOREIGN KEY(epoch) REFERENCES attempts (epoch),
    CONSTRAINT fk_reservations_gpu_id FOREIGN KEY(gpu_id) REFERENCES gpus (gpu_id),
    CONSTRAINT fk_reservations_vm_id FOREIGN KEY(vm_id) REFERENCES vms (vm_id)
);
CREATE INDEX ix_reservations_epoch ON reservations (epoch);
CREATE INDEX ix_reservations_open ON reservations (vm_id) WHERE released_at IS NULL;
CREATE UNIQUE INDEX uq_reservations_gpu ON reservations (gpu_id) WHERE released_at IS NULL AND share_mb IS NULL;
CREATE UNIQUE INDEX uq_reservations_slot ON reservations (vm_id, slot) WHERE released_at IS NULL AND gpu_id IS NULL;
