-- Times are Unix times in seconds. JSON is text.

-- Policy versions: weights that were or are served. Version 0 is the base model.
CREATE TABLE policy_versions (
    version      INTEGER PRIMARY KEY,
    status       TEXT NOT NULL,                   -- publishing | ready | live | failed
    publish      TEXT,                            -- lora | merged
    path         TEXT,                            -- where its files are; NULL once they are gone
    served_model TEXT,
    adapters     TEXT NOT NULL DEFAULT '{}',      -- JSON: what agents' own adapters are served as, by name
    verified     INTEGER NOT NULL DEFAULT 0,      -- vLLM was seen to serve these weights
    step         INTEGER,                         -- the training step that made it
    created_at   REAL NOT NULL,
    live_at      REAL,
    error        TEXT,
    metrics      TEXT NOT NULL DEFAULT '{}'       -- JSON
);
INSERT INTO policy_versions (version, status, verified, created_at, live_at) VALUES (0, 'live', 1, 0, 0);

-- Which version was live from when on. The newest row is the live one.
CREATE TABLE policy_log (
    n       INTEGER PRIMARY KEY,
    version INTEGER NOT NULL REFERENCES policy_versions (version),
    at      REAL NOT NULL
);
INSERT INTO policy_log (version, at) VALUES (0, 0);

-- Training steps.
CREATE TABLE steps (
    step        INTEGER PRIMARY KEY,
    status      TEXT NOT NULL,                    -- claimed | trained
    version     INTEGER,                          -- the policy version that was published from it
    base        INTEGER NOT NULL,                 -- the policy version whose weights it started from
    checkpoint  TEXT,                             -- its directory; NULL once that is gone
    metrics     TEXT NOT NULL DEFAULT '{}',       -- JSON
    created_at  REAL NOT NULL,
    finished_at REAL
);
CREATE INDEX steps_claimed ON steps (step) WHERE status = 'claimed';

-- Rollouts: one run of an agent on one task.
CREATE TABLE rollouts (
    n              INTEGER PRIMARY KEY,           -- order of opening; the cursor of GET /rollouts
    rollout_id     TEXT NOT NULL UNIQUE,
    task_id        TEXT,
    agent          TEXT,
    mode           TEXT NOT NULL DEFAULT 'train', -- train | eval
    status         TEXT NOT NULL DEFAULT 'running', -- running | completed | failed | discarded
    reason         TEXT,                          -- why it ended
    metadata       TEXT NOT NULL DEFAULT '{}',    -- JSON
    policy_version INTEGER,                       -- the version that it began with
    reward         REAL,                          -- newest rollout-level reward named 'reward'
    rewarded_at    REAL,                          -- when the first reward came that counts
    calls          INTEGER NOT NULL DEFAULT 0,    -- ended calls
    foreign_calls  INTEGER NOT NULL DEFAULT 0,    -- those of them that other models than the policy answered
    tokens         INTEGER NOT NULL DEFAULT 0,    -- sampled tokens
    created_at     REAL NOT NULL,
    ended_at       REAL,
    step           INTEGER,                       -- the training step that took it
    dropped        TEXT,                          -- why the trainer will not take it
    dropped_by     INTEGER                        -- the step that was put together then; it gives it back if it fails
);
CREATE INDEX rollouts_by_task ON rollouts (task_id, n);
CREATE INDEX rollouts_by_status ON rollouts (status, n);
CREATE INDEX rollouts_by_mode ON rollouts (mode, n);
CREATE INDEX rollouts_by_mode_and_status ON rollouts (mode, status, n);
CREATE INDEX rollouts_by_step ON rollouts (step) WHERE step IS NOT NULL;
CREATE INDEX rollouts_by_dropping ON rollouts (dropped_by) WHERE dropped_by IS NOT NULL;
-- Rollouts that nobody ends stay running; the versions that recent ones began with are asked for every second.
CREATE INDEX rollouts_running ON rollouts (status, created_at, policy_version) WHERE status = 'running';
-- The trainer looks at all that waits, many times a minute: at the index alone. Without its first column, which is the
-- same everywhere, SQLite takes another index.
CREATE INDEX rollouts_claimable
    ON rollouts (mode, task_id, ended_at, status, rewarded_at, step, dropped, calls, foreign_calls)
    WHERE mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL AND task_id IS NOT NULL;
-- Rollouts without a task that can be trained on, and those that wait for a reward of whatever name.
CREATE INDEX rollouts_lone ON rollouts (mode, task_id, ended_at)
    WHERE mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL AND task_id IS NULL;
CREATE INDEX rollouts_unrewarded ON rollouts (mode, rewarded_at)
    WHERE mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL AND rewarded_at IS NULL;

-- How many rollouts there are, kept as they come and go: counting a million takes too long for every look.
CREATE TABLE rollout_counts (
    mode     TEXT NOT NULL,
    status   TEXT NOT NULL,
    rollouts INTEGER NOT NULL,
    PRIMARY KEY (mode, status)
) WITHOUT ROWID;
CREATE TRIGGER rollout_opened AFTER INSERT ON rollouts BEGIN
    INSERT INTO rollout_counts VALUES (NEW.mode, NEW.status, 1)
    ON CONFLICT (mode, status) DO UPDATE SET rollouts = rollout_counts.rollouts + 1;
END;
CREATE TRIGGER rollout_changed AFTER UPDATE OF mode, status ON rollouts
WHEN OLD.mode <> NEW.mode OR OLD.status <> NEW.status BEGIN
    UPDATE rollout_counts SET rollouts = rollouts - 1 WHERE mode = OLD.mode AND status = OLD.status;
    INSERT INTO rollout_counts VALUES (NEW.mode, NEW.status, 1)
    ON CONFLICT (mode, status) DO UPDATE SET rollouts = rollout_counts.rollouts + 1;
END;
CREATE TRIGGER rollout_deleted AFTER DELETE ON rollouts BEGIN
    UPDATE rollout_counts SET rollouts = rollouts - 1 WHERE mode = OLD.mode AND status = OLD.status;
END;

-- What answers the alias in rollouts that were opened for another model than the policy.
CREATE TABLE rollout_models (
    rollout_id TEXT PRIMARY KEY REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
    model      TEXT NOT NULL
) WITHOUT ROWID;

-- Keys given out by `lightning-proxy keys`; the keys themselves are not kept. A revoked one stays, and lets nobody in.
CREATE TABLE keys (
    key_id              TEXT PRIMARY KEY,
    key_hash            TEXT NOT NULL UNIQUE,     -- SHA-256
    name                TEXT NOT NULL,
    role                TEXT NOT NULL,            -- agent | admin
    requests_per_minute INTEGER,                  -- NULL: as proxy.limits says
    tokens_per_minute   INTEGER,
    concurrent          INTEGER,
    recording           INTEGER NOT NULL DEFAULT 1,
    created_at          REAL NOT NULL,
    revoked_at          REAL
);
CREATE UNIQUE INDEX keys_by_name ON keys (name) WHERE revoked_at IS NULL;

-- Keys given out for one rollout each. `key_id`: the key that asked for it; its limits count, and it ends both.
CREATE TABLE rollout_keys (
    key_hash   TEXT PRIMARY KEY,
    rollout_id TEXT NOT NULL REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
    key_id     TEXT REFERENCES keys (key_id) ON DELETE CASCADE
);
CREATE INDEX rollout_keys_by_rollout ON rollout_keys (rollout_id);

-- Calls: one request and its answer. A row is written twice, at the start (as 'incomplete') and at the end. Request and
-- prompt tokens are stored as what they add to an earlier call of the rollout, `parent_id` (delta.py).
CREATE TABLE calls (
    call_id            TEXT PRIMARY KEY,
    rollout_id         TEXT NOT NULL REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
    seq                INTEGER NOT NULL,          -- 0, 1, 2, … in the rollout
    parent_id          TEXT,
    agent              TEXT,
    endpoint           TEXT NOT NULL,
    status             TEXT NOT NULL,             -- incomplete | ok | error | cancelled
    http_status        INTEGER,
    upstream           TEXT,                      -- the one that answered
    model              TEXT,
    policy_version     INTEGER,                   -- at its start; NULL: not answered by the policy
    policy_version_end INTEGER,                   -- at its end, where weights are replaced in place
    superseded_by      TEXT,                      -- the call that sent the same request again
    started_at         REAL NOT NULL,
    ttft_ms            REAL,
    latency_ms         REAL,
    finish_reason      TEXT,
    untrainable_reason TEXT,
    error              TEXT,
    usage              TEXT,                      -- JSON
    request            TEXT NOT NULL,             -- JSON; '': it is in large_requests
    response           TEXT,                      -- JSON
    prompt_shared      INTEGER NOT NULL DEFAULT 0, -- so many prompt tokens are those of the parent
    prompt_ids         BLOB,                      -- the others: 32-bit integers
    token_ids          BLOB,                      -- of the first choice
    logprobs           BLOB,                      -- 32-bit floats
    more_choices       TEXT,                      -- JSON, of a request with n > 1
    UNIQUE (rollout_id, seq)
);
-- Whether any call is under way: few are at a time, however many there were.
CREATE INDEX calls_under_way ON calls (started_at) WHERE status = 'incomplete';

-- Large requests, apart from their calls: the end of a call writes its row again, and they would be most of that.
CREATE TABLE large_requests (
    call_id TEXT PRIMARY KEY REFERENCES calls (call_id) ON DELETE CASCADE,
    request TEXT NOT NULL
);

-- Which agents made calls of which rollout, newest rollout first when read backwards.
CREATE TABLE rollout_agents (
    agent TEXT NOT NULL,
    n     INTEGER NOT NULL REFERENCES rollouts (n) ON DELETE CASCADE,
    PRIMARY KEY (agent, n)
) WITHOUT ROWID;
CREATE INDEX rollout_agents_by_rollout ON rollout_agents (n);
CREATE TRIGGER agent_called AFTER INSERT ON calls WHEN NEW.agent IS NOT NULL BEGIN
    INSERT INTO rollout_agents SELECT NEW.agent, n FROM rollouts WHERE rollout_id = NEW.rollout_id
    ON CONFLICT (agent, n) DO NOTHING;
END;

-- Tool calls of answers, and the results that a later request brought back.
CREATE TABLE tool_calls (
    rollout_id   TEXT NOT NULL REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
    call_id      TEXT NOT NULL REFERENCES calls (call_id) ON DELETE CASCADE,
    position     INTEGER NOT NULL,                -- in the answer
    tool_call_id TEXT,
    name         TEXT NOT NULL,
    arguments    TEXT NOT NULL,
    result       TEXT,                            -- JSON
    is_error     INTEGER,
    PRIMARY KEY (call_id, position)
);
CREATE INDEX tool_calls_by_id ON tool_calls (rollout_id, tool_call_id);

-- Rewards, as they were posted. The newest for the same rollout, call and name counts.
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
CREATE INDEX rewards_by_call ON rewards (call_id) WHERE call_id IS NOT NULL;

-- Events: what an agent says of itself between its calls.
CREATE TABLE events (
    event_id   INTEGER PRIMARY KEY,
    rollout_id TEXT NOT NULL REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
    seq        INTEGER NOT NULL,                  -- of the call that comes next
    kind       TEXT NOT NULL,                     -- state | action | note
    agent      TEXT,
    name       TEXT,
    value      TEXT,                              -- JSON, as arguments and result
    arguments  TEXT,
    result     TEXT,
    is_error   INTEGER NOT NULL DEFAULT 0,
    created_at REAL NOT NULL
);
CREATE INDEX events_by_rollout ON events (rollout_id, event_id);

-- Answers to posts with an Idempotency-Key.
CREATE TABLE idempotency (
    key        TEXT PRIMARY KEY,
    body_hash  TEXT NOT NULL,
    answer     TEXT NOT NULL,                     -- JSON
    created_at REAL NOT NULL
);
CREATE INDEX idempotency_by_age ON idempotency (created_at);

-- Conversations of rollouts that nobody names, by digest. Where a digest leads: the last rollout that was at that
-- point, or the one that something telling comes from (NULL: several).
CREATE TABLE conversation_points (
    digest     BLOB PRIMARY KEY,
    rollout_id TEXT,
    at         REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX conversation_points_by_age ON conversation_points (at);

-- What waits to be gone on with, each by one request: answers, and requests that a client may send again.
CREATE TABLE conversation_tips (
    digest     BLOB NOT NULL,
    at         REAL NOT NULL,
    call_id    TEXT NOT NULL,
    rollout_id TEXT NOT NULL,
    PRIMARY KEY (digest, at, call_id)
) WITHOUT ROWID;
CREATE INDEX conversation_tips_by_age ON conversation_tips (at);
