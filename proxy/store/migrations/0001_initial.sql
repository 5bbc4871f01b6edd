CREATE TABLE rollouts (
    n              INTEGER PRIMARY KEY,           -- order of opening; the cursor of GET /rollouts
    rollout_id     TEXT NOT NULL UNIQUE,
    task_id        TEXT,
    agent          TEXT,
    mode           TEXT NOT NULL DEFAULT 'train',
    status         TEXT NOT NULL DEFAULT 'running',
    reason         TEXT,
    metadata       TEXT NOT NULL DEFAULT '{}',
    policy_version INTEGER,                       -- the version that it began with
    reward         REAL,                          -- newest rollout-level reward named 'reward'
    calls          INTEGER NOT NULL DEFAULT 0,
    tokens         INTEGER NOT NULL DEFAULT 0,    -- sampled tokens
    created_at     REAL NOT NULL,
    ended_at       REAL,
    step           INTEGER,                       -- the training step that took it
    dropped        TEXT                           -- why the trainer will not take it
);
CREATE INDEX rollouts_by_task ON rollouts (task_id, n);
CREATE INDEX rollouts_by_status ON rollouts (status, n);
CREATE INDEX rollouts_by_step ON rollouts (step) WHERE step IS NOT NULL;
CREATE INDEX rollouts_claimable ON rollouts (task_id, ended_at)
    WHERE mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL;

CREATE TABLE rollout_keys (
    key_hash   TEXT PRIMARY KEY,
    rollout_id TEXT NOT NULL REFERENCES rollouts (rollout_id) ON DELETE CASCADE
);

-- A call's request and prompt tokens are stored as what they add to an earlier call of the rollout (delta.py).
CREATE TABLE calls (
    call_id            TEXT PRIMARY KEY,
    rollout_id         TEXT NOT NULL REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
    seq                INTEGER NOT NULL,
    parent_id          TEXT,
    agent              TEXT,
    endpoint           TEXT NOT NULL,
    status             TEXT NOT NULL,
    http_status        INTEGER,
    model              TEXT,
    policy_version     INTEGER,
    policy_version_end INTEGER,
    request            TEXT NOT NULL,
    response           TEXT,
    prompt_shared      INTEGER NOT NULL DEFAULT 0,
    prompt_ids         BLOB,
    token_ids          BLOB,                      -- of the first choice
    logprobs           BLOB,
    finish_reason      TEXT,
    more_choices       TEXT,                      -- of a request with n > 1
    usage              TEXT,
    error              TEXT,
    untrainable_reason TEXT,
    started_at         REAL NOT NULL,
    ttft_ms            REAL,
    latency_ms         REAL,
    UNIQUE (rollout_id, seq)
);

CREATE TABLE tool_calls (
    rollout_id   TEXT NOT NULL REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
    call_id      TEXT NOT NULL REFERENCES calls (call_id) ON DELETE CASCADE,
    position     INTEGER NOT NULL,
    tool_call_id TEXT,
    name         TEXT NOT NULL,
    arguments    TEXT NOT NULL,
    result       TEXT,
    is_error     INTEGER,
    PRIMARY KEY (call_id, position)
);
CREATE INDEX tool_calls_by_id ON tool_calls (rollout_id, tool_call_id);

CREATE TABLE rewards (
    reward_id  INTEGER PRIMARY KEY,
    rollout_id TEXT NOT NULL REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
    call_id    TEXT REFERENCES calls (call_id) ON DELETE CASCADE,
    name       TEXT NOT NULL,
    value      REAL NOT NULL,
    source     TEXT,
    comment    TEXT,
    final      INTEGER NOT NULL,
    created_at REAL NOT NULL
);
CREATE INDEX rewards_by_rollout ON rewards (rollout_id, call_id, name, reward_id);

CREATE TABLE idempotency (
    key        TEXT PRIMARY KEY,
    body_hash  TEXT NOT NULL,
    answer     TEXT NOT NULL,
    created_at REAL NOT NULL
);

CREATE TABLE policy_versions (
    version      INTEGER PRIMARY KEY,
    status       TEXT NOT NULL,
    publish      TEXT,
    path         TEXT,
    served_model TEXT,
    step         INTEGER,
    created_at   REAL NOT NULL,
    live_at      REAL,
    error        TEXT,
    metrics      TEXT NOT NULL DEFAULT '{}'
);
INSERT INTO policy_versions (version, status, created_at, live_at) VALUES (0, 'live', 0, 0);

-- Which version was live from when on; the newest row is the live one.
CREATE TABLE policy_log (
    n       INTEGER PRIMARY KEY,
    version INTEGER NOT NULL REFERENCES policy_versions (version),
    at      REAL NOT NULL
);
INSERT INTO policy_log (version, at) VALUES (0, 0);

CREATE TABLE steps (
    step        INTEGER PRIMARY KEY,
    status      TEXT NOT NULL,                    -- claimed | trained
    version     INTEGER,                          -- the policy version that was published from it
    base        INTEGER NOT NULL,                 -- the policy version whose weights it started from
    checkpoint  TEXT,
    metrics     TEXT NOT NULL DEFAULT '{}',
    created_at  REAL NOT NULL,
    finished_at REAL
);
