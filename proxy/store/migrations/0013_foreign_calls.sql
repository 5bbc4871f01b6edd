-- How many of a rollout's `calls` were answered by other models than the policy: where all were, it is no sibling.
ALTER TABLE rollouts ADD COLUMN foreign_calls INTEGER NOT NULL DEFAULT 0;
UPDATE rollouts SET foreign_calls = found.calls
FROM (
    SELECT rollout_id, COUNT(*) AS calls FROM calls
    WHERE policy_version IS NULL AND status <> 'incomplete' GROUP BY rollout_id
) AS found
WHERE found.rollout_id = rollouts.rollout_id;
DROP INDEX rollouts_claimable;
CREATE INDEX rollouts_claimable
    ON rollouts (mode, task_id, ended_at, status, rewarded_at, step, dropped, calls, foreign_calls)
    WHERE mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL AND task_id IS NOT NULL;
