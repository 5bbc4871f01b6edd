-- Rewards by the policy version that rollouts began with, which are asked for again and again: off the index alone.
CREATE INDEX rollouts_by_version ON rollouts (policy_version, mode, task_id, key_id, reward, foreign_calls)
    WHERE reward IS NOT NULL AND foreign_calls = 0;
