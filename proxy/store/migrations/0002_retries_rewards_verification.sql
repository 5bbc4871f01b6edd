-- The call that took this one's place: the client sent the same request again.
ALTER TABLE calls ADD COLUMN superseded_by TEXT;

-- When the first reward named 'reward' came, for the rollout or for one of its calls.
ALTER TABLE rollouts ADD COLUMN rewarded_at REAL;
UPDATE rollouts SET rewarded_at = (
    SELECT MIN(created_at) FROM rewards WHERE rewards.rollout_id = rollouts.rollout_id AND rewards.name = 'reward'
);

-- Whether vLLM was seen to serve these weights.
ALTER TABLE policy_versions ADD COLUMN verified INTEGER NOT NULL DEFAULT 0;
UPDATE policy_versions SET verified = 1 WHERE status IN ('live', 'ready');

-- For deleting a rollout.
CREATE INDEX rollout_keys_by_rollout ON rollout_keys (rollout_id);
CREATE INDEX rewards_by_call ON rewards (call_id) WHERE call_id IS NOT NULL;
