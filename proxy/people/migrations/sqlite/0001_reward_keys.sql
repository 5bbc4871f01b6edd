-- Keys for one person's reward of one call (docs/people.md). They go with their rollout.
CREATE TABLE reward_keys (
    key_hash   TEXT PRIMARY KEY,
    rollout_id TEXT NOT NULL REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
    call_id    TEXT NOT NULL,
    key_id     TEXT,                              -- the key of `keys` that it was asked for with
    evidence   INTEGER NOT NULL,
    expires_at REAL NOT NULL,
    used_at    REAL NOT NULL DEFAULT 0,
    reward_id  INTEGER                            -- the reward that it gave, which the next one replaces
) WITHOUT ROWID;
CREATE INDEX reward_keys_by_rollout ON reward_keys (rollout_id);
CREATE INDEX reward_keys_by_end ON reward_keys (expires_at);
