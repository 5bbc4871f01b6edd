-- schema 7
-- The tables of the core for both databases, in SQLite's words; `schema.py` has PostgreSQL's. What only one database
-- has is in `sqlite.sql` and `postgres.sql`. A key that is INTEGER PRIMARY KEY is a number that the database gives; one
-- that is NOT NULL, too, is given by us. Times are Unix times in seconds. JSON is text.

-- Which schema a store has: a row for the core, `store`, and for each feature with tables.
CREATE TABLE schema_numbers (
    room   TEXT PRIMARY KEY,
    number INTEGER NOT NULL
);

-- Policy versions: weights that were or are served. Version 0 is the base model.
CREATE TABLE policy_versions (
    version      INTEGER NOT NULL PRIMARY KEY,
    status       TEXT NOT NULL,                   -- publishing | candidate | ready | live | failed | rejected
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
-- What a call, a second or a step reads of versions and steps is found without the others, however many there were.
CREATE INDEX policy_versions_by_status ON policy_versions (status, version);
CREATE INDEX policy_versions_served ON policy_versions (served_model, version) WHERE served_model IS NOT NULL;
CREATE INDEX policy_versions_with_files ON policy_versions (version) WHERE path IS NOT NULL;
CREATE INDEX policy_versions_published ON policy_versions (publish) WHERE publish IS NOT NULL;

-- Which version was live from when on. The newest row is the live one.
CREATE TABLE policy_log (
    n       INTEGER PRIMARY KEY,
    version INTEGER NOT NULL REFERENCES policy_versions (version),
    at      REAL NOT NULL
);
INSERT INTO policy_log (version, at) VALUES (0, 0);

-- How new weights are published: one row, by the first process that decided it or the last that was told otherwise.
CREATE TABLE publishing (
    n          INTEGER NOT NULL PRIMARY KEY CHECK (n = 1),
    mode       TEXT NOT NULL,                     -- lora | merged
    decided_by TEXT NOT NULL,                     -- trainer | proxy
    at         REAL NOT NULL
);

-- What a policy version answered when it was first asked, and why its server does not seem to serve it now.
CREATE TABLE probes (
    version INTEGER NOT NULL PRIMARY KEY,
    model   TEXT NOT NULL,                        -- the name that the version is served under
    answer  TEXT NOT NULL,                        -- JSON: by position, the sampled token and the most likely ones
    at      REAL NOT NULL,
    problem TEXT                                  -- NULL: it answers as it did
);

-- Training steps.
CREATE TABLE steps (
    step        INTEGER NOT NULL PRIMARY KEY,
    status      TEXT NOT NULL,                    -- claimed | trained
    version     INTEGER,                          -- the policy version that was published from it
    base        INTEGER NOT NULL,                 -- the policy version whose weights it started from
    checkpoint  TEXT,                             -- its directory; NULL once that is gone
    metrics     TEXT NOT NULL DEFAULT '{}',       -- JSON
    created_at  REAL NOT NULL,
    finished_at REAL
);
CREATE INDEX steps_claimed ON steps (step) WHERE status = 'claimed';
CREATE INDEX steps_with_checkpoints ON steps (step) WHERE checkpoint IS NOT NULL;

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
    alias_model    TEXT,                          -- what answers the alias, if it was opened for another model
    policy_version INTEGER,                       -- the version that it began with
    key_id         TEXT,                          -- the key of `keys` that it was opened with
    owner          TEXT,                          -- that key, if it sees only its own rollouts
    evidence       INTEGER NOT NULL DEFAULT 0,    -- 1: that key gave evidence then
    end_counts     INTEGER NOT NULL DEFAULT 1,    -- 0: the key that said how it ended gave none
    reward         REAL,                          -- its return (core/returns.py)
    own_reward     REAL,                          -- weighted; NULL: it has none of its own
    trusted_reward REAL,                          -- its return by the rewards that act on everybody (rewards.py)
    rewarded_at    REAL,                          -- when the first reward came that counts
    calls          INTEGER NOT NULL DEFAULT 0,    -- ended calls
    foreign_calls  INTEGER NOT NULL DEFAULT 0,    -- those of them that other models than the policy answered
    tokens         INTEGER NOT NULL DEFAULT 0,    -- sampled tokens
    created_at     REAL NOT NULL,
    ended_at       REAL,
    -- The group that it was opened in, or in which a step compared it: the n of its first member. A sibling that was
    -- still running then has it, too, and is compared with the whole group when it ends. NULL: opened one by one.
    group_id       INTEGER,
    step           INTEGER,                       -- the training step that took it
    dropped        TEXT,                          -- why the trainer will not take it
    dropped_by     INTEGER                        -- the step that was put together then; it gives it back if it fails
);
CREATE INDEX rollouts_by_task ON rollouts (task_id, n);
CREATE INDEX rollouts_by_status ON rollouts (status, n);
CREATE INDEX rollouts_by_mode_and_status ON rollouts (mode, status, n);
CREATE INDEX rollouts_by_step ON rollouts (step) WHERE step IS NOT NULL;
CREATE INDEX rollouts_by_dropping ON rollouts (dropped_by) WHERE dropped_by IS NOT NULL;
CREATE INDEX rollouts_by_key ON rollouts (key_id, n) WHERE key_id IS NOT NULL;
CREATE INDEX rollouts_by_group ON rollouts (group_id) WHERE group_id IS NOT NULL;
-- Whether training stands still is asked at every poll.
CREATE INDEX rollouts_dropped ON rollouts (dropped, n) WHERE dropped IS NOT NULL;
-- Those that may still belong to a group that waits.
CREATE INDEX rollouts_running_of_task ON rollouts (task_id, n) WHERE status = 'running' AND task_id IS NOT NULL;

-- By which rules returns are counted. One row.
CREATE TABLE returns (
    n        INTEGER NOT NULL PRIMARY KEY CHECK (n = 1),
    weights  TEXT NOT NULL,                       -- JSON: the weight of each reward by its name
    failed   REAL,                                -- the reward of a failed rollout that has none of its own
    low      REAL NOT NULL DEFAULT -10000,        -- rewards beyond count as the nearer end
    high     REAL NOT NULL DEFAULT 10000,
    evaluated INTEGER NOT NULL DEFAULT 0,         -- 1: an evaluator's reward came, and plain keys' act on nobody
    stale_to INTEGER NOT NULL                     -- rollouts up to this n are still to be counted by these rules
);
INSERT INTO returns (n, weights, stale_to) VALUES (1, '{"reward":1.0}', 0);

-- The reward function that the proxy was started with (`rewards.function`); no row if there is none.
CREATE TABLE reward_function (
    function TEXT PRIMARY KEY
) WITHOUT ROWID;

-- Completed rollouts for which the reward function is still to be asked. No training step takes them.
CREATE TABLE awaiting_rewards (
    n INTEGER NOT NULL PRIMARY KEY REFERENCES rollouts (n) ON DELETE CASCADE
);

-- Keys given out by `lightning-proxy keys`; the keys themselves are not kept. A revoked one stays, and lets nobody in.
CREATE TABLE keys (
    key_id              TEXT PRIMARY KEY,
    key_hash            TEXT NOT NULL UNIQUE,     -- SHA-256
    name                TEXT NOT NULL,
    role                TEXT NOT NULL,            -- agent | admin
    scope               TEXT NOT NULL DEFAULT 'all', -- all | own: only the rollouts that were opened with it
    evaluator           INTEGER NOT NULL DEFAULT 0, -- 1: it gives evidence, as an admin's key does
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
    key_id     TEXT REFERENCES keys (key_id) ON DELETE CASCADE,
    may_reward INTEGER NOT NULL DEFAULT 1         -- 0: it may only call the model
);
CREATE INDEX rollout_keys_by_rollout ON rollout_keys (rollout_id);

-- Calls: one request and its answer. A row is written twice, at the start (as 'incomplete') and at the end. Request and
-- prompt tokens are stored as what they add to an earlier call of the rollout, `parent_id` (requests.py).
CREATE TABLE calls (
    rowid              INTEGER PRIMARY KEY,       -- order of beginning
    call_id            TEXT NOT NULL UNIQUE,
    rollout_id         TEXT NOT NULL REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
    seq                INTEGER NOT NULL,          -- 0, 1, 2, … in the rollout
    parent_id          TEXT,
    agent              TEXT,
    harness            TEXT,                      -- JSON: what the agent's program says of the call's context
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
    input_tokens       INTEGER,                   -- by its usage, or else those recorded; NULL: neither says it
    cached_tokens      INTEGER,                   -- of them, read from a cache, as are the next written to it
    kept_tokens        INTEGER,
    output_tokens      INTEGER,
    reasoning_tokens   INTEGER,                   -- of them
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

-- How the newest step that took a call's rollout trained it: one small row for each call of a trained agent.
CREATE TABLE call_credit (
    n         INTEGER NOT NULL REFERENCES rollouts (n) ON DELETE CASCADE,
    seq       INTEGER NOT NULL,                   -- of the call
    step      INTEGER NOT NULL,
    "return"  REAL NOT NULL,
    advantage REAL NOT NULL,
    "row"     INTEGER,                            -- of the rollout's training rows, from 0; NULL: in none
    placed    TEXT NOT NULL,                      -- why it opened, joined or is in no row
    PRIMARY KEY (n, seq)
) WITHOUT ROWID;

-- Which agents made calls of which rollout, newest rollout first when read backwards.
CREATE TABLE rollout_agents (
    agent TEXT NOT NULL,
    n     INTEGER NOT NULL REFERENCES rollouts (n) ON DELETE CASCADE,
    PRIMARY KEY (agent, n)
) WITHOUT ROWID;
CREATE INDEX rollout_agents_by_rollout ON rollout_agents (n);

-- Tool calls of answers, and the results that a later request brought back. A result is found by where the call stands
-- in its conversation: `place` is a digest of what users said and models called before it (proxy/gateway/recent.py).
CREATE TABLE tool_calls (
    rollout_id   TEXT NOT NULL REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
    call_id      TEXT NOT NULL REFERENCES calls (call_id) ON DELETE CASCADE,
    position     INTEGER NOT NULL,                -- in the answer
    tool_call_id TEXT,
    name         TEXT NOT NULL,
    arguments    TEXT NOT NULL,
    result       TEXT,                            -- JSON
    is_error     INTEGER,
    place        BLOB,
    PRIMARY KEY (call_id, position)
);
CREATE INDEX tool_calls_by_place ON tool_calls (rollout_id, place) WHERE place IS NOT NULL;

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
    key_id     TEXT,                              -- the key of `keys` that it was posted with
    evidence   INTEGER NOT NULL DEFAULT 0,        -- 1: that key gave evidence then
    created_at REAL NOT NULL
);
CREATE INDEX rewards_by_rollout ON rewards (rollout_id, call_id, name, reward_id);
CREATE INDEX rewards_of_plain_keys ON rewards (reward_id) WHERE evidence = 0;
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

-- What waits to be gone on with, each by one request: answers, and requests that a client may send again. `exact`: the
-- digest with the results of tools, which do not count in `digest`; NULL: a request.
CREATE TABLE conversation_tips (
    digest     BLOB NOT NULL,
    at         REAL NOT NULL,
    call_id    TEXT NOT NULL,
    rollout_id TEXT NOT NULL,
    exact      BLOB,
    PRIMARY KEY (digest, at, call_id)
) WITHOUT ROWID;
CREATE INDEX conversation_tips_by_age ON conversation_tips (at);

-- What happened, in order, for those who watch. `ref` names the row that says what: the newest 10,000 are kept.
CREATE TABLE feed (
    n    INTEGER PRIMARY KEY,                     -- the cursor of GET /feed
    kind TEXT NOT NULL,                           -- call | reward | rollout | step | version | group
    ref  TEXT NOT NULL                            -- call_id | reward_id | rollouts.n | step | version | rollouts.n
);

CREATE TRIGGER rollout_awaits_reward AFTER UPDATE OF status ON rollouts
WHEN OLD.status = 'running' AND NEW.status = 'completed' BEGIN
    INSERT INTO awaiting_rewards SELECT NEW.n WHERE EXISTS (SELECT 1 FROM reward_function);
END;
CREATE TRIGGER agent_called AFTER INSERT ON calls WHEN NEW.agent IS NOT NULL BEGIN
    INSERT INTO rollout_agents SELECT NEW.agent, n FROM rollouts WHERE rollout_id = NEW.rollout_id
    ON CONFLICT (agent, n) DO NOTHING;
END;

CREATE TRIGGER feed_of_calls AFTER UPDATE OF status ON calls WHEN OLD.status = 'incomplete' BEGIN
    INSERT INTO feed (kind, ref) VALUES ('call', NEW.call_id);
END;
CREATE TRIGGER feed_of_rewards AFTER INSERT ON rewards BEGIN
    INSERT INTO feed (kind, ref) VALUES ('reward', NEW.reward_id);
END;
CREATE TRIGGER feed_of_opened AFTER INSERT ON rollouts BEGIN
    INSERT INTO feed (kind, ref) VALUES ('rollout', NEW.n);
END;
CREATE TRIGGER feed_of_ended AFTER UPDATE OF status ON rollouts WHEN OLD.status <> NEW.status BEGIN
    INSERT INTO feed (kind, ref) VALUES ('rollout', NEW.n);
END;
CREATE TRIGGER feed_of_claimed AFTER INSERT ON steps BEGIN
    INSERT INTO feed (kind, ref) VALUES ('step', NEW.step);
END;
-- A step's metrics come when it is trained, and again when it is published.
CREATE TRIGGER feed_of_steps AFTER UPDATE OF metrics ON steps BEGIN
    INSERT INTO feed (kind, ref) VALUES ('step', NEW.step);
END;
CREATE TRIGGER feed_of_versions AFTER UPDATE OF status, verified ON policy_versions
WHEN OLD.status <> NEW.status OR OLD.verified <> NEW.verified BEGIN
    INSERT INTO feed (kind, ref) VALUES ('version', NEW.version);
END;
CREATE TRIGGER feed_of_live AFTER INSERT ON policy_log BEGIN
    INSERT INTO feed (kind, ref) VALUES ('version', NEW.version);
END;
-- A group may have become ready, or other than it was: the trainer looks at those alone.
CREATE TRIGGER feed_of_groups AFTER UPDATE OF status, mode, task_id, rewarded_at, step, dropped ON rollouts
WHEN (NEW.status <> 'running' OR NEW.mode <> OLD.mode) AND (
    NEW.status <> OLD.status OR NEW.mode <> OLD.mode OR NEW.task_id IS NOT OLD.task_id
    OR NEW.rewarded_at IS NOT OLD.rewarded_at OR NEW.step IS NOT OLD.step OR NEW.dropped IS NOT OLD.dropped
) BEGIN
    INSERT INTO feed (kind, ref) VALUES ('group', NEW.n);
END;
CREATE TRIGGER feed_of_scored AFTER DELETE ON awaiting_rewards BEGIN
    INSERT INTO feed (kind, ref) VALUES ('group', OLD.n);
END;

-- How many rollouts there are: counting a million takes too long for every look. Changes, which are summed up now and
-- then, so that no transaction waits for another.
CREATE TABLE rollout_count_changes (
    n        INTEGER PRIMARY KEY,
    mode     TEXT NOT NULL,
    status   TEXT NOT NULL,
    rollouts INTEGER NOT NULL
);
CREATE VIEW rollout_counts AS
    SELECT mode, status, CAST(SUM(rollouts) AS INTEGER) AS rollouts FROM rollout_count_changes GROUP BY mode, status;
CREATE TRIGGER rollout_opened AFTER INSERT ON rollouts BEGIN
    INSERT INTO rollout_count_changes (mode, status, rollouts) VALUES (NEW.mode, NEW.status, 1);
END;
CREATE TRIGGER rollout_changed AFTER UPDATE OF mode, status ON rollouts
WHEN OLD.mode <> NEW.mode OR OLD.status <> NEW.status BEGIN
    INSERT INTO rollout_count_changes (mode, status, rollouts)
    VALUES (OLD.mode, OLD.status, -1), (NEW.mode, NEW.status, 1);
END;
CREATE TRIGGER rollout_deleted AFTER DELETE ON rollouts BEGIN
    INSERT INTO rollout_count_changes (mode, status, rollouts) VALUES (OLD.mode, OLD.status, -1);
END;
