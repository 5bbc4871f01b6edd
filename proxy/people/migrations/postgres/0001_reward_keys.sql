-- The schema of ../sqlite/0001_reward_keys.sql, which says what the columns mean.
CREATE TABLE reward_keys (
    key_hash   TEXT PRIMARY KEY,
    rollout_id TEXT NOT NULL REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
    call_id    TEXT NOT NULL,
    key_id     TEXT,
    evidence   BIGINT NOT NULL,
    expires_at DOUBLE PRECISION NOT NULL,
    used_at    DOUBLE PRECISION NOT NULL DEFAULT 0,
    reward_id  BIGINT
);
CREATE INDEX reward_keys_by_rollout ON reward_keys (rollout_id);
CREATE INDEX reward_keys_by_end ON reward_keys (expires_at);
