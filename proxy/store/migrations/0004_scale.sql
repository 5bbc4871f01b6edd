-- How many rollouts there are, kept as they come and go: counting a million takes too long for every look.
CREATE TABLE rollout_counts (
    mode     TEXT NOT NULL,
    status   TEXT NOT NULL,
    rollouts INTEGER NOT NULL,
    PRIMARY KEY (mode, status)
) WITHOUT ROWID;
INSERT INTO rollout_counts SELECT mode, status, COUNT(*) FROM rollouts GROUP BY mode, status;
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

-- Which agents made calls of which rollout, newest rollout first when read backwards.
CREATE TABLE rollout_agents (
    agent TEXT NOT NULL,
    n     INTEGER NOT NULL REFERENCES rollouts (n) ON DELETE CASCADE,
    PRIMARY KEY (agent, n)
) WITHOUT ROWID;
CREATE INDEX rollout_agents_by_rollout ON rollout_agents (n);
INSERT INTO rollout_agents
SELECT DISTINCT calls.agent, rollouts.n FROM calls JOIN rollouts ON rollouts.rollout_id = calls.rollout_id
WHERE calls.agent IS NOT NULL;
CREATE TRIGGER agent_called AFTER INSERT ON calls WHEN NEW.agent IS NOT NULL BEGIN
    INSERT INTO rollout_agents SELECT NEW.agent, n FROM rollouts WHERE rollout_id = NEW.rollout_id
    ON CONFLICT (agent, n) DO NOTHING;
END;

CREATE INDEX rollouts_by_mode ON rollouts (mode, n);
CREATE INDEX rollouts_by_mode_and_status ON rollouts (mode, status, n);
-- Rollouts that nobody ends stay running; the versions that recent ones began with are asked for every second.
CREATE INDEX rollouts_running ON rollouts (status, created_at, policy_version) WHERE status = 'running';
-- The trainer looks at all that waits, many times a minute: at the index alone. Without its first column, which is the
-- same everywhere, SQLite takes another index.
DROP INDEX rollouts_claimable;
CREATE INDEX rollouts_claimable ON rollouts (mode, task_id, ended_at, status, rewarded_at, step, dropped)
    WHERE mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL AND task_id IS NOT NULL;
CREATE INDEX idempotency_by_age ON idempotency (created_at);
CREATE INDEX steps_claimed ON steps (step) WHERE status = 'claimed';

-- Conversations of rollouts that nobody names, by digest (continuation.py). Where a digest leads: the last rollout that
-- was at that point, or the one that something telling comes from (NULL: several).
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
