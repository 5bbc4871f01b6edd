-- What a key may do: 'own' sees and rewards only the rollouts that were opened with it.
ALTER TABLE keys ADD COLUMN scope TEXT NOT NULL DEFAULT 'all';    -- all | own
ALTER TABLE rollout_keys ADD COLUMN may_reward INTEGER NOT NULL DEFAULT 1; -- 0: it may only call the model
ALTER TABLE rollouts ADD COLUMN key_id TEXT;                      -- the key of `keys` that it was opened with
CREATE INDEX rollouts_by_key ON rollouts (key_id, n) WHERE key_id IS NOT NULL;
